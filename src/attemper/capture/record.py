"""What capture hands to an observer: one attention call, and what was not seen.

A record holds the call's own tensors, detached, on the device where they are; nothing in it forces a transfer to the host. They
are not copies: what the model writes over afterwards (a preallocated cache) changes in the record too.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.capture.projections import Origin
from attemper.ops import row_stats, without_autocast
from attemper.stats import RowStats

HIDDEN = -1e4  # older models write this into their masks instead of the most negative number


class Written(NamedTuple):
    """In which order code that writes its logits down computes them.

    Attributes:
        product: dtype of the product q·k as it is written down.
        scaled_first: whether the scale is in it already (on q or k, or within the product as in baddbmm).
    """

    product: torch.dtype
    scaled_first: bool


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention, as the model made it.

    Attributes:
        module: dotted name of the module that made the call ("" for the model itself or outside any module).
        call: how many calls this module made before in the same capture (shared modules run more than once).
        order: how many calls the whole model made before.
        seam: where it was seen: "huggingface", "sdpa", "multihead", "attemper", "eager", "flex" or "flash".
        query: [batch, heads, queries, d]; key: [batch, kv_heads, keys, d]; value: [batch, kv_heads, keys, d_v].
        attn_mask: bool (True = visible) or float (added to the logits), broadcastable to [batch, heads, queries, keys]; or None.
        is_causal, offset, window: position rules on top of the mask, as in `attemper.attention`.
        scale: the factor that the call really applies to the product.
        scale_given: the factor that was passed, None where the call left it to the default.
        softcap: as in `attemper.attention`; sinks: [heads] or None.
        dropout_p: probability of dropping a weight in this call.
        self_attention: False where the keys are known to come from another sequence than the queries.
        mismatch: where the model's own logits can be had ("eager", "flex"): a bool without dimension on the device, True where
            they differ from this record by more than rounding. Then the record is wrong, and the capture names it as unseen.
        logits_over_record: [heads] on the device, by which multiple of this record's scale a regression of the model's own
            logits on q·k explains them ("eager"): 1 where the record is right, NaN where no multiple explains them; or None.
        query_origin, key_origin: how q and k relate to their projections, where the capture follows them; or None.
        softcap_given, sinks_given: what the model passes to a function that does not name it among its parameters (it may still
            use it, or drop it silently); or None.
        output: [batch, heads, queries, d_v], what the call itself returned, where the seam sees it; or None.
        written: the order of operations of code that writes its logits down; None for kernels, which keep them in float32.
        rows: the record that the call made itself, [batch, heads, queries] ("attemper", where the capture asks for it); or None.
    """

    module: str
    call: int
    order: int
    seam: str
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float | Tensor
    scale_given: float | Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    window: tuple[int | None, int | None] | None = None
    offset: int = 0
    dropout_p: float = 0.0
    self_attention: bool = True
    mismatch: Tensor | None = None
    logits_over_record: Tensor | None = None
    query_origin: Origin | None = None
    key_origin: Origin | None = None
    softcap_given: float | None = None
    sinks_given: Tensor | None = None
    output: Tensor | None = None
    written: Written | None = None
    rows: RowStats | None = None

    @property
    def query_factor(self) -> float | None:
        """The constant factor on q since its projection (since its norm, where one ran); None where none was found."""
        return None if self.query_origin is None else self.query_origin.factor

    @property
    def key_factor(self) -> float | None:
        """As `query_factor`, for k."""
        return None if self.key_origin is None else self.key_origin.factor

    @property
    def query_change(self) -> str | None:
        """What became of q since its projection, in a word: see `Origin.change`; None where not followed."""
        return None if self.query_origin is None else self.query_origin.change

    @property
    def key_change(self) -> str | None:
        """As `query_change`, for k."""
        return None if self.key_origin is None else self.key_origin.change

    def row_stats(self, row_stride: int = 1) -> RowStats:
        """The exact statistics of this call's logits, [batch, heads, queries]. Masks of -1e4 and below hide a pair.

        Args:
            row_stride: as in `attemper.ops.row_stats`: the record of every so many queries, [batch, heads, ⌈queries / stride⌉].
        """
        mask = self.attn_mask
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.masked_fill(mask <= HIDDEN, -torch.inf)
        scale = self.scale
        if not isinstance(scale, Tensor) and not math.isfinite(scale):  # refused as a number; here it is what the model did
            scale = torch.full((), scale, device=self.query.device)
        with without_autocast(self.query.device):  # these tensors are what was multiplied: nothing is left to be cast
            return row_stats(
                self.query,
                self.key,
                mask,
                self.is_causal,
                scale=scale,
                softcap=self.softcap,
                sinks=self.sinks,
                window=self.window,
                offset=self.offset,
                row_stride=row_stride,
            )

    def query_mask(self) -> Tensor | None:
        """[batch, queries], True where the query is a real token; None where nothing says that any is padding.

        In self-attention a position whose key no query sees is padding, unless no key at all is seen: such a sequence is not
        all padding, its mask is at fault. That needs a key for every query: over a longer cache, and in cross attention,
        nothing is said. (nn.MultiheadAttention's extra keys come last and are left aside.)
        """
        queries, keys = self.query.shape[-2], self.key.shape[-2]
        extra = keys - queries if self.seam == "multihead" else 0
        if self.attn_mask is None or not self.self_attention or extra < 0 or keys - extra != queries:
            return None
        visible = self.attn_mask if self.attn_mask.dtype == torch.bool else self.attn_mask > HIDDEN
        visible = visible.reshape((1,) * (4 - visible.ndim) + visible.shape)[..., : queries if visible.shape[-1] > 1 else 1]
        position = torch.arange(queries, device=visible.device)
        distance = position - position[:, None]  # key - query
        if self.is_causal:
            visible = visible & (distance <= self.offset)
        left, right = self.window or (None, None)
        if left is not None:
            visible = visible & (distance >= self.offset - left)
        if right is not None:
            visible = visible & (distance <= self.offset + right)
        seen = visible.any(-2).any(1)
        return (seen | ~seen.any(-1, keepdim=True)).expand(self.query.shape[0], queries)


@dataclass(frozen=True)
class Unseen:
    """An attention module that ran (or exists) without a call being seen, and why."""

    module: str
    reason: str
