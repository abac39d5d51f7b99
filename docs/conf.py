"""Sphinx settings. What is written from tables in the code and from measurements is made by the extension docs.writing."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sphinx.application import Sphinx

import attemper

project = "attemper"
author = copyright = "the attemper developers"
release = version = attemper.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "docs.mathml", "docs.writing"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "generated"]
html_theme = "furo"
html_title = f"attemper {release}"
html_theme_options = {"footer_icons": []}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings give shapes and dtypes, which annotations cannot
autoclass_content = "class"
add_module_names = False
napoleon_use_ivar = True
default_role = "code"


def keep_bars(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """|x| is an absolute value in a docstring, not a substitution."""
    lines[:] = [line.replace("|", "\\|") for line in lines]


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", keep_bars)
