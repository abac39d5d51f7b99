"""Dials that a reader of a page turns: width, keys, scale, number format, correlation; the browser computes what follows.

`dials_part` gives a page everything that it needs for them; `controls_page` is a page with nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attemper.errors import ArgumentError
from attemper.report.page.dials_words import WORDS
from attemper.report.page.shell import Script, render_page, render_part, script

BINS = 48  # of the histogram, and weights that are drawn; dials_numbers.js has the same
DTYPES = ("float32", "float16", "bfloat16")
STEPS: Mapping[str, tuple[float, ...]] = {
    "d": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024),
    "n": (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
    "tau": (1, 2, 4, 8, 10, 16, 32, 64, 100),
    "sigma": (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64),
}
START: Mapping[str, Any] = {
    "d": 64, "n": 256, "rho": 0, "sigma": 1, "rule": "sqrt", "tau": 10, "dtype": "float32", "softmax": "safe",
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A number that the dials show; form: "number" or "percent"."""

    key: str
    formula: str
    form: str = "number"


FIGURES = (
    Figure("logit_std", "√ mean Var z"),
    Figure("product_absmax", "max |u|"),
    Figure("normalized_entropy", "−Σ p ln p / ln n"),
    Figure("peak", "max p"),
    Figure("gain", "1 − Σ p²"),
    Figure("jacobian_norm", "√(Σp² − 2 Σp³ + (Σp²)²)"),
    Figure("gradient_rms", "√ mean dz², dz = p (dp − Σ p dp)"),
    Figure("gradient_median", "median ‖dz‖"),
    Figure("product_overflow", "|u| = ∞", "percent"),
    Figure("exp_overflow", "e^z = ∞", "percent"),
    Figure("lost_rows", "|u| = ∞, p = NaN, Σ p = 0", "percent"),
)


@dataclass(frozen=True)
class Part:
    """What a page takes over to have the dials: data by the id of its element, script, style sheets, and `html`.

    That is a `Markup`, which a page's template takes as it is.
    """

    html: str
    data: Mapping[str, Any]
    script: Script
    styles: tuple[str, ...] = ("dials.css",)


def dials_part(words: Mapping[str, Any]) -> Part:
    """The dials with the words of a language, one of `WORDS`. A page has them once: the ids begin with "dials"."""
    html = render_part(
        "dials.html.j2",
        words=words,
        steps=STEPS,
        start=START,
        dtypes={name: name for name in DTYPES},
        figures=FIGURES,
        bins=BINS,
    )
    forms = {figure.key: figure.form for figure in FIGURES}
    spoken = {key: text for key, text in words.items() if isinstance(text, str)}
    data = {"dials-data": {"words": spoken, "forms": forms, "steps": STEPS}}
    return Part(html, data, script("numbers.js", "dials_numbers.js", "dials.js"))


def controls_page(lang: str) -> str:
    """A page with the dials alone, as text of one HTML file.

    Args:
        lang: "en" or "zh".

    Raises:
        ArgumentError: another language.
    """
    if lang not in WORDS:
        raise ArgumentError("lang", repr(lang), f"one of {', '.join(map(repr, WORDS))}")
    words = WORDS[lang]
    part = dials_part(words)
    scripts = [part.script, script("dials_page.js")]
    return render_page(
        "dials_page.html.j2",
        styles=part.styles,
        scripts=scripts,
        data=part.data,
        language=lang,
        title=words["title"],
        part=part.html,
    )
