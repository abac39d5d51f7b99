"""Seam: attention in plain products, softmax(q·k) · v, wherever a model writes it out.

A product of two tensors that are not parameters is followed, step by step (see `chains`), until a softmax runs over its rows or
its columns; the weights are followed further, until their product with the values: then the call is told. What must hold: the
model's own functions run unchanged; no number is read off the device; tensors are held by reference, while what was made of them
is alive; a chain that is not understood is never told but named, with the function that broke it; and what is told is compared
with the logits that the softmax received.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from attemper.capture.arrangement import arranged
from attemper.capture.chains import Call, Chain, Lost, axes_after, dropout_of, followed, is_reference, is_understood
from attemper.capture.flex import tell_of_operator
from attemper.capture.products import PRODUCTS, factors_of, product_of
from attemper.capture.recorder import Recorder
from attemper.capture.weights import Attending, Weights, tell_with_values

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_attn_heads")
_WITHOUT_VALUES = (
    "it computes its attention in its own code: a softmax over logits ran, and no product of its weights with values"
)
_PLAIN = "it computes its attention in its own code: a softmax over logits ran, and no call that capture sees"


_BEGINNINGS = {"softmax", "flex_attention", *PRODUCTS}


def begins(func: Any) -> bool:
    """Whether `EagerSeam.notice` wants to hear of a function where no tensor is followed."""
    return name_of(func)[0] in _BEGINNINGS


def name_of(func: Any) -> tuple[str, bool]:
    """A function's name, as `add`, `matmul` or `mT`, and whether it works in place."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(func.__self__, "__name__", "")  # a property: `x.mT`
    name = name.partition(".")[0]  # torch.ops.aten.bmm.default
    in_place = name.endswith("_") and not name.endswith("__")
    return name[:-1] if in_place else name, in_place


class EagerSeam:
    """Told of every torch function by the functional seam's mode.

    Attributes:
        followed: the tensors that are followed now, by id, and what each of them is.
    """

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self.recorder = recorder
        self._model = model
        self.followed: dict[int, tuple[weakref.ref[Tensor], Chain | Lost | Weights]] = {}
        self._parameters: set[int] | None = None

    def forget(self) -> None:
        """Let everything go that is still followed."""
        self.followed.clear()
        self._parameters = None

    def notice(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """One function of torch that ran."""
        name, in_place = name_of(func)
        if name == "flex_attention" and len(args) > 5:
            tell_of_operator(self.recorder, args)
            return
        if name == "softmax":
            self._softmax(args, kwargs, output)
            return
        if name in PRODUCTS and isinstance(output, Tensor) and self._product(name, args, kwargs, output):
            return
        if self.followed:
            self._step(name, args, kwargs, args[0] if name == "__setitem__" else output, in_place or name == "__setitem__")

    def _get(self, thing: Any) -> "Chain | Lost | Weights | None":
        known = self.followed.get(id(thing))
        return known[1] if known is not None and known[0]() is thing else None

    def _put(self, tensor: Tensor, what: "Chain | Lost | Weights") -> None:
        key, known = id(tensor), self.followed
        known[key] = (weakref.ref(tensor, lambda _: known.pop(key, None)), what)

    def _step(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, in_place: bool) -> None:
        flat = [*args, *kwargs.values()]
        found = [(place, what) for place, each in enumerate(flat) if (what := self._get(each)) and not is_reference(name, place)]
        if not found and args and isinstance(args[0], list | tuple):
            found = [(-1, what) for each in args[0] if (what := self._get(each))]
        if not found or not isinstance(output, Tensor):
            return
        # Of several, the first that is still followed: the others are addends.
        place, what = next((each for each in found if not isinstance(each[1], Lost)), found[0])
        known = is_understood(name) and 0 <= place < len(args)
        call = Call(name, args, kwargs, output, place)
        if isinstance(what, Lost):
            if known:
                self._put(output, what)
        elif isinstance(what, Weights):
            axes = axes_after(what.axes, call) if known else None
            if axes is not None:
                self._put(output, Weights(what.attending, axes, max(what.dropout_p, dropout_of(call))))
            elif output.is_floating_point() and not what.attending.told and what.attending.module in self.recorder.softmaxes:
                self._unfinished(what.attending, f"; {name} was applied to them, which capture does not follow")
        elif known:
            self._put(output, followed(what, call))
        elif in_place or (output.is_floating_point() and output.ndim > 2):
            self._put(output, Lost(name))

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> bool:
        factors = factors_of(name, args, kwargs)
        if factors is None:
            return False
        for place, each in enumerate((factors.left, factors.right)):
            what = self._get(each)
            if isinstance(what, Weights):
                return not what.attending.told and tell_with_values(self.recorder, what, factors, place, output)
        if not all(_is_plain(each) for each in (factors.left, factors.right, output)):
            return False
        if self._is_parameter(factors.left) or self._is_parameter(factors.right) or not output.is_floating_point():
            return False
        product = product_of(factors)
        if product is None or product.axes.reshaped(output.shape) is None:
            return False
        self._put(output, Chain.begin(product, output, self.recorder.running()))
        return True

    def _is_parameter(self, tensor: Tensor) -> bool:
        if self._parameters is None:
            self._parameters = {place for each in self._model.parameters() if (place := _storage(each))}
        return _storage(tensor) in self._parameters

    def _softmax(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        logits, dim = softmax_arguments(args, kwargs)
        if not isinstance(logits, Tensor) or not isinstance(dim, int):
            return
        frames = self.recorder.frames
        if frames and isinstance(frames[-1].module, nn.Softmax):
            frames = frames[:-1]
        module = frames[-1].name if frames else ""
        what = self._get(logits)
        arrangement = arranged(what, dim, self._heads()) if isinstance(what, Chain) else None
        if isinstance(what, Chain) and arrangement is not None:
            with self.recorder.quiet(), torch.no_grad():
                attending = Attending.begin(what, arrangement, logits.detach(), module)
            self._put(output, Weights(attending, arrangement.axes))
            if looks_like_logits(logits, dim):
                self._unfinished(attending)
        elif looks_like_logits(logits, dim):
            if isinstance(what, Lost):
                reason = f"its logits pass through {what.by} between the product and the softmax, which capture does not follow"
                self.recorder.refuse(module, reason)
            elif frames:
                self.recorder.softmaxes.setdefault(module, _PLAIN)

    def _unfinished(self, attending: Attending, more: str = "") -> None:
        self.recorder.softmaxes[attending.module] = _WITHOUT_VALUES + more

    def _heads(self) -> int | None:
        for frame in self.recorder.frames[:-3:-1]:
            for name in _HEADS:
                heads = getattr(frame.module, name, None)
                if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
                    return heads
        return None


def softmax_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The tensor and the dimension that a softmax was given."""
    logits = args[0] if args else kwargs.get("input", kwargs.get("self"))
    return logits, args[1] if len(args) > 1 else kwargs.get("dim")


def looks_like_logits(logits: Tensor, dim: int | None) -> bool:
    """Routers and samplers have fewer dimensions; heads folded into the batch give [batch·heads, queries, keys]."""
    square = logits.ndim == 3 and logits.shape[-2] == logits.shape[-1] > 1
    return dim in (-1, logits.ndim - 1) and (logits.ndim >= 4 or square)


def _is_plain(tensor: Tensor) -> bool:
    """Neither sparse, nor nested, nor a stand-in of torch.func for many tensors."""
    return tensor.layout == torch.strided and not tensor.is_nested and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _storage(tensor: Tensor) -> int:
    """Where its numbers lie, so that views of a parameter are known as such; 0 where it has no place of its own."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0
