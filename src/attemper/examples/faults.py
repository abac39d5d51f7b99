"""One tiny model for each fault that `attemper check` knows: the example of each code, and what its page shows.

    attemper check attemper.examples.faults:scale_twice

Each takes a few lines, so that the fault can be read. Weights are random with one seed, or made for the purpose.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, WIDTH, TOKENS = 3, 8, 29  # width of a head
SEED = 1706


class Attention(nn.Module):
    """Causal self-attention of three heads with the usual scale; a fault changes one step of it."""

    num_heads, head_dim = HEADS, WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, HEADS·WIDTH] to the same."""
        query, key, value = (self.split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.attend(query, key, value).transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        """[batch, tokens, HEADS·WIDTH] to [batch, HEADS, tokens, WIDTH]."""
        return x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The step that a fault changes."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Model(nn.Module):
    """An embedding, one layer of attention and a residual connection.

    Args:
        attention: the layer.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, HEADS * WIDTH)
        self.attention = attention

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[batch, tokens] ids to [batch, tokens, HEADS·WIDTH]."""
        x = self.embed(input_ids)
        return x + self.attention(x)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, for those who want to change what is embedded."""
        return self.embed

    def example_inputs(self) -> dict[str, Tensor]:
        """Two rows of different ids."""
        return {"input_ids": torch.stack([torch.arange(TOKENS), torch.arange(TOKENS).flip(0)])}


def _model(attention: type[Attention] = Attention, kind: type[Model] = Model) -> Model:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        return kind(attention()).eval()


class _ScaleMissing(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)


def scale_missing() -> Model:
    """ATT101: no factor on q·k."""
    return _model(_ScaleMissing)


class _ScaleTwice(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query * WIDTH**-0.5, key, value, is_causal=True)  # the default scale is on


def scale_twice() -> Model:
    """ATT102: the query is scaled, and the kernel scales again."""
    return _model(_ScaleTwice)


class _ScaleOfModelWidth(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=(HEADS * WIDTH) ** -0.5)


def scale_of_model_width() -> Model:
    """ATT103: 1/sqrt(d_model) in place of 1/sqrt(d_head)."""
    return _model(_ScaleOfModelWidth)


class _ScaleDiffers(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1 / WIDTH)


def scale_differs() -> Model:
    """ATT104: 1/d_head in place of 1/sqrt(d_head)."""
    return _model(_ScaleDiffers)


class _Accelerated(Tensor):
    """Tensors of a backend that takes `is_causal` and does nothing with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            given.pop("is_causal", None)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **given)


class _ArgumentIgnored(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query.as_subclass(_Accelerated), key, value, is_causal=True)


def argument_ignored() -> Model:
    """ATT105: the call says causal, and the backend lets every token see all others."""
    return _model(_ArgumentIgnored)


def _grown(factor: float) -> Model:
    model = _model()
    with torch.no_grad():
        model.attention.q_proj.weight *= factor
        model.attention.k_proj.weight *= factor
    return model


def product_overflows() -> Model:
    """ATT201: projections so large that q·k passes 65504 before it is scaled."""
    return _grown(250.0)


def large_logits() -> Model:
    """ATT202: projections that have grown, as they do in training without QK-norm."""
    return _grown(12.0)


def not_finite() -> Model:
    """ATT203: one damaged number in a weight."""
    model = _model()
    with torch.no_grad():
        model.attention.v_proj.weight[3, 5] = torch.nan
    return model


class _WithLargeActivation(Model):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids * 0 + 7)
        return self.attention(self.after(x * 1e6))

    def __init__(self, attention: Attention) -> None:
        super().__init__(attention)
        self.after = nn.LayerNorm(HEADS * WIDTH)  # attention itself sees ordinary numbers


def large_activation() -> Model:
    """ATT204: a residual stream beyond 65504, in front of a norm."""
    return _model(kind=_WithLargeActivation)


