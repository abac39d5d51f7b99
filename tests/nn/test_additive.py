"""AdditiveAttention: its definition, the blocked form beside the plain one, and how much memory that takes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attemper.errors import ArgumentError
from attemper.nn import AdditiveAttention, additive_tiles
from tests.attention_cases import Budget

BATCH, QUERIES, KEYS, QUERY_DIM, KEY_DIM, HIDDEN, VALUE_DIM = 2, 7, 11, 3, 5, 13, 17


def build(impl: str = "auto", dtype: torch.dtype = torch.float32, **options: Any) -> AdditiveAttention:
    module = AdditiveAttention(QUERY_DIM, KEY_DIM, HIDDEN, impl=impl, dtype=dtype, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.7)
    return module


def draw(dtype: torch.dtype = torch.float32, *, queries: int = QUERIES, keys: int = KEYS) -> list[Tensor]:
    shapes = ((BATCH, queries, QUERY_DIM), (BATCH, keys, KEY_DIM), (BATCH, keys, VALUE_DIM))
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def definition(module: AdditiveAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    rows = []
    for batch in range(query.shape[0]):
        for row in range(query.shape[1]):
            logits = torch.stack(
                [module.v @ torch.tanh(module.q_proj(query[batch, row]) + module.k_proj(each)) for each in key[batch]]
            )
            if mask is not None:
                logits = logits + mask.expand(query.shape[0], query.shape[1], key.shape[1])[batch, row]
            rows.append(torch.softmax(logits, 0) @ value[batch])
    return torch.stack(rows).unflatten(0, (query.shape[0], -1))


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(additive_tiles, "_TILE_ELEMENTS", BATCH * HIDDEN * 12)  # 3 × 4 pairs


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("impl", ["plain", "blocked"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_logits_are_those_of_the_formula(bias: bool, impl: str) -> None:
    module = build(impl, torch.float64, bias=bias)
    assert (module.q_proj.bias is not None) == bias
    mask = torch.randn(QUERIES, KEYS, dtype=torch.float64)
    given = draw(torch.float64)
    torch.testing.assert_close(module(*given), definition(module, *given))
    torch.testing.assert_close(module(*given, mask), definition(module, *given, mask))


MASKS: dict[str, Any] = {
    "none": None,
    "bool": torch.arange(QUERIES * KEYS).reshape(QUERIES, KEYS) % 5 > 1,
    "with empty rows": (torch.arange(QUERIES * KEYS).reshape(QUERIES, KEYS) % 5 > 1) & (torch.arange(QUERIES) != 3)[:, None],
    "of keys": (torch.arange(KEYS) % 3 > 0).expand(BATCH, 1, KEYS),
    "float": torch.linspace(-2.0, 2.0, BATCH * QUERIES * KEYS).reshape(BATCH, QUERIES, KEYS),
    "of queries": torch.linspace(-2.0, 2.0, QUERIES).unsqueeze(-1),
}


def results(module: AdditiveAttention, given: list[Tensor], mask: Tensor | None, **arguments: Any) -> dict[str, Tensor]:
    given = [x.detach().requires_grad_() for x in given]
    wanted = {"query": given[0], "key": given[1], "value": given[2], **dict(module.named_parameters())}
    if mask is not None and mask.dtype != torch.bool:
        mask = wanted["mask"] = mask.to(given[0].dtype, copy=True).requires_grad_()
    output = module(*given, mask, **arguments)
    upstream = torch.linspace(-1.0, 1.0, output.numel(), dtype=torch.float64).reshape(output.shape).to(output.dtype)
    found = torch.autograd.grad(output, list(wanted.values()), upstream, materialize_grads=True)
    return {"output": output, **dict(zip(wanted, found, strict=True))}


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"is_causal": True, "offset": 4}], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_blocked_is_plain_within_the_error_of_float32(mask: str, arguments: dict[str, Any]) -> None:
    budget = Budget()
    for _ in range(12):
        module = build(bias=True)
        given = draw()
        found = {}
        for impl, dtype in (("plain", torch.float64), ("plain", torch.float32), ("blocked", torch.float32)):
            same = copy.deepcopy(module).to(dtype)
            same.impl = impl
            found[impl, dtype] = results(same, [x.to(dtype) for x in given], MASKS[mask], **arguments)
        for name, actual in found["blocked", torch.float32].items():
            budget.add(name, actual, found["plain", torch.float64][name], found["plain", torch.float32][name])
    budget.check()


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("impl", ["plain", "blocked"])
def test_gradients(impl: str) -> None:
    module = AdditiveAttention(3, 2, 5, impl=impl, dtype=torch.float64, bias=True)
    names = list(dict(module.named_parameters()))

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *parameters: Tensor) -> Any:
        arguments = (query, key, value, mask)
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), arguments, {"is_causal": True})

    shapes = ((2, 3, 3), (2, 4, 2), (2, 4, 2), (3, 4))
    leaves = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    assert torch.autograd.gradcheck(call, [leaf.detach().requires_grad_() for leaf in (*leaves, *module.parameters())])


@pytest.mark.usefixtures("_small_tiles")
def test_dropout_drops_the_same_weights_in_both_forms() -> None:
    module = build(dropout=0.4)
    found = []
    for impl in ("plain", "blocked"):
        module.impl = impl
        torch.manual_seed(5)
        given = draw()
        torch.manual_seed(11)
        found.append(results(module, given, None))
    for name, plain in found[0].items():
        torch.testing.assert_close(found[1][name], plain)
    given = draw()
    output, weights = module(*given, need_weights=True)
    assert 0.2 < (weights == 0.0).float().mean() < 0.6
    torch.testing.assert_close(weights @ given[2], output)
    module.eval()
    torch.testing.assert_close(module(*given, need_weights=True)[1].sum(-1), torch.ones(BATCH, QUERIES))


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("impl", ["plain", "blocked"])
def test_rows_without_a_key_and_hidden_nan_leave_no_trace(impl: str) -> None:
    module, given = build(impl), draw()
    mask = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    mask[:, 4] = False
    mask[3] = False
    clean = results(module, given, mask)
    assert not clean["output"][:, 3].any()
    given[1][:, 4] = torch.nan
    given[2][:, 4] = torch.inf
    dirty = results(module, given, mask)
    for name, expected in clean.items():
        # A projection multiplies the 0 that comes back by the NaN that went in: that one is the caller's.
        if name != "k_proj.weight":
            torch.testing.assert_close(dirty[name], expected)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor held that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.itemsize))
        return result


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_blocked_form_never_holds_the_hidden_layer_of_all_pairs(dropout: float) -> None:
    tokens, hidden = 701, 37
    module = AdditiveAttention(QUERY_DIM, KEY_DIM, hidden, impl="blocked", dropout=dropout)
    given = [torch.randn(1, tokens, width, requires_grad=True) for width in (QUERY_DIM, KEY_DIM, VALUE_DIM)]
    largest = {}
    for impl in ("blocked", "plain"):
        module.impl = impl
        with Largest() as largest[impl]:
            module(*given).sum().backward()
    assert largest["plain"].numbers >= tokens * tokens * hidden
    assert largest["blocked"].numbers <= 2**20


def test_auto_is_blocked_where_the_hidden_layer_is_large() -> None:
    module = AdditiveAttention(QUERY_DIM, KEY_DIM, 64)
    given = [torch.randn(1, 512, width) for width in (QUERY_DIM, KEY_DIM, VALUE_DIM)]
    with Largest() as large:
        module(*given)
    assert large.numbers <= 2**20
    with Largest() as small:
        module(*[x[:, :128] for x in given])
    assert small.numbers == 64 * 128 * 128


def test_it_needs_no_scale_whatever_the_widths() -> None:
    for width in (8, 512):
        module = AdditiveAttention(width, hidden_dim=32)
        x = 10.0 * torch.randn(1, 23, width)
        _, weights = module(x, x, x, need_weights=True)
        bound = module.v.abs().sum()
        assert (torch.log(weights.amax(-1) / weights.amin(-1)) <= 2 * bound).all()


def test_leading_dimensions_and_16_bits() -> None:
    module, (query, key, value) = build(), draw()
    whole = module(query, key, value)
    torch.testing.assert_close(module(query[0], key[0], value[0]), whole[0])
    nested = module(*(x.unsqueeze(1).expand(-1, 3, -1, -1) for x in (query, key, value)), torch.ones(BATCH, 1, 1, KEYS).bool())
    torch.testing.assert_close(nested, whole.unsqueeze(1).expand(-1, 3, -1, -1))
    half = module.bfloat16()(query.bfloat16(), key.bfloat16(), value.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), whole, rtol=0.1, atol=0.1)
    assert build()(query[:, :0], key, value).shape == (BATCH, 0, VALUE_DIM)
    for impl in ("plain", "blocked"):
        assert not build(impl)(query, key[:, :0], value[:, :0]).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build("tiled"), "impl: got 'tiled'; expected one of 'auto', 'plain', 'blocked'"),
        (lambda: build(dropout=-1.0), r"dropout: got -1.0; expected a probability in \[0, 1\]"),
        (lambda: build()(*draw()[1:], draw()[0]), r"query: got shape \(2, 11, 5\); expected \[..., tokens, 3\]"),
        (lambda: build()(draw()[0], *(x[1] for x in draw()[1:])), r"key: got leading dimensions \(\); expected \(2,\)"),
        (lambda: build()(*draw()[:2], draw(keys=5)[2]), "value: got 5 tokens; expected 11: one value for each key"),
        (
            lambda: build()(*draw(), torch.ones(7, 7).bool()),
            r"attn_mask: got shape \(7, 7\); expected one that broadcasts to \(2, 7",
        ),
        (lambda: build()(*draw(), torch.ones(7, 11).int()), "attn_mask: got torch.int32; expected bool"),
    ],
)
def test_what_does_not_fit_is_named(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
