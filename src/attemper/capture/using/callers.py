"""Modules that call `F.scaled_dot_product_attention`, by whatever name they imported it: redirected while they run.

What it must hold:
- only calls made while a module of the model runs are redirected, in each thread by itself, also where activation
  checkpointing runs it again in the backward pass;
- what a call means is what torch says it means; what ours does not take, and what torch refuses, goes to torch;
- a torch function mode slows every torch function a little, so one is entered by the outermost module alone, and modules that
  cannot make such a call have no hooks: those of torch.nn, and of transformers where their file never says the word (but any
  module may whose forward method somebody has replaced).
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from attemper.capture.eager import looks_like_logits, softmax_arguments
from attemper.capture.functional import SDPA, SDPA_ARGUMENTS
from attemper.capture.running import Running
from attemper.capture.using.notes import Notes
from attemper.errors import ArgumentError
from attemper.ops import attention

_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
_OWN_CODE = "it computes its attention in its own code: a softmax over logits ran, and no call that can be redirected"
HOW = "calls of scaled_dot_product_attention, redirected while it runs"


class _Entered(NamedTuple):
    """A module that runs, and how autograd stood when it began."""

    caller: "Caller"
    saving: Any
    recording: bool


class Redirect(TorchFunctionMode):
    """Sees every torch function of a thread while modules in use run there, and redirects attention.

    Args:
        running: the modules that run, the outermost first.
        outermost: the call of the outermost. A keyboard interrupt passes by the hooks that would leave the mode.
    """

    def __init__(self, running: list[_Entered], outermost: Running | None = None) -> None:
        super().__init__()
        self.running, self.outermost = running, outermost

    def interrupted(self) -> bool:
        """Whether the outermost module is running no more."""
        return self.outermost is not None and self.outermost.over()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SDPA:
            if not torch.compiler.is_compiling() and self.interrupted():
                return func(*args, **kwargs)
            return _redirect(self.running[-1], func, args, kwargs)
        notes, name = self.running[-1].caller.notes, self.running[-1].caller.name
        if func in _SOFTMAX and looks_like_logits(*softmax_arguments(args, kwargs)):
            notes.softmaxes.setdefault(name, _OWN_CODE)
        elif func is F.multi_head_attention_forward:
            notes.refuse(name, "it calls multi_head_attention_forward, which is left to torch")
        elif getattr(func, "__name__", "") == "flex_attention":
            notes.refuse(name, "it calls flex_attention, which is left to torch")
        return func(*args, **kwargs)


class Caller:
    """One watched module: its hooks, and what they note."""

    def __init__(self, name: str, module: nn.Module, notes: Notes) -> None:
        self.name, self.module, self.notes = name, module, notes
        notes.watched.add(name)
        self.traced = Redirect([_Entered(self, None, True)])  # torch.compile traces a mode that is there, not one being made
        self.handles = (
            module.register_forward_pre_hook(self.enter, prepend=True),
            module.register_forward_hook(self.leave, always_call=True),
        )

    def __call__(self) -> None:
        """Undo."""
        for handle in self.handles:
            handle.remove()
        self.leave(self.module, (), None)  # it may be running, and its hook will not be called then

    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook."""
        if torch.compiler.is_compiling():
            self.traced.__enter__()
            return
        self.notes.ran[self.name] += 1
        running = _Entered(self, _top_saved_tensors_default_hooks(True), torch.is_grad_enabled())
        top = _get_current_function_mode()
        if not isinstance(top, Redirect):
            Redirect([running], Running(sys._getframe(1))).__enter__()
        elif top.interrupted():
            top.running[:], top.outermost = [running], Running(sys._getframe(1))
        else:
            top.running.append(running)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook, called after exceptions too."""
        if torch.compiler.is_compiling():
            self.traced.__exit__(None, None, None)
            return
        top = _get_current_function_mode()
        if not isinstance(top, Redirect):  # the model has entered a mode of its own and not left it
            return
        if top is self.traced:  # entered in a graph that broke before this
            top.__exit__(None, None, None)
            return
        for depth in range(len(top.running) - 1, -1, -1):
            if top.running[depth].caller is self:
                del top.running[depth:]  # what is above was left by an exception
                break
        if not top.running:
            top.__exit__(None, None, None)


def watch(model: nn.Module, notes: Notes) -> Iterator[Callable[[], None]]:
    """Put hooks on every module that might call it; yields what takes them off."""
    for name, module in model.named_modules():
        if _may_call(module):
            yield Caller(name, module, notes)


def _may_call(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False
    if "forward" in module.__dict__:
        return True
    # A parametrised module has a class of torch's, made for it, before its own.
    place = next(kind.__module__ for kind in type(module).__mro__ if kind.__module__ != "torch.nn.utils.parametrize")
    if place.startswith(("torch.nn.", "torch._dynamo.", "attemper.nn.", "attemper.capture.")):
        return False
    if place.startswith("transformers."):
        return any("scaled_dot_product_attention" in _text_of(owner.__module__) for owner in type(module).__mro__)
    return True


_texts: dict[str, str] = {}


def _text_of(name: str) -> str:
    """The source of a module of transformers' models, "" for others."""
    if not name.startswith("transformers.models."):
        return ""
    if name not in _texts:
        _texts[name] = inspect.getsource(sys.modules[name])
    return _texts[name]


