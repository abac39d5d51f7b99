"""Hugging Face models in float64, as a reference: what their code casts to float32 on the way stays in float64."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Exact(TorchFunctionMode):
    """While it is entered, float64 tensors are not cast to float32: not by `float`, not by `to`, not inside a softmax."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func is Tensor.to:
                args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def doubled(model: nn.Module) -> nn.Module:
    """The same model in float64; experts in plain products, since the grouped ones have no float64."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.double()


def doubled_inputs(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same inputs in float64."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
