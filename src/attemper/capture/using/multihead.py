"""nn.MultiheadAttention modules become attemper's where they stand.

The class of the module is changed and nothing else of it: the same object with the same parameters, hooks, children and mode, so
that optimizers, references to it and the keys of its state dict stay. It remains an instance of torch's class too, and undone it
is what it was.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attemper.capture.using.notes import Notes
from attemper.nn import MultiheadAttention

HOW = "as attemper.nn.MultiheadAttention, on the same parameters"
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class ConvertedMultiheadAttention(MultiheadAttention, nn.MultiheadAttention):  # pyrefly: ignore[inconsistent-inheritance]
    """`attemper.nn.MultiheadAttention` in the place of torch's. Nested tensors go to torch's own code, and are noted."""

    _attemper_place: tuple[Notes, str, bool]  # where to note what, and whether torch's fused path knew the weights

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See `attemper.nn.MultiheadAttention`."""
        if not query.is_nested:
            return super().forward(query, key, value, *args, **kwargs)
        notes, name, fused = self._attemper_place
        notes.refuse(name, "it was given nested tensors, which only torch's own module takes")
        self._qkv_same_embed_dim = fused  # what torch's code reads
        try:
            return nn.MultiheadAttention.forward(self, query, key, value, *args, **kwargs)
        finally:
            self._qkv_same_embed_dim = False


def convert(model: nn.Module, notes: Notes) -> Iterator[Callable[[], None]]:
    """Convert what can be, and note it; yields what undoes each step, once it is done."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        reason = _reason(module)
        if reason is None:
            yield _Conversion(name, module, notes)
            notes.replace(name, HOW)
        else:
            notes.keep(name, reason)
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(each, ConvertedMultiheadAttention) for each in encoder.modules()
        ):
            yield _Dense(encoder)


def _reason(module: nn.MultiheadAttention) -> str | None:
    """Why a module is kept: whatever might make its code, or that of its parts, another than torch's."""
    kind = type(module)
    if kind is not nn.MultiheadAttention:
        return f"it is a {kind.__module__}.{kind.__qualname__}, whose code may differ from torch.nn.MultiheadAttention's"
    out = module.out_proj
    if "forward" in module.__dict__ or "forward" in out.__dict__:
        return "somebody has replaced its forward method"
    if not isinstance(out, nn.Linear) or type(out).forward is not nn.Linear.forward:
        return f"its out_proj is a {type(out).__qualname__}, of which torch's module reads the weight alone"
    if out._forward_hooks or out._forward_pre_hooks or out._backward_hooks or out._backward_pre_hooks:
        return "hooks sit on its out_proj, which torch's module never calls"
    weights = ["in_proj_weight"] if module._qkv_same_embed_dim else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    missing = [name for name in weights if module._parameters.get(name) is None]
    if missing:
        return f"its {missing[0]} is no parameter of it: something computes it"
    if out.weight.dtype not in _DTYPES:
        return f"its parameters are {out.weight.dtype}"
    return None


class _Conversion:
    """The change of one module's class, and back."""

    def __init__(self, name: str, module: nn.MultiheadAttention, notes: Notes) -> None:
        fields = MultiheadAttention.shaped_like(module, device="meta", impl=notes.impl).__dict__
        self.module, self.fused = module, module._qkv_same_embed_dim
        self.added = [field for field in fields if field not in module.__dict__] + ["_attemper_place"]
        module.__dict__.update({field: fields[field] for field in self.added[:-1]})
        module.__dict__["_attemper_place"] = (notes, name, self.fused)
        # Torch's encoder modules read this to decide on their fused path, which would take the weights and pass ours by.
        module._qkv_same_embed_dim = False
        module.__class__ = ConvertedMultiheadAttention

    def __call__(self) -> None:
        self.module.__class__ = _unconverted(type(self.module))
        self.module._qkv_same_embed_dim = self.fused
        for field in self.added:
            self.module.__dict__.pop(field, None)


def _unconverted(kind: type[Any]) -> type[Any]:
    """A class with torch's module in our place: others (parametrizations, FSDP) may have derived one from ours meanwhile."""
    if kind is ConvertedMultiheadAttention:
        return nn.MultiheadAttention
    if not issubclass(kind, ConvertedMultiheadAttention):
        return kind
    body = {name: thing for name, thing in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    name = kind.__name__.replace(ConvertedMultiheadAttention.__name__, nn.MultiheadAttention.__name__)
    return type(kind)(name, tuple(_unconverted(base) for base in kind.__bases__), body)


class _Dense:
    """Keeps a torch encoder from making nested tensors of padded ones for a fused path that is off, and back."""

    def __init__(self, encoder: nn.TransformerEncoder) -> None:
        self.encoder, self.before = encoder, encoder.__dict__.get("use_nested_tensor")
        if self.before is not None:
            encoder.use_nested_tensor = False

    def __call__(self) -> None:
        if self.before is not None:
            self.encoder.use_nested_tensor = self.before
