"""Masks: tokens that see nothing, a future that is seen, padding that leaks, caches and batches that change outputs (ATT4xx)."""

from collections.abc import Iterator

from attemper.checker.backend import Shown
from attemper.checker.evidence import Batching, Continuation, Evidence, NanReach
from attemper.checker.findings import finding, heads_in_words
from attemper.checker.probes import listed
from attemper.report import Finding, Severity

_FUTURE_COST = "Training loss looks better than it is, and generation fails, since the future is not there."
_NO_LAYER = (
    "No attention mask lets it in: look for what else mixes positions, such as a convolution without causal padding, a norm or a "
    "mean over the sequence, a shift or a flip along it."
)


def mask_findings(evidence: Evidence) -> Iterator[Finding]:
    """The findings ATT401 to ATT406."""
    for call in evidence.calls:
        blind = int(call.masked_rows.max())
        if blind > 0:
            heads = [head for head, count in enumerate(call.masked_rows.tolist()) if count]
            yield finding(
                "ATT401",
                f"{blind} of {call.real_rows} real tokens may not look at any key.",
                cost="Their output is NaN, zero or the mean of all values, depending on the kernel that happens to run.",
                module=call.module,
                call=call.call,
                heads=heads if len(heads) < call.heads else (),
                measured=float(blind),
                threshold=0.0,
            )
    if evidence.future is not None and evidence.future.leaks:
        yield _future(evidence)
    elif evidence.nearly_causal and evidence.future is None and evidence.deterministic:
        yield _ahead(evidence)
    if evidence.padding is not None and evidence.padding.leaks:
        yield _padding(evidence)
    if evidence.nan_reach is not None and evidence.nan_reach.reached:
        yield _nan(evidence.nan_reach)
    if evidence.continuation is not None and evidence.continuation.parted.leaks:
        yield _continued(evidence.continuation)
    if evidence.batching is not None:
        yield from _batched(evidence.batching, evidence)


def _future(evidence: Evidence) -> Finding:
    leak = evidence.future
    assert leak is not None
    seeing = [call for call in evidence.calls if call.self_attention and call.future_heads and call.in_causal_part]
    layers = [call.module for call in seeing]
    some = seeing[0].future_heads if seeing and len(seeing[0].future_heads) < seeing[0].heads else ()
    # Its masks hide later keys, and what runs it takes none of them: ATT105 has it.
    ignoring = [call.module for call in evidence.calls if isinstance(call.shown, Shown) and call.shown.cause == "mask"]
    where = (
        f"later keys are visible in {listed(layers)}" + (f" ({heads_in_words(some)} of the first)" if some else "")
        if layers
        else f"the mask hides them, but the backend does not keep to it in {listed(ignoring)} (ATT105)"
        if ignoring
        else "no attention call that was seen shows later keys, so they come in by another way"
    )
    why = f"{where}. Held to be causal because {evidence.causal_claim}" if evidence.causal_claim else evidence.nearly_causal
    return finding(
        "ATT402",
        f"changing the tokens from position {leak.changed} on moves {leak.positions} earlier outputs, from position "
        f"{leak.first} on, by up to {leak.moved:.3g} (rounding explains {leak.allowed:.2g}); {why}.",
        cost=_FUTURE_COST,
        module=next(iter([*layers, *ignoring]), ""),
        heads=some,
        measured=leak.moved,
        threshold=leak.allowed,
        severity=None if evidence.causal_claim else Severity.WARNING,
        remedy=None if layers or ignoring else _NO_LAYER,
    )


def _ahead(evidence: Evidence) -> Finding:
    """By its masks alone, where the outputs could not be looked at."""
    seeing = [call for call in evidence.calls if call.near_heads]
    worst = max(seeing, key=lambda call: call.ahead.pairs)
    return finding(
        "ATT402",
        f"{evidence.nearly_causal}; whether outputs depend on it could not be tried on these inputs.",
        cost=_FUTURE_COST,
        module=worst.module,
        heads=worst.near_heads if len(worst.near_heads) < worst.heads else (),
        measured=float(worst.ahead.pairs),
        threshold=0.0,
        severity=Severity.WARNING,
    )


