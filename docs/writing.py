"""A Sphinx extension that writes pages before Sphinx reads them, from tables and docstrings in the code and from measurements."""

from pathlib import Path

from sphinx.application import Sphinx

from attemper.checker.thresholds import THRESHOLDS
from attemper.monitor.alarms.thresholds import ALARM_THRESHOLDS
from docs.pages.api import api_files
from docs.pages.commands import commands_list
from docs.pages.files import write, write_folder
from docs.pages.findings import alarms_table, finding_pages, thresholds_table
from docs.pages.lab_results import lab_results
from docs.pages.scale_rules import scale_rule_pages, uses_table
from docs.pages.statistics import statistic_pages
from docs.pages.weight_families import weight_families_table


def write_pages(app: Sphinx) -> None:
    """Write all of them into the folder of the sources."""
    here = Path(app.srcdir)
    write_folder(here / "rules", finding_pages())
    write_folder(here / "scale-rules", scale_rule_pages())
    write_folder(here / "statistics", statistic_pages())
    for name, text in {
        "scale_rules": uses_table(),
        "thresholds": thresholds_table(THRESHOLDS),
        "alarm_thresholds": thresholds_table(ALARM_THRESHOLDS),
        "alarms": alarms_table(),
        "weight_families": weight_families_table(),
        "commands": commands_list(),
        "lab_results": lab_results(here / "lab"),
        **api_files(),
    }.items():
        write(here / "generated" / f"{name}.md", text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
