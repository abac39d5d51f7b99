"""The compiled kernel's own promises: the same bits on any number of threads, alive after a fork, every build of it right."""

import hashlib
import os
import re
import select
import signal
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from attemper import attention
from attemper.errors import UnsupportedError
from attemper.kernels import cpu
from attemper.ops import row_stats
from attemper.stats import FIELDS
from tests.attention_cases import CASES, Budget, Case, Problem, build, gradients_of, plain

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the kernel is not built here (CI insists on it)")

LARGE = (
    Case("few heads, keys dealt out", 1, 2, 1, 197, 1201, 23, 13, mask="bool"),
    Case("many heads", 2, 6, 6, 131, 389, 16, 16, is_causal=True, sinks=True, scale="head"),
)


def everything(problem: Problem, impl: str = "cpu") -> list[Tensor]:
    output, rows = attention(problem.query, problem.key, problem.value, **problem.arguments, return_stats=True, impl=impl)
    gradients = gradients_of(problem, output, rows.lse, rows.entropy)
    return [output, rows.lse, rows.entropy, rows.rest, *gradients.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_the_number_of_threads_changes_no_bit(case: Case, dtype: torch.dtype) -> None:
    found = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        found.append(everything(build(case, dtype)))
    for other in found[1:]:
        for one, another in zip(found[0], other, strict=True):
            assert torch.equal(one, another)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 37, 16), (1, 2, 700, 16), (1, 5, 1, 8)], ids=str)
