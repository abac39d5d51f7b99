"""What one order of operations, run on rows of one attention call in a narrow dtype, does to them: a number for each head."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from attemper.stats.numbers import from_json, to_json

COUNTS = (
    "rows", "operand_overflows", "product_overflows", "product_underflows", "logit_overflows", "broken_rows", "subnormal_weights",
)  # fmt: skip


@dataclass(frozen=True)
class OrderFigures:
    """The figures of one order in one dtype, each a tuple with a number for each head.

    Attributes:
        dtype: "float16", "bfloat16", "float8_e4m3fn" or "float8_e5m2"; order: its name (see `attemper.checker.orders.WORDS`).
        rows: rows that were computed.
        operand_overflows: numbers of q (of these rows), k and v that pass the dtype's largest.
        product_overflows, logit_overflows: visible pairs whose product, or logit, is not finite where it is written down.
        product_underflows: visible pairs whose product is 0 and should not be.
        broken_rows: rows whose weights or output are not finite.
        subnormal_weights: weights below the dtype's smallest normal number.
        lost_weight: the largest sum of a row's weights that became 0, 0 to 1.
        weight_error: the largest total variation ½ Σ|p − p₆₄| of a row against float64, 0 to 1; 1 for a broken row.
        output_error: ‖o − o₆₄‖ / ‖o₆₄‖ over the rows; inf where one is broken.
    """

    dtype: str
    order: str
    rows: tuple[int, ...]
    operand_overflows: tuple[int, ...]
    product_overflows: tuple[int, ...]
    product_underflows: tuple[int, ...]
    logit_overflows: tuple[int, ...]
    broken_rows: tuple[int, ...]
    subnormal_weights: tuple[int, ...]
    lost_weight: tuple[float, ...]
    weight_error: tuple[float, ...]
    output_error: tuple[float, ...]

    FIGURES: ClassVar[tuple[str, ...]] = (*COUNTS, "lost_weight", "weight_error", "output_error")

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: numbers that are measured to four digits, counts as they are."""
        figures = {
            name: [to_json(each if name in COUNTS else float(f"{each:.4g}")) for each in getattr(self, name)]
            for name in self.FIGURES
        }
        return {"dtype": self.dtype, "order": self.order, **figures}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """What `to_dict` wrote.

        Raises:
            KeyError: a part is missing.
        """
        figures = {name: tuple(from_json(each) for each in data[name]) for name in cls.FIGURES}
        return cls(data["dtype"], data["order"], **figures)
