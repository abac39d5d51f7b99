"""Small line charts as SVG within a page: no script, no file of its own, and colours that follow the site's theme (site.css)."""

import html
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

_WIDTH, _HEIGHT = 520, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 88, 16, 40
_DASHES = ("", "7 3", "2 3")


def curves(x: Sequence[float], series: Mapping[str, Sequence[float]], *, x_label: str, y_label: str, log: bool) -> str:
    """Lines over an axis of octaves, as a block of raw HTML in MyST.

    Args:
        x: above 0, rising; series: what each line is called → its values, one for each x.
        x_label, y_label: of the axes.
        log: whether the vertical axis is logarithmic too; values have to be above 0 then.
    """
    values = [value for line in series.values() for value in line]
    ticks = _octaves(min(values), max(values)) if log else _round(min(values), max(values))
    across = _place(x, True, _LEFT, _WIDTH - _RIGHT)
    up = _place([*ticks, *values], log, _HEIGHT - _BOTTOM, _TOP)
    parts = [f'<div class="curves"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(y_label)}">']
    for tick in ticks:
        y = up(tick)
        parts.append(f'<path class="rule" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    octaves = [each for each in x if math.log2(each).is_integer()]
    below = _HEIGHT - _BOTTOM + 16
    parts += [f'<text x="{across(each):.1f}" y="{below}" text-anchor="middle">{each:g}</text>' for each in octaves]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{html.escape(x_label)}</text>')
    ends = _apart([up(line[-1]) for line in series.values()])
    for number, (name, line) in enumerate(series.items()):
        points = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in zip(x, line, strict=True))
        parts.append(f'<polyline class="line{number}" stroke-dasharray="{_DASHES[number]}" points="{points}"/>')
        end = f'x="{_WIDTH - _RIGHT + 6}" y="{ends[number] + 4:.1f}"'
        parts.append(f'<text class="name{number}" {end}>{html.escape(name)}</text>')
    return "```{raw} html\n" + "\n".join([*parts, "</svg></div>"]) + "\n```\n"


def _number(value: float) -> str:
    return f"{value:.6g}".replace("-", "−")


def _place(values: Sequence[float], log: bool, start: float, end: float) -> Callable[[float], float]:
    """From a value to a coordinate."""
    low, high = min(values), max(values)
    read = math.log if log else float
    span = read(high) - read(low) or 1.0
    return lambda value: start + (end - start) * (read(value) - read(low)) / span


def _octaves(low: float, high: float) -> list[float]:
    """Powers of ten or two within the values: at most seven."""
    for base in (2, 4, 10, 100, 1000):
        first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
        if last - first < 7:
            return [float(base) ** power for power in range(first, last + 1)]
    return [low, high]


def _round(low: float, high: float) -> list[float]:
    """Round numbers from below the values to above them: about five."""
    rough = (high - low) / 4 or 1.0
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _apart(places: Sequence[float], least: float = 14.0) -> list[float]:
    """The places of names, moved so far that none covers another, within the picture."""
    order = sorted(range(len(places)), key=lambda each: places[each])
    moved = list(places)
    for before, after in itertools.pairwise(order):
        moved[after] = max(moved[after], moved[before] + least)
    over = max(moved) - (_HEIGHT - _BOTTOM)
    return [place - max(0.0, over) for place in moved]
