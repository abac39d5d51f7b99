"""Seam: FlexAttention, torch's `flex_attention`, whose masks and biases are functions of positions.

Uncompiled it ends in one operator, which the functional seam shows. Compiled, nothing is visible inside, so the compiled function
is replaced where the model's code finds it. Its mask is written out by torch's own `create_mask`; a `score_mod` is written out as
what it makes of a logit of 0, and held against what it makes of the real ones: if it does more than add, the call is named as not
seen.
"""

import contextlib
import math
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn

from attemper.capture.agreement import stride
from attemper.capture.places import replaced
from attemper.capture.recorder import Recorder, crosses
from attemper.ops import without_autocast

_ARGUMENTS = ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa")
_DOUBT = "its score_mod does more to a logit than add to it, which no record can describe: disregard its call"


@contextlib.contextmanager
def installed(recorder: Recorder, model: nn.Module) -> Generator[None]:
    """Listen to compiled forms of flex_attention that the model's code holds."""

    def tell(_: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        mask = given.get("block_mask")
        mask_mod = None if mask is None else (mask.mask_mod, *mask.kv_num_blocks.shape[:2])
        _tell(recorder, given["query"], given["key"], given["value"], given.get("score_mod"), mask_mod, given.get("scale"))

    with replaced(recorder, model, _is_compiled_flex, tell):
        yield


def tell_of_operator(recorder: Recorder, args: tuple[Any, ...]) -> None:
    """Tell of one call of torch's operator behind flex_attention: its functions are graphs, with the tensors they use beside."""
    query, key, value, score_mod, block_mask, scale = args[:6]
    score_tensors, mask_tensors = args[7:9] if len(args) > 8 else ((), ())
    mask_mod, blocks = block_mask[-1], block_mask[2]

    def score(z: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score_mod(z, b, h, i, j, *score_tensors)

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mask_mod(b, h, i, j, *mask_tensors)

    plain = None if _gives_back(score_mod) else score
    _tell(recorder, query, key, value, plain, (mask, *blocks.shape[:2]), scale)


def _is_compiled_flex(thing: Any) -> bool:
    inner = getattr(thing, "_torchdynamo_orig_callable", None)
    if inner is None:
        return False
    return getattr(inner, "__name__", "") == "flex_attention" and "flex_attention" in getattr(inner, "__module__", "")


def _gives_back(score_mod: Any) -> bool:
    """Whether a graph returns its first input as it is."""
    nodes = list(score_mod.graph.nodes) if isinstance(score_mod, torch.fx.GraphModule) else []
    return bool(nodes) and nodes[-1].op == "output" and nodes[-1].args[0] in (nodes[0], (nodes[0],))


def _tell(
    recorder: Recorder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    mask_mod: tuple[Callable[..., Tensor], int, int] | None,
    scale: float | None,
) -> None:
    name = recorder.running()
    number = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    mask = mismatch = None
    with recorder.quiet(), torch.no_grad(), without_autocast(query.device):
        if mask_mod is not None:
            from torch.nn.attention.flex_attention import create_mask

            function, batch, heads = mask_mod
            mask = create_mask(function, batch, heads, query.shape[2], key.shape[2], device=str(query.device))
        if score_mod is not None:
            bias, mismatch = _bias(score_mod, query.detach(), key.detach(), number)
            mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
    recorder.tell(
        name,
        seam="flex",
        query=query,
        key=key,
        value=value,
        attn_mask=mask,
        is_causal=False,
        scale=number,
        scale_given=scale,
        self_attention=not crosses(recorder, name),
        mismatch=mismatch,
        doubt=_DOUBT,
    )


def _bias(score_mod: Callable[..., Tensor], query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What is added to each logit, [batch, heads, queries, keys], and whether some rows say that more happens."""
    (batch, heads, queries, _), keys, device = query.shape, key.shape[2], query.device
    over = score_mod
    for dims in ((0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None), (0, 0, None, None, None)):
        over = torch.vmap(over, in_dims=dims)
    places = [torch.arange(size, device=device) for size in (batch, heads, queries, keys)]
    bias = over(torch.zeros(batch, heads, queries, keys, device=device, dtype=torch.float32), *places)
    step = stride(queries)
    wide = key.repeat_interleave(heads // key.shape[1], dim=1)
    logits = query[:, :, ::step].float() @ wide.float().mT * scale
    changed, added = over(logits, places[0], places[1], places[2][::step], places[3]), bias[:, :, ::step]
    allowed = 8 * torch.finfo(torch.float32).eps * (logits.abs() + added.abs() + changed.abs())
    same = ((changed - logits - added).abs() <= allowed) | (changed == added)  # equal: both hide the pair
    return bias, ~(same | changed.isnan()).all()
