"""`MultiheadAttention`: torch's module with everything that `attemper.attention` can do.

What it must hold:
- with torch's own arguments it is torch's module: the same parameters by the same names, the same masks, the same results;
- every option is off by default and adds no parameter while it is off, so that weights load both ways;
- a row that nothing may attend gives heads of 0, whichever path is taken;
- no fused path of torch's encoder modules may take the weights and leave the options out.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ArgumentError
from attemper.nn.factors import factor_of
from attemper.nn.heads import HeadGroup, lay_out, of_heads
from attemper.nn.masks import merge
from attemper.nn.qk_norm import QKNorm
from attemper.nn.rotary import RotaryEmbedding
from attemper.ops import attention, attention_with_weights, check_name
from attemper.stats import RowStats


class _Call(NamedTuple):
    """One forward pass: what every group of heads is told alike."""

    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    offset: int
    need_weights: bool
    need_rows: bool


class _Attended(NamedTuple):
    output: Tensor
    weights: Tensor | None
    rows: RowStats | None


class MultiheadAttention(nn.Module):
    """Concat(head₁, …, head_h)·W_O with headᵢ = softmax(z)·V Wᵢ_V, z = scale·(Q Wᵢ_Q)·(K Wᵢ_K)ᵀ + mask, as torch's module.

    The arguments up to `dtype`, those of `forward`, the parameters and their names are `torch.nn.MultiheadAttention`'s, and so
    are the results; `state_dict`s load both ways. Differences: rows without a visible key give heads of 0, thus `out_proj.bias`,
    where torch gives NaN or that, depending on the path; `is_causal=True` hides later keys, with or without a mask, while torch
    takes it as a hint about the mask; dropout draws other numbers. See docs/nn.md.

    Args:
        embed_dim: width of query and output.
        num_heads: number of query heads.
        dropout: probability with which a weight is dropped in training.
        bias: whether the projections have one.
        add_bias_kv: append one learned key and value, after rotation and norm.
        add_zero_attn: append a key and value of zeros. Both are visible to every query, and causal rule and masks leave them.
        kdim, vdim: widths of key and value, embed_dim if None.
        batch_first: inputs are [batch, tokens, width] instead of [tokens, batch, width].
        device, dtype: of the parameters.
        scale: None (1/√width of the head), a number, a tensor ([num_heads], or broadcastable to [batch, num_heads, queries]; a
            `Parameter` is learned) or a rule of `attemper.scales`. In heads of different widths a rule is asked for each width.
        qk_norm: "rms", "layer" or "l2" (per head, with gains), or a `QKNorm` with other options; before the rotation.
        softcap: bound on |scale·q·k|, above 0.
        sinks: whether each head has a learned logit that takes weight and has no value; it starts at 0.
        rope: a `RotaryEmbedding`; it turns the first `rope.width` entries of each head. Self-attention is what it is for.
        num_kv_heads: number of key and value heads, a divisor of num_heads; head h reads key head
            h // (num_heads / num_kv_heads).
        head_dims: width of the heads, one number or one for each head; None: embed_dim / num_heads. Heads that share a key head
            are equally wide. Their sum need not be embed_dim.
        gate: multiply the heads by sigmoid(query·W_gate) before the output projection (arXiv 2505.06708, section 2, "G1").
        impl: kernel of `attemper.attention`, where no weights are asked for.

    Raises:
        ArgumentError: an argument does not fit the others; the message names it.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2; grouped key heads: Ainslie et al. 2023 (arXiv 2305.13245);
    the other options: see `attention`, `QKNorm` and `RotaryEmbedding`.
    """

    # torch's encoder modules read this to decide on their fused path, which takes the weights and knows none of the options.
    _qkv_same_embed_dim = False

    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    sinks: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        scale: Any = None,
        qk_norm: str | QKNorm | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        rope: RotaryEmbedding | None = None,
        num_kv_heads: int | None = None,
        head_dims: int | Sequence[int] | None = None,
        gate: bool = False,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        self.layout = lay_out(embed_dim, num_heads, num_kv_heads, head_dims)
        if not 0.0 <= dropout <= 1.0:
            raise ArgumentError("dropout", repr(dropout), "a probability in [0, 1]")
        if rope is not None and rope.width > min(self.layout.widths):
            raise ArgumentError("rope", f"width {rope.width}", f"at most {min(self.layout.widths)}, the narrowest head")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, len(self.layout.kv_widths)
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.head_dim = self.layout.widths[0] if len(self.layout.groups) == 1 else None
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        check_name(impl)
        self.softcap, self.impl = softcap, impl

        made = {"device": device, "dtype": dtype}
        inner, kv_inner = sum(self.layout.widths), sum(self.layout.kv_widths)
        packed = self.kdim == embed_dim and self.vdim == embed_dim

        def parameter(wanted: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, **made)) if wanted else None

        self.q_proj_weight = parameter(not packed, inner, embed_dim)
        self.k_proj_weight = parameter(not packed, kv_inner, self.kdim)
        self.v_proj_weight = parameter(not packed, kv_inner, self.vdim)
        self.in_proj_weight = parameter(packed, inner + 2 * kv_inner, embed_dim)
        self.in_proj_bias = parameter(bias, inner + 2 * kv_inner)
        self.out_proj = nn.Linear(inner, embed_dim, bias=bias, **made)
        self.bias_k = parameter(add_bias_kv, 1, 1, kv_inner)
        self.bias_v = parameter(add_bias_kv, 1, 1, kv_inner)
        self.sinks = parameter(sinks, num_heads)
        self._reset_parameters()
        self.gate_proj = nn.Linear(embed_dim, inner, bias=bias, **made) if gate else None

        self.rope = rope
        self.qk_norm = self._norm(qk_norm, made)
        if isinstance(scale, Tensor) and not isinstance(scale, nn.Parameter):
            self.register_buffer("scale", scale, persistent=False)  # given, not learned: no part of torch's state dict
        else:
            self.scale = scale

    def _norm(self, qk_norm: str | QKNorm | None, made: dict[str, Any]) -> nn.Module | None:
        if not isinstance(qk_norm, str):
            if qk_norm is not None and {qk_norm.head_dim} != set(self.layout.widths):
                expected = f"heads of {qk_norm.head_dim}; for several widths give the name of a norm, which is built for each"
                raise ArgumentError("qk_norm", f"a QKNorm of {qk_norm.head_dim} for heads of {self.layout.widths}", expected)
            return qk_norm
        norms = {str(group.width): QKNorm(group.width, qk_norm, **made) for group in self.layout.groups}
        return norms.popitem()[1] if len(norms) == 1 else nn.ModuleDict(norms)

    def _reset_parameters(self) -> None:
        # In this order, and by these rules, so that torch's seed gives torch's weights.
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias, self.sinks):
            if bias is not None:
                nn.init.zeros_(bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        offset: int = 0,
        return_stats: bool = False,
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, RowStats]:
        """Attend.

        Args:
            query: [queries, batch, embed_dim], with `batch_first` [batch, queries, embed_dim], or unbatched [queries, embed_dim].
            key, value: the same with keys, and kdim and vdim.
            key_padding_mask: [batch, keys], unbatched [keys]; bool, **True = hidden**, or float, added to the logits.
            need_weights: also return the weights, which then are all written down; without, a kernel runs.
            attn_mask: [queries, keys] or [batch·num_heads, queries, keys], bool, **True = hidden**, or float.
            average_attn_weights: the mean of the weights over heads, instead of each.
            is_causal: key j is visible to query i at j ≤ i + offset; with a mask, both apply.
            offset: position of query 0 among the keys, for the causal rule and the rotation.
            return_stats: also return the record of the logits.

        Returns:
            (output, weights), with `return_stats` (output, weights, `RowStats`). Output has the shape of query. Weights are
            [batch, queries, keys], each head's [batch, heads, queries, keys], after dropout, or None; a learned key and the zero
            key are columns after the others. The record is [batch, heads, queries]. Unbatched: the same without batch.

        Raises:
            ArgumentError: an argument does not fit; the message names it.
        """
        batched = self._check(query, key, value)
        sequence_first = batched and not self.batch_first
        projected = self._project(query, key, value)
        gate = None if self.gate_proj is None else torch.sigmoid(self.gate_proj(query))
        if not batched:
            projected = [each.unsqueeze(0) for each in projected]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif sequence_first:
            projected = [each.transpose(0, 1) for each in projected]
        q, k, v = projected
        shape = (q.shape[0], self.num_heads, q.shape[1], k.shape[1])
        extra = (self.bias_k is not None) + self.add_zero_attn
        call = _Call(
            mask=merge(attn_mask, key_padding_mask, shape, q.device, extra_keys=extra, is_causal=is_causal, offset=offset),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal and not extra,  # else it is in the mask
            offset=offset,
            need_weights=need_weights,
            need_rows=return_stats,
        )
        done = self._attend(q, k, v, call)

        output = done.output.squeeze(0) if not batched else done.output.transpose(0, 1) if sequence_first else done.output
        output = self.out_proj(output if gate is None else output * gate)
        weights = done.weights
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        if done.rows is None:
            return output, weights
        rows = done.rows
        return output, weights, rows if batched else RowStats(rows.lse[0], rows.entropy[0], rows.rest[:, 0], rows.sink)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        inner, kv_inner = sum(self.layout.widths), sum(self.layout.kv_widths)
        sizes = [inner, kv_inner, kv_inner]
        if self.in_proj_weight is not None:
            if query is key and key is value:  # one product instead of three
                return list(F.linear(query, self.in_proj_weight, self.in_proj_bias).split(sizes, -1))
            weights = self.in_proj_weight.split(sizes)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        assert all(weight is not None for weight in weights)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
        return [F.linear(x, weight, bias) for x, weight, bias in zip((query, key, value), weights, biases, strict=True)]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> _Attended:
        split = zip(self.layout.groups, self.layout.split(q), self.layout.split_kv(k), self.layout.split_kv(v), strict=True)
        learned = [None if bias is None else self.layout.split_kv(bias) for bias in (self.bias_k, self.bias_v)]
        parts = []
        for place, (group, group_q, group_k, group_v) in enumerate(split):
            group_q, group_k = self._position(group, group_q, group_k, call.offset)
            bias_k, bias_v = (None if each is None else each[place] for each in learned)
            parts.append(self._attend_group(group, group_q, self._extend(group_k, bias_k), self._extend(group_v, bias_v), call))
        return _Attended(
            self.layout.join([part.output for part in parts]),
            self.layout.in_order([part.weights for part in parts if part.weights is not None], -3) if call.need_weights else None,
            self._rows([part.rows for part in parts if part.rows is not None]) if call.need_rows else None,
        )

    def _position(self, group: HeadGroup, q: Tensor, k: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        if self.qk_norm is not None:
            norm = self.qk_norm[str(group.width)] if isinstance(self.qk_norm, nn.ModuleDict) else self.qk_norm
            q, k = norm(q, k)
        if self.rope is not None:
            length = max(offset + q.shape[-2], k.shape[-2])
            q, k = self.rope(q, offset=offset, length=length), self.rope(k, length=length)
        return q, k

    def _extend(self, x: Tensor, learned: Tensor | None) -> Tensor:
        """The keys or values with the learned one and the zero one after them."""
        if learned is not None:
            x = torch.cat([x, learned.expand(x.shape[0], -1, -1, -1).to(x.dtype)], -2)
        return F.pad(x, (0, 0, 0, 1)) if self.add_zero_attn else x

    def _attend_group(self, group: HeadGroup, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> _Attended:
        mask = None if call.mask is None else of_heads(call.mask, group, self.num_heads, -3)
        shape = {"heads": self.num_heads, "queries": q.shape[-2], "keys": k.shape[-2], "offset": call.offset}
        options = {
            "scale": factor_of(self.scale, group, **shape, device=q.device),
            "enable_gqa": len(group.heads) != len(group.kv_heads),
            "softcap": self.softcap,
            "sinks": None if self.sinks is None else of_heads(self.sinks, group, self.num_heads, 0),
            "offset": call.offset,
        }
        given = (q, k, v, mask, call.dropout_p, call.is_causal)
        if call.need_weights:
            return _Attended(*attention_with_weights(*given, **options))
        if call.need_rows:
            output, rows = attention(*given, **options, return_stats=True, impl=self.impl)
            return _Attended(output, None, rows)
        return _Attended(attention(*given, **options, impl=self.impl), None, None)

    def _rows(self, parts: list[RowStats]) -> RowStats:
        lse, entropy, rest = (
            self.layout.in_order([getattr(part, name) for part in parts], -2) for name in ("lse", "entropy", "rest")
        )
        return RowStats(lse, entropy, rest, parts[0].sink)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether the inputs are batched."""
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, width), x in zip(widths.items(), (query, key, value), strict=True):
            if not isinstance(x, Tensor):
                raise ArgumentError(name, type(x).__name__, "a torch.Tensor")
            if x.is_nested:
                expected = "a dense tensor; set use_nested_tensor = False on a torch.nn.TransformerEncoder around this module"
                raise ArgumentError(name, "a nested tensor", expected)
            if x.ndim not in (2, 3) or x.shape[-1] != width:
                layout = "[batch, tokens" if self.batch_first else "[tokens, batch"
                raise ArgumentError(name, f"shape {tuple(x.shape)}", f"{layout}, {width}], or [tokens, {width}] unbatched")
            if x.ndim != query.ndim:
                raise ArgumentError(name, f"shape {tuple(x.shape)}", f"{query.ndim} dimensions, as query has")
            weight = self.out_proj.weight
            if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
                raise ArgumentError(name, str(x.dtype), f"{weight.dtype}, the dtype of the parameters")
        if key.shape[:-1] != value.shape[:-1]:
            raise ArgumentError("value", f"shape {tuple(value.shape)}", f"{(*key.shape[:-1], self.vdim)}: one value for each key")
        batch_dim = 0 if self.batch_first else 1
        if query.ndim == 3 and query.shape[batch_dim] != key.shape[batch_dim]:
            raise ArgumentError("key", f"a batch of {key.shape[batch_dim]}", f"{query.shape[batch_dim]}, as query has")
        return query.ndim == 3

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> "MultiheadAttention":
        """A module on the very parameters of torch's, which thus stay those of its optimizer.

        Args:
            module: whose parameters and mode to take.
            options: keyword arguments beyond torch's, such as `softcap`. Those that change the shape of a parameter cannot be.
        """
        made = cls.shaped_like(module, device=module.out_proj.weight.device, **options)
        for name, theirs in module.named_parameters():
            owner, _, last = name.rpartition(".")
            own = made.get_parameter(name)
            if own.shape != theirs.shape:
                raise ArgumentError(
                    "options", f"{name} of shape {tuple(own.shape)}", f"{tuple(theirs.shape)}, that of the module"
                )
            setattr(made.get_submodule(owner), last, theirs)
        return made.train(module.training)

    @classmethod
    def shaped_like(cls, module: nn.MultiheadAttention, *, device: torch.device | str, **options: Any) -> "MultiheadAttention":
        """A new module with the arguments that torch's was made with, parameters of its own, on the device.

        Args:
            module: whose arguments to take. device: of the parameters; "meta" makes none. options: as in `from_torch`.
        """
        return cls(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            module.in_proj_bias is not None,
            module.bias_k is not None,
            module.add_zero_attn,
            module.kdim,
            module.vdim,
            module.batch_first,
            device,
            module.out_proj.weight.dtype,
            **options,
        )
