"""torch.func: vmap over any arguments is a loop over them, its derivatives too, and dropout follows vmap's randomness."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from attemper import attention
from attemper.errors import UnsupportedError
from attemper.ops import row_stats
from tests.attention_cases import every_implementation

SAMPLES, BATCH, HEADS, KV_HEADS, QUERIES, KEYS, WIDTH = 3, 2, 4, 2, 7, 11, 5

NAMES = ("query", "key", "value", "attn_mask", "scale", "sinks")
SHAPES: dict[str, tuple[int, ...]] = {
    "query": (BATCH, HEADS, QUERIES, WIDTH),
    "key": (BATCH, KV_HEADS, KEYS, WIDTH),
    "value": (BATCH, KV_HEADS, KEYS, 13),
    "attn_mask": (HEADS, 1, KEYS),
    "scale": (HEADS,),
    "sinks": (HEADS,),
}
# Which dimension of each is mapped over, None: the same for all.
IN_DIMS = [
    ("the query", (0, None, None, None, None, None)),
    ("key and value, inside", (None, 2, 3, None, None, None)),
    ("all tensors", (0, 1, 2, 0, 1, None)),
    ("mask and scale", (None, None, None, 1, 0, None)),
    ("the sinks", (None, None, None, None, None, 0)),
    ("query and sinks", (1, None, 0, None, None, 1)),
]
every_mapping = pytest.mark.parametrize("in_dims", [dims for _, dims in IN_DIMS], ids=[name for name, _ in IN_DIMS])


def made(in_dims: tuple[int | None, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    def shape(name: str, dim: int | None) -> tuple[int, ...]:
        own = SHAPES[name]
        return own if dim is None else (*own[:dim], SAMPLES, *own[dim:])

    return [torch.randn(shape(name, dim), dtype=dtype) for name, dim in zip(NAMES, in_dims, strict=True)]


def sample(tensors: list[Tensor], in_dims: tuple[int | None, ...], i: int) -> list[Tensor]:
    return [x if dim is None else x.select(dim, i) for x, dim in zip(tensors, in_dims, strict=True)]


def call(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    given = dict(zip(NAMES, tensors, strict=True))
    output, rows = attention(**given, is_causal=True, offset=4, enable_gqa=True, return_stats=True, **options)
    return output, rows.lse, rows.entropy, rows.rest


@every_implementation
@every_mapping
def test_vmap_is_a_loop(in_dims: tuple[int | None, ...], impl: str) -> None:
    tensors = made(in_dims)
    found = vmap(lambda *x: call(*x, impl=impl), in_dims, out_dims=(0, 1, 0, 2))(*tensors)
    one_by_one = [call(*sample(tensors, in_dims, i), impl=impl) for i in range(SAMPLES)]
    for column, whole, dim in zip(zip(*one_by_one, strict=True), found, (0, 1, 0, 2), strict=True):
        torch.testing.assert_close(whole, torch.stack(column, dim))


@every_implementation
@every_mapping
def test_the_gradient_of_each_sample(in_dims: tuple[int | None, ...], impl: str) -> None:
    def loss(*tensors: Tensor) -> Tensor:
        output, lse, entropy, _ = call(*tensors, impl=impl)
        return output.sin().sum() + lse.square().sum() + entropy.sum()

    tensors = made(in_dims)
    found = vmap(grad(loss, argnums=tuple(range(len(NAMES)))), in_dims)(*tensors)
    for i in range(SAMPLES):
        leaves = [x.detach().requires_grad_() for x in sample(tensors, in_dims, i)]
        for name, ours, theirs in zip(NAMES, found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(ours[i], theirs, msg=lambda text, name=name: f"{name}: {text}")


@every_implementation
def test_the_gradient_through_vmap(impl: str) -> None:
    query, key, value = torch.randn(SAMPLES, 2, 7, 5), torch.randn(2, 11, 5), torch.randn(2, 11, 13)

    def loss(key: Tensor) -> Tensor:
        return vmap(lambda query: attention(query, key, value, impl=impl))(query).sin().sum()

    leaf = key.clone().requires_grad_()
    looped = torch.stack([attention(each, leaf, value, impl=impl) for each in query]).sin().sum()
    torch.testing.assert_close(grad(loss)(key), torch.autograd.grad(looped, leaf)[0])


@every_implementation
def test_jacobians(impl: str) -> None:
    query, key, value = (torch.randn(1, n, d, dtype=torch.float64) for n, d in ((3, 2), (5, 2), (5, 3)))
    rows = torch.autograd.functional.jacobian(lambda key: attention(query, key, value, impl=impl), key)
    torch.testing.assert_close(jacrev(lambda key: attention(query, key, value, impl=impl))(key), rows)
    # Mapped over the backward pass of a call that was made outside.
    leaf = key.clone().requires_grad_()
    output = attention(query, leaf, value, impl=impl)
    basis = torch.eye(output.numel(), dtype=output.dtype).reshape(-1, *output.shape)
    mapped = vmap(lambda one: torch.autograd.grad(output, leaf, one, retain_graph=True)[0])(basis)
    torch.testing.assert_close(mapped.reshape(rows.shape), rows)


@every_implementation
def test_vmap_within_vmap(impl: str) -> None:
    query, key = torch.randn(SAMPLES, 2, 7, 5), torch.randn(2, 11, 2, 5)
    inner = vmap(lambda query, key: attention(query, key, key, impl=impl), in_dims=(None, 2))
    found = vmap(inner, in_dims=(0, None))(query, torch.stack([key[:, :, i] for i in range(2)], 2))
    torch.testing.assert_close(found[2, 1], attention(query[2], key[:, :, 1], key[:, :, 1], impl=impl))


@every_implementation
def test_the_statistics_alone(impl: str) -> None:
    query, key, sinks = torch.randn(SAMPLES, 2, 7, 5), torch.randn(2, 11, 5), torch.randn(SAMPLES, 2)
    for dim in (None, 0):
        given = sinks[0] if dim is None else sinks
        found = vmap(lambda query, sinks: row_stats(query, key, sinks=sinks, impl=impl).rest, (0, dim), out_dims=1)(query, given)
        for i in range(SAMPLES):
            alone = row_stats(query[i], key, sinks=given if dim is None else given[i], impl=impl).rest
            torch.testing.assert_close(found[:, i], alone)


class TestDropout:
    """As for torch's own random functions."""

    def test_nothing_random_unless_vmap_is_told_how(self) -> None:
        query = torch.randn(SAMPLES, 2, 7, 5)
        with pytest.raises(RuntimeError, match="called random operation while in randomness error mode"):
            vmap(lambda query: attention(query, query, query, dropout_p=0.5))(query)

    @every_implementation
    @pytest.mark.parametrize("randomness", ["same", "different"])
    def test_the_same_for_all_or_different(self, randomness: str, impl: str) -> None:
        query, key = torch.randn(2, 3, 7, 5).expand(SAMPLES, 2, 3, 7, 5), torch.randn(2, 3, 11, 5)
        run = vmap(lambda query: attention(query, key, key, dropout_p=0.5, impl=impl), randomness=randomness)
        first, second, third = run(query)
        assert torch.equal(first, second) == (randomness == "same")
        assert torch.equal(first, third) == (randomness == "same")

    @every_implementation
    def test_the_backward_pass_drops_what_the_forward_pass_dropped(self, impl: str) -> None:
        zeros, identity = torch.zeros(1, 11, 5), torch.eye(11).expand(SAMPLES, 1, 11, 11)

        def both(value: Tensor) -> tuple[Tensor, Tensor]:
            output, pull = torch.func.vjp(lambda value: attention(zeros, zeros, value, dropout_p=0.5, impl=impl), value)
            return output, pull(torch.eye(11)[None])[0]

        weights, gradient = vmap(both, randomness="different")(identity)
        torch.testing.assert_close(gradient, weights.mT)


@every_implementation
def test_a_second_derivative_is_refused(impl: str) -> None:
    query = torch.randn(1, 3, 5)
    with pytest.raises(UnsupportedError, match="a second derivative was asked for, and this kernel has only the first"):
        jacrev(jacrev(lambda query: attention(query, query, query, impl=impl).sum()))(query)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, where forward mode is first used
def test_a_forward_mode_derivative_is_refused() -> None:
    query = torch.randn(1, 3, 5)
    with pytest.raises(NotImplementedError, match="You must implement the jvp function"):
        torch.func.jvp(lambda query: attention(query, query, query), (query,), (query,))