class _CoarseLogits(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key = key + torch.tensor([60.0] + [0.0] * (WIDTH - 1)).to(key)  # a direction that all keys share
        query = query * 2 + torch.tensor([20.0] + [0.0] * (WIDTH - 1)).to(query)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def coarse_logits() -> Model:
    """ATT205: logits near 400, nearly all of it common to the row; in 16 bits what is left has steps of 2."""
    return _model(_CoarseLogits)


def float8_range() -> Model:
    """ATT206: projections that have grown beyond what three bits of a number can tell apart."""
    return _grown(20.0)


def saturated_head() -> Model:
    """ATT301: each token finds itself and nothing else."""
    return _grown(40.0)


class _SinkHead(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sink = torch.zeros(query.shape[-2], key.shape[-2]).index_fill(1, torch.tensor([0]), 4.0)  # a bias towards the first key
        causal = torch.full_like(sink, -torch.inf).triu(1)
        return F.scaled_dot_product_attention(query, key, value, sink + causal)


def sink_head() -> Model:
    """ATT302: heads that rest on the first token."""
    return _model(_SinkHead)


def uniform_head() -> Model:
    """ATT303: projections that have shrunk."""
    return _grown(0.3)


class _DeadHead(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        itself = 40.0 * torch.eye(query.shape[-2])  # a bias towards a token's own key that nothing can make up for
        causal = torch.full_like(itself, -torch.inf).triu(1)
        return F.scaled_dot_product_attention(query, key, value, itself + causal)


def dead_head() -> Model:
    """ATT304: each token sees itself only, and no gradient reaches the queries and keys."""
    return _model(_DeadHead)


class _PreviousToken(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        before = 4.0 * torch.ones(query.shape[-2], key.shape[-2]).tril(-1).triu(-1)  # a bias towards the key before
        causal = torch.full_like(before, -torch.inf).triu(1)
        return F.scaled_dot_product_attention(query, key, value, before + causal)


def previous_token_head() -> Model:
    """ATT305: heads that look at the token before."""
    return _model(_PreviousToken)


class _BehindNorm(Model):
    def __init__(self, attention: Attention) -> None:
        super().__init__(attention)
        self.attn_norm = nn.LayerNorm(HEADS * WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        return x + self.attention(self.attn_norm(x))


def logit_bound() -> Model:
    """ATT306: projections that have grown, behind a norm."""
    model = _model(kind=_BehindNorm)
    with torch.no_grad():
        model.attention.q_proj.weight *= 150.0
        model.attention.k_proj.weight *= 150.0
    return model


def query_and_key_outgrow_value() -> Model:
    """ATT307: projections of q and k that have grown away from that of v."""
    return _grown(12.0)


class _BlindRow(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        earlier = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(-1)  # strictly: the first token sees nothing
        return F.scaled_dot_product_attention(query, key, value, earlier)


def blind_row() -> Model:
    """ATT401: a mask that leaves the first token without a key."""
    return _model(_BlindRow)


class _SeesTheFuture(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


class _Causal(Model):
    is_causal = True  # so it says


def sees_the_future() -> Model:
    """ATT402: a causal model whose mask was forgotten."""
    return _model(_SeesTheFuture, _Causal)


class _PaddingLeaks(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)  # no mask reaches the call


class _Padded(Model):
    def example_inputs(self) -> dict[str, Tensor]:
        padding = torch.ones(2, TOKENS, dtype=torch.int64)
        padding[1, TOKENS // 2 :] = 0
        return super().example_inputs() | {"attention_mask": padding}


def padding_leaks() -> Model:
    """ATT403: an attention mask that is taken and not used."""
    return _model(_PaddingLeaks, _Padded)


class _NanInPadding(Attention):
    real: Tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        earlier = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        logits = query @ key.mT * WIDTH**-0.5
        return logits.masked_fill(~(earlier & self.real[:, None, None]), -torch.inf).softmax(-1) @ value


class _PaddedOnTheLeft(Model):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.attention.real = torch.ones_like(input_ids) > 0 if attention_mask is None else attention_mask > 0
        return super().forward(input_ids)

    def example_inputs(self) -> dict[str, Tensor]:
        padding = torch.ones(2, TOKENS, dtype=torch.int64)
        padding[1, : TOKENS // 2] = 0  # queries here see no key at all
        return super().example_inputs() | {"attention_mask": padding}


def nan_in_padding() -> Model:
    """ATT404: padded queries that see no key, and a softmax over minus infinity."""
    return _model(_NanInPadding, _PaddedOnTheLeft)


class Continued(NamedTuple):
    """Outputs, and the embedded tokens so far."""

    hidden: Tensor
    past_key_values: Tensor


class _OverCache(Attention):
    def forward(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        query, (key, value) = self.q_proj(x), (project(x if kept is None else kept) for project in (self.k_proj, self.v_proj))
        attended = self.attend(*map(self.split, (query, key, value)))  # is_causal=True starts at the top left
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class _WithCache(Model):
    is_causal = True

    def forward(  # pyrefly: ignore
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Tensor | None = None,
        use_cache: bool = True,
    ) -> Continued:
        x = self.embed(input_ids)
        kept = x if past_key_values is None else torch.cat([past_key_values, x], dim=1)
        return Continued(x + self.attention(x, kept), kept)


def cache_continues_wrongly() -> Model:
    """ATT405: a causal mask that starts at the top left, where it should end at the bottom right."""
    return _model(_OverCache, _WithCache)


class _OverTheBatch(Model):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = super().forward(input_ids)
        return x / (1 + x.var(0, correction=0)).sqrt()  # a norm by the batch's own spread


def depends_on_batch() -> Model:
    """ATT406: a norm that looks at the whole batch."""
    return _model(kind=_OverTheBatch)
