"""`compare`: both models on the same inputs, every pair of attention calls, and the first one that is apart beyond rounding.

What it must hold: an error in a layer is told from what it inherits; of each layer of one model only what is linear in the length
is kept, of the other nothing but figures; both models are left as they were found.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attemper.capture import AttentionCall, Unseen, capture
from attemper.checker import probes
from attemper.checker.applying.applied import Applied, applied, output_bound, unit_roundoff
from attemper.checker.applying.logits import View
from attemper.checker.comparing.behind import kept, output_gaps, parting_behind
from attemper.checker.comparing.explain import Side, explain
from attemper.checker.comparing.gaps import Allowance, Gaps, allowance, coarser, measure
from attemper.checker.comparing.kept import brought, copied
from attemper.checker.comparing.pairing import Sequence, key_of, sequence, shape_of
from attemper.checker.comparing.records import OutputGap, PairRow, Parting
from attemper.checker.comparing.rounding import DRAWS, rounded_anew
from attemper.checker.comparing.sides import load_two
from attemper.checker.comparing.verdict import Comparison
from attemper.checker.inputs import Inputs, prepare
from attemper.checker.load import Subject
from attemper.checker.measure import dtype_name, evaluating, run
from attemper.checker.options import Options, Progress, one_line, untold
from attemper.checker.outputs import Outputs
from attemper.checker.padding import padding_mask
from attemper.errors import LoadError


def compare(
    a: "str | os.PathLike[str] | nn.Module",
    b: "str | os.PathLike[str] | nn.Module | None" = None,
    inputs: Any = None,
    *,
    attn: tuple[str, str] | None = None,
    dtypes: tuple[str, str] | None = None,
    inputs_b: Any = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    max_tokens: int = 512,
    progress: Progress | None = None,
) -> Comparison:
    """Run two models, or one model in two ways, on the same inputs and say where their attention parts.

    A difference counts only beyond what rounding explains: twice what each model does when its roundings are drawn anew, plus
    the last rounding of q and k, 2u·|s|·Σ|q||k| with u the unit roundoff of the coarser dtype.

    Args:
        a, b: as `attemper.check` takes them; b None: a again, with `attn` or `dtypes` to tell the two apart.
        inputs: as `attemper.check` takes them, for both; inputs_b: for B alone, where its arguments have other names.
        attn: the attention implementations of a Hugging Face model, such as ("eager", "sdpa").
        dtypes: what each computes in: "auto", "float32", "float16" or "bfloat16"; None: float32, and modules as they are.
        allow_pickle, trust_remote_code, progress: as in `attemper.check`. max_tokens: texts are cut to this length.

    Returns:
        The comparison; `str()` of it is what the command prints, `exit_code()` what it returns.

    Raises:
        ArgumentError: an argument that cannot be used. LoadError: a model or the inputs cannot be read or run.
        MissingExtraError: an optional package is needed.
    """
    tell = progress or untold
    options = Options(None, allow_pickle, trust_remote_code, max_tokens)
    try:
        tell("loading the models")
        one, two = load_two(a, b, attn, dtypes, options)
        tell("preparing inputs")
        given = prepare(one, inputs, options)
        given_b = prepare(two, inputs_b if inputs_b is not None else given.kwargs or given.args, options)
    except OSError as error:
        raise LoadError(f"a file could not be read: {one_line(error)}") from error
    return _Comparing(_Ran(one, given), _Ran(two, given_b)).run(tell)


@dataclass
class _Ran:
    """One of the two: the model, its inputs, and what it did not let be seen."""

    subject: Subject
    inputs: Inputs
    unseen: tuple[Unseen, ...] = ()
    outputs: Outputs = field(default_factory=lambda: Outputs(None, None))  # of the last run

    def watch(self, observer: Callable[[AttentionCall], None]) -> None:
        model = self.subject.model
        with evaluating(model), torch.no_grad(), capture(model, observer, follow_projections=True) as seen:
            self.outputs = kept(run(self.subject, self.inputs))
        self.unseen = seen.unseen()


@dataclass(frozen=True)
class _Apart:
    """The first pair that is apart, by the rules that the calls applied."""

    row: int
    a: Applied
    b: Applied
    gaps: Gaps
    allowed: Allowance
    real: Tensor


@dataclass
class _Comparing:
    """A and B under comparison. `kept` is the one whose roundings are coarser: it runs first, and again with them drawn anew."""

    a: _Ran
    b: _Ran
    rows: dict[int, PairRow] = field(default_factory=dict)
    apart: _Apart | None = None
    drawn: list[Outputs] = field(default_factory=list)
    broken: str = ""
    notes: list[str] = field(default_factory=list)

    def run(self, tell: Progress) -> Comparison:
        kept_is_b = _roundoff(self.b.subject) > _roundoff(self.a.subject)
        first, second = (self.b, self.a) if kept_is_b else (self.a, self.b)
        tell(f"running {first.subject.name}")
        calls: list[AttentionCall] = []
        first.watch(lambda call: calls.append(copied(call, calls[-1].attn_mask if calls else None)))
        self.drawn = [first.outputs]
        peers: list[list[Gaps]] = [[] for _ in calls]
        for draw in range(DRAWS):
            tell(f"running it with its roundings drawn anew, {draw + 1} of {DRAWS}")
            self._draw(first, calls, peers, draw)
            self.drawn.append(first.outputs)
        first.outputs = self.drawn[0]
        tell(f"running {second.subject.name}")
        pairs = sequence(calls, second.subject.model)
        met: list[int] = []

        def observe(call: AttentionCall) -> None:
            if self.broken:
                return
            place = pairs.partner(call)
            self.broken = _sequence_fault(call, place, pairs, kept_is_b)
            if self.broken or place is None:
                return
            met.append(place)
            other = pairs.calls[place]
            here = brought(call, other)
            self._pair(place, *((here, other) if kept_is_b else (other, here)), peers[place])

        second.watch(observe)
        missing = sorted(set(range(len(calls))) - set(met))
        if missing and not self.broken:
            who = ("B", "A") if kept_is_b else ("A", "B")
            self.broken = f"{who[0]} makes a call in {_place(calls[missing[0]])} that {who[1]} does not make"
        return self._verdict()

    def _draw(self, ran: _Ran, calls: list[AttentionCall], peers: list[list[Gaps]], seed: int) -> None:
        def observe(call: AttentionCall) -> None:
            if call.order < len(calls) and shape_of(call) == shape_of(calls[call.order]):
                kept = calls[call.order]
                peers[call.order].append(measure(View(kept), View(brought(call, kept)), self._real(kept, kept), one_rule=True))

        with rounded_anew(ran.subject.model, seed):
            ran.watch(observe)

    def _pair(self, place: int, a: AttentionCall, b: AttentionCall, peers: list[Gaps]) -> None:
        """Measure one pair; keep it if it is the first that is apart by the rules that its calls applied."""
        real = self._real(a, b)
        one, two = View(a), View(b)
        gaps = measure(one, two, real)
        allowed = _allowed(one, two, gaps, peers, real)
        parts = allowed.parts(gaps)
        if parts and self.apart is None:
            did_a, did_b = applied(a, real), applied(b, real)
            if did_a.cause or did_b.cause:
                one, two = View(did_a.call), View(did_b.call)
                gaps = measure(one, two, real)
                allowed = _allowed(one, two, gaps, peers, real)
                parts = allowed.parts(gaps)
            if parts:
                keep = [replace(did, call=copied(did.call)) for did in (did_a, did_b)]
                self.apart = _Apart(place, keep[0], keep[1], gaps, allowed, real)
        self.rows[place] = _row(a, b, one, gaps, allowed, parts)

    def _real(self, a: AttentionCall, b: AttentionCall) -> Tensor:
        """bool [batch, queries]: those that are no padding, by the inputs' own mask where it is about them, or by the calls'."""
        stated = self._padding(a, a.query.shape[-2])
        if stated is not None:
            return stated.to(a.query.device)
        real = torch.ones(a.query.shape[0], a.query.shape[-2], dtype=torch.bool, device=a.query.device)
        for call in (a, b):
            shown = call.query_mask()
            real = real if shown is None else real & shown.to(real.device)
        return real

    def _padding(self, call: AttentionCall, length: int) -> Tensor | None:
        """The inputs' own attention mask, bool [batch, length], where it is about these queries or keys."""
        ran = self.a
        padding = padding_mask(ran.inputs)
        if padding is None or padding.shape != (call.query.shape[0], length):
            return None
        config = ran.subject.config
        decodes = getattr(config, "is_encoder_decoder", False)
        if decodes and call.self_attention and probes.in_causal_part(ran.subject.model, config, call.module):
            return None  # the mask is about the encoder's tokens
        return padding

    def _verdict(self) -> Comparison:
        order = sorted(self.rows)
        parting = None
        if self.apart is not None:
            apart = self.apart
            sides = [Side(ran.subject, did, View(did.call)) for ran, did in ((self.a, apart.a), (self.b, apart.b))]
            padding = self._padding(apart.a.call, apart.a.call.key.shape[-2])
            parting = explain(sides[0], sides[1], apart.gaps, apart.allowed, apart.real, padding, order.index(apart.row))
        if self.broken and parting is None:
            parting = Parting(len(order), (), "sequence", None, self.broken)
        elif self.broken:
            self.notes.append(f"the sequences of calls differ as well: {self.broken}")
        outputs = self._outputs() if order else ()
        if parting is None and outputs:
            models = self.a.subject.model, self.b.subject.model
            parting = parting_behind(outputs, len(order), self.rows[order[-1]].a, *models)
        return Comparison(
            a=self.a.subject.name,
            b=self.b.subject.name,
            inputs=self.a.inputs.description,
            dtypes=(dtype_name(self.a.subject.model), dtype_name(self.b.subject.model)),
            rows=tuple(self.rows[place] for place in order),
            parting=parting,
            unseen=tuple(dict.fromkeys((each.module, each.reason) for ran in (self.a, self.b) for each in ran.unseen)),
            notes=tuple(dict.fromkeys((*self.a.subject.notes, *self.b.subject.notes, *self.a.inputs.notes, *self.notes))),
            outputs=outputs,
        )

    def _outputs(self) -> tuple[OutputGap, ...]:
        padding = None if getattr(self.a.subject.config, "is_encoder_decoder", False) else padding_mask(self.a.inputs)
        roundoff = max(_roundoff(self.a.subject), _roundoff(self.b.subject))
        return output_gaps(self.a.outputs, self.b.outputs, self.drawn, padding, roundoff)


