"""What a run's table says, whatever it looks like: heading, one line a layer with its trend, alarms, one closing line."""

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from torch import Tensor

from attemper.report import layout
from attemper.report.names import safe
from attemper.report.runs.view import LayerCurves, RunView

COLUMNS = ("layer", "max |s·q·k|", "head", "last steps", "way", "max logit", "entropy", "gain", "saturated")
LEGEND = (
    "Of the last logged step. max |s·q·k|: largest |scale·q·k| of the worst head, its course over the last steps (each line on "
    "a scale of its own) and which way it went. max logit: after softcap and bias. entropy: mean of H / ln(keys) of the lowest "
    "head. gain: mean of 1 − Σp² of the lowest head. saturated: share of rows with a weight above 0.99, of the highest head."
)
_TREND = 24  # steps
_NAME = 12  # of a layer's name, what is always shown
_BARS = "▁▂▃▄▅▆▇█"
_MARKS = {"error": "✗", "warning": "!", "info": "i"}


def heading(view: RunView) -> tuple[tuple[str, str], ...]:
    """(label, text) pairs for the top."""
    info = view.info
    started = f"{datetime.fromtimestamp(info.started, UTC):%Y-%m-%d %H:%M %Z}"
    every = "every step" if info.every == 1 else f"every {info.every} steps"
    world = "" if info.world == 1 else f", {info.world} processes"
    went_back = f", went back {layout.plural(view.attempt, 'time')}" if view.attempt else ""
    return (
        ("run", f"{safe(info.model)}, {safe(info.mode)}, {every}{world}, started {started}{went_back}"),
        ("step", f"{step_words(view)}{scalar_words(view)}"),
    )


def step_words(view: RunView) -> str:
    """The last step and how many were logged."""
    if not view.steps:
        return "none logged yet"
    return f"{view.steps[-1]} ({layout.plural(len(view.steps), 'logged step')} since {view.steps[0]})"


def scalar_words(view: RunView) -> str:
    """What the caller logged beside, each at its last step that has it."""
    return "".join(f", {safe(name)} {scalar(value)}" for name, value in view.latest.items())


def scalar(value: float) -> str:
    """A number that was logged: not-a-number is one of them, and the one that matters most."""
    return "nan" if math.isnan(value) else layout.number(value)


def table(view: RunView, most: int | None = None) -> tuple[str, list[list[str]], int]:
    """(what all layer names have in common; one row of cells a layer, with a mark where it has alarms; how many were left out).

    Args:
        most: how many layers to show: those with the largest |scale·q·k|, in the model's order. None: all.
    """
    shared, names = layout.apart([safe(each.name) or "(model)" for each in view.layers])
    numbers = list(range(len(view.layers)))
    if most is not None and most < len(numbers) and view.steps:
        sizes = [math.inf if _all_nan(each) else _last(each.worst("max_scaled_product")[0]) for each in view.layers]
        chosen = sorted(numbers, key=lambda number: (math.isnan(sizes[number]), -sizes[number]))[: max(1, most)]
        numbers = sorted(chosen)
    marks = _marks(view)
    rows = [
        _cells(f"{names[number]} {marks.get(view.layers[number].name, '')}".rstrip(), view.layers[number]) for number in numbers
    ]
    return shared, rows, len(view.layers) - len(numbers)


