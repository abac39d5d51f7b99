"""What a run of the model leaves behind for the rules: small numbers for each attention call, never its q and k.

The rules (`scale`, `numeric_range`, `health`, `masks`) read an `Evidence` and return findings; none of them runs the model again.
`scale_measured.measure_call(call)` is called inside the forward pass for each attention call (no transfer to the host, nothing
of the size of q or k kept); what it returns is kept as `CallEvidence.scaling`. `scale.scale_findings(evidence)` returns its
findings.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from attemper.capture import Written
from attemper.checker.thresholds import DEFAULTS, Thresholds
from attemper.report import OrderFigures
from attemper.stats import HeadStats


@dataclass(frozen=True)
class KeyShare:
    """How often one key is the strongest of a row, per head.

    Attributes:
        key: [heads] int64, the key that is the strongest of most rows (in most sequences of the batch), -1 without rows.
        share: [heads] float64, share of the rows with two visible keys or more whose strongest key it is, 0 to 1.
        weight: [heads] float64, lower bound of its mean attention weight over all such rows, 0 to 1.
        at_start: [heads] bool, whether it is the first real position of every sequence.
    """

    key: Tensor
    share: Tensor
    weight: Tensor
    at_start: Tensor


@dataclass(frozen=True)
class Ahead:
    """Later keys that real queries may look at: how many pairs in the head with most, and the first of them (-1: none).

    Attributes:
        pairs: different pairs of positions, over the sequences of a batch; query, key: the positions of the first pair.
    """

    pairs: int = 0
    query: int = -1
    key: int = -1


@dataclass(frozen=True)
class CallEvidence:
    """One attention call, reduced.

    Attributes:
        module, call, order, seam: as in `attemper.capture.AttentionCall`.
        queries, keys, head_dim: sizes of the call; kv_heads: heads of the keys.
        stats: over the real query rows, [heads].
        largest_logit, largest_logit_centred: [heads] float64, the largest logit of a head and how far it stands above its
            row's mean.
        scale: the factor that the call applies to the product (a tensor where it differs by head or position), on the CPU.
        softcap: as in the call.
        self_attention: as many queries as keys, from position 0 on.
        in_causal_part: whether the call belongs to the part that would be causal (not to the encoder of an encoder-decoder).
        future_heads: heads in which any real query may look at a real key behind its own position.
        near_heads: those of them whose mask is causal but for a few pairs; ahead: which pairs.
        sees_padding: whether any real query may look at a position that the inputs' attention mask calls padding.
        masked_rows: [heads] int64, real queries (by the inputs' own attention mask, where it fits) with no visible key.
        real_rows: how many real queries there are for each head.
        sink: the strongest key of the rows.
        dead: [heads] float64, share of the rows with two visible keys or more whose gain lies below the threshold dead-gain.
        previous: [heads] float64, share of the rows behind the first, with two visible keys or more, whose strongest key is the
            position before their own; 0 outside self-attention.
        scaling: what `scale_measured.measure_call` returned; shown: what `backend.measure_output` did.
        written: as in the call; orders: what orders of operations do to a few of its rows, in each narrow dtype.
    """

    module: str
    call: int
    order: int
    seam: str
    queries: int
    keys: int
    head_dim: int
    kv_heads: int
    stats: HeadStats
    largest_logit: Tensor
    largest_logit_centred: Tensor
    scale: float | Tensor
    softcap: float | None
    self_attention: bool
    in_causal_part: bool
    future_heads: tuple[int, ...]
    sees_padding: bool
    masked_rows: Tensor
    real_rows: int
    sink: KeyShare
    dead: Tensor
    previous: Tensor
    scaling: Any = None
    shown: Any = None
    written: Written | None = None
    orders: tuple[OrderFigures, ...] = ()
    near_heads: tuple[int, ...] = ()
    ahead: Ahead = Ahead()

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.masked_rows.shape[0]

    def is_same(self, other: "CallEvidence") -> bool:
        """Whether it is the same call of the same module, with as many heads, be it on other inputs."""
        return (self.module, self.call, self.heads) == (other.module, other.call, other.heads)


@dataclass(frozen=True)
class Misread:
    """A call whose record disagrees with the model's own logits: only the scale that these show is known of it.

    Attributes:
        module, call: as in `CallEvidence`; scaling: with the scale that a regression of the logits on q·k gives.
    """

    module: str
    call: int
    scaling: Any


@dataclass(frozen=True)
class NonFinite:
    """The first NaN or infinity of the forward pass.

    Attributes:
        module: dotted name of the module whose code made it.
        before: name of the submodule that received it, where it arose between submodules (a residual sum, say), else "".
        kind: "NaN" or "infinity".
        in_parameters: name of a parameter of that module that is itself not finite, else "".
        largest: largest finite magnitude seen in an activation before it.
    """

    module: str
    before: str
    kind: str
    in_parameters: str
    largest: float


@dataclass(frozen=True)
class Leak:
    """Outcome of one perturbation: how far outputs moved that should not have, against what rounding allows.

    Attributes:
        moved: largest absolute change of an output that should have stayed; allowed: what rounding explains.
        positions: how many positions, in all sequences, moved further than allowed; first: the lowest of them, -1 if none did.
        changed: the lowest position that was changed.
    """

    moved: float
    allowed: float
    positions: int
    first: int
    changed: int

    @property
    def leaks(self) -> bool:
        """Whether outputs moved further than rounding explains (NaN counts as not measured)."""
        return self.moved > self.allowed


@dataclass(frozen=True)
class NanReach:
    """Outcome of embedding NaN at padded positions.

    Attributes:
        module: which module made a NaN by itself, "" if that is not known; made: at how many padded positions it came out.
        reached: how many of the real tokens got NaN from padding; real: of how many.
    """

    module: str
    made: int
    reached: int
    real: int


@dataclass(frozen=True)
class Batching:
    """How far a sequence's outputs part from those of the same sequence alone; None where not tried.

    Attributes:
        right: padded on the right, beside a longer one; left: padded on the left; beside: not padded, in a batch of two.
    """

    right: Leak | None
    left: Leak | None
    beside: Leak | None


@dataclass(frozen=True)
class Continuation:
    """How far the last tokens' outputs part when they continue a cache, from those of one run over all.

    Attributes:
        parted: the outcome; alignments: (module, what `causal_alignment` says) of the calls over the cache.
        recurrent: whether some layers carry a state instead of keys.
    """

    parted: Leak
    alignments: tuple[tuple[str, str], ...]
    recurrent: bool


@dataclass(frozen=True)
class Evidence:
    """Everything that was measured on one model and one set of inputs.

    Attributes:
        model: the module, in the state in which it was measured; config: its Hugging Face configuration, or None.
        dtype: name of the dtype that was computed in ("float32", ...).
        calls: one entry for each attention call, in the order of the forward pass; over all inputs, if there are several.
        by_input: the entries of each input by itself, where there are several.
        nonfinite: first NaN or infinity, or None.
        largest_activation: (module, magnitude) of the largest finite activation outside attention weights and logits.
        causal_claim: why the model is held to be causal, "" where nothing says so.
        nearly_causal: where nothing says so, but masks are causal but for a few pairs: in which way, else "".
        deterministic: whether the outputs of two runs on the same inputs agree; where they do not, the probes are not run.
        future: outcome of changing later tokens; padding: outcome of changing padded tokens; None where not run.
        nan_reach, batching, continuation: outcomes of the other probes; None where not run.
        untried: probes that could not be run, in words.
        thresholds: the numbers that findings are decided by.
        misread: calls that are left out of `calls`, where the scale is known all the same.
    """

    model: nn.Module
    config: Any
    dtype: str
    calls: tuple[CallEvidence, ...]
    nonfinite: NonFinite | None = None
    largest_activation: tuple[str, float] = ("", 0.0)
    causal_claim: str = ""
    future: Leak | None = None
    padding: Leak | None = None
    nan_reach: NanReach | None = None
    batching: Batching | None = None
    continuation: Continuation | None = None
    untried: tuple[str, ...] = ()
    thresholds: Thresholds = DEFAULTS
    misread: tuple[Misread, ...] = ()
    by_input: tuple[tuple[CallEvidence, ...], ...] = ()
    nearly_causal: str = ""
    deterministic: bool = True

    def on_each_input(self, call: CallEvidence) -> tuple[CallEvidence, ...]:
        """A call of `calls` as it was on each input that made it."""
        if not self.by_input:
            return (call,)
        return tuple(each for one in self.by_input for each in one if each.is_same(call))
