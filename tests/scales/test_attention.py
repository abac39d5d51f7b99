"""Rules in `attention` and `row_stats`: the same as the factor, with gradients, on every kernel, compiled, and captured."""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import attemper
from attemper import scales
from attemper.capture import AttentionCall, capture
from attemper.errors import ArgumentError
from attemper.ops import IMPLEMENTATIONS, row_stats
from attemper.scales import LogitShape, Scale
from tests.scales.examples import EXAMPLES, SHAPE

KERNELS = [each.name for each in IMPLEMENTATIONS if each.kernel is not None and each.name != "triton"]  # it has no float64
LEARNED = [rule.at(2) for rule in EXAMPLES if isinstance(rule, nn.Module)]


def tensors(dtype: torch.dtype = torch.float32, batch: int = 2, queries: int = SHAPE.queries) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(23)
    lengths = (queries, SHAPE.head_dim), (SHAPE.keys, SHAPE.head_dim), (SHAPE.keys, 5)
    query, key, value = (torch.randn(batch, 3, *shape, generator=generator, dtype=dtype) for shape in lengths)
    return query, key, value


@pytest.mark.parametrize("rule", [rule.at(2) for rule in EXAMPLES], ids=str)
def test_a_rule_means_its_factor(rule: Scale) -> None:
    factor = rule.factor(SHAPE)
    options: dict[str, Any] = {"is_causal": True, "offset": SHAPE.offset}
    output, rows = attemper.attention(*tensors(), scale=rule, return_stats=True, **options)
    expected, expected_rows = attemper.attention(*tensors(), scale=factor, return_stats=True, **options)
    assert torch.equal(output, expected)
    assert torch.equal(rows.rest, expected_rows.rest)
    query, key, _ = tensors()
    assert torch.equal(row_stats(query, key, scale=rule, **options).rest, rows.rest)
    if rule != scales.InverseSqrt():
        assert not torch.equal(output, attemper.attention(*tensors(), **options))


def test_the_usual_rule_is_the_default() -> None:
    assert torch.equal(attemper.attention(*tensors(), scale=scales.InverseSqrt()), attemper.attention(*tensors()))


def test_a_rule_is_told_the_shape_of_the_call() -> None:
    told = []

    class Telling(Scale):
        def factor(self, shape: LogitShape) -> float:
            told.append(shape)
            return 0.5

    query, key, value = tensors()
    attemper.attention(query, key[:, :1], value[:, :1], scale=Telling(), enable_gqa=True, offset=4)
    assert told == [SHAPE._replace(layer=None, device=query.device)]


def test_a_factor_by_position_is_made_where_the_query_is() -> None:
    query, key, value = (tensor.to("meta") for tensor in tensors())
    assert attemper.attention(query, key, value, scale=scales.Llama4()).device.type == "meta"
    with pytest.raises(ArgumentError, match="scale: got a tensor on cpu; expected one on meta, the device of query"):
        attemper.attention(query, key, value, scale=scales.LogLength(3))


def test_decoding_with_a_cache_gives_the_rows_of_the_whole() -> None:
    query, key, value = tensors(queries=SHAPE.keys)
    for rule in (scales.LogLength(3), scales.Llama4(0.3, 3)):
        whole = attemper.attention(query, key, value, is_causal=True, scale=rule)
        for count in range(1, SHAPE.keys + 1):
            last, seen = slice(count - 1, count), slice(count)
            row = attemper.attention(query[:, :, last], key[:, :, seen], value[:, :, seen], scale=rule, offset=count - 1)
            torch.testing.assert_close(row, whole[:, :, last])


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("rule", LEARNED, ids=str)
def test_gradients_of_what_is_learned(rule: Scale, impl: str) -> None:
    """Of output, lse and entropy, with a softcap and sinks: the real kernel in float64."""
    assert isinstance(rule, nn.Module)
    query, key, value = (tensor.requires_grad_() for tensor in tensors(torch.float64, batch=1))
    sinks = torch.linspace(-1, 1, 3, dtype=torch.float64)
    rule = rule.to(torch.float64)
    name, parameter = next(iter(rule.named_parameters()))

    def call(parameter: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        scale = _With(rule, name, parameter)
        options: dict[str, Any] = {"is_causal": True, "offset": SHAPE.offset, "softcap": 5.0, "sinks": sinks, "impl": impl}
        output, rows = attemper.attention(query, key, value, scale=scale, return_stats=True, **options)
        return output, rows.lse, rows.entropy

    leaf = parameter.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(call, (leaf, query, key, value), fast_mode=True)
    torch.stack([each.sum() for each in call(leaf, query, key, value)]).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.ne(0).all()


class _With(Scale):
    """A learned rule, computed with another tensor in the place of its parameter."""

    def __init__(self, rule: nn.Module, name: str, parameter: Tensor) -> None:
        self._call = lambda shape: torch.func.functional_call(_Factor(rule), {f"rule.{name}": parameter}, (shape,))

    def factor(self, shape: LogitShape) -> Tensor:
        return self._call(shape)


class _Factor(nn.Module):
    def __init__(self, rule: nn.Module) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, shape: LogitShape) -> Any:
        return self.rule.factor(shape)


