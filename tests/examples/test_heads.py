"""The picture on the README's first screen shows what is measured today."""

import math
import re
import sys
from pathlib import Path

import pytest

from tests.running import ROOT, run

README = (ROOT / "README.md").read_text("utf-8")
PICTURES = [ROOT / "docs" / f"heads-{theme}.svg" for theme in ("light", "dark")]
FIGURES = re.compile(r"^(.*?) +layer \d head \d: largest logit +([\d.]+), gain ([\d.]+), saturated", re.MULTILINE)
WIDTH, HEIGHT = 560, 230  # of the frame, in pixels
LOGITS = (6, 120)  # its edges; gains are from 0 to 1
OFF = 2.0  # pixels: what is printed is rounded, and another processor rounds otherwise


@pytest.fixture(scope="module")
def figures() -> list[tuple[str, float, float]]:
    """Model, largest logit and gain of each head, as the command prints them."""
    printed = run(sys.executable, str(ROOT / "examples" / "heads.py"))
    return [(model, float(largest), float(gain)) for model, largest, gain in FIGURES.findall(printed)]


def marks(picture: Path) -> list[tuple[float, float]]:
    """Where the picture has a point, from the frame's upper left corner."""
    symbols = picture.read_text("utf-8").split('class="mark-symbol', 1)[1].split("</g>", 1)[0]
    return [(float(x), float(y)) for x, y in re.findall(r"translate\(([\d.]+),([\d.]+)\)", symbols)]


@pytest.mark.parametrize("picture", PICTURES, ids=["light", "dark"])
def test_every_head_stands_where_it_is_measured(picture: Path, figures: list[tuple[str, float, float]]) -> None:
    places = []
    for _, largest, gain in figures:
        along = (math.log(largest) - math.log(LOGITS[0])) / (math.log(LOGITS[1]) - math.log(LOGITS[0]))
        places.append((WIDTH * along, HEIGHT * (1 - gain)))
    shown = marks(picture)
    assert len(shown) == len(places) == 16
    for place, (x, y) in zip(places, shown, strict=True):
        assert (x, y) == pytest.approx(place, abs=OFF)


def test_the_words_for_those_who_do_not_see_it_have_its_figures(figures: list[tuple[str, float, float]]) -> None:
    for model in dict.fromkeys(model for model, _, _ in figures):
        logits = [largest for one, largest, _ in figures if one == model]
        gains = [gain for one, _, gain in figures if one == model]
        words = f"largest logits of {min(logits):.0f} to {max(logits):.0f}, gains of {min(gains):.2f} to {max(gains):.2f}"
        assert words in README


@pytest.mark.parametrize("picture", PICTURES, ids=["light", "dark"])
def test_the_readme_shows_it_and_it_is_small(picture: Path) -> None:
    assert f'"docs/{picture.name}"' in README
    assert picture.stat().st_size < 60_000
