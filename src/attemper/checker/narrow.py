"""What narrow dtypes do to the attention of this model, from orders that were really run on its q, k and v (ATT205, ATT206)."""

from collections.abc import Iterator, Sequence

from attemper.checker.evidence import CallEvidence, Evidence
from attemper.checker.findings import finding, heads_in_words
from attemper.checker.orders import AMAX, EAGER, FUSED, SCALE_FIRST, UNSCALED, WORDS, own_order
from attemper.report import Finding, OrderFigures, Severity

SIXTEEN = ("float16", "bfloat16")
EIGHT = ("float8_e4m3fn", "float8_e5m2")


def narrow_findings(evidence: Evidence) -> Iterator[Finding]:
    """The findings ATT205 and ATT206."""
    for call in evidence.calls:
        yield from _rounded_away(call, evidence)
        yield from _float8(call, evidence.thresholds.eight_bit_error)


def of(call: CallEvidence, dtype: str, order: str) -> OrderFigures | None:
    """The figures of one order in one dtype, None where it was not run."""
    return next((each for each in call.orders if (each.dtype, each.order) == (dtype, order)), None)


def outcomes(call: CallEvidence, dtype: str, heads: Sequence[int]) -> str:
    """A sentence on what each order did to these heads; "" where none was run."""
    parts = []
    for order in (EAGER, SCALE_FIRST, FUSED):
        run = of(call, dtype, order)
        if run is None:
            continue
        broken, rows = (sum(values[head] for head in heads) for values in (run.broken_rows, run.rows))
        parts.append(f"{order} ({WORDS[order]}) " + (f"breaks {broken} of {rows} rows" if broken else "holds"))
    return f"Run in {dtype} on rows with the largest products and others: {'; '.join(parts)}." if parts else ""


def _rounded_away(call: CallEvidence, evidence: Evidence) -> Iterator[Finding]:
    limit, own = evidence.thresholds.sixteen_bit_error, own_order(call.written, evidence.dtype)
    happens = of(call, evidence.dtype, own) if evidence.dtype in SIXTEEN else None
    if happens is not None and _over(happens, limit):
        yield _coarse(call, [happens], limit, Severity.WARNING, f"The model's code does this ({own} in {evidence.dtype}).")
        return
    hazards = [run for dtype in SIXTEEN if (run := of(call, dtype, EAGER)) is not None and _over(run, limit)]
    if hazards:
        cost = f"None as it runs now ({own} in {evidence.dtype}); code that writes logits down in {_names(hazards)} would pay."
        yield _coarse(call, hazards, limit, Severity.INFO, cost)


def _coarse(call: CallEvidence, runs: list[OrderFigures], limit: float, severity: Severity, cost: str) -> Finding:
    worst = max(runs, key=lambda run: max(_sound(run)))
    heads = sorted({head for run in runs for head in _over(run, limit)})
    parts = []
    for run in runs:
        head = _worst(run)
        part = f"in {run.dtype} {run.order} ({WORDS[run.order]}) puts {run.weight_error[head]:.3g} of a row's weight elsewhere"
        part += f" and moves the output by {run.output_error[head]:.3g} of it (head {head})"
        fused = of(call, run.dtype, FUSED)
        parts.append(part if fused is None or run.order == FUSED else f"{part}; fused {fused.weight_error[head]:.2g}")
    return finding(
        "ATT205",
        f"{heads_in_words(heads)}: {'; '.join(parts)}. Against float64, threshold {limit:g}.",
        severity=severity,
        cost=cost,
        module=call.module,
        call=call.call,
        heads=heads,
        measured=max(_sound(worst)),
        threshold=limit,
    )


def _float8(call: CallEvidence, limit: float) -> Iterator[Finding]:
    scaled = [run for dtype in EIGHT if (run := of(call, dtype, AMAX)) is not None]
    plain = [run for dtype in EIGHT if (run := of(call, dtype, UNSCALED)) is not None and any(run.operand_overflows)]
    if not scaled:
        return
    best = min(scaled, key=lambda run: max(run.weight_error))
    heads = set(_over(best, limit))
    parts = []
    for run in plain:
        lost = [head for head, numbers in enumerate(run.operand_overflows) if numbers]
        heads |= set(lost)
        parts.append(f"numbers of q, k or v pass the largest {run.dtype} number, so each tensor needs a scale of its own")
    if not heads:
        return
    head = _worst(best)
    done = f"puts {best.weight_error[head]:.3g} of a row's weight elsewhere and moves the output by {best.output_error[head]:.3g}"
    parts.append(
        f"with each tensor scaled to its range {best.dtype}, the better one, {done} of it (head {head}; threshold {limit:g})"
    )
    yield finding(
        "ATT206",
        f"{heads_in_words(sorted(heads))}: {'; '.join(parts)}.",
        cost="None in the dtype measured; attention whose q, k and v are float8 would pay it.",
        module=call.module,
        call=call.call,
        heads=sorted(heads),
        measured=best.weight_error[head],
        threshold=limit,
    )


def _sound(run: OrderFigures) -> list[float]:
    """Weight errors without those of heads that broke: they overflow, which is another finding."""
    return [0.0 if broken else error for error, broken in zip(run.weight_error, run.broken_rows, strict=True)]


def _over(run: OrderFigures, limit: float) -> list[int]:
    return [head for head, error in enumerate(_sound(run)) if error > limit]


def _worst(run: OrderFigures) -> int:
    errors = _sound(run)
    return errors.index(max(errors))


def _names(runs: list[OrderFigures]) -> str:
    return " or ".join(run.dtype for run in runs)
