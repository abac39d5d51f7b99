"""The page of a run: verdict, curves of layers and heads, a map of heads at any step, alarms, the layers at the last step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attemper.monitor.alarms.thresholds import AlarmThresholds
from attemper.monitor.records import Alarm
from attemper.report import layout as words
from attemper.report.names import safe
from attemper.report.page.charts import LABEL_WIDTH, curves, heat_map, themes, vega_script
from attemper.report.page.check_page import RuleWords
from attemper.report.page.requirements import require_page
from attemper.report.page.run_curves import head_thinning, heads_data, layers_data, run_data
from attemper.report.page.shell import render_page, script
from attemper.report.records import Severity
from attemper.report.runs import RunView, layout

_ALARMS = 200  # in the table and as marks, the last ones
_SCALARS = 8  # curves of what the caller logged


@dataclass(frozen=True)
class Told:
    """One alarm in the table; target: the head or layer that it leads to, "" where there is no map."""

    step: int
    severity: str
    code: str
    name: str
    message: str
    target: str


def run_page(view: RunView, rules: Mapping[str, RuleWords] | None = None, name: str = "") -> str:
    """The run as one HTML file, as text.

    Args:
        view: the run. rules: names by code, to stand beside the alarms. name: where the run was read from.

    Raises:
        MissingExtraError: a package of the extra `html` is absent.
    """
    require_page()
    shared, rows, _ = layout.table(view)
    labels = [cells[0] for cells in rows]
    drawn = bool(view.steps and view.layers)
    alarms = view.alarms[-_ALARMS:]
    scalars = _scalars(view)
    data: dict[str, Any] = {}
    scripts = []
    if drawn:
        scripts = [vega_script(), script("numbers.js", "chart.js", "map.js", "controls.js", "curves.js", "run.js")]
        data["data"] = run_data(view, labels) | _for_script(view, alarms, rules or {}, scalars)
        data["layers-data"] = layers_data(view)
        thinning = head_thinning(view)
        data |= {f"layer-data-{number}": heads_data(layer, thinning) for number, layer in enumerate(view.layers)}
    size = -(-len(view.steps) // max(1, len(data["data"]["steps"]) // 2)) if drawn else 1
    return render_page(
        "run.html.j2",
        styles=("check.css", "run.css"),
        scripts=scripts,
        data=data,
        title=f"attemper report: {safe(name or view.info.model)}",
        tone=_tone(view),
        verdict=_verdict(view),
        facts=[
            *([("read from", safe(name))] if name else []),
            *layout.heading(view),
            ("version", f"attemper {safe(view.info.version)}"),
        ],
        tiles=_tiles(view) if drawn else [],
        drawn=drawn,
        thinned=size if drawn and len(data["data"]["steps"]) < len(view.steps) else 0,
        scalars=[safe(each) for each in scalars] if drawn else [],
        last=view.steps[-1] if view.steps else 0,
        shared=shared,
        alarms=[_told(each, view, rules or {}, drawn) for each in alarms[::-1]],
        more_alarms=len(view.alarms) - len(alarms),
        columns=layout.COLUMNS,
        table=rows if view.steps else [],
        legend=layout.LEGEND,
    )


def _tone(view: RunView) -> str:
    worst = next((severity for severity in Severity if any(each.severity == severity for each in view.alarms)), None)
    return str(worst) if worst else "clean" if view.steps else "nothing"


def _verdict(view: RunView) -> str:
    if not view.steps:
        return "No step has been logged yet."
    where = f"in {words.plural(len(view.steps), 'logged step')}"
    if not view.alarms:
        return f"No alarm {where}."
    errors = sum(each.severity == "error" for each in view.alarms)
    graver = f", {words.plural(errors, 'error')}" if errors else ""
    return f"{words.plural(len(view.alarms), 'alarm')} {where}{graver}."


def _tiles(view: RunView) -> list[tuple[str, str]]:
    ends = {figure: [layer.worst(figure)[0][-1].item() for layer in view.layers] for figure in ("max_scaled_product", "gain")}
    entropies = [layer.worst("normalized_entropy")[0][-1].item() for layer in view.layers]
    known = [value for value in entropies if value == value]
    loss = view.latest.get("loss")
    return [
        ("logged steps", f"{len(view.steps):,}"),
        ("last step", f"{view.steps[-1]:,}"),
        ("layers", f"{len(view.layers):,}"),
        ("heads", f"{sum(layer.heads for layer in view.layers):,}"),
        ("largest |s·q·k|", layout.largest_of(max(ends["max_scaled_product"], key=lambda value: (value == value, value)), view)),
        ("lowest norm. entropy", words.form(min(known), ".3f") if known else "—"),
        *([("loss", layout.scalar(loss))] if loss is not None else []),
        ("alarms", f"{len(view.alarms):,}"),
    ]


def _scalars(view: RunView) -> list[str]:
    """Those worth a curve: with more than one number, the loss first; a learning rate that never changes is none."""
    varying = [name for name, values in view.scalars.items() if len(values[~values.isnan()].unique()) > 1]
    return sorted(varying, key=lambda name: "loss" not in name.lower())[:_SCALARS]


def _told(alarm: Alarm, view: RunView, rules: Mapping[str, RuleWords], drawn: bool) -> Told:
    layer = _number(alarm, view)
    target = "" if layer is None or not drawn else f"#layer-{layer}" if alarm.head is None else f"#head-{layer}-{alarm.head}"
    name = rules[alarm.code].name if alarm.code in rules else ""
    return Told(alarm.step, safe(alarm.severity), safe(alarm.code), name, safe(alarm.message), target)


def _number(alarm: Alarm, view: RunView) -> int | None:
    """Which layer of the page an alarm is about; None where the page does not have it, or not that head."""
    for number, layer in enumerate(view.layers):
        if (layer.layer, layer.call) == (alarm.layer, alarm.call):
            return number if alarm.head is None or 0 <= alarm.head < layer.heads else None
    return None


def _for_script(view: RunView, alarms: Sequence[Alarm], rules: Mapping[str, RuleWords], scalars: Sequence[str]) -> dict[str, Any]:
    """Alarms as marks of the curves and, by code, of the map; thresholds as rules; charts and themes."""
    limits = AlarmThresholds()
    sizes = [limits.alarming_logit, limits.hurting_logit, limits.diverging_logit]
    logits = [{"y": size, "words": f"{size:g}"} for size in sizes]
    numbers = [_number(alarm, view) for alarm in alarms]
    groups = list(dict.fromkeys((alarm.code, alarm.severity) for alarm in alarms))
    return {
        "scalarNames": list(scalars),
        "rules": {
            "max_scaled_product": logits,
            "max_logit": logits,
            "normalized_entropy": [{"y": limits.collapsed_entropy, "words": f"{limits.collapsed_entropy:g}"}],
            "gain": [{"y": limits.collapsed_gain, "words": f"{limits.collapsed_gain:g}"}],
        },
        "alarms": [
            {
                "step": alarm.step, "layer": number, "head": alarm.head, "severity": alarm.severity,
                "words": f"{safe(alarm.code)} {rules[alarm.code].name if alarm.code in rules else ''}".rstrip(),
            }
            for alarm, number in zip(alarms, numbers, strict=True)
        ],
        "groups": [
            {"code": safe(code), "severity": severity, "name": rules[code].name if code in rules else ""}
            for code, severity in groups
        ],
        "findings": [
            {
                "group": groups.index((alarm.code, alarm.severity)), "layer": number,
                "heads": [] if alarm.head is None else [alarm.head], "message": safe(alarm.message),
            }
            for alarm, number in zip(alarms, numbers, strict=True)
            if number is not None
        ],
        "labelWidth": LABEL_WIDTH,
        "charts": {"map": heat_map()} | {kind: curves(kind) for kind in ("share", "linear", "log")},
        "themes": themes(),
    }  # fmt: skip
