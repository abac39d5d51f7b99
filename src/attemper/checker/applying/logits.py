"""One attention call in float64, a few queries at a time: its products, logits and weights by the rule that its record states.

What it must hold: no tensor of queries × keys for a whole layer; the same arithmetic for both calls of a pair, so that equal
q, k and rules give a difference of exactly 0.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.capture.record import HIDDEN, AttentionCall
from attemper.kernels.spec import Tile, logits_of, masking
from attemper.ops.arguments import check

_ELEMENTS = 1 << 22  # of one tile: 32 MiB in float64, of which a handful live at a time


class Logits(NamedTuple):
    """Some rows of a call: [batch, heads, rows, keys] each.

    rows: which queries; scaled: s·u; logits: after cap and bias, also where hidden; visible: bool.
    """

    rows: slice
    scaled: Tensor
    logits: Tensor
    visible: Tensor


class View:
    """A call as float64 numbers.

    Attributes:
        call: the record; query: [batch, heads, queries, d]; key, value: [batch, heads, keys, d], repeated for grouped heads.
        scale: [batch or 1, heads or 1, queries or 1].

    Args:
        sample: the queries that `tiles` goes through; None: all.
    """

    def __init__(self, call: AttentionCall, sample: slice | None = None) -> None:
        self.call, self._sample = call, sample
        mask, scale = call.attn_mask, call.scale
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.masked_fill(mask <= HIDDEN, -torch.inf)
        problem = check(
            call.query.double(),
            call.key.double(),
            None,
            mask,
            is_causal=call.is_causal,
            scale=scale if isinstance(scale, Tensor) else torch.full((), scale, dtype=torch.float64, device=call.query.device),
            enable_gqa=True,
            softcap=call.softcap,
            sinks=call.sinks,
            window=call.window,
            offset=call.offset,
        )
        self._inputs, self._rules = problem.inputs, problem.rules
        self.query, self.scale, self.sinks = problem.inputs.query, problem.inputs.scale, problem.inputs.sinks
        groups = self.query.shape[1] // call.key.shape[1]
        self.key = problem.inputs.key.repeat_interleave(groups, 1)
        self.value = call.value.double().repeat_interleave(groups, 1)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys)."""
        return self._inputs.shape

    def tiles(self) -> Iterator[slice]:
        """Ranges of the queries in the sample, each small enough to be written out."""
        batch, heads, queries, keys = self.shape
        step = max(1, _ELEMENTS // max(1, batch * heads * keys))
        first, last, _ = (self._sample or slice(None)).indices(queries)
        for start in range(first, last, step):
            yield slice(start, min(start + step, last))

    def logits(self, rows: slice) -> Logits:
        """The logits of some queries."""
        scale = self.scale if self.scale.shape[-1] == 1 else self.scale[..., rows]
        products = self.query[..., rows, :] @ self.key.mT
        visible, bias = self._masking(rows)
        full = torch.ones((), dtype=torch.bool, device=products.device) if visible is None else visible
        scaled = products * scale.unsqueeze(-1)
        return Logits(rows, scaled, logits_of(products, scale, self._rules.softcap, bias), full.expand_as(products))

    def bias(self, rows: slice) -> Tensor | None:
        """What is added to the logits of some queries, 0 where they are hidden."""
        return self._masking(rows)[1]

    def magnitude(self, rows: slice) -> Tensor:
        """|s|·Σ|q||k|, which bounds what rounding q and k can do to s·u."""
        scale = self.scale if self.scale.shape[-1] == 1 else self.scale[..., rows]
        return (self.query[..., rows, :].abs() @ self.key.abs().mT) * scale.abs().unsqueeze(-1)

    def weights(self, logits: Tensor, visible: Tensor) -> Tensor:
        """Softmax over the visible keys, and the sink where there is one; a row that sees nothing gives none."""
        hidden = logits.masked_fill(~visible, -torch.inf)
        if self.sinks is not None:
            sink = self.sinks.view(1, -1, 1, 1).expand(*hidden.shape[:-1], 1)
            return torch.softmax(torch.cat([hidden, sink], -1), -1)[..., :-1]
        return torch.where(visible.any(-1, keepdim=True), torch.softmax(hidden, -1), 0.0)

    def _masking(self, rows: slice) -> tuple[Tensor | None, Tensor | None]:
        return masking(self._inputs, self._rules, Tile(rows.start, rows.stop, 0, self.shape[3]))
