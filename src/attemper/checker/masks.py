"""Masks: real tokens that see nothing, a future that is seen, padding that leaks (ATT4xx)."""

from collections.abc import Iterator, Sequence

from attemper.checker.evidence import Evidence
from attemper.checker.findings import finding, heads_in_words
from attemper.report import Finding


def mask_findings(evidence: Evidence) -> Iterator[Finding]:
    """The findings ATT401 to ATT403."""
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
    if evidence.padding is not None and evidence.padding.leaks:
        yield _padding(evidence)


def _future(evidence: Evidence) -> Finding:
    leak = evidence.future
    assert leak is not None
    seeing = [call for call in evidence.calls if call.self_attention and call.future_heads and call.in_causal_part]
    layers = [call.module for call in seeing]
    some = seeing[0].future_heads if seeing and len(seeing[0].future_heads) < seeing[0].heads else ()
    where = (
        f"later keys are visible in {_listed(layers)}" + (f" ({heads_in_words(some)} of the first)" if some else "")
        if layers
        else "no attention call that was seen shows later keys, so they come in by another way"
    )
    return finding(
        "ATT402",
        f"changing the tokens from position {leak.changed} on moves {leak.positions} earlier outputs, from position "
        f"{leak.first} on, by up to {leak.moved:.3g} (rounding explains {leak.allowed:.2g}); {where}. Held to be causal because "
        f"{evidence.causal_claim}.",
        cost="Training loss looks better than it is, and generation fails, since the future is not there.",
        module=layers[0] if layers else "",
        heads=some,
        measured=leak.moved,
        threshold=leak.allowed,
    )


def _padding(evidence: Evidence) -> Finding:
    leak = evidence.padding
    assert leak is not None
    layers = [call.module for call in evidence.calls if call.sees_padding]
    return finding(
        "ATT403",
        f"changing what is embedded at padded positions moves {leak.positions} outputs of real tokens by up to "
        f"{leak.moved:.3g} (rounding explains {leak.allowed:.2g}); padded keys are visible in {_listed(layers)}.",
        cost="A result depends on the company that a sequence keeps in its batch.",
        module=layers[0] if layers else "",
        measured=leak.moved,
        threshold=leak.allowed,
    )


def _listed(modules: Sequence[str], most: int = 3) -> str:
    names = list(dict.fromkeys(modules))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
