"""The state that all seams share while a capture runs: which module is running, what was called, whether anyone listens.

It must hold: one call is told once, however many seams it passes; a recomputation in the backward pass, another thread, and
the observer's own work are not told; nothing here reads a value off the device; whatever fails, the stack of running modules
is right again.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attemper.capture.projections import Origin, kept_kind, origin
from attemper.capture.record import AttentionCall
from attemper.capture.turned import turned_part
from attemper.ops import without_autocast

Observer = Callable[[AttentionCall], None]
_CROSS = ("cross", "encoder_attn", "encdec", "enc_dec", "encoder_decoder", "encoder_attention")


@dataclass(slots=True)
class Frame:
    """One running module: its name, how it found the mode (None: left alone), the outputs of its projections and norms."""

    module: nn.Module
    name: str
    found: bool | None
    outputs: list[tuple[str, Tensor]] = field(default_factory=list)


class Recorder:
    """Names running modules and tells the observer of each call.

    Args:
        model: the model under capture; observer: called with each `AttentionCall`.
        follow_projections: keep what is needed to follow q and k back.
    """

    def __init__(self, model: nn.Module, observer: Observer, follow_projections: bool) -> None:
        self.observer = observer
        self.follow = follow_projections
        self.names = {id(module): name for name, module in model.named_modules()}
        self.frames: list[Frame] = []
        self.calls = 0
        self.ran: Counter[str] = Counter()
        self.covered: set[str] = set()  # modules with a call in them or below
        self.softmaxes: dict[str, str] = {}  # modules whose own code ran a softmax over logits, and why that was not told
        self.doubts: list[tuple[str, Tensor, str]] = []  # told calls, whether the record disagrees with the model, and why
        self.products: list[torch.dtype] | None = None  # of the products in code that is not listened to, where asked for
        self.refused: dict[str, str] = {}  # calls that no record can describe
        self.switch: Callable[[bool], bool] = lambda on: on  # enters or lifts the torch function mode, and says how it was
        self.forget: Callable[[], None] = lambda: None  # called when the outermost module returned
        self._made: Counter[str] = Counter()
        self._quiet = False
        self._thread = threading.get_ident()

    @property
    def listening(self) -> bool:
        """False while a call is being told, in the observer, in other threads, in a graph being traced, in a backward pass.

        There the forward code runs again under activation checkpointing, in either of its forms.
        """
        return (
            not torch.compiler.is_compiling()  # first: what follows cannot be traced
            and not self._quiet
            and threading.get_ident() == self._thread
            and torch._C._current_graph_task_id() == -1
        )

    @contextlib.contextmanager
    def quiet(self) -> Generator[None]:
        """What runs inside is not told."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of every module."""
        name = self.names.get(id(module))
        if name is not None and self.listening:
            # Torch's own modules may have lifted the mode; code that is not torch's, inside them, has it back.
            foreign = not type(module).__module__.startswith("torch.nn.")
            self.frames.append(Frame(module, name, self.switch(True) if foreign else None))
            self.ran[name] += 1

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of every module, called after exceptions too."""
        if not self.listening:
            return
        for depth in range(len(self.frames) - 1, -1, -1):
            if self.frames[depth].module is module:
                found = self.frames[depth].found
                del self.frames[depth:]  # frames above it were left by an exception
                if found is not None:
                    self.switch(found)
                if self.follow and self.frames:
                    self._keep(module, output)
                if not self.frames:
                    self.forget()
                return

    def _keep(self, module: nn.Module, output: Any) -> None:
        owner = self.frames[-1]
        kind = kept_kind(module, owner.module)
        tensor = output[0] if isinstance(output, tuple) and output else output
        if kind is not None and isinstance(tensor, Tensor) and tensor.is_floating_point():
            self.keep(kind, tensor)

    def keep(self, kind: str, output: Tensor) -> None:
        """Remember an output of the running module until it returns or makes its call."""
        if self.follow and self.frames:
            self.frames[-1].outputs.append((kind, output.detach()))

    def running(self) -> str:
        """Name of the innermost running module."""
        return self.frames[-1].name if self.frames else ""

    def name_of(self, module: nn.Module | None) -> str:
        """Name of a module that says of itself that it makes the call; the running one where it is not the model's."""
        name = None if module is None else self.names.get(id(module))
        return self.running() if name is None else name

    def refuse(self, name: str, reason: str) -> None:
        """Note a call that was seen and cannot be described."""
        self.refused.setdefault(name, reason)

    def tell(
        self, name: str, *, query: Tensor, key: Tensor, value: Tensor, exact: bool = False, doubt: str = "", **fields: Any
    ) -> None:
        """Make the record and hand it to the observer, under no_grad and outside autocast.

        Args:
            exact: q and k are the outputs of their projections by construction.
            doubt: what to say where `mismatch`, among the fields, turns out to be True.
        """
        with self.quiet(), torch.no_grad():
            query, key, value = (_as_multiplied(tensor.detach()) for tensor in (query, key, value))
            fields = {field: _detached(given) for field, given in fields.items()}
            order, call = self.calls, self._made[name]
            self.calls += 1
            self._made[name] += 1
            self._cover(name)
            if self.follow:
                fields |= self._origins(query, key, exact)
            if isinstance(fields.get("mismatch"), Tensor):
                self.doubts.append((name, fields["mismatch"], doubt))
            record = AttentionCall(name, call, order, query=query, key=key, value=value, **fields)
            with without_autocast(query.device):
                self.observer(record)

    def _cover(self, name: str) -> None:
        for covered in (name, *(frame.name for frame in self.frames)):
            while covered not in self.covered:
                self.covered.add(covered)
                covered = covered.rpartition(".")[0]

    def _origins(self, query: Tensor, key: Tensor, exact: bool) -> dict[str, Origin]:
        if exact:
            return {"query_origin": Origin(None), "key_origin": Origin(None)}
        outputs = [kept for frame in reversed(self.frames) for kept in reversed(frame.outputs)]
        for frame in self.frames:
            frame.outputs.clear()
        heads = (query.shape[1], key.shape[1])
        turned = turned_part([frame.module for frame in reversed(self.frames)], query.shape[-1])
        return {"query_origin": origin(query, outputs, heads, turned), "key_origin": origin(key, outputs, heads, turned)}


def crosses(recorder: Recorder, name: str) -> bool:
    """Whether a module's name, its parent's, or one of their classes says that it attends to another sequence."""
    words = [".".join(name.split(".")[-2:])] + [type(frame.module).__name__ for frame in recorder.frames[-2:]]
    return any(mark in word.lower() for word in words for mark in _CROSS)


def _as_multiplied(tensor: Tensor) -> Tensor:
    """Autocast rounds the operands of the product; a record shows what was multiplied."""
    device = tensor.device.type
    if tensor.dtype == torch.float32 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def _detached(given: Any) -> Any:
    return given.detach() if isinstance(given, Tensor) else given
