"""Triton: chosen where it can run and nowhere else, right under its interpreter, and compiled ahead of time without a spill."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from attemper import attention
from attemper.errors import UnsupportedError
from attemper.kernels import triton_problem
from attemper.kernels.spec import Inputs, Rules
from attemper.ops import implementations
from attemper.ops.implementations import choose
from tests.attention_cases import INTERPRETED, tensors
from tests.running import ROOT

if INTERPRETED:
    pytest.skip("these start the interpreter themselves", allow_module_level=True)

# Of the tests of every implementation: not those of float64 and bfloat16, which this kernel or the interpreter does not have, nor
# those of very many keys.
SHARED = ("tests/ops/test_nonfinite.py", "tests/ops/test_numerics.py", "tests/ops/test_operators.py::test_opcheck")
LEFT_OUT = (
    "scale_reaches",
    "sixteen_bit",
    "maximum_is_not_rounded",
    "float64",
    "softcap_bounds",
    "long_cache",
    "many_tiles",
    "tile_after_tile",
    "trailing_tiles",
    "stop_growing",
)


@pytest.mark.slow
def test_the_kernels_are_right_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.kernels.interpreter", "-p", "no:cacheprovider"]
    command += [
        "tests/kernels/interpreted.py",
        "tests/kernels/interpreted_backward.py",
        "tests/kernels/interpreted_tiles.py",
        "tests/kernels/interpreted_compiled.py",
        *SHARED,
        "-k",
        f"not ({' or '.join(LEFT_OUT)})",
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def on_gpu(query: Tensor, key: Tensor, value: Tensor) -> Inputs:
    """The inputs of a plain call on a GPU that is not there."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty_like(each, device="cuda") for each in (query, key, value))
        return Inputs(q, k, v, None, torch.empty(1, 1, 1, device="cuda"), None)


def test_auto_prefers_triton_on_a_gpu_and_never_on_a_cpu() -> None:
    query, key, value = tensors(1, 2, 5, 7)
    assert choose("auto", on_gpu(query, key, value), seen=False) == "triton"
    on_cpu = Inputs(query, key, value, None, torch.ones(1, 1, 1), None)
    assert choose("auto", on_cpu, seen=True) in ("cpu", "blocked")
    with pytest.raises(UnsupportedError, match=r"impl: 'triton' does not take a tensor on cpu, except under its interpreter"):
        attention(query, key, value, impl="triton")


def test_a_trace_for_a_gpu_holds_our_operator_alone() -> None:
    def run(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        output, rows = attention(query, key, value, is_causal=True, return_stats=True)
        return [output, rows.lse]

    query, key, value, *_ = on_gpu(*tensors(1, 2, 5, 7))
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = make_fx(run)(query, key, value).graph
    (ours,) = (node for node in graph.nodes if "attemper" in str(node.target))
    assert str(ours.target) == "attemper.forward.default"
    assert "triton" in ours.args


def test_what_triton_does_not_take_is_left_to_another_kernel() -> None:
    double = on_gpu(*(each.double() for each in tensors(1, 2, 5, 7)))
    wide = on_gpu(*tensors(1, 2, 5, 300))
    for inputs, reason in ((double, "torch.float64"), (wide, "a width of 300, above 256")):
        assert choose("auto", inputs, seen=False) == "blocked"
        with pytest.raises(UnsupportedError, match=f"impl: 'triton' does not take {reason}; 'blocked' does"):
            choose("triton", inputs, seen=False)


def test_without_triton_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_problem, "available", lambda: False)
    assert triton_problem.describe() == "Triton, for GPUs; not installed here: pip install 'attemper[triton]'"
    monkeypatch.delitem(implementations.KERNELS, "triton")
    assert choose("auto", on_gpu(*tensors(1, 2, 5, 7)), seen=False) == "blocked"
    with pytest.raises(UnsupportedError, match="impl: 'triton' is not available"):
        attention(*tensors(1, 2, 5, 7), impl="triton")


def test_triton_is_not_loaded_before_it_is_asked_for() -> None:
    code = (
        "import sys, attemper, attemper.ops; print([name for name in sys.modules if name.startswith('attemper.kernels.triton')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "['attemper.kernels.triton_problem']"


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 90])
def test_the_widest_kernel_that_may_not_spill_does_not(target: int) -> None:
    resources = pytest.importorskip("benchmarks.triton_resources")
    causal = next(variant for variant in resources.VARIANTS if variant.name == "causal, statistics")
    built = resources.of_build(resources.Build("forward", torch.bfloat16, 128, causal, target))
    assert [each.kernel for each in built] == ["attend", "attend"]  # the second where a value is not finite
    assert not any(each.spilled for each in built)
    assert all(0 < each.shared < 100 * 1024 for each in built)


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 90])
def test_nor_does_the_backward_pass(target: int) -> None:
    resources = pytest.importorskip("benchmarks.triton_resources")
    causal = next(variant for variant in resources.VARIANTS if variant.name == "causal, statistics")
    built = resources.of_build(resources.Build("backward", torch.bfloat16, 128, causal, target))
    each_of_two = ["query_gradients"] * 2 + ["key_gradients"] * 2  # the second where a gradient is not finite
    assert [each.kernel for each in built] == ["row_constants", *each_of_two]
    assert not any(each.spilled for each in built)


def test_positions_are_small_numbers_that_mean_the_same() -> None:
    query, key, value = (torch.zeros(1, 1, n, 4) for n in (7, 11, 11))
    inputs = Inputs(query, key, value, None, torch.ones(1, 1, 1), None)
    for offset in (-(2**60), -9, -3, 0, 4, 13, 2**60):
        for left, right in ((0, 0), (2, 1), (2**61, 2), (3, None), (None, 0)):
            for step in (1, 3):
                rules = Rules(window=(left, right), offset=offset, row_step=step)
                found = triton_problem.arguments(inputs, rules)
                assert all(-(2**31) < found[name] < 2**31 for name in ("low", "high"))
                for i in range(7):
                    for j in range(11):
                        distance = j - rules.place(i)
                        seen = (left is None or distance >= -left) and (right is None or distance <= right)
                        ours = (not found["LEFT"] or j >= i * step + found["low"]) and (
                            not found["RIGHT"] or j <= i * step + found["high"]
                        )
                        assert ours == seen, (offset, left, right, step, i, j)
