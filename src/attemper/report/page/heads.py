"""What a page's script reads about heads: the figures that it opens with, and the rest by layer.

A hundred layers of 128 heads have some megabytes of histograms. Those of a layer are unpacked when one of its heads is looked at.
"""

import base64
import json
import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from attemper.report.page.charts import LABEL_WIDTH, heat_map, histogram, themes
from attemper.report.page.figures import FIGURES, HISTOGRAMS, SHARES, Figure, mapped
from attemper.report.records import LayerRow
from attemper.report.schema import to_json
from attemper.stats.heads import HISTOGRAM_EDGES

_DECIMALS = {"fixed": 4, "percent": 3}


def map_data(rows: Sequence[LayerRow], labels: Sequence[str], titles: Sequence[str]) -> dict[str, Any]:
    """What the page needs to open: the figures that have a map, and what is drawn.

    Args:
        labels: a short name for each row; titles: the whole one.
    """
    maps = mapped([row.stats for row in rows])
    return {
        "figures": [{name: getattr(figure, name) for name in ("key", "label", "definition", "form")} for figure in FIGURES],
        "maps": [
            {"key": figure.key, "kind": scale.kind, "low": scale.low, "high": scale.high, "reverse": figure.strong == "low"}
            for figure, scale in maps
        ],
        "layers": [
            {
                "label": label,
                "title": title,
                "seam": row.seam,
                "scale": _short(row.scale),
                "heads": row.stats.heads,
                "values": {figure.key: _mapped_values(figure, row) for figure, _ in maps},
            }
            for row, label, title in zip(rows, labels, titles, strict=True)
        ],
        "histograms": [
            {"label": label, "share": name in SHARES, "edges": [_short(edge) for edge in HISTOGRAM_EDGES[name].tolist()]}
            for name, label in HISTOGRAMS
        ],
        "labelWidth": LABEL_WIDTH,
        "charts": {"map": heat_map()} | {kind: histogram(kind) for kind in ("share", "linear", "log")},
        "themes": themes(),
    }


def layer_data(row: LayerRow) -> str:
    """The rest about one layer, as JSON, deflated, in base 64: a quarter of the text.

    `values`: every figure by key. `runs`: for each histogram and head the first occupied bin, then the counts up to the last one.
    """
    whole = {
        "values": {figure.key: _values(figure, row) for figure in FIGURES},
        "runs": [_runs(row.stats.histograms[name]) for name, _ in HISTOGRAMS],
    }
    text = json.dumps(whole, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _values(figure: Figure, row: LayerRow) -> list[Any]:
    return [_as_shown(value, figure.form) for value in figure.read(row.stats).tolist()]


def _runs(counts: torch.Tensor) -> list[list[int]]:
    """[[first bin, counts …] for each head]; [0] where there is nothing."""
    occupied = (counts > 0).int()
    first = occupied.argmax(-1).tolist()
    last = (counts.shape[-1] - occupied.flip(-1).argmax(-1)).tolist()
    return [
        [begin, *head[begin:end]] if head[begin] else [0] for begin, end, head in zip(first, last, counts.tolist(), strict=True)
    ]


def _mapped_values(figure: Figure, row: LayerRow) -> list[Any]:
    """The same for a map, where a head without rows is blank: its largest logit is −∞ and its room without end."""
    empty = (row.stats.rows == 0).tolist()
    values = _values(figure, row)
    return [None if nothing and figure.form != "count" else value for value, nothing in zip(values, empty, strict=True)]


def _as_shown(value: float, form: str) -> Any:
    """Rounded here, once, to what is shown: rounded twice, a last digit may differ from the text report's."""
    if form in _DECIMALS and math.isfinite(value):
        return round(value, _DECIMALS[form])
    return _short(value)


def _short(value: float | None) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) and math.isfinite(value) else to_json(value)