@pytest.mark.parametrize("make", [scales.Learned, scales.LogLength], ids=lambda make: make.__name__)
def test_a_rule_learns(make: Any) -> None:
    query, key, value = tensors()
    target = attemper.attention(query, key, value, scale=make(3, initial=0.7)).detach()
    rule = make(3, initial=0.2)
    optimizer = torch.optim.Adam(rule.parameters(), lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        (attemper.attention(query, key, value, scale=rule) - target).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(rule.factor(SHAPE), make(3, initial=0.7).factor(SHAPE), rtol=0.02, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_without_a_break(dynamic: bool) -> None:
    nested = scales.InverseLayer(scales.Yarn(40.0), layer=2)
    for rule in (nested, scales.Llama4(0.3, 3), scales.Critical(causal=False), scales.Learned(3), scales.LogLength(3)):
        torch._dynamo.reset()

        def call(*given: Tensor, scale: Scale = rule) -> Tensor:
            return attemper.attention(*given, is_causal=True, offset=4, scale=scale)

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        output, expected = compiled(*tensors()), call(*tensors())
        torch.testing.assert_close(output, expected)
        if isinstance(rule, nn.Module):
            parameters = list(rule.parameters())
            gradients = torch.autograd.grad(output.square().sum(), parameters)
            torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), parameters))
    torch._dynamo.reset()


def test_capture_sees_the_factor() -> None:
    seen: list[AttentionCall] = []

    class Model(nn.Module):
        def __init__(self, scale: Scale) -> None:
            super().__init__()
            self.scale = scale

        def forward(self) -> Tensor:
            return attemper.attention(*tensors(), scale=self.scale)

    for rule in (scales.Yarn(40.0), scales.Learned(3, initial=1.3)):
        with capture(model := Model(rule), seen.append):
            model()
    fixed, learned = (call.scale for call in seen)
    assert fixed == scales.Yarn(40.0).factor(SHAPE)
    assert isinstance(learned, Tensor)
    assert learned.flatten().tolist() == pytest.approx([1.3 * SHAPE.head_dim**-0.5] * 3)


@pytest.mark.parametrize(
    ("scale", "changes", "words"),
    [
        (scales.LogLength(5), {}, "heads: got 3 heads of query; expected 5, for which this LogLength was made"),
        (scales.InverseLayer(), {}, "layer: got None; expected the layer's number, which InverseLayer needs"),
        (
            scales.InverseSqrt,
            {},
            "scale: got .*InverseSqrt'>; expected a finite number, .* or a rule of attemper.scales",
        ),
        (scales.Llama4(), {"query": 0}, "query: got int; expected a torch.Tensor"),
        (scales.Llama4(), {"key": torch.zeros(2, 3)}, r"key: got shape \(2, 3\); expected \[\.\.\., heads, tokens, width\]"),
        (scales.Llama4(), {"offset": 0.5}, r"offset: got 0\.5; expected a whole number"),
    ],
)
def test_what_does_not_fit_is_refused(scale: Any, changes: dict[str, Any], words: str) -> None:
    arguments = dict(zip(("query", "key", "value"), tensors(), strict=True)) | changes
    with pytest.raises(ArgumentError, match=words):
        attemper.attention(**arguments, scale=scale)
