"""Faults of weights: projections that grew, numbers that are none, a stream that overflows beside attention, an offset."""

import contextlib
import re
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attemper.capture.projections import is_linear
from attemper.checker.thresholds import DEFAULTS
from benchmarks.check_faults.models import Tiny
from benchmarks.check_faults.planting import NotApplicableError

FLOAT16 = torch.finfo(torch.float16).max
_Q_OR_K = re.compile(r"^(q|k|query|key)(_proj|_lin|_head|_b_proj)?$|^kv_b_proj$")
_FUSED = re.compile(r"^(c_attn|qkv|qkv_proj|query_key_value|Wqkv|in_proj)$")
_NORM = re.compile(r"^(q|k|qk)_(layer)?norm$")
_FEED_FORWARD = re.compile(r"mlp|ffn|fc1|lin1|linear1|intermediate|feed_forward|DenseReluDense|\bwi\b|\bff\b")
# Here a bias of q or k is rotated, or multiplied with terms of position: no offset that a row has in common.
_BY_POSITION = ("roformer", "deberta", "deberta_v2", "sew_d")
_COSINE = ("swinv2", "swin2sr")  # q and k have length 1, whatever the weights
_CONTIGUOUS = ("gpt2", "gpt_bigcode", "openai-gpt", "vitdet")  # one projection gives [q | k | v]


@contextlib.contextmanager
def overflowing(tiny: Tiny) -> Generator[frozenset[str]]:
    """The projections of q and k of the last module grow until the largest product is four times what float16 can hold."""
    row = tiny.before.rows[-1]
    yield _grow(tiny, row.module, 4 * FLOAT16 / float(row.stats.product_absmax.max()))


@contextlib.contextmanager
def saturated(tiny: Tiny) -> Generator[frozenset[str]]:
    """The projections of q and k of a module grow until the largest of its products, scaled, is 3000."""
    if getattr(tiny.config, "attn_logit_softcapping", None) or tiny.name == "t5gemma":
        raise NotApplicableError  # a softcap bounds the logits
    judged = [row for row in tiny.before.rows if float(row.stats.softmax_rows.min()) >= DEFAULTS.fewest_rows]
    if not judged:
        raise NotApplicableError
    row = judged[-1]
    scale = row.scale or 1.0
    yield _grow(tiny, row.module, 3000.0 / (float(row.stats.product_absmax.max()) * scale))


@contextlib.contextmanager
def not_a_number(tiny: Tiny) -> Generator[frozenset[str]]:
    """One weight of the last module's projections is NaN."""
    name = tiny.attention[-1]
    with torch.no_grad():
        next(_weights(tiny.model.get_submodule(name))).view(-1)[3] = torch.nan
    yield _sharing(tiny, name)


@contextlib.contextmanager
def overflow_outside(tiny: Tiny) -> Generator[frozenset[str]]:
    """The weights of a feed-forward part are finite and its sums or products are not: the residual stream overflows there."""
    for name, module in tiny.model.named_modules():
        if is_linear(module) and _FEED_FORWARD.search(name) and not name.startswith(tuple(f"{each}." for each in tiny.attention)):
            parent = name.rpartition(".")[0]
            beside = [each for each in tiny.model.get_submodule(parent).children() if is_linear(each)]
            with torch.no_grad():
                for weight in [weight for each in beside for weight in each.parameters() if weight.dim() > 1]:
                    weight.fill_(torch.finfo(weight.dtype).max)
            yield frozenset([parent])
            return
    raise NotApplicableError


@contextlib.contextmanager
def offset(tiny: Tiny) -> Generator[frozenset[str]]:
    """The biases of q and k of the last module add 300 to every logit, which the softmax ignores."""
    name = tiny.attention[-1]
    module = tiny.model.get_submodule(name)
    row = tiny.before.rows[-1]
    if row.scale is None or tiny.name in _BY_POSITION or any("Rotary" in type(each).__name__ for each in tiny.model.modules()):
        raise NotApplicableError
    query, key = _biases(tiny, module)
    with torch.no_grad():
        query.fill_(1.0)
        width = query.numel() // row.stats.product_absmax.numel()
        key.fill_(300.0 / (width * row.scale))
    yield _sharing(tiny, name)


def _biases(tiny: Tiny, module: nn.Module) -> tuple[Tensor, Tensor]:
    children: dict[str, Any] = dict(module.named_children())
    for names in (("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"), ("query_proj", "key_proj"), ("q", "k")):
        query, key = (getattr(children.get(name), "bias", None) for name in names)
        if isinstance(query, Tensor) and isinstance(key, Tensor):
            return query, key
    fused: Any = None
    if isinstance(module, nn.MultiheadAttention):
        fused = module.in_proj_bias
    elif tiny.name in _CONTIGUOUS:
        fused = next((child.bias for name, child in children.items() if _FUSED.match(name)), None)
    if not isinstance(fused, Tensor):
        raise NotApplicableError
    if tiny.name == "gpt_bigcode":  # one key head and one value head for all
        width = (fused.numel() - tiny.config.n_embd) // 2
        return fused[: -2 * width], fused[-2 * width : -width]
    query, key, _ = fused.chunk(3)
    return query, key


def _grow(tiny: Tiny, name: str, factor: float) -> frozenset[str]:
    """Multiply q·k through what makes q and k: the gains of their norms where there are any, else their projections."""
    if tiny.name in _COSINE:
        raise NotApplicableError
    module = tiny.model.get_submodule(name)
    norms = [child for part, child in module.named_children() if _NORM.match(part)]
    weights = [weight for norm in norms for weight in norm.parameters()] or list(_weights(module))
    # A layer that takes its keys from another one has only q to grow.
    root = factor if len(norms) == 1 and not hasattr(module, "k_norm") else factor**0.5
    with torch.no_grad():
        for weight in weights:
            if norms and bool((weight == 0).all()):  # a gain that is kept as 1 + weight
                weight.add_(root - 1.0)
            else:
                weight.mul_(root)
    return _sharing(tiny, name)


def _sharing(tiny: Tiny, name: str) -> frozenset[str]:
    """The module, and those that have its weights too."""
    own = {id(parameter) for parameter in tiny.model.get_submodule(name).parameters()}
    return frozenset(
        each for each in tiny.attention if own & {id(parameter) for parameter in tiny.model.get_submodule(each).parameters()}
    )


def _weights(module: nn.Module) -> Iterator[Tensor]:
    """The parameters that make q and k; of a fused projection all of it, v included."""
    if isinstance(module, nn.MultiheadAttention):
        yield from (module.in_proj_weight, module.in_proj_bias)
        return
    children = dict(module.named_children())
    chosen = [child for part, child in children.items() if _Q_OR_K.match(part)]
    chosen = chosen or [child for part, child in children.items() if _FUSED.match(part)]
    found = [parameter for child in chosen for parameter in child.parameters()]
    found += [parameter for part, parameter in module.named_parameters(recurse=False) if part in ("q", "k")]
    if not found:
        raise NotApplicableError
    yield from found
