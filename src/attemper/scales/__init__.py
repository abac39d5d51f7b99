"""Scale rules: the factor on q·k as small objects, each with its formula, what it assumes, and where it comes from.

`attemper.attention(..., scale=rule)` takes any of them. `rule.factor(shape)` is the number, `rule.logit_variance(shape)` what it
makes of the logits at initialisation, `rule.at(layer)` binds the layer; a rule of your own derives from `Scale`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from attemper.scales.base import LogitShape, Scale

if TYPE_CHECKING:
    from attemper.scales.learned import Cosine, Learned, LogLength
    from attemper.scales.positional import Beam, Critical, Inkling, Llama4, Ministral3
    from attemper.scales.rotary import LongRope, MScale, Yarn
    from attemper.scales.rules import (
        AttentionMultiplier,
        Constant,
        Inverse,
        InverseLayer,
        InverseSqrt,
        InverseSqrtTerms,
        QueryPreAttnScalar,
        Sqrt,
    )

__all__ = [
    "AttentionMultiplier",
    "Beam",
    "Constant",
    "Cosine",
    "Critical",
    "Inkling",
    "Inverse",
    "InverseLayer",
    "InverseSqrt",
    "InverseSqrtTerms",
    "Learned",
    "Llama4",
    "LogLength",
    "LogitShape",
    "LongRope",
    "MScale",
    "Ministral3",
    "QueryPreAttnScalar",
    "Scale",
    "Sqrt",
    "Yarn",
]


def __getattr__(name: str) -> Any:
    # A quarter of the time of `import attemper` would be these classes, and most programs want none of them.
    if name in __all__:
        for place in ("rules", "rotary", "positional", "learned"):
            found = getattr(importlib.import_module(f"attemper.scales.{place}"), name, None)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module 'attemper.scales' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
