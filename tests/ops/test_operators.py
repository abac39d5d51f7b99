"""The registered operators: what torch itself checks of one, the kernels' own results, and shapes without memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from attemper import attention
from attemper.errors import UnsupportedError
from attemper.kernels import cpu
from attemper.kernels.spec import Inputs
from attemper.ops import operators, row_stats
from attemper.ops.arguments import check
from tests.attention_cases import CASES, IMPLEMENTATIONS, INTERPRETED, Case, build

KERNELS = IMPLEMENTATIONS
every_kernel = pytest.mark.parametrize("kernel", KERNELS)

# Every argument, each kind of empty result, and shapes of nought; the rest of the table differs only in numbers.
NAMES: tuple[str, ...] = (
    "plain",
    "no keys, sinks",
    "no queries",
    "no heads",
    "no batch",
    "width nought",
    "grouped, masked",
    "window",
    "scale: per head",
    "everything",
)
if INTERPRETED:
    NAMES = ("grouped, masked",)  # opcheck runs a kernel many times, and the interpreter takes its time
SELECTION = [case for case in CASES if case.name in NAMES]


def arguments_of(case: Case, kernel: str, dtype: torch.dtype, dropout_p: float = 0.0) -> tuple[Inputs, tuple[Any, ...]]:
    """(tensors, what follows them up to the dropout) of a call of `forward`, detached: opcheck says nothing of gradients."""
    given = build(case, dtype)
    named = {name: thing.detach() if isinstance(thing, Tensor) else thing for name, thing in given.arguments.items()}
    problem = check(given.query.detach(), given.key.detach(), given.value.detach(), dropout_p=dropout_p, **named)
    rules = problem.rules
    seed = torch.tensor(11) if dropout_p else None
    return problem.inputs, (seed, kernel, *rules.sides, rules.offset, rules.softcap, dropout_p)


def backward_arguments(inputs: Inputs, numbers: tuple[Any, ...], needs: list[bool], flowing: str) -> tuple[Any, ...]:
    seed, *rest = numbers
    output, lse, entropy, _, figures, unrounded = operators.forward(*inputs, *numbers, True, True)
    upstream = [torch.randn_like(x) if name in flowing else None for name, x in (("o", output), ("l", lse), ("e", entropy))]
    return *inputs, seed, output, lse, entropy, figures, unrounded, *upstream, *rest, needs


@pytest.mark.slow
@every_kernel
@pytest.mark.parametrize("case", SELECTION, ids=lambda case: case.name)
def test_opcheck(case: Case, kernel: str) -> None:
    inputs, numbers = arguments_of(case, kernel, torch.float32)
    query, key, _, mask, scale, sinks = inputs
    torch.library.opcheck(operators.forward, (*inputs, *numbers, True, True))
    torch.library.opcheck(operators.row_stats, (query, key, mask, scale, sinks, *numbers[1:-1], 1))
    needs = [tensor is not None and tensor.is_floating_point() for tensor in inputs]
    torch.library.opcheck(operators.backward, backward_arguments(inputs, numbers, needs, "ole"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", ["cpu", "blocked"])
def test_opcheck_where_the_heads_of_a_row_lie_beside_one_another(kernel: str, dtype: torch.dtype) -> None:
    if kernel == "cpu" and not cpu.available():
        pytest.skip("the kernel is not built here (CI insists on it)")
    inputs, numbers = arguments_of(Case("", is_causal=True), kernel, dtype)
    query, key, value, *others = inputs
    assert value is not None
    inputs = Inputs(*(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value)), *others)
    torch.library.opcheck(operators.forward, (*inputs, *numbers, True, True))
    needs = [tensor is not None and tensor.is_floating_point() for tensor in inputs]
    torch.library.opcheck(operators.backward, backward_arguments(inputs, numbers, needs, "ole"))


@pytest.mark.slow
@every_kernel
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_opcheck_in_other_precisions_with_dropout_and_less_wanted(dtype: torch.dtype, kernel: str) -> None:
    inputs, numbers = arguments_of(Case("", mask="float", scale="query"), kernel, dtype, dropout_p=0.3)
    for statistics, differentiable in ((False, False), (False, True)):
        torch.library.opcheck(operators.forward, (*inputs, *numbers, statistics, differentiable))
    for needs, flowing in (([True, False, False, False, True, False], "o"), ([False, True, False, True, False, False], "e")):
        torch.library.opcheck(operators.backward, backward_arguments(inputs, numbers, needs, flowing))


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_operator_gives_and_derives_what_a_direct_call_does(dtype: torch.dtype, kernel: str) -> None:
    case = next(case for case in CASES if case.name == "everything")
    given = build(case, dtype)
    leaves = list(given.leaves().values())
    output, rows = attention(given.query, given.key, given.value, **given.arguments, return_stats=True, impl=kernel)
    problem = check(given.query, given.key, given.value, **given.arguments)
    numbers = (None, kernel, *problem.rules.sides, problem.rules.offset, problem.rules.softcap, 0.0)
    results = operators.forward(*problem.inputs, *numbers, True, True)
    for ours, theirs in zip(results, (output, rows.lse, rows.entropy, rows.rest), strict=False):
        assert torch.equal(ours, theirs)
    assert [result.requires_grad for result in results] == [True, True, True, False, False, False]
    upstream = [torch.randn_like(result) for result in results[:3]]
    expected = torch.autograd.grad((output, rows.lse, rows.entropy), leaves, upstream)
    for ours, theirs in zip(torch.autograd.grad(results[:3], leaves, upstream), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_not_wanted_is_empty() -> None:
    inputs, numbers = arguments_of(Case(""), "blocked", torch.float16)
    assert [tuple(x.shape) for x in operators.forward(*inputs, *numbers, False, False)[3:]] == [(0,)] * 3
    *_, figures, unrounded = operators.forward(*inputs, *numbers, False, True)
    assert figures.shape == (3, *inputs.query.shape[:3])
    assert unrounded.shape == (*inputs.query.shape[:3], 11)
    assert unrounded.dtype == torch.float32


@every_kernel
def test_no_result_shares_memory_with_another(kernel: str) -> None:
    inputs, numbers = arguments_of(Case(""), kernel, torch.float32)
    results = [x for x in (*inputs, *operators.forward(*inputs, *numbers, True, True)) if x is not None and x.numel()]
    assert len({x.untyped_storage().data_ptr() for x in results}) == len(results)


@pytest.mark.parametrize("impl", ["auto", *KERNELS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meta_tensors_have_the_shapes_of_real_ones(dtype: torch.dtype, impl: str) -> None:
    def run(device: str) -> list[Tensor]:
        query, key, value = (torch.zeros(2, 5, heads, n, d, dtype=dtype, device=device) for heads, n, d in SHAPES)
        query.requires_grad_()
        mask = torch.zeros(7, 11, dtype=torch.bool, device=device)
        options: dict[str, Any] = {"attn_mask": mask, "enable_gqa": True, "impl": impl}
        output, rows = attention(query, key, value, dropout_p=0.3, return_stats=True, **options)
        (gradient,) = torch.autograd.grad(output.sum() + rows.entropy.sum(), query)
        alone = row_stats(query, key, mask, impl=impl)
        return [output, rows.lse, rows.entropy, rows.rest, rows.count, gradient, alone.lse, alone.rest]

    for ours, real in zip(run("meta"), run("cpu"), strict=True):
        assert ours.is_meta
        assert (ours.shape, ours.dtype, ours.stride()) == (real.shape, real.dtype, real.stride())


SHAPES = ((6, 7, 3), (2, 11, 3), (2, 11, 13))


def test_fake_tensors_stand_for_real_ones_inside_their_mode_and_outside() -> None:
    with FakeTensorMode():
        query, key, value = (torch.zeros(2, heads, n, d) for heads, n, d in SHAPES)
        output, rows = attention(query, key, value, enable_gqa=True, dropout_p=0.3, return_stats=True)
        elsewhere = torch.zeros(2, 3, 5, 7, device="cuda")
        assert attention(elsewhere, elsewhere, elsewhere).device.type == "cuda"
    assert output.shape == (2, 6, 7, 13)
    assert rows.rest.shape == (10, 2, 6, 7)
    assert type(attention(query, key, value, enable_gqa=True)) is type(query)


def test_the_compiled_kernel_refuses_another_device_by_name() -> None:
    with FakeTensorMode():
        elsewhere = torch.zeros(2, 3, 5, 7, device="cuda")
        with pytest.raises(UnsupportedError, match="impl: 'cpu' does not take a tensor on cuda:0; 'blocked' does"):
            attention(elsewhere, elsewhere, elsewhere, impl="cpu")
        with pytest.raises(UnsupportedError, match="impl: 'cpu' does not take a tensor on cuda:0"):
            row_stats(elsewhere, elsewhere, impl="cpu")


@every_kernel
def test_a_second_derivative_of_an_operator_is_refused(kernel: str) -> None:
    inputs, numbers = arguments_of(Case(""), kernel, torch.float32)
    query = inputs.query.requires_grad_()
    output = operators.forward(*inputs, *numbers, False, True)[0]
    (gradient,) = torch.autograd.grad(output.sin().sum(), query, create_graph=True)
    with pytest.raises(UnsupportedError, match="a second derivative was asked for, and this kernel has only the first"):
        gradient.sum().backward()


def test_a_pending_sign_is_turned_on_the_way_to_an_operator() -> None:
    inputs, numbers = arguments_of(Case(""), "cpu", torch.float32)
    turned = inputs._replace(key=torch._neg_view(inputs.key))
    output = operators.forward(*turned, *numbers, False, False)[0]
    assert torch.equal(output, operators.forward(*inputs._replace(key=-inputs.key), *numbers, False, False)[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kernel", ["blocked", "cpu"])
def test_a_trace_holds_the_call_and_not_its_result(kernel: str) -> None:
    def call(query: Tensor, key: Tensor) -> Tensor:
        return attention(query, key, key, is_causal=True, impl=kernel)

    traced = torch.jit.trace(call, (torch.randn(1, 2, 7, 5), torch.randn(1, 2, 7, 5)), check_trace=False)
    others = torch.randn(1, 2, 7, 5), torch.randn(1, 2, 7, 5)
    torch.testing.assert_close(traced(*others), call(*others))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_hook_may_lay_out_anew_what_is_kept_for_the_backward_pass(kernel: str) -> None:
    tensors = [torch.randn(1, 2, 7, 5, requires_grad=True) for _ in range(3)]

    def turned(tensor: Tensor) -> Tensor:
        return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor

    def gradients() -> tuple[Tensor, ...]:
        output, rows = attention(*tensors, return_stats=True, impl=kernel)
        return torch.autograd.grad((output**2).sum() + rows.entropy.sum(), tensors)

    expected = gradients()
    with torch.autograd.graph.saved_tensors_hooks(turned, lambda tensor: tensor):
        found = gradients()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
