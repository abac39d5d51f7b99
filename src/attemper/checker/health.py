"""Softmax health: heads that pass next to no gradient, and heads that rest on one key (ATT3xx)."""

from collections.abc import Iterator

import torch

from attemper.checker.evidence import CallEvidence, Evidence
from attemper.checker.findings import finding, heads_in_words
from attemper.report import Finding

# Above half of its rows saturated, a head's median row has gain 1 - sum p^2 < 1 - 0.99^2 < 0.02.
SATURATED_SHARE = 0.5
# Fewer rows than this say nothing about a share.
FEWEST_ROWS = 8
# The threshold of arXiv 2410.10781 section 3 for the mean weight of a sink; that most rows agree on it is ours.
SINK_WEIGHT, SINK_ROWS = 0.3, 0.5
# A saturated head is at rest, rather than at work, if nearly all its rows choose the first token.
AT_REST_ROWS = 0.9


def health_findings(evidence: Evidence) -> Iterator[Finding]:
    """The findings ATT301 and ATT302."""
    for call in evidence.calls:
        yield from _saturated(call)
        yield from _sinks(call)


def _saturated(call: CallEvidence) -> Iterator[Finding]:
    share = call.stats.saturated_share
    at_rest = call.sink.at_start & (call.sink.share >= AT_REST_ROWS)
    chosen = (call.stats.softmax_rows >= FEWEST_ROWS) & (share > SATURATED_SHARE) & ~at_rest
    heads = torch.nonzero(chosen).flatten().tolist()
    if not heads:
        return
    worst = heads[int(share[heads].argmax())]
    yield finding(
        "ATT301",
        f"{heads_in_words(heads)}: up to {share[worst]:.1%} of rows put more than 0.99 of their weight on one key "
        f"(threshold {SATURATED_SHARE:.0%}); mean gain {call.stats.mean_gain[worst]:.3g}.",
        cost="Next to no gradient reaches the queries and keys of such rows. Some heads do this on purpose (matching, "
        "copying) and work.",
        module=call.module,
        call=call.call,
        heads=heads,
        measured=float(share[worst]),
        threshold=SATURATED_SHARE,
    )


def _sinks(call: CallEvidence) -> Iterator[Finding]:
    sink = call.sink
    chosen = (call.stats.softmax_rows >= FEWEST_ROWS) & (sink.weight > SINK_WEIGHT) & (sink.share > SINK_ROWS) & (call.keys > 2)
    heads = torch.nonzero(chosen).flatten().tolist()
    if not heads:
        return
    worst = heads[int(sink.weight[heads].argmax())]
    place = "the first token" if bool(sink.at_start[worst]) else f"key {int(sink.key[worst])}"
    yield finding(
        "ATT302",
        f"{heads_in_words(heads)}: rest on one key; head {worst} most, {sink.share[worst]:.0%} of whose rows have {place} as "
        f"their "
        f"strongest, with at least {sink.weight[worst]:.2f} of all weight (threshold {SINK_WEIGHT:g}).",
        cost="None by itself; it matters for cache eviction, quantisation and reading attention maps.",
        module=call.module,
        call=call.call,
        heads=heads,
        measured=float(sink.weight[worst]),
        threshold=SINK_WEIGHT,
    )
