"""`use`: a model's attention, computed by attemper until it is undone."""

import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import torch
from torch import nn

from attemper.capture.unseen import NEVER_RAN, NOTHING_SEEN, find_unseen
from attemper.capture.using import callers, configs, multihead
from attemper.capture.using.notes import Kept, Notes, Replaced
from attemper.errors import ArgumentError, UnsupportedError
from attemper.ops import check_name

_MARK = "_attemper_use"  # on the model: its Use
_PART = "_attemper_notes"  # on every module of it: the notes, which do not know the model, so that a copy of a part is no more
_OWN_CODE = "it computes its attention in its own code, past transformers' attention interface and torch's functions"
_NOTHING_SEEN = (
    "it ran, and neither a call to replace nor a softmax over logits was seen in it (attemper.attention needs no replacing)"
)
_OURS = "it is attemper's own already"


def use(model: nn.Module, *, impl: str = "auto") -> "Use":
    """Compute the attention of a model by `attemper.attention`, until it is undone::

        used = attemper.use(model)
        model(**inputs)
        used.replaced, used.kept
        used.undo()

    Also a context manager, `with attemper.use(model): ...`, which undoes at the end. Hugging Face models are switched through
    their attention interface, `torch.nn.MultiheadAttention` modules become `attemper.nn.MultiheadAttention` where they stand, on
    the same parameters, and calls of `F.scaled_dot_product_attention` are redirected while the model runs. What computes its
    attention in another way is kept, and named with the reason. Outputs are those of before within rounding, but for rows that
    may attend nothing, which give 0, and for the random numbers of dropout. See docs/use.md.

    Args:
        model: any module, in any mode, compiled or not.
        impl: kernel of `attemper.attention`: "auto", "reference", "blocked", "cpu" or "triton".

    Raises:
        ArgumentError: model is no module, or impl no kernel. UnsupportedError: the kernel is not here, or the model, or a part
            of it, is in use.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", type(model).__name__, "a torch.nn.Module")
    check_name(impl)
    for name, module in model.named_modules():
        if _PART in module.__dict__:
            what = f"its part {name!r}" if name else "it"
            raise UnsupportedError(f"model: {what} is in use; undo() what use() returned for it (Use.of(model) finds that) first")
    return Use(model, impl)


class Use:
    """What `use` returns: what it replaced and what it kept, and the way back.

    A copy of a model in use, by copy.deepcopy or pickle, is in use too, with a `Use` of its own, which `Use.of` finds. A copy of
    a part of it is in use for good.

    Args:
        model, impl: as in `use`.
    """

    def __init__(self, model: nn.Module, impl: str) -> None:
        self._model = model
        self._notes = Notes(impl)
        self._undo: list[Callable[[], None]] = []
        try:
            for step in (configs.switch, multihead.convert, callers.watch, _mark_parts):
                for done in step(model, self._notes):
                    self._undo.append(done)
        except BaseException:
            self.undo()
            raise
        model.__dict__[_MARK] = self
        _forget_compiled()

    @staticmethod
    def of(model: nn.Module) -> "Use | None":
        """The object in charge of a model in use, or None."""
        return model.__dict__.get(_MARK)

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """Modules whose attention is attemper's, in the model's order. Callers of SDPA are known once they have called."""
        how, strayed = self._notes.replaced, configs.strayed(self._model)
        return tuple(Replaced(name, how[name]) for name, _ in self._model.named_modules() if name in how and name not in strayed)

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Attention modules that were left alone, and calls that were, with the reason. Ask after a forward pass."""
        notes = self._notes
        reasons = {each.module: self._put(each.module, each.reason) for each in find_unseen(self._model, notes)}
        reasons |= notes.kept | configs.strayed(self._model)
        return tuple(Kept(name, reasons[name]) for name, _ in self._model.named_modules() if name in reasons)

    def _put(self, name: str, reason: str) -> str:
        """What `find_unseen` says of a module, put for a model in use."""
        if type(self._model.get_submodule(name)).__module__.startswith("attemper.nn."):
            return _OURS
        if reason == NEVER_RAN and name not in self._notes.watched:
            return _OWN_CODE
        return _NOTHING_SEEN if reason == NOTHING_SEEN else reason

    def undo(self) -> None:
        """Put everything back. A second time does nothing."""
        while self._undo:
            self._undo.pop()()
        if Use.of(self._model) is self:
            del self._model.__dict__[_MARK]
        _forget_compiled()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"Use(replaced={len(self.replaced)}, kept={len(self.kept)})"


class _Part:
    """The mark on one module of a model in use, and off again, also where it is no module of that model any more."""

    def __init__(self, module: nn.Module, notes: Notes) -> None:
        self.module, self.notes = module, notes
        module.__dict__[_PART] = notes

    def __call__(self) -> None:
        if self.module.__dict__.get(_PART) is self.notes:
            del self.module.__dict__[_PART]


def _mark_parts(model: nn.Module, notes: Notes) -> Iterator[Callable[[], None]]:
    for module in model.modules():
        yield _Part(module, notes)


def _forget_compiled() -> None:
    """Graphs that torch.compile has made hold what the model was: it does not look at hooks again."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