def _padding(evidence: Evidence) -> Finding:
    leak = evidence.padding
    assert leak is not None
    layers = [call.module for call in evidence.calls if call.sees_padding]
    return finding(
        "ATT403",
        f"changing what is embedded at padded positions moves {leak.positions} outputs of real tokens by up to "
        f"{leak.moved:.3g} (rounding explains {leak.allowed:.2g}); padded keys are visible in {listed(layers)}.",
        cost="A result depends on the company that a sequence keeps in its batch.",
        module=layers[0] if layers else "",
        measured=leak.moved,
        threshold=leak.allowed,
    )


def _nan(reach: NanReach) -> Finding:
    where = f"in {reach.module}" if reach.module else "inside"
    out = f" and {reach.made} of them come out so" if reach.made else ""
    return finding(
        "ATT404",
        f"the model makes NaN at padded positions ({where}){out}; with NaN embedded there, {reach.reached} of {reach.real} real "
        "tokens get NaN too, so masks do not hold it back.",
        cost="Real tokens are right as long as nothing attends over what is NaN: another layer, or a cache that keeps it, "
        "spreads it (0·NaN is NaN).",
        module=reach.module,
        measured=float(reach.reached),
        threshold=0.0,
    )


def _continued(found: Continuation) -> Finding:
    parted = found.parted
    wrong = [(module, how) for module, how in found.alignments if how in ("top-left", "everything")]
    if wrong:
        kind = wrong[0][1]
        modules = [module for module, how in wrong if how == kind]
        what = "starts at the top left: query i sees keys up to i" if kind == "top-left" else "hides nothing"
        cause = f"the mask over the cache {what}, where it should end at the bottom right, in {listed(modules)}"
    elif found.alignments:
        modules = []
        cause = "the masks over the cache end where they should, so look at positions and at what the cache keeps"
    else:
        modules = []
        cause = "no attention call over a cache was seen, so the cause is not known"
    state = ". Some of its layers carry a state, and many such continue one token at a time only" if found.recurrent else ""
    return finding(
        "ATT405",
        f"continued from a cache, {parted.positions} of the last tokens' outputs part from those of one run over all tokens by "
        f"up to {parted.moved:.3g} (rounding explains {parted.allowed:.2g}); {cause}{state}.",
        cost="Generation from a cache (chunked prefill, speculative decoding, a prompt after a prompt) computes another model.",
        module=modules[0] if modules else "",
        measured=parted.moved,
        threshold=parted.allowed,
        severity=None if wrong else Severity.WARNING,
    )


def _batched(found: Batching, evidence: Evidence) -> Iterator[Finding]:
    ways = (
        ("beside another of its length", found.beside),
        ("padded on the right", found.right),
        ("padded on the left", found.left),
    )
    parted = [(words, leak) for words, leak in ways if leak is not None and leak.leaks]
    company = found.beside is not None and found.beside.leaks
    if not parted or (not company and evidence.padding is not None and evidence.padding.leaks):
        return  # padding that leaks is a finding of its own
    if [words for words, _ in parted] == ["padded on the right"] and evidence.future is not None and evidence.future.leaks:
        return  # what comes later is seen, and that is a finding of its own
    words, worst = max(parted, key=lambda each: each[1].moved)
    whole = [words for words, leak in ways if leak is not None and not leak.leaks]
    yield finding(
        "ATT406",
        f"in a batch, {', '.join(words for words, _ in parted)}, a sequence's outputs part from those of the same sequence alone "
        f"by up to {worst.moved:.3g} ({words + '; ' if len(parted) > 1 else ''}rounding explains {worst.allowed:.2g})"
        + (f"; {', '.join(whole)}, they do not." if whole else "."),
        cost="A result depends on the company that a sequence keeps in its batch.",
        measured=worst.moved,
        threshold=worst.allowed,
        severity=None if company else Severity.WARNING,
    )
