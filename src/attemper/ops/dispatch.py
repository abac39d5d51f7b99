"""Torch's dispatcher: who must see a call of a kernel, and when it may be passed by, since it costs more than a small attention.

Some of this has no public name in torch; it is all here.
"""

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def compiling() -> bool:
    """Whether a compiler traces this very call."""
    return torch.compiler.is_compiling()


def transformed() -> bool:
    """Whether a transform of torch.func is at work: vmap, grad and those made of them."""
    return torch._C._are_functorch_transforms_active()


def nobody_looks() -> bool:
    """Whether neither a compiler nor a transform nor a dispatch mode nor torch.jit.trace is at work."""
    return not (compiling() or transformed() or torch._C._len_torch_dispatch_stack() or torch._C._is_tracing())


def may_pass_by(*tensors: Tensor | None) -> bool:
    """Whether the kernel may be called on these tensors directly: nobody looks, and they have memory.

    Subclasses other than fake tensors may: a kernel in PyTorch operations then works on them by their own rules.
    """
    if not nobody_looks():
        return False
    for tensor in tensors:
        if tensor is not None and (tensor.is_meta or (type(tensor) is not Tensor and isinstance(tensor, FakeTensor))):
            return False
    return True


def flop_registries() -> list[dict[Any, Any]]:
    """The formulas of each `FlopCounterMode` that is at work, by operator."""
    counting = sys.modules.get("torch.utils.flop_counter")  # nobody counts who has not imported it
    if counting is None:
        return []
    modes = _get_current_dispatch_mode_stack()
    return [mode.counter.flop_registry for mode in modes if isinstance(mode, counting._FlopCounterMode)]


def with_autograd() -> AbstractContextManager[object]:
    """A region, within an operator, in which autograd works: there it is otherwise left out, silently.

    Autograd's key alone is let in again. Those of autocast are kept out in the same set, and must stay there.
    """
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded - torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU))
