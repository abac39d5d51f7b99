"""Formulas as MathML, which browsers draw themselves: the site loads no script for them, and has them without a network too.

The conversion is that of docutils, on which Sphinx stands already.
"""

import html
import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from docutils.utils.math.unichar2tex import uni2tex_table
from sphinx.application import Sphinx
from sphinx.util import logging

_LOGGER = logging.getLogger(__name__)
_TO_TEX = uni2tex_table | {ord("·"): r"\cdot "}
# A name of a function, such as ln, and whether a bracket follows. Browsers set no space around it of themselves.
_FUNCTION = re.compile(r"<mi>(\w+)</mi>\s*<mo>&ApplyFunction;</mo>(?=\s*(?:<mrow>\s*)?(<mo[^>]*>\()?)")


def mathml(node: nodes.math | nodes.math_block, block: bool) -> str:
    """A formula in LaTeX as MathML; one that cannot be converted is shown as it is, and is a warning, which fails the build."""
    tex = node.astext()
    try:
        return _FUNCTION.sub(_spaced, tex2mathml(tex.translate(_TO_TEX), as_block=block))
    except MathError as error:
        _LOGGER.warning("no MathML for the formula %s: %s", tex, error, location=node)
        return f"<code>{html.escape(tex)}</code>"


def _spaced(name: re.Match[str]) -> str:
    return f'<mo lspace="0.17em" rspace="{0 if name[2] else 0.17}em">{name[1]}</mo>'


def inline(translator: Any, node: nodes.math) -> None:
    """A formula in a line of text."""
    translator.body.append(mathml(node, block=False))
    raise nodes.SkipNode


def display(translator: Any, node: nodes.math_block) -> None:
    """A formula by itself."""
    translator.body.append(f'<div class="math">{mathml(node, block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