def _allowed(a: View, b: View, gaps: Gaps, peers: list[Gaps], real: Tensor) -> Allowance:
    return allowance(gaps, peers, coarser(a, b), output_bound(a, real) + output_bound(b, real))


def _row(a: AttentionCall, b: AttentionCall, one: View, gaps: Gaps, allowed: Allowance, parts: tuple[str, ...]) -> PairRow:
    used = torch.where(gaps.logits > 0, gaps.logits / allowed.logits, 0.0)
    worst = int(used.argmax()) if used.numel() else 0
    value_widths = (a.value.shape[-1], b.value.shape[-1])
    seen = a.output is not None and b.output is not None and value_widths[0] == value_widths[1]
    return PairRow(
        a=a.module,
        b=b.module,
        call=a.call,
        heads=one.shape[1],
        factor=float(gaps.products.sum() / gaps.squares.sum()),
        factors=tuple(gaps.factor.tolist()),
        inherited=float(gaps.inherited.max()),
        own=float(gaps.own.max()),
        logits=float(gaps.logits[worst]) if used.numel() else 0.0,
        allowed=float(allowed.logits[worst]) if used.numel() else 0.0,
        share=float(used.max()) if used.numel() else 0.0,
        output=float(gaps.output.max()) if seen else None,
        widths=(a.query.shape[-1], b.query.shape[-1]),
        value_widths=value_widths,
        parts=parts,
        pairs=int(gaps.pairs.sum()),
    )


def _sequence_fault(call: AttentionCall, place: int | None, pairs: Sequence, kept_is_b: bool) -> str:
    """Where the sequences of calls first differ, "" where this call has a partner of its shape."""
    who = ("A", "B") if kept_is_b else ("B", "A")
    if place is None:
        return f"{who[0]} makes a call in {_place(call)} that {who[1]} does not make"
    other = pairs.calls[place]
    if shape_of(call) != shape_of(other) or call.query.shape[-1] == 0:
        shapes = [shape_of(each) for each in ((other, call) if not kept_is_b else (call, other))]
        words = f"at {_place(other)} the calls have other shapes"
        return f"{words}: (batch, heads, queries, keys) is {shapes[0]} in A and {shapes[1]} in B"
    return ""


def _place(call: AttentionCall) -> str:
    module, number = key_of(call)
    return f"{module or 'the model itself'}{f' (call {number})' if number else ''}"


def _roundoff(subject: Subject) -> float:
    return unit_roundoff(getattr(torch, dtype_name(subject.model)))