def fitted(
    rows: Sequence[Sequence[str]], width: int, gap: int, length: Callable[[str], int] = len
) -> tuple[tuple[str, ...], list[list[str]]]:
    """(column names, rows) of a table that is no wider: the course gets shorter, then columns go, from the right.

    A number is shown whole or not at all. A name that has no room and takes more than a third of the width is cut at its
    beginning.

    Args:
        rows: as `table` gives them. gap: spaces between columns. length: of a text, in columns of the terminal.
    """
    course = COLUMNS.index("last steps")
    sizes = [max(length(cells[column]) for cells in [COLUMNS, *rows]) for column in range(len(COLUMNS))]
    sizes[course] = length(COLUMNS[course])
    room = width - sum(sizes[1:]) - gap * (len(COLUMNS) - 1)  # for names, with a short course
    named = [[_ending(cells[0], max(_NAME, width // 3, room), length), *cells[1:]] for cells in rows]
    sizes[0] = max(length(cells[0]) for cells in [COLUMNS, *named])
    count = len(COLUMNS)
    while count > 1 and sum(sizes[:count]) + gap * (count - 1) > width:
        count -= 1
    if count > course:
        spare = width - sum(sizes[:count]) - gap * (count - 1)
        steps = sizes[course] + spare
        named = [[*cells[:course], cells[course][-steps:], *cells[course + 1 :]] for cells in named]
    return COLUMNS[:count], [cells[:count] for cells in named]


def _ending(text: str, most: int, length: Callable[[str], int]) -> str:
    if length(text) <= most:
        return text
    while length(text) >= most:
        text = text[max(1, (length(text) - most) // 2) :]
    return f"…{text}"


def alarms(view: RunView, most: int) -> list[tuple[str, str, str]]:
    """(severity, code and step, message), the last ones first."""
    return [(each.severity, f"{safe(each.code)} step {each.step}", safe(each.message)) for each in view.alarms[::-1][:most]]


def closing(view: RunView) -> str:
    """Counts in one line."""
    if not view.steps:
        return "No step has been logged yet."
    counts = ", ".join(
        layout.plural(sum(each.severity == severity for each in view.alarms), noun)
        for severity, noun in (("error", "error"), ("warning", "warning"))
    )
    heads = sum(each.heads for each in view.layers)
    largest = largest_of(max((largest_ever(each) for each in view.layers), default=math.nan), view)
    return (
        f"{layout.plural(len(view.layers), 'attention layer')}, {layout.plural(heads, 'head')}, "
        f"{layout.plural(len(view.steps), 'logged step')}: {counts} in {layout.plural(len(view.alarms), 'alarm')}. "
        f"Largest |scale·q·k| of them all {largest}."
    )


def largest_of(value: float, view: RunView) -> str:
    """The largest of several layers: of nothing but NaN it is nan."""
    return "nan" if value == -math.inf and any(map(_all_nan, view.layers)) else layout.number(value)


def largest_ever(layer: LayerCurves) -> float:
    """The largest |scale·q·k| of any head at any step."""
    values = layer.worst("max_scaled_product")[0]
    known = values[~values.isnan()]
    return float(known.max()) if len(known) else math.nan


def sparkline(values: Sequence[float]) -> str:
    """Bars from the lowest to the highest, by their logarithm where all are above zero; a space where there is no number."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return " " * len(values)
    logarithmic = min(known) > 0
    heights = [math.log(value) if logarithmic and math.isfinite(value) else value for value in values]
    low = min(height for height in heights if math.isfinite(height))
    high = max(height for height in heights if math.isfinite(height))
    span = high - low

    def bar(height: float) -> str:
        if math.isnan(height):
            return " "
        if math.isinf(height):
            return _BARS[-1] if height > 0 else _BARS[0]
        return _BARS[round((height - low) / span * (len(_BARS) - 1))] if span > 1e-3 * max(1.0, abs(high)) else _BARS[3]

    return "".join(map(bar, heights))


def arrow(values: Sequence[float]) -> str:
    """Which way a figure went over these steps: up or down by a tenth at least, or twofold."""
    known = [value for value in values if math.isfinite(value) and value > 0]
    if len(known) < 2:
        return ""
    part = max(1, len(known) // 4)
    octaves = math.log2((sum(known[-part:]) / part) / (sum(known[:part]) / part))
    return "↑" if octaves >= 1 else "↗" if octaves >= 0.14 else "↓" if octaves <= -1 else "↘" if octaves <= -0.14 else "→"


def _cells(name: str, layer: LayerCurves) -> list[str]:
    largest, heads = layer.worst("max_scaled_product")
    course = largest[-_TREND:].tolist()
    return [
        name,
        _size(_last(largest), layer),
        str(int(heads[-1])) if len(heads) else "",
        sparkline(course),
        arrow(course),
        _size(_last(layer.worst("max_logit")[0]), layer),
        layout.form(_last(layer.worst("normalized_entropy")[0]), ".3f"),
        layout.form(_last(layer.worst("gain")[0]), ".3f"),
        layout.form(_last(layer.worst("saturated_share")[0]), ".1%"),
    ]


def _size(value: float, layer: LayerCurves) -> str:
    return "nan" if _all_nan(layer) else layout.number(value)


def _all_nan(layer: LayerCurves) -> bool:
    """Whether no head has a logit that is a number in the last step."""
    return _last(layer.worst("max_logit")[0]) == -math.inf and bool(layer.all_nan()[-1].any())


def _last(values: Tensor) -> float:
    return float(values[-1]) if len(values) else math.nan


def _marks(view: RunView) -> dict[str, str]:
    """The gravest alarm of each layer."""
    marks: dict[str, str] = {}
    for severity in ("info", "warning", "error"):
        for each in view.alarms:
            if each.severity == severity:
                marks[f"{each.layer}#{each.call}" if each.call else each.layer] = _MARKS[severity]
    return marks
