"""Softmax health: heads that pass next to no gradient, and heads that do one simple thing, described as what they do (ATT3xx).

Each figure is measured on every input by itself; a finding says on how many of them it holds, and how far apart they lie. A head
that is dead on one of them is told as such, and not once more as saturated.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from attemper.checker.evidence import CallEvidence, Evidence
from attemper.checker.findings import finding, heads_in_words
from attemper.checker.thresholds import Thresholds
from attemper.report import Finding

Judged = tuple[Tensor, Tensor]  # [heads]: the figure, and whether it makes a finding


def health_findings(evidence: Evidence) -> Iterator[Finding]:
    """The findings ATT301 to ATT305."""
    whole = _all_uniform(evidence)
    if whole is not None:
        yield whole
    for call in evidence.calls:
        on_each = evidence.on_each_input(call)
        for rule in (_saturated, _sinks, _uniform, _dead, _previous):
            if rule is not _uniform or whole is None:
                yield from rule(on_each, evidence.thresholds)


def _saturated(calls: Sequence[CallEvidence], limits: Thresholds) -> Iterator[Finding]:
    def judge(call: CallEvidence) -> Judged:
        share = call.stats.saturated_share
        return share, _enough(call, limits) & (share > limits.saturated_share) & ~_at_rest(call, limits) & ~dead

    dead = torch.stack([_judge_dead(call, limits)[1] for call in calls]).any(0)
    for heads, at, worst, spread in _holds(calls, judge):
        share, gain, most = at.stats.saturated_share[worst], at.stats.mean_gain[worst], _most(heads, worst)
        yield finding(
            "ATT301",
            f"{heads_in_words(heads)}: {most}{share:.1%} of its rows put more than 0.99 of their weight on one key "
            f"(threshold {limits.saturated_share:.0%}); mean gain of all its rows {gain:.3g}{spread}.",
            cost="Next to no gradient reaches the queries and keys of such rows. Some heads do this on purpose (matching, "
            "copying) and work.",
            module=at.module,
            call=at.call,
            heads=heads,
            measured=float(share),
            threshold=limits.saturated_share,
        )


def _sinks(calls: Sequence[CallEvidence], limits: Thresholds) -> Iterator[Finding]:
    def judge(call: CallEvidence) -> Judged:
        sink = call.sink
        chosen = (sink.weight > limits.sink_weight) & (sink.share > limits.sink_rows) & (call.keys > 2)
        return sink.weight, _enough(call, limits) & chosen

    for heads, at, worst, spread in _holds(calls, judge):
        sink = at.sink
        place = "the first token" if bool(sink.at_start[worst]) else f"key {int(sink.key[worst])}"
        several = len(heads) > 1
        most, whose = (f"head {worst} most, ", "whose") if several else ("", "its")
        yield finding(
            "ATT302",
            f"{heads_in_words(heads)}: {'rest' if several else 'rests'} on one key; {most}{sink.share[worst]:.0%} of {whose} "
            f"rows have {place} as their strongest, with at least {sink.weight[worst]:.2f} of all weight (threshold "
            f"{limits.sink_weight:g}){spread}.",
            cost="None by itself; it matters for cache eviction, quantisation and reading attention maps.",
            module=at.module,
            call=at.call,
            heads=heads,
            measured=float(sink.weight[worst]),
            threshold=limits.sink_weight,
        )


def _uniform(calls: Sequence[CallEvidence], limits: Thresholds) -> Iterator[Finding]:
    for heads, at, worst, spread in _holds(calls, lambda call: _judge_uniform(call, limits)):
        entropy = float(at.stats.mean_normalized_entropy[worst])
        yield finding(
            "ATT303",
            f"{heads_in_words(heads)}: weights are next to equal over the visible keys; {_most(heads, worst)}mean normalized "
            f"entropy of its rows {entropy:.4f} of 1 (threshold {limits.uniform_entropy:g}){spread}.",
            cost="Such a head takes the mean of all values; its queries and keys could go.",
            module=at.module,
            call=at.call,
            heads=heads,
            measured=entropy,
            threshold=limits.uniform_entropy,
        )


def _judge_uniform(call: CallEvidence, limits: Thresholds) -> Judged:
    entropy = call.stats.mean_normalized_entropy
    return entropy, _enough(call, limits) & (entropy > limits.uniform_entropy)


def _all_uniform(evidence: Evidence) -> Finding | None:
    """One finding in place of one for each layer, where every head there is does no more than average."""
    judged = [_judge_uniform(each, evidence.thresholds) for call in evidence.calls for each in evidence.on_each_input(call)]
    if len(evidence.calls) < 2 or not all(bool(chosen.all()) for _, chosen in judged):
        return None
    least = min(float(entropy.min()) for entropy, _ in judged)
    return finding(
        "ATT303",
        f"all {sum(call.heads for call in evidence.calls)} heads of the model weigh the visible keys next to equally; normalized "
        f"entropy is {least:.4f} or more, of 1 at most (threshold {evidence.thresholds.uniform_entropy:g}).",
        cost="Attention takes the mean of all values: the weights are untrained, or something makes the logits far too small.",
        measured=least,
        threshold=evidence.thresholds.uniform_entropy,
    )


def _dead(calls: Sequence[CallEvidence], limits: Thresholds) -> Iterator[Finding]:
    for heads, at, worst, spread in _holds(calls, lambda call: _judge_dead(call, limits)):
        yield finding(
            "ATT304",
            f"{heads_in_words(heads)}: {_most(heads, worst)}{at.dead[worst]:.1%} of its rows have a gain below "
            f"{limits.dead_gain:g} (threshold {limits.dead_rows:.0%} of them); mean gain of all its rows "
            f"{at.stats.mean_gain[worst]:.2g}{spread}.",
            cost="No gradient to speak of reaches the queries and keys: training does not move them any more.",
            module=at.module,
            call=at.call,
            heads=heads,
            measured=float(at.dead[worst]),
            threshold=limits.dead_rows,
        )


def _judge_dead(call: CallEvidence, limits: Thresholds) -> Judged:
    return call.dead, _enough(call, limits) & (call.dead >= limits.dead_rows) & ~_at_rest(call, limits)


def _previous(calls: Sequence[CallEvidence], limits: Thresholds) -> Iterator[Finding]:
    def judge(call: CallEvidence) -> Judged:
        return call.previous, _enough(call, limits) & (call.previous >= limits.previous_rows)

    for heads, at, worst, spread in _holds(calls, judge):
        most = _most(heads, worst)
        yield finding(
            "ATT305",
            f"{heads_in_words(heads)}: {'look' if len(heads) > 1 else 'looks'} at the token before; {most}it is the strongest "
            f"key of {at.previous[worst]:.0%} of its rows (threshold {limits.previous_rows:.0%}){spread}.",
            cost="None: such heads are common, and induction is built on them.",
            module=at.module,
            call=at.call,
            heads=heads,
            measured=float(at.previous[worst]),
            threshold=limits.previous_rows,
        )


def _holds(
    calls: Sequence[CallEvidence], judge: Callable[[CallEvidence], Judged]
) -> Iterator[tuple[list[int], CallEvidence, int, str]]:
    """One item or none: the heads concerned on any input, the input and head of the largest figure, and the spread in words.

    Args:
        calls: one call, on each of the inputs.
    """
    judged = [judge(call) for call in calls]
    figures = torch.stack([figure.double() for figure, _ in judged])
    chosen = torch.stack([holds for _, holds in judged])
    heads = torch.nonzero(chosen.any(0)).flatten().tolist()
    if not heads:
        return
    best = torch.where(chosen, figures, -torch.inf)
    at, worst = divmod(int(best.argmax()), best.shape[1])
    spread = ""
    if len(calls) > 1:
        of_worst, seen = figures[:, worst], chosen[:, worst]
        spread = (
            f"; head {worst} so on {int(seen.sum())} of {len(calls)} inputs, from {of_worst.min():.3g} to {of_worst.max():.3g}"
        )
    yield heads, calls[at], worst, spread


def _most(heads: Sequence[int], worst: int) -> str:
    """Whose figure follows: the table's are means over heads, and a finding's the largest of any."""
    return f"most in head {worst}: " if len(heads) > 1 else ""


def _enough(call: CallEvidence, limits: Thresholds) -> Tensor:
    return call.stats.softmax_rows >= limits.fewest_rows


def _at_rest(call: CallEvidence, limits: Thresholds) -> Tensor:
    return call.sink.at_start & (call.sink.share >= limits.at_rest_rows)