def test_results_lie_as_the_inputs_do(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Heads of a row beside one another, as projections leave them, or not: the same bits; 700 keys are dealt out in parts."""
    batch, heads, rows, width = shape
    draw = torch.randn(4, batch, rows, heads, width).to(dtype).transpose(2, 3)
    found = []
    for query, key, value, flow in (draw, draw.contiguous()):
        inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        output, stats = attention(*inputs, is_causal=True, return_stats=True, impl="cpu")
        gradients = torch.autograd.grad(output, inputs, flow)
        for result in (output, *gradients):
            assert rows == 1 or result.stride() == query.stride()
        with torch.no_grad():
            unrecorded, again = attention(query, key, value, is_causal=True, return_stats=True, impl="cpu")
            bare = attention(query, key, value, is_causal=True, impl="cpu")
        assert rows == 1 or unrecorded.stride() == bare.stride() == query.stride()
        assert torch.equal(unrecorded, output)
        assert torch.equal(bare, output)
        assert torch.equal(again.rest, stats.rest)
        found.append([output, *gradients])
    for beside, apart in zip(*found, strict=True):
        assert torch.equal(beside, apart)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_result_that_lies_as_the_inputs_do_is_no_view(recorded: bool) -> None:
    """Autograd refuses to change a view in place that a Function, or code under no_grad, gave back."""
    query, key, value = torch.randn(3, 2, 5, 4, 8, dtype=torch.bfloat16).transpose(2, 3)
    factor = torch.tensor(2.0, dtype=torch.bfloat16, requires_grad=True)
    with torch.set_grad_enabled(recorded):
        output, stats = attention(query.requires_grad_(), key, value, return_stats=True, impl="cpu")
    lse = stats.lse
    assert output.stride() == query.stride()
    assert not output._is_view()
    if recorded:
        (lse.sum() + output.detach().sum()).backward()
        assert query.grad is not None
        assert not query.grad._is_view()
    else:
        output.mul_(factor)
        output.sum().backward()
        assert factor.grad is not None


SMALL = [case.name for case in CASES if case.keys <= 601 and case.queries <= 41]
SCRIPT = """
import sys, torch
from attemper.kernels import cpu
from tests.attention_cases import CASES, build
from tests.kernels.test_cpu import everything
wanted = sys.argv[2:]
found = {case.name: [x.detach() for x in everything(build(case, torch.float32))] for case in CASES if case.name in wanted}
print(cpu.describe())
torch.save(found, sys.argv[1])
"""


@pytest.mark.parametrize("isa", ["portable", "neon", "avx2", "avx512", "avx512bf16"])
def test_every_build_gives_the_same_within_rounding(isa: str, tmp_path: object) -> None:
    file = f"{tmp_path}/found.pt"
    environment = {**os.environ, "ATTEMPER_CPU_ISA": isa}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, file, *SMALL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if f"ATTEMPER_CPU_ISA: got '{isa}'" in done.stderr:
        pytest.skip(f"this processor has no {isa}")
    assert done.returncode == 0, done.stderr
    assert isa in done.stdout
    for name, tensors in torch.load(file).items():
        case = next(case for case in CASES if case.name == name)
        truth = everything(build(case, torch.float32).to(torch.float64), "reference")
        for theirs, ours in zip(tensors, truth, strict=True):
            if ours.ndim == 4 and ours.shape[0] == len(
                FIELDS
            ):  # the record: rounding may exchange two keys that are all but equal
                theirs[FIELDS.index("argmax")] = ours[FIELDS.index("argmax")].float()
            finite = torch.isfinite(ours)
            assert torch.equal(theirs[~finite].double(), ours[~finite].double()), name
            scale = ours[finite].abs().max().item() if finite.any() else 0.0
            torch.testing.assert_close(theirs[finite].double(), ours[finite].double(), rtol=0.0, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("call", ["attention(x, x, x)", "attention(x, x, x, impl='cpu')", "row_stats(x, x)"])
def test_an_unknown_build_is_refused_where_the_kernel_is_asked_for(call: str) -> None:
    script = f"""
import torch
from attemper import attention
from attemper.errors import UnsupportedError
from attemper.ops import row_stats
x = torch.ones(1, 1, 3, 5)
attention(x, x, x, impl="blocked")
try:
    {call}
except UnsupportedError as error:
    print(error)
"""
    found = _with_build("sse9", "-c", script)
    assert re.fullmatch(
        r"impl: 'cpu' is not available \(ATTEMPER_CPU_ISA: got 'sse9'; expected a build that this processor can run "
        r"\((\w+, )*portable\), or unset it for the best\); available here: 'reference', 'blocked'(, 'triton')?\n",
        found,
    ), found


def test_the_command_says_why_the_kernel_is_absent() -> None:
    found = " ".join(_with_build("sse9", "-m", "attemper", "info").split())
    assert re.search(r"kernel cpu: absent: ATTEMPER_CPU_ISA: got 'sse9'; expected a build [^:]*portable\), or unset it", found), (
        found
    )
    assert "extra hf" in found


def _with_build(isa: str, *arguments: str) -> str:
    environment = {**os.environ, "ATTEMPER_CPU_ISA": isa}
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _gradient(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
    output = attention(query, key, value, impl="cpu")
    output.backward(torch.full_like(output, 0.5))
    assert query.grad is not None
    return torch.cat([output.detach(), query.grad])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("shape", [(1, 4, 301, 17), (1, 4, 200, 32)], ids=str)
def test_a_forked_child_computes_the_same(shape: tuple[int, ...]) -> None:
    torch.set_num_threads(2)
    attention(*(torch.ones(shape) for _ in range(3)), impl="cpu")  # starts the threads that a child has not
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        found = b"nothing"
        try:
            found = _gradient(shape).numpy().tobytes()
        finally:
            os.write(writer, hashlib.sha256(found).digest())
            os._exit(0)
    ready, _, _ = select.select([reader], [], [], 60.0)
    os.kill(child, signal.SIGKILL)  # one that hangs would wait for ever
    os.waitpid(child, 0)
    assert ready, "the child hangs"
    assert os.read(reader, 32) == hashlib.sha256(_gradient(shape).numpy().tobytes()).digest()
    os.close(reader)


def test_auto_is_this_kernel_where_it_takes_the_tensors() -> None:
    query, key, value = (torch.randn(1, 2, 67, 16) for _ in range(3))
    assert torch.equal(attention(query, key, value), attention(query, key, value, impl="cpu"))
    assert not torch.equal(attention(query, key, value, impl="blocked"), attention(query, key, value, impl="cpu"))
    turned = torch._neg_view(query)
    torch.testing.assert_close(attention(turned, key, value), attention(-query, key, value))


def test_what_it_does_not_take_is_named() -> None:
    with FakeTensorMode():
        elsewhere = torch.empty(1, 2, 3, 5, device="cuda")
    with pytest.raises(UnsupportedError, match="impl: 'cpu' does not take a tensor on cuda:0; 'blocked' does"):
        attention(elsewhere, elsewhere, elsewhere, impl="cpu")

    class Wrapped(Tensor):
        pass

    query = torch.randn(1, 2, 3, 5).as_subclass(Wrapped)
    with pytest.raises(UnsupportedError, match="impl: 'cpu' does not take a Wrapped"):
        attention(query, query, query, impl="cpu")


@pytest.mark.parametrize("width", [1, 3, 64, 80, 127, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_head_width(width: int, dtype: torch.dtype) -> None:
    problem, budget = build(Case("", 1, 2, 2, 67, 131, width, width), dtype), Budget()
    output = attention(problem.query, problem.key, problem.value, impl="cpu")
    budget.add("output", output, plain(problem.to(torch.float64))[0], plain(problem.to(torch.float32))[0])
    budget.check()


def test_a_mean_under_an_offset_far_from_the_first_tile() -> None:
    # The first tile shows a few keys of one side; later ones move the mean away from it.
    key = torch.cat([torch.full((100,), 5.0), torch.full((3000,), -2.0)]).reshape(1, 1, -1, 1)
    rows = row_stats(torch.ones(1, 1, 1, 1), key, scale=1.0, impl="cpu")
    exact = key.double().flatten()
    assert rows.mean.item() == pytest.approx(exact.mean().item(), rel=3e-7)
    assert rows.var.item() == pytest.approx(exact.var(unbiased=False).item(), rel=1e-6)
