"""The gain of a norm behind a projection: where it lies, and whether it is used as w or as 1 + w, which is measured."""

import copy
from collections import OrderedDict

import torch
from torch import nn
from torch.func import functional_call

from attemper.errors import UnsupportedError
from attemper.weights.layout import Heads


def gain(module: str, name: str, norm: nn.Module, heads: int, width: int) -> Heads:
    """Where the gain of a norm on q or on k lies.

    One gain for all heads where it has d numbers, one a head where it has heads·d, be the norm taken over one head or all.

    Args:
        module: name of the attention module. name: that of the norm in it. norm: the norm.
        heads: of the operand. width: of one of them.

    Raises:
        UnsupportedError: it has no gain, or one of another size, or uses it in another way than w or 1 + w.
    """
    weight = norm._parameters.get("weight")
    where = f"{module}.{name} ({type(norm).__name__})"
    if weight is None:
        raise UnsupportedError(f"{where} has no gain: what is multiplied before it has no effect, and nothing comes after it")
    if weight.numel() not in (width, heads * width):
        size = f"a gain of {weight.numel()} numbers where one head has {width} and all {heads} have {heads * width}"
        raise UnsupportedError(f"{where} has {size}; pass layouts={{{module!r}: Projections(...)}}")
    parameters = tuple(f"{name}.{part}" for part in ("weight", "bias") if norm._parameters.get(part) is not None)
    features = torch.arange(weight.numel()).view(-1, width)
    said = getattr(norm, "zero_centred", None)
    if isinstance(said, bool):  # attemper's own norm says so
        return Heads(parameters, features, dim=None, offset=float(said))
    return Heads(parameters, features, dim=None, offset=_offset(where, norm, weight))


@torch.no_grad()
def _offset(where: str, norm: nn.Module, weight: nn.Parameter) -> float:
    """0.0 where the norm multiplies by w, 1.0 where by 1 + w: seen from its outputs at w = 0, 1 and 2."""
    probe = torch.linspace(-1.0, 2.0, 2 * weight.numel(), device=weight.device, dtype=weight.dtype).view(2, *weight.shape)
    bare = copy.copy(norm)  # whose hooks are not to run
    bare._forward_hooks, bare._forward_pre_hooks = OrderedDict(), OrderedDict()
    # Plain tensors, of the whole shape, also where the parameters are shards.
    kind = {"dtype": weight.dtype, "device": weight.device}
    rest = {name: torch.zeros(one.shape, **kind) for name, one in norm.named_parameters() if name != "weight"}
    at = [
        functional_call(bare, {**rest, "weight": torch.full(weight.shape, value, **kind)}, (probe,)).float()
        for value in (0.0, 1.0, 2.0)
    ]
    close = {"rtol": 0.02, "atol": 0.02}
    for offset in (0.0, 1.0):
        unit = at[1] / (1.0 + offset)
        if all(torch.allclose(output, (value + offset) * unit, **close) for value, output in enumerate(at)) and bool(unit.any()):
            return offset
    raise UnsupportedError(f"{where} uses its weight neither as w nor as 1 + w: pass layouts= with its Projections")
