"""Softmax health: heads that pass next to no gradient, and heads that rest on one key (ATT3xx)."""

from collections.abc import Iterator

import torch

from attemper.checker.evidence import CallEvidence, Evidence
from attemper.checker.findings import finding, heads_in_words
from attemper.checker.thresholds import Thresholds
from attemper.report import Finding


def health_findings(evidence: Evidence) -> Iterator[Finding]:
    """The findings ATT301 and ATT302."""
    for call in evidence.calls:
        yield from _saturated(call, evidence.thresholds)
        yield from _sinks(call, evidence.thresholds)


def _saturated(call: CallEvidence, limits: Thresholds) -> Iterator[Finding]:
    share = call.stats.saturated_share
    at_rest = call.sink.at_start & (call.sink.share >= limits.at_rest_rows)
    chosen = (call.stats.softmax_rows >= limits.fewest_rows) & (share > limits.saturated_share) & ~at_rest
    heads = torch.nonzero(chosen).flatten().tolist()
    if not heads:
        return
    worst = heads[int(share[heads].argmax())]
    yield finding(
        "ATT301",
        f"{heads_in_words(heads)}: up to {share[worst]:.1%} of rows put more than 0.99 of their weight on one key "
        f"(threshold {limits.saturated_share:.0%}); mean gain {call.stats.mean_gain[worst]:.3g}.",
        cost="Next to no gradient reaches the queries and keys of such rows. Some heads do this on purpose (matching, "
        "copying) and work.",
        module=call.module,
        call=call.call,
        heads=heads,
        measured=float(share[worst]),
        threshold=limits.saturated_share,
    )


def _sinks(call: CallEvidence, limits: Thresholds) -> Iterator[Finding]:
    sink = call.sink
    chosen = (
        (call.stats.softmax_rows >= limits.fewest_rows)
        & (sink.weight > limits.sink_weight)
        & (sink.share > limits.sink_rows)
        & (call.keys > 2)
    )
    heads = torch.nonzero(chosen).flatten().tolist()
    if not heads:
        return
    worst = heads[int(sink.weight[heads].argmax())]
    place = "the first token" if bool(sink.at_start[worst]) else f"key {int(sink.key[worst])}"
    yield finding(
        "ATT302",
        f"{heads_in_words(heads)}: rest on one key; head {worst} most, {sink.share[worst]:.0%} of whose rows have {place} as "
        f"their "
        f"strongest, with at least {sink.weight[worst]:.2f} of all weight (threshold {limits.sink_weight:g}).",
        cost="None by itself; it matters for cache eviction, quantisation and reading attention maps.",
        module=call.module,
        call=call.call,
        heads=heads,
        measured=float(sink.weight[worst]),
        threshold=limits.sink_weight,
    )
