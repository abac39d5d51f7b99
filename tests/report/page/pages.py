"""Reports to make pages of: sound, hostile, and such as have nothing or nonsense in them."""

from dataclasses import replace
from typing import Any

import torch

from attemper.report import Finding, LayerRow, Report, Severity
from attemper.stats import HeadStats, RowStats
from tests.reports import finding, stats

HOSTILE = (
    "</script><script>window.pwned=1;alert(1)</script>",
    '"><img src=x onerror="window.pwned=1">',
    "<!--<script>",
    "'};window.pwned=1;//",
    "\u202egpj.\u2066\x1b]0;t\x07\x00\u2028",
    "{{ 7 * 7 }}{% raw %}",
    "</style><style>*{display:none}",
    "&lt;b&gt;&#x3c;",
    "\ud800",
)


def row(number: int, heads: int = 3, **changes: Any) -> LayerRow:
    made = LayerRow(f"layers.{number}.attention", 0, "sdpa", stats(number, heads, 1.0 + 4 * number), 0.125)
    return replace(made, **changes)


def report(*findings: Finding, rows: tuple[LayerRow, ...] | None = None, **changes: Any) -> Report:
    rows = tuple(map(row, range(5))) if rows is None else rows
    whole = Report(model="a model", inputs="some inputs", dtype="float32", rows=rows, findings=findings)
    return replace(whole, **changes)


def hostile() -> Report:
    """Every text that a checkpoint may have a say in is hostile, in each way."""
    whole = " ".join(HOSTILE)
    rows = tuple(row(number, module=name, seam=name) for number, name in enumerate(HOSTILE))
    findings = tuple(
        finding(module=name, heads=(0, 2), message=name, source=name, cost=name, remedy=name, code=name) for name in HOSTILE
    )
    return report(*findings, rows=rows, model=whole, inputs=whole, dtype=whole, unseen=((whole, whole),), notes=(whole,))


def broken() -> Report:
    """Heads without rows, with one key, with infinities and with NaN; layers of 1, 2 and 7 heads."""
    nothing = HeadStats.from_rows(RowStats.from_logits(torch.zeros(1, 2, 3, 5), torch.zeros(1, 2, 3, 5, dtype=torch.bool)))
    one_key = HeadStats.from_rows(RowStats.from_logits(torch.ones(1, 1, 3, 1)))
    logits = torch.randn(1, 7, 11, 13, generator=torch.Generator().manual_seed(0))
    logits[0, 1, 2, 3], logits[0, 2, 0, 0], logits[0, 3] = torch.nan, torch.inf, 3e38
    logits[0, 4] *= 1e6
    logits[0, 5] = 0.0
    wild = HeadStats.from_rows(RowStats.from_logits(logits))
    rows = (row(0, stats=nothing, scale=None), row(1, stats=one_key), row(2, stats=wild, scale=float("inf")))
    return report(finding("ATT203", Severity.ERROR, module="", call=None, heads=(), measured=None, threshold=None), rows=rows)


def shared() -> Report:
    """One module, called again and again."""
    rows = tuple(row(number, module="shared.attention", call=number) for number in range(5))
    return report(finding(module="shared.attention", call=3, heads=(2,)), rows=rows)
