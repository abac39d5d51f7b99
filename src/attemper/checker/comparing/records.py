"""Plain records of a comparison: one row for each pair of calls, and where and why the two part."""

from dataclasses import dataclass, field

ALIKE, PART, NOTHING_SEEN = 0, 1, 3  # 2: could not run


@dataclass(frozen=True)
class PairRow:
    """One pair of calls.

    Attributes:
        a, b: the modules that made them; call: how many calls that module of A made before.
        heads: how many.
        factor: least squares of B's s·q·k on A's, over all heads; factors: head by head.
        inherited: largest difference of logits that comes with q and k; own: that A's and B's rules make of the same q and k.
        logits: largest difference of logits; allowed: what rounding explains of it, for the head that uses most.
        pairs: how many pairs of a query and a key were compared; without any there is no factor (NaN).
        share: largest share of the allowance used by any head.
        output: largest difference of the outputs, None where they were not seen, or a head's are not of one width.
        widths, value_widths: of a head's q and k, and of its v, in A and in B.
        parts: what is beyond the allowance: "visible", "logits", "value", "output".
    """

    a: str
    b: str
    call: int
    heads: int
    factor: float
    factors: tuple[float, ...]
    inherited: float
    own: float
    logits: float
    allowed: float
    share: float
    output: float | None
    widths: tuple[int, int]
    value_widths: tuple[int, int]
    parts: tuple[str, ...] = ()
    pairs: int = 0


@dataclass(frozen=True)
class Parting:
    """The first place where the two part beyond rounding, and why.

    Attributes:
        row: index of the row; heads: those that part.
        cause: "scale", "position", "mask", "softcap", "sinks", "bias", "heads", "widths", "weights", "values", "inputs",
            "nonfinite", "sequence", "outputs" (behind the last pair: `row` is their number) or "unknown".
        factor: by which B's scaled products are larger, where one factor explains them; None otherwise.
        curve: the factor by query position, where it depends on it; () otherwise.
        explanation: in words; also: further differences at the same place, each in words.
        parameters: names of parameters that differ, the first few.
    """

    row: int
    heads: tuple[int, ...]
    cause: str
    factor: float | None
    explanation: str
    curve: tuple[float, ...] = ()
    also: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class OutputGap:
    """How far what comes behind attention is apart.

    Attributes:
        place: "last hidden states" (below the head, of a Hugging Face model) or "outputs".
        difference: largest difference at a position that is no padding; allowed: what rounding explains of it.
    """

    place: str
    difference: float
    allowed: float

    @property
    def parts(self) -> bool:
        """Whether they are apart beyond rounding."""
        return not self.difference <= self.allowed


@dataclass(frozen=True)
class Outcome:
    """What was found; `Comparison` adds its forms as text and as JSON.

    Attributes:
        a, b: the two, in words; inputs: what they were run on; dtypes: what each computed in.
        rows: one for each pair of attention calls, in A's order.
        parting: where they part first, None where all is within rounding.
        outputs: how far the outputs are apart, () where they have none of one shape.
        unseen: (module, reason) of attention that was not compared; notes: what a reader should know.
    """

    a: str
    b: str
    inputs: str
    dtypes: tuple[str, str]
    rows: tuple[PairRow, ...]
    parting: Parting | None
    unseen: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = field(default=())
    outputs: tuple[OutputGap, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing that was compared differs at all, not even by rounding."""
        attention = all(row.logits == row.own == 0 and not row.output for row in self.rows)
        return self.parting is None and attention and all(gap.difference == 0 for gap in self.outputs)

    def exit_code(self) -> int:
        """0 alike within rounding, 1 they part, 3 no attention was seen in either."""
        if self.parting is not None:
            return PART
        return ALIKE if self.rows else NOTHING_SEEN
