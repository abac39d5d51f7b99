"""What the tests of `compare` share: attention functions that do not do as they are told, and a small decoder with dials."""

import contextlib
import math
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, KV_HEADS, WIDTH, TOKENS, LAYERS = 4, 2, 6, 13, 3


@contextlib.contextmanager
def registered(name: str, function: Callable[..., Any], *, mask: bool = True) -> Generator[str]:
    """An attention function under a name, with eager's mask function beside it unless that is to be missing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(name, function)
    if mask:
        AttentionMaskInterface.register(name, eager_mask)
    try:
        yield name
    finally:
        del AttentionInterface._global_mapping[name]
        if mask:
            del AttentionMaskInterface._global_mapping[name]


def faulty(
    *,
    scale: Callable[[float, int], float] = lambda scale, _width: scale,
    softcap: bool = True,
    sinks: bool = True,
    grouped: str = "interleave",
    scaled_mask: bool = False,
) -> Callable[..., Any]:
    """An eager attention function for transformers, sound unless an argument says how it is not."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap_given: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        width, groups = query.shape[-1], query.shape[1] // key.shape[1]
        own = width**-0.5 if scaling is None else scaling
        spread = (lambda x: x.repeat_interleave(groups, 1)) if grouped == "interleave" else (lambda x: x.repeat(1, groups, 1, 1))
        logits = query @ spread(key).mT * scale(own, width)
        cap = kwargs.get("softcap")
        if cap is not None and softcap:
            logits = cap * torch.tanh(logits / cap)
        if attention_mask is not None:
            logits = logits + attention_mask * (own if scaled_mask else 1.0)
        given = kwargs.get("s_aux")
        if given is not None and sinks:
            sink = given.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
            weights = torch.softmax(torch.cat([logits, sink], -1), -1)[..., :-1]
        else:
            weights = torch.softmax(logits, -1)
        return (weights @ spread(value)).transpose(1, 2), None

    return _taking(attend)


def _taking(attend: Callable[..., Any]) -> Callable[..., Any]:
    """With softcap and s_aux in the signature, as transformers' own functions that know them have."""

    def function(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        return attend(module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, s_aux=s_aux)

    return function


class Dials:
    """How one layer of `Small` attends."""

    def __init__(self, **given: Any) -> None:
        self.scale: float = given.get("scale", WIDTH**-0.5)
        self.pairing: str = given.get("pairing", "half-split")
        self.base: float = given.get("base", 10000.0)
        self.shift: int = given.get("shift", 0)
        self.grouped: str = given.get("grouped", "interleave")
        self.order: list[int] = given.get("order", list(range(HEADS)))
        self.part: float = given.get("part", 1.0)


class Layer(nn.Module):
    """Attention with rotary embeddings, behind a residual."""

    def __init__(self, dials: Dials, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.dials, self.names = dials, names
        for name, heads in zip(names, (HEADS, KV_HEADS, KV_HEADS), strict=True):
            setattr(self, name, nn.Linear(HEADS * WIDTH, heads * WIDTH, bias=False))
        self.out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False)
        self.register_buffer("inv_freq", dials.base ** (-torch.arange(0, WIDTH, 2) / WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        dials = self.dials
        q, k, v = (getattr(self, name)(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for name in self.names)
        q, k = self.turned(q, dials.shift), self.turned(k, 0)
        groups = HEADS // KV_HEADS
        k, v = ((t.repeat_interleave(groups, 1) if dials.grouped == "interleave" else t.repeat(1, groups, 1, 1)) for t in (k, v))
        q, k, v = (t[:, dials.order] for t in (q, k, v))
        q = torch.cat([q[..., :4], q[..., 4:] * dials.part], -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=dials.scale)
        back = torch.tensor(dials.order).argsort()
        return x + self.out(out[:, back].transpose(1, 2).flatten(2))

    def turned(self, x: Tensor, shift: int) -> Tensor:
        angle = torch.outer(torch.arange(x.shape[-2]) + shift, self.inv_freq)
        cos, sin = angle.cos(), angle.sin()
        if self.dials.pairing == "half-split":
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Small(nn.Module):
    """Three layers over numbers; `changed` turns the dials of one of them."""

    def __init__(self, layer: int = -1, names: tuple[str, str, str] = ("q", "k", "v"), **changed: Any) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.Sequential(*(Layer(Dials(**(changed if n == layer else {})), names) for n in range(LAYERS)))
        with torch.no_grad():
            for weight in self.parameters():
                weight.mul_(3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def example_inputs(self) -> dict[str, Tensor]:
        return {"x": torch.randn(2, TOKENS, HEADS * WIDTH, generator=torch.Generator().manual_seed(5))}


def small() -> nn.Module:
    """A factory for the command."""
    return Small()


def ported() -> nn.Module:
    """The same weights under other names, with the scale of the second layer applied twice."""
    return Small(1, ("wq", "wk", "wv"), scale=WIDTH**-0.5 * WIDTH**-0.5)


def hostile() -> nn.Module:
    """One layer, whose name would turn a terminal red."""
    model = Small()
    layer = model.layers[0]
    model.layers = nn.Sequential()
    model.layers.add_module("\x1b[31m", layer)
    return model


def blind() -> nn.Module:
    """A model without attention."""
    model = Small()
    model.layers = nn.Sequential(nn.Linear(HEADS * WIDTH, 1))
    return model


class Cached(nn.Module):
    """Attention of few queries over more keys, by a rule of alignment."""

    def __init__(self, bottom_right: bool) -> None:
        super().__init__()
        self.bottom_right = bottom_right

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.bottom_right:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        queries, keys = q.shape[-2], k.shape[-2]
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        return F.scaled_dot_product_attention(q, k, v, mask)

    def example_inputs(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(5)
        sizes = {"q": 5, "k": 11, "v": 11}
        return {name: torch.randn(2, 3, length, 7, generator=generator) for name, length in sizes.items()}


def yarn_mscale(factor: float) -> float:
    """0.1·ln(factor) + 1."""
    return 0.1 * math.log(factor) + 1


class WithoutQueries(nn.Module):
    """A call whose queries are none, and one that has some."""

    def forward(self, x: Tensor) -> Tensor:
        F.scaled_dot_product_attention(x[:, :, :0], x, x)
        return F.scaled_dot_product_attention(x, x, x)
