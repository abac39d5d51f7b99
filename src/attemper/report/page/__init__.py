"""Pages that people read in a browser: one self-contained file, no network, no script but the page's own.

`check_page` writes that of a report. A page is put together from parts that know nothing of it: `shell` (the file, its policy,
its theme), `charts` (what Vega draws), `templates/parts.html.j2` (facts, tiles, lists).
"""

from attemper.report.page.check_page import RuleWords, check_page
from attemper.report.page.requirements import require_page

__all__ = ["RuleWords", "check_page", "require_page"]
