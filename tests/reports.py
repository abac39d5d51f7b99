"""Reports made by hand, for tests of what is made of them; names as hostile as a checkpoint may bring along."""

import math
from dataclasses import replace

import torch

from attemper.report import Finding, LayerRow, OrderFigures, Report, Severity, WeightRow
from attemper.stats import HeadStats, RowStats

HOSTILE = "layers.\x1b]0;title\x07\x1b[2J.\u202e\u200bgpj[bold red]\n\r\x9b31m.attention"


def stats(seed: int, heads: int = 3, factor: float = 1.0) -> HeadStats:
    logits = torch.randn(2, heads, 7, 11, generator=torch.Generator().manual_seed(seed)) * factor
    return HeadStats.from_rows(RowStats.from_logits(logits))


def orders(seed: int) -> tuple[OrderFigures, ...]:
    """Two orders of three heads; in the first, one head is broken."""
    counts = [(head, seed, 0) for head in range(7)]
    return (
        OrderFigures("float16", "eager", *counts, (0.0, 0.125, 0.5), (0.25, 0.0625, 1.0), (0.75, 0.5, math.inf)),
        OrderFigures("float8_e5m2", "float8-amax", *counts, (0.0,) * 3, (0.12345678, 0.0, 1e-9), (0.0, 1 / 3, 0.0)),
    )


def finding(code: str = "ATT301", severity: Severity = Severity.WARNING, **changes: object) -> Finding:
    whole = Finding(
        code=code,
        severity=severity,
        module="layers.1.attention",
        call=0,
        heads=(1, 2),
        measured=0.75,
        threshold=0.5,
        message="heads 1 and 2: something was measured.",
        source="a source",
        cost="a cost",
        remedy="a remedy",
    )
    return replace(whole, **changes)


def report(*findings: Finding, layers: int = 3, **changes: object) -> Report:
    rows = tuple(
        LayerRow(f"layers.{i}.attention", 0, "sdpa", stats(i), 0.125, own_order="eager", orders=orders(i)) for i in range(layers)
    )
    return Report(
        **{"model": "a model", "inputs": "some inputs", "dtype": "float32", "rows": rows, "findings": findings} | changes
    )


def by_weights(unseen: tuple[tuple[str, str], ...] = ()) -> Report:
    """What --weights-only gives: no rows, and not nothing. With `unseen`: a second module too, which has no bound."""
    rows = (WeightRow("layers.0.attention", 3, (17.0, 19.0, 23.0), 5.0, 7.0, None, "layers.0.norm"),)
    rows += (WeightRow("layers.1.attention", 3, (), 5.0, 7.0, None),) if unseen else ()
    return report(layers=0, weights=rows, unseen=unseen)


def hostile_report() -> Report:
    """Everything that a report can hold, under names that want out of their form."""
    forms = (
        HOSTILE,
        "a](javascript:alert(1))[b{0}",
        "::error title=x::gotcha\n::stop-commands::x",
        "]]><script>&amp;\"'<!--",
        "\x00\x08\ufffe\uffff\ud800\U0001ffff",
        "100%,:25%0A",
    )
    severities = list(Severity)
    findings = [finding(f"ATT30{i % 2 + 1}", severities[i % 3], module=name, message=name) for i, name in enumerate(forms)]
    rows = tuple(LayerRow(name, 0, "sdpa", stats(i), 0.125 if i else None) for i, name in enumerate(forms))
    return report(
        *findings,
        finding("ATT203", Severity.ERROR, measured=None, threshold=None, heads=(), call=None, module=""),
        finding("ATT201", measured=math.inf, threshold=65504.0, cost=HOSTILE, remedy=HOSTILE, source=HOSTILE),
        rows=rows,
        model=HOSTILE,
        inputs=forms[3],
        unseen=tuple((name, name) for name in forms),
        notes=forms,
        suppressed=(finding("ATT202", module=forms[1], message=forms[2]),),
    )
