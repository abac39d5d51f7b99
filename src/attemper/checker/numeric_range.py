"""Range: what overflows float16, what is not finite, which logits are large, and whether attention is to blame."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attemper.checker.evidence import CallEvidence, Evidence
from attemper.checker.findings import finding, heads_in_words
from attemper.checker.narrow import of, outcomes
from attemper.checker.orders import EAGER, FUSED, SCALE_FIRST, own_order
from attemper.checker.thresholds import Thresholds
from attemper.report import Finding, Severity

LARGEST_FLOAT16 = torch.finfo(torch.float16).max


def range_findings(evidence: Evidence) -> Iterator[Finding]:
    """The findings ATT201 to ATT204."""
    if evidence.nonfinite is not None:
        yield _not_finite(evidence)
    for call in evidence.calls:
        yield from _overflow(call, evidence.dtype)
        yield from _large_logits(call, evidence.dtype, evidence.thresholds)
    module, largest = evidence.largest_activation
    if evidence.dtype != "float16" and LARGEST_FLOAT16 < largest < math.inf:
        place = "in attention" if _in_attention(module, evidence) else "not in attention"
        yield finding(
            "ATT204",
            f"an activation reaches {largest:.4g}, first in {module or 'the model itself'} ({place}); float16 ends at 65504."
            + ("" if _in_attention(module, evidence) else _attention_in_float16(evidence)),
            cost="None in the dtype measured; float16 would have infinity there, whatever headroom the attention logits have.",
            module=module,
            measured=largest,
            threshold=LARGEST_FLOAT16,
        )


_CLIP = "keep the product in float32 or bfloat16, or clip the projections (QK-clip)."
_REMEDIES: dict[tuple[str, ...], str] = {
    (SCALE_FIRST, FUSED): f"Multiply the query by the scale before the product, use a fused kernel, {_CLIP}",
    (FUSED,): f"Scaling first is not enough here: use a fused kernel, {_CLIP}",
    (SCALE_FIRST,): f"Multiply the query by the scale before the product, {_CLIP}",
    (): f"Neither scaling first nor a fused kernel is enough in float16: {_CLIP}",
}


def _breaks(call: CallEvidence, order: str, heads: list[int]) -> bool:
    run = of(call, "float16", order)
    return run is not None and any(run.broken_rows[head] for head in heads)


def _attention_in_float16(evidence: Evidence) -> str:
    """Whether attention itself would hold in float16, for a fault that is not its own."""
    headroom = _headroom(evidence)
    runs = [each for call in evidence.calls for each in call.orders if each.dtype == "float16"]
    if not 1 < headroom < math.inf or not runs:
        return ""
    broken = sorted({each.order for each in runs if any(each.broken_rows)})
    held = f"{' and '.join(broken)} in float16 would not hold" if broken else "every order of operations holds in float16"
    return f" In attention q·k has {headroom:.3g} times headroom, and of the rows that were run {held}."


def _headroom(evidence: Evidence) -> float:
    return min((float(call.stats.headroom(torch.float16).min()) for call in evidence.calls), default=math.inf)


def _overflow(call: CallEvidence, dtype: str) -> Iterator[Finding]:
    products = call.stats.product_absmax
    heads = _where(products > LARGEST_FLOAT16)
    if not heads:
        return
    own = own_order(call.written, dtype)
    happens = dtype == "float16" and (own == EAGER or _breaks(call, own, heads))
    safe = tuple(order for order in (SCALE_FIRST, FUSED) if not _breaks(call, order, heads))
    worst = float(products[heads].max())
    yield finding(
        "ATT201",
        f"{heads_in_words(heads)}: the raw product q·k reaches {worst:.4g}, {worst / LARGEST_FLOAT16:.3g} times the largest "
        f"float16 number, before the scale is applied. {outcomes(call, 'float16', heads)}",
        severity=Severity.ERROR if happens else Severity.WARNING,
        cost=(
            f"The model's code does this ({own}): its rows are NaN."
            if happens
            else f"None as it runs now ({own} in {dtype}); eager attention in float16 would write infinity and then NaN."
        ),
        remedy=_REMEDIES[safe],
        module=call.module,
        call=call.call,
        heads=heads,
        measured=worst,
        threshold=LARGEST_FLOAT16,
    )


def _large_logits(call: CallEvidence, dtype: str, limits: Thresholds) -> Iterator[Finding]:
    largest, above_mean = call.largest_logit, call.largest_logit_centred
    large = (largest > limits.large_logit) & largest.isfinite()
    offset = large & (above_mean <= limits.offset_share * largest)
    if sharp := _where(large & ~offset):
        worst = _worst(largest, sharp)
        yield finding(
            "ATT202",
            f"{heads_in_words(sharp)}: the largest logit is {largest[worst]:.4g}, {above_mean[worst]:.4g} above the mean of "
            f"its row (threshold {limits.large_logit:g}).",
            cost="The softmax is a hard choice there and passes no gradient; in training such logits tend to keep growing "
            "until the run diverges.",
            module=call.module,
            call=call.call,
            heads=sharp,
            measured=float(largest[worst]),
            threshold=limits.large_logit,
        )
    if shifted := _where(offset):
        worst = _worst(largest, shifted)
        value = float(largest[worst])
        yield finding(
            "ATT202",
            f"{heads_in_words(shifted)}: the largest logit is {value:.4g} (threshold {limits.large_logit:g}), but "
            f"{value - above_mean[worst]:.4g} of it is an offset common to its row, which the softmax ignores; only "
            f"{above_mean[worst]:.4g} of it counts. This is not saturation.",
            severity=Severity.INFO if dtype == "float32" else Severity.WARNING,
            cost=f"No gradient; but 16-bit code that writes logits down has steps of {_step(value, torch.float16):g} (float16) "
            f"and {_step(value, torch.bfloat16):g} (bfloat16) there.",
            module=call.module,
            call=call.call,
            heads=shifted,
            measured=value,
            threshold=limits.large_logit,
        )


def _not_finite(evidence: Evidence) -> Finding:
    first = evidence.nonfinite
    assert first is not None
    inside = _in_attention(first.module, evidence)
    where = first.module or "the model itself"
    if first.before:
        where = f"{where}, between its submodules and before {first.before} (a residual sum, say)"
    parts = [f"the first {first.kind} arises in {where}"]
    if first.in_parameters:
        parts.append(f"its parameter {first.in_parameters} is itself not finite")
    elif evidence.dtype == "float16" and first.largest > LARGEST_FLOAT16 / 16:
        parts.append(f"activations had reached {first.largest:.4g}, and float16 ends at {LARGEST_FLOAT16:g}")
    if inside:
        parts.append("this is attention")
    else:
        headroom = _headroom(evidence)
        room = (
            f" (where products were finite, they have {headroom:.3g} times headroom in float16)"
            if 1 < headroom < math.inf
            else ""
        )
        parts.append(f"this is not attention{room}")
    return finding(
        "ATT203",
        "; ".join(parts) + ".",
        cost="Everything computed behind it is wrong.",
        module=first.module,
        measured=None,
        threshold=None,
    )


def _in_attention(module: str, evidence: Evidence) -> bool:
    return any(module == call.module or (call.module and module.startswith(call.module + ".")) for call in evidence.calls)


def _where(mask: Tensor) -> list[int]:
    return torch.nonzero(mask).flatten().tolist()


def _worst(values: Tensor, heads: list[int]) -> int:
    return heads[int(values[heads].argmax())]


def _step(value: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers of a dtype near a value."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(value))
