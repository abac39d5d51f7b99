"""What is said of runs that no preset asked for: side by side, with curves and heat maps, and no claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attemper.lab.comparing import spread, told
from attemper.lab.presets.grouping import figure_series, grouped, series_of, validation_series
from attemper.lab.store.results import RunResult
from attemper.lab.table import flat
from attemper.lab.table import varied as varied_fields
from attemper.report.sweeps import Answer, Chart, HeatMap, Series, Table

DRAWN = 8  # arms in a chart: more are not told apart by eye
_UNIT = "nats a scored position"
_AFTER = {"length": "length of an example", "logit_factor": "factor on the logits"}
Arms = Mapping[tuple[str, ...], Sequence[RunResult]]


def plain_answer(found: Sequence[RunResult]) -> Answer:
    """The runs by what was varied, with means over the seeds; nothing is claimed."""
    rows = [flat(result.config.model_dump(mode="json")) for result in found]
    varied = varied_fields(rows)
    keys = {run: tuple(str(row[name]) for name in varied) for run, row in zip(found, rows, strict=True)}
    arms = grouped(found, keys.__getitem__)
    tables = (_ends(varied, arms), *_after_tables(varied, arms))
    losses = {key: spread([run.loss for run in runs]) for key, runs in arms.items()}
    known = sorted((key for key, loss in losses.items() if loss.count), key=lambda key: losses[key].mean)
    if not known:
        return Answer("Every run diverged: there is no loss to tell.", "none", tables, _charts(varied, arms, list(arms)))
    best = losses[known[0]]
    gone = sum(run.status == "diverged" for run in found)
    lost = f" {gone} of {len(found)} runs diverged, and are in no mean." if gone else ""
    sentence = (
        f"The lowest mean held-out loss is {best} {_UNIT}, of {_named(varied, known[0])}.{lost} "
        "No test is made here: see `attemper lab compare`."
    )
    drawn = [*known, *(key for key in arms if key not in known)]
    return Answer(sentence, f"{best.mean:.3f} nats", tables, _charts(varied, arms, drawn), _maps(varied, arms))


def _named(varied: Sequence[str], key: Sequence[str]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in zip(varied, key, strict=True)) or "its only arm"


def _ends(varied: Sequence[str], arms: Arms) -> Table:
    lines = tuple(
        (
            *key,
            str(spread([run.loss for run in runs])),
            told(spread([run.accuracy for run in runs]).mean, ".3f"),
            str(len(runs)),
            str(sum(run.status == "diverged" for run in runs)),
        )
        for key, runs in arms.items()
    )
    return Table("Held-out loss at the end", (*varied, "loss, nats", "accuracy", "seeds", "diverged"), lines)


def _measured(arms: Arms, kind: str) -> list[float]:
    return sorted({at for runs in arms.values() for run in runs for at in run.losses(kind)})


def _after_tables(varied: Sequence[str], arms: Arms) -> list[Table]:
    tables = []
    for kind, words in _AFTER.items():
        places = _measured(arms, kind)
        lines = []
        for key, runs in arms.items():
            losses = [run.losses(kind) for run in runs]
            lines.append((*key, *(str(spread([each[at] for each in losses if at in each])) for at in places)))
        if places:
            tables.append(Table(f"Held-out loss over the {words}, nats", (*varied, *(f"{at:g}" for at in places)), tuple(lines)))
    return tables


def _charts(varied: Sequence[str], arms: Arms, order: Sequence[tuple[str, ...]]) -> tuple[Chart, ...]:
    drawn = order[:DRAWN]
    last = [name.rpartition(".")[2] for name in varied]
    short = last if len(set(last)) == len(last) else varied  # a legend has little room
    note = "Bands are one standard deviation over the seeds."
    if len(order) > len(drawn):
        note += f" Of {len(order)} arms the {len(drawn)} of the lowest loss."

    def series(of: Callable[[str, Sequence[RunResult]], Series]) -> tuple[Series, ...]:
        made = (of(_named(short, key), arms[key]) for key in drawn)
        return tuple(each for each in made if each.x)

    charts = [
        Chart("Held-out loss", "step", _UNIT, series(validation_series), note=note),
        Chart("Entropy over ln n", "step", "entropy / ln n", series(_entropy), note="Mean over layers and heads."),
    ]
    for kind, words in _AFTER.items():
        curves = series(lambda name, runs, kind=kind: series_of(name, runs, lambda run: run.losses(kind)))
        charts.append(Chart(f"Held-out loss over the {words}", words, _UNIT, curves, log_x=True))
    return tuple(chart for chart in charts if chart.series)


def _entropy(name: str, runs: Sequence[RunResult]) -> Series:
    return figure_series(name, runs, "normalized_entropy")


def _maps(varied: Sequence[str], arms: Arms) -> tuple[HeatMap, ...]:
    """Of two fields that vary, one down and one across."""
    if len(varied) != 2:
        return ()
    down, across = (tuple(dict.fromkeys(key[place] for key in arms)) for place in (0, 1))
    values = tuple(tuple(spread([run.loss for run in arms.get((row, column), [])]).mean for column in across) for row in down)
    note = f"Rows are {varied[0]}, columns {varied[1]}. Mean over the seeds, without what diverged."
    return (HeatMap("Held-out loss at the end", down, across, values, _UNIT, note),)