def _redirect(running: _Entered, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    notes, name = running.caller.notes, running.caller.name
    given = dict(zip(SDPA_ARGUMENTS, args, strict=False)) | kwargs
    reason = _reason(given) or _recomputed_elsewhere(running, given)
    if reason is None:
        try:
            output = _attend(given, notes.impl)
        except ArgumentError as error:  # torch takes it, or refuses it in its own words
            reason = str(error)
        else:
            notes.replace(name, HOW)
            return output
    notes.refuse(name, f"a call of scaled_dot_product_attention was left to torch: {reason}")
    return func(*args, **kwargs)


def _attend(given: dict[str, Any], impl: str) -> Tensor:
    options = {
        option: given[option] for option in ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa") if option in given
    }
    query, key, value = given["query"], given["key"], given["value"]
    if key.ndim > 2 and key.shape[-3] == value.shape[-3] == 1:
        options["enable_gqa"] = True  # torch broadcasts a single head without being asked
    if query.ndim == 2:
        query, key, value = query[None], key[None], value[None]
        return attention(query, key, value, **options, impl=impl)[0]
    return attention(query, key, value, **options, impl=impl)


def _reason(given: dict[str, Any]) -> str | None:
    for name in ("query", "key", "value", "attn_mask"):
        tensor = given.get(name)
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            return f"{name} is no tensor"
        if tensor.is_nested:
            return f"{name} is a nested tensor"
        if not torch.compiler.is_compiling() and type(tensor) not in (Tensor, nn.Parameter):
            return f"{name} is a {type(tensor).__name__}"
    mask = given.get("attn_mask")
    if mask is not None and given.get("is_causal"):
        return "a mask beside is_causal"  # refused or obeyed, by torch's version and kernel
    if mask is not None and mask.dtype not in (torch.bool, given["query"].dtype):
        return f"a mask of {mask.dtype} for a query of {given['query'].dtype}"
    return None


def _recomputed_elsewhere(running: _Entered, given: dict[str, Any]) -> str | None:
    """A function, not a module, that activation checkpointing runs again does so where no hook sees it.

    Then the second run would be torch's: autograd would find other tensors than it saved, or dropout other numbers.
    """
    if torch.compiler.is_compiling():
        return None
    if _top_saved_tensors_default_hooks(True) != running.saving:
        return "it is in a function that torch.utils.checkpoint runs again past every module; checkpoint a module instead"
    if running.recording and not torch.is_grad_enabled() and given.get("dropout_p", 0.0):
        return "it drops weights with gradients off, as in a function that torch.utils.checkpoint runs again past every module"
    return None
