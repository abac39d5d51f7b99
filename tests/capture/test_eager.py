"""Attention written out in plain products, in every form: the record computes what the code did, and nothing else is told."""

import gc
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attemper.capture import AttentionCall, capture
from attemper.checker import check
from tests.capture.watching import agrees, same

BATCH, HEADS, QUERIES, KEYS, WIDTH, VALUES = 2, 3, 5, 7, 11, 13
SCALE = 0.37
HIDDEN = torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(3)
LOWEST = torch.finfo(torch.float32).min

Form = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Runs one form of attention inside a module with a name."""

    def __init__(self, form: Form, **attributes: Any) -> None:
        super().__init__()
        self.attn = Inner(form)
        for name, value in attributes.items():
            setattr(self.attn, name, value)

    def forward(self, *qkv: Tensor) -> Tensor:
        return self.attn(*qkv)


class Inner(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, *qkv: Tensor) -> Tensor:
        return self.form(*qkv)


def qkv(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(3)
    shapes = ((BATCH, HEADS, QUERIES, WIDTH), (BATCH, HEADS, KEYS, WIDTH), (BATCH, HEADS, KEYS, VALUES))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def seen(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, list[AttentionCall]]:
    calls: list[AttentionCall] = []
    with torch.no_grad():
        plain = model(*inputs)
        with capture(model, calls.append) as captured:
            output = model(*inputs)
    assert same(plain, output)
    assert captured.unseen() == ()
    assert not any(bool(call.mismatch) for call in calls)
    return output, calls


def matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)) * SCALE, dim=-1), v)


def operators(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(SCALE * (q @ k.mT), -1) @ v


def bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    z = torch.bmm(q, k.transpose(1, 2)).view(BATCH, HEADS, QUERIES, KEYS) / (1 / SCALE)
    return torch.bmm(z.view(-1, QUERIES, KEYS).softmax(-1), v).view(BATCH, HEADS, QUERIES, VALUES)


def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    return (SCALE * q.bmm(k.mT)).softmax(-1).bmm(v).unflatten(0, (BATCH, HEADS))


def baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    bias = torch.linspace(-1, 1, KEYS).expand(BATCH * HEADS, 1, KEYS)
    z = bias.baddbmm(batch1=q, batch2=k.mT, beta=0.5, alpha=SCALE)
    return torch.bmm(z.softmax(-1), v).view(BATCH, HEADS, QUERIES, VALUES)


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = torch.einsum("bhid,bhjd->bhij", q, k) * SCALE
    return torch.einsum("bhij,bhjd->bhid", z.softmax(-1), v)


def einsum_tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.permute(2, 0, 1, 3) for each in (q, k, v))
    z = torch.einsum("i...d,j...d->...ij", [q, k]) * SCALE
    return torch.einsum("...ij,j...d->...id", z.softmax(dim=3), v)


def aten(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = torch.ops.aten.mul.Tensor(torch.ops.aten.matmul.default(q, k.mT), SCALE)
    return torch.ops.aten.matmul(torch.softmax(z, -1), v)


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (v.mT @ (k @ q.mT * SCALE).softmax(-2)).mT


def scaled_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * SCALE) @ k.mT).softmax(-1) @ v


def divided_by_a_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) / torch.sqrt(torch.tensor(float(WIDTH)))).softmax(-1) @ v


def by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * torch.linspace(0.2, 0.6, HEADS).view(HEADS, 1, 1)).softmax(-1) @ v


def by_position(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * torch.linspace(0.2, 0.6, QUERIES).view(QUERIES, 1)).softmax(-1) @ v


def negative(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.ones(KEYS) - (q @ k.mT).neg() * SCALE).softmax(-1) @ v


def added_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE + torch.zeros(QUERIES, KEYS).masked_fill(HIDDEN, -torch.inf)).softmax(-1) @ v


def masked_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE).masked_fill(HIDDEN, LOWEST).softmax(-1) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q @ k.mT
    z *= SCALE
    z += torch.linspace(0, 1, KEYS)
    z.masked_fill_(HIDDEN, LOWEST)
    return z.softmax(-1) @ v


def where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.where(~HIDDEN, q @ k.mT * SCALE, LOWEST).softmax(-1) @ v


def where_the_other_way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.full((), LOWEST).where(HIDDEN, q @ k.mT * SCALE).softmax(-1) @ v


def bounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q @ k.mT * SCALE + torch.zeros(QUERIES, KEYS).masked_fill(HIDDEN, LOWEST)
    return torch.max(z, torch.tensor(LOWEST)).clamp(max=5e4).softmax(-1) @ v


def multiplied_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = (~HIDDEN).float()
    return (q @ k.mT * SCALE * keep - 1e4 * (1 - keep)).softmax(-1) @ v


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q @ k.mT * SCALE
    return (torch.tanh(z / 1.7) * 1.7 + torch.zeros(QUERIES, KEYS).masked_fill(HIDDEN, LOWEST)).softmax(-1) @ v


def casts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q.float() @ k.mT).double() * SCALE).to(q.dtype).softmax(-1, dtype=torch.float64).type_as(v).contiguous() @ v


def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q @ k.mT * SCALE
    return (z - z.amax(-1, keepdim=True)).softmax(-1) @ v


def head_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.dropout((q @ k.mT * SCALE)[:, :, :, None].squeeze(3).softmax(-1), 0.2, training=False)
    return (weights * torch.ones(1, HEADS, 1, 1)).to(v.dtype) @ v


FORMS = [
    matmul,
    operators,
    bmm,
    folded,
    baddbmm,
    einsum,
    einsum_tokens_first,
    aten,
    keys_first,
    scaled_before,
    divided_by_a_tensor,
]
FORMS += [by_head, by_position, negative, added_mask, masked_fill, in_place, where, where_the_other_way, bounded, multiplied_mask]
FORMS += [softcap, casts, shifted, head_mask]


@pytest.mark.parametrize("form", FORMS)
def test_a_record_computes_what_the_code_computed(form: Form) -> None:
    output, (call,) = seen(Block(form, num_heads=HEADS), *qkv())
    assert (call.module, call.seam, call.is_causal, call.dropout_p) == ("attn", "eager", False, 0.0)
    assert call.query.shape == (BATCH, HEADS, QUERIES, WIDTH)
    assert call.key.shape == (BATCH, HEADS, KEYS, WIDTH)
    assert call.value.shape == (BATCH, HEADS, KEYS, VALUES)
    agrees(call, output)


FILLS: list[Callable[[Tensor], Tensor]] = [
    lambda z: z.masked_fill(HIDDEN, -torch.inf),
    lambda z: torch.where(HIDDEN, torch.tensor(LOWEST), z),
    lambda z: z.clamp(min=LOWEST),
]
STEPS: list[Callable[[Tensor], Tensor]] = [
    lambda z: z * 0.8,
    lambda z: z / 1.3,
    lambda z: -z,
    lambda z: 0.5 - z,
    lambda z: z + torch.linspace(-1, 1, KEYS),
    lambda z: z.sub(torch.linspace(-1, 1, QUERIES)[:, None], alpha=2),
    lambda z: z.add_(torch.linspace(0, 1, KEYS)),
    lambda z: z.double().to(torch.float32),
    lambda z: z[..., None, :, :].squeeze(-3),
]
LAYOUTS: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (lambda z: z, lambda z: z),
    (lambda z: z.flatten(0, 1), lambda z: z.unflatten(0, (BATCH, HEADS))),
    (lambda z: z.transpose(0, 1), lambda z: z.permute(1, 0, 2, 3)),
    (lambda z: z.view(1, BATCH, HEADS, QUERIES, KEYS), lambda z: z.reshape(BATCH, HEADS, QUERIES, KEYS)),
    (lambda z: z.movedim(1, 0).contiguous(), lambda z: z.movedim(0, 1)),
    (lambda z: z.mT.contiguous().mT, lambda z: z.clone()),
]


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_steps(seed: int) -> None:
    draw = random.Random(seed)
    steps = [(draw.choice(kind), *draw.choice(LAYOUTS)) for kind in [STEPS] * 6 + [FILLS] * 2]
    there, back = draw.choice(LAYOUTS)

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = draw_product(q, k)
        for step, forth, home in steps:
            z = home(step(forth(z)))
        return back(there(z).softmax(-1)) @ v

    draw_product = draw.choice([lambda q, k: q @ k.mT, lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k)])
    output, (call,) = seen(Block(form, num_heads=HEADS), *qkv())
    assert call.query.shape == (BATCH, HEADS, QUERIES, WIDTH)
    agrees(call, output)


@pytest.mark.parametrize("form", [matmul, operators, bmm, einsum, aten, keys_first, masked_fill, in_place, softcap])
def test_the_scale_is_read_off_the_code(form: Form) -> None:
    _, (call,) = seen(Block(form), *qkv())
    assert call.scale == pytest.approx(SCALE, rel=1e-12)
    assert call.scale_given == call.scale
    assert (call.attn_mask is None) == (form not in (masked_fill, in_place, softcap))
    assert call.softcap == (pytest.approx(1.7) if form is softcap else None)


def test_masks_and_biases_stay_as_small_as_they_were() -> None:
    _, (call,) = seen(Block(added_mask), *qkv())
    assert call.attn_mask is not None
    assert call.attn_mask.shape == (1, 1, QUERIES, KEYS)


def test_heads_that_share_their_keys() -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = q.unflatten(1, (HEADS, 2)) @ k.unsqueeze(2).mT
        return ((z * SCALE).softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)

    _, k, v = qkv()
    output, (call,) = seen(Block(grouped, num_heads=2 * HEADS), torch.randn(BATCH, 2 * HEADS, QUERIES, WIDTH), k, v)
    assert call.query.shape == (BATCH, 2 * HEADS, QUERIES, WIDTH)
    assert call.key.shape == (BATCH, HEADS, KEYS, WIDTH)
    agrees(call, output)


def test_one_key_head_for_all() -> None:
    def multi_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = torch.einsum("bhqd,bkd->bhqk", q, k[:, 0]) * SCALE
        return torch.einsum("bhqk,bke->bhqe", z.softmax(-1), v[:, 0])

    output, (call,) = seen(Block(multi_query), *qkv())
    assert (call.query.shape[1], call.key.shape[1]) == (HEADS, 1)
    agrees(call, output)


def capped_and_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = torch.tanh(q @ k.mT * SCALE / 1.7) * 1.7
    z = z.masked_fill(HIDDEN, torch.finfo(q.dtype).min) + torch.linspace(-1, 1, KEYS).to(q.dtype)
    return z.float().softmax(-1).to(v.dtype) @ v


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [matmul, keys_first, capped_and_masked])
def test_sixteen_bits(form: Form, dtype: torch.dtype) -> None:
    _, (call,) = seen(Block(form), *qkv(dtype))
    assert call.query.dtype == dtype


def test_autocast_shows_what_was_multiplied() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        _, (call,) = seen(Block(matmul), *qkv())
    assert {each.dtype for each in (call.query, call.key, call.value)} == {torch.bfloat16}
    assert call.row_stats().lse.isfinite().all()


def test_dropout_of_the_weights_is_told() -> None:
    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout((q @ k.mT).softmax(-1), 0.3, training=True) @ v

    calls: list[AttentionCall] = []
    block = Block(dropped)
    torch.manual_seed(5)
    plain = block(*qkv())
    state = torch.get_rng_state()
    with capture(block, calls.append):
        output = block(*qkv())
    assert same(plain, output)
    assert torch.equal(state, torch.get_rng_state())
    assert [call.dropout_p for call in calls] == [0.3]


class Timm(nn.Module):
    """Attention as vision libraries write it, with a bias by relative position; scale and softmax can be left out."""

    def __init__(self, width: int = 22, heads: int = 2, scaled: bool = True) -> None:
        super().__init__()
        self.num_heads = heads
        self.scale = (width // heads) ** -0.5 if scaled else 1.0
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_drop = nn.Dropout(0.1)
        self.table = nn.Parameter(torch.randn(heads, 2 * QUERIES - 1))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        place = torch.arange(tokens)
        attn = attn + self.table[:, place - place[:, None] + tokens - 1].unsqueeze(0)
        attn = self.attn_drop(attn.softmax(dim=-1))
        return self.proj((attn @ v).transpose(1, 2).reshape(batch, tokens, width))


class Gpt(nn.Module):
    """Two blocks of causal attention written out; the scale can be left out."""

    def __init__(self, scaled: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([CausalSelfAttention(scaled) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class CausalSelfAttention(nn.Module):
    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.n_head, self.scaled = 2, scaled
        self.c_attn, self.c_proj = nn.Linear(22, 66), nn.Linear(22, 22)
        self.register_buffer("bias", torch.ones(16, 16).tril().view(1, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (each.view(batch, tokens, 2, -1).transpose(1, 2) for each in self.c_attn(x).split(width, dim=2))
        att = q @ k.transpose(-2, -1)
        if self.scaled:
            att = att * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :tokens, :tokens] == 0, float("-inf"))  # type: ignore[index]
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, tokens, width))


@pytest.mark.parametrize("model", [Timm, Gpt])
def test_a_missing_scale_is_found_in_code_written_out(model: Callable[..., nn.Module]) -> None:
    torch.manual_seed(3)
    x = torch.randn(BATCH, QUERIES, 22)
    right, wrong = (check(model(scaled=scaled), x, select="ATT1") for scaled in (True, False))
    assert right.unseen == wrong.unseen == ()
    assert right.findings == ()
    assert {finding.code for finding in wrong.findings} == {"ATT101"}
    assert wrong.findings[0].measured == pytest.approx(1.0)


def no_attention(name: str) -> nn.Module:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if name == "linear attention":
                return q.softmax(-1) @ (k.softmax(-2).mT @ v)
            if name == "router":
                return (q @ self.table).softmax(-1) @ self.table
            if name == "pooling by a learned query":
                return (k @ self.table[0].view(1, 1, WIDTH, 1)).softmax(-2).mT @ v
            if name == "vocabulary":
                return (q @ self.table.expand(BATCH, HEADS, WIDTH, WIDTH).mT).softmax(-1) @ self.table
            return torch.stack([q.mean(), (k @ v[:, :, :, :WIDTH].mT).softmax(1).sum()])

    return Plain()


@pytest.mark.parametrize("name", ["linear attention", "router", "pooling by a learned query", "vocabulary", "softmax over heads"])
def test_what_is_no_attention_is_not_told(name: str) -> None:
    calls: list[AttentionCall] = []
    model = no_attention(name)
    with torch.no_grad(), capture(model, calls.append):
        model(*qkv())
    assert calls == []


def test_a_chain_that_was_misread_is_named_and_left_out_of_the_check() -> None:
    def behind_its_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = q @ k.mT
        z.view(-1).mul_(2.0)  # writes through a view: z itself is never an argument
        return z.softmax(-1) @ v

    model = Block(behind_its_back)
    calls: list[AttentionCall] = []
    with torch.no_grad(), capture(model, calls.append) as captured:
        model(*qkv())
    assert [bool(call.mismatch) for call in calls] == [True]
    assert calls[0].logits_over_record is not None
    torch.testing.assert_close(calls[0].logits_over_record, torch.full((HEADS,), 2.0, dtype=torch.float64), rtol=1e-6, atol=0)
    ((name, reason),) = [(each.module, each.reason) for each in captured.unseen()]
    assert name == "attn"
    assert "does not give the logits" in reason
    report = check(model, tuple(qkv()))
    assert report.rows == ()
    assert [name for name, _ in report.unseen] == ["attn"]


def test_nothing_is_read_off_the_device() -> None:
    class NoReading(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "_local_scalar_dense" not in str(func)
            assert "nonzero" not in str(func)
            return func(*args, **(kwargs or {}))

    forms = [form for form in FORMS if form is not softcap]
    inputs = qkv()
    for form in forms:
        calls: list[AttentionCall] = []
        model = Block(form)
        with torch.no_grad(), capture(model, calls.append, follow_projections=True), NoReading():
            model(*inputs)
        assert len(calls) == 1


def test_logits_are_let_go_before_the_values_come() -> None:
    alive: list[bool] = []

    def watching(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = q @ k.mT * SCALE
        there = weakref.ref(z)
        weights = z.softmax(-1)
        del z
        gc.collect()
        alive.append(there() is not None)
        return weights @ v

    model = Block(watching)
    inputs = qkv()
    there = [weakref.ref(each) for each in inputs]
    with torch.no_grad(), capture(model, lambda call: None) as captured:
        model(*inputs)
        assert captured.calls == 1
        del inputs
        assert [each() for each in there] == [None] * 3
    assert alive == [False]
