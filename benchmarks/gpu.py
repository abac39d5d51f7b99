"""Attention on a GPU: ours without and with statistics, PyTorch's fused kernels and FlexAttention, in one process and in turn.

    python -m benchmarks.gpu [--write] [--dtype bfloat16]

Forward and backward, causal and full. `--write` puts the tables into docs/performance.md. Exits 2 where there is no CUDA device.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import attemper
from benchmarks.report import Report, Table, around_markers

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
MARKER = "benchmarks.gpu"
TOKENS, MODEL_WIDTH = 16384, 2048  # in all of a call, so that every line does the same work but for the length of its rows
LENGTHS, WIDTHS = (512, 1024, 2048, 4096, 8192, 16384), (64, 128)
DTYPES = ("bfloat16", "float16")
PEERS = ("SDPA flash", "SDPA cuDNN", "FlexAttention, max scores")
ROUNDS, WARM_UP, SECONDS_OF_ROUND = 15, 3, 0.02


class Setting(NamedTuple):
    """One line: shapes, dtype, mask and device."""

    batch: int
    heads: int
    length: int
    width: int
    dtype: torch.dtype
    causal: bool
    device: str = "cuda"

    def tensors(self) -> list[Tensor]:
        """query, key, value and a gradient that flows into the output."""
        shape = (self.batch, self.heads, self.length, self.width)
        drawn = [torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(4)]
        return [*(each.requires_grad_() for each in drawn[:3]), drawn[3]]

    @property
    def operations(self) -> float:
        """Multiplications and additions of the forward pass; half of them where half of the pairs are hidden."""
        return 4.0 * self.batch * self.heads * self.length**2 * self.width * (0.5 if self.causal else 1.0)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(causal: bool) -> Attend:
    """Attention without statistics."""
    return lambda q, k, v: attemper.attention(q, k, v, is_causal=causal)


def with_statistics(causal: bool) -> Attend:
    """Attention with all of them."""
    return lambda q, k, v: attemper.attention(q, k, v, is_causal=causal, return_stats=True)[0]


def sdpa(causal: bool, backend: SDPBackend) -> Attend:
    """PyTorch's, by one of its kernels and no other."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def flex(setting: Setting) -> Attend:
    """FlexAttention, compiled, with the largest logit of each row: the only one of our figures beside lse that it gives."""
    block_mask = None
    if setting.causal:
        length = setting.length
        block_mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, length, length, device=setting.device)
    compiled, wanted = torch.compile(flex_attention), AuxRequest(lse=True, max_scores=True)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, return_aux=wanted)[0]


def functions(setting: Setting) -> list[Attend]:
    """Ours, ours with statistics, and the peers in their order."""
    peers = [sdpa(setting.causal, SDPBackend.FLASH_ATTENTION), sdpa(setting.causal, SDPBackend.CUDNN_ATTENTION)]
    return [ours(setting.causal), with_statistics(setting.causal), *peers, flex(setting)]


def seconds(call: Callable[[], object], times: int, device: str) -> float:
    """Seconds a call, by the device's own clock where it has one."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000.0 / times
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def in_turn(calls: list[Callable[[], object] | None], device: str) -> list[list[float] | None]:
    """Seconds a call of each in every round; None for what cannot run here."""
    times = [0 if call is None else max(1, int(SECONDS_OF_ROUND / seconds(call, WARM_UP, device))) for call in calls]
    rounds = [
        [None if call is None else seconds(call, number, device) for call, number in zip(calls, times, strict=True)]
        for _ in range(ROUNDS)
    ]
    found: list[list[float] | None] = []
    for column in zip(*rounds, strict=True):
        kept = [each for each in column if each is not None]
        found.append(kept or None)
    return found


def forward_calls(setting: Setting, attends: list[Attend]) -> list[Callable[[], object] | None]:
    """Each forward pass without a graph, None where it refuses these tensors."""
    q, k, v, _ = (each.detach() for each in setting.tensors())
    return [_if_it_runs(lambda attend=attend: attend(q, k, v)) for attend in attends]


def backward_calls(setting: Setting, attends: list[Attend]) -> list[Callable[[], object] | None]:
    """Each backward pass of a forward pass that was made once."""
    q, k, v, flow = setting.tensors()
    calls = []
    for attend in attends:
        output = _if_it_runs(lambda attend=attend: attend(q, k, v))
        if output is None:
            calls.append(None)
            continue
        made = output()
        calls.append(_if_it_runs(lambda made=made: torch.autograd.grad(made, (q, k, v), flow, retain_graph=True)))
    return calls


def _if_it_runs(call: Callable[[], Any]) -> Callable[[], Any] | None:
    try:
        call()
    except RuntimeError as error:  # a kernel that is not built for this GPU, or not for these shapes
        print(f"left out: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    return call


def add_line(table: Table, setting: Setting, direction: str, timed: list[list[float] | None]) -> None:
    """Times, and ratios as medians over rounds: above 1 ours with statistics is faster than the peer."""
    plain, stats, *peers = timed
    work = setting.operations * (1.0 if direction == "forward" else 2.5)

    def ratio(one: list[float] | None, other: list[float] | None) -> str:
        if one is None or other is None:
            return "–"
        return f"{statistics.median(a / b for a, b in zip(one, other, strict=True)):.2f}"

    def milliseconds(times: list[float] | None) -> str:
        return "–" if times is None else f"{1000.0 * statistics.median(times):.3g}"

    rate = "–" if stats is None else f"{work / statistics.median(stats) / 1e12:.3g}"
    shape = f"{setting.batch}, {setting.heads}, {setting.length}, {setting.width}"
    cells = (shape, "causal" if setting.causal else "full", direction, milliseconds(plain), milliseconds(stats))
    table.add(*cells, *map(milliseconds, peers), ratio(stats, plain), *(ratio(peer, stats) for peer in peers), rate)


def measure(report: Report, settings: list[Setting], title: str) -> None:
    """One table of all settings, forward and backward."""
    columns = ("B, H, N, D       ", "mask  ", "pass    ", "ours, ms", "with statistics, ms", *(f"{peer}, ms" for peer in PEERS))
    ratios = ("with / without statistics", *(f"{peer} / with statistics" for peer in PEERS))
    table = report.table(title, *columns, *ratios, "with statistics, TFLOP/s")
    for setting in settings:
        attends = functions(setting)
        add_line(table, setting, "forward", in_turn(forward_calls(setting, attends), setting.device))
        add_line(table, setting, "backward", in_turn(backward_calls(setting, attends), setting.device))


def all_settings(dtype: torch.dtype) -> list[Setting]:
    """Lengths, widths and masks of one dtype."""
    return [
        Setting(TOKENS // length, MODEL_WIDTH // width, length, width, dtype, causal)
        for width in WIDTHS
        for length in LENGTHS
        for causal in (False, True)
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write where asked to; 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put the tables into {DOCUMENT.name}")
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            f"benchmarks.gpu: no CUDA device that PyTorch {torch.__version__} can use; nothing was measured. "
            "Run this on a machine with an NVIDIA GPU and a CUDA build of PyTorch.",
            file=sys.stderr,
        )
        return 2
    if given.write:
        around_markers(DOCUMENT, MARKER)  # now, not when all is measured
    report = Report()
    for dtype in given.dtype or DTYPES:
        measure(report, all_settings(getattr(torch, dtype)), f"{dtype}, on one {torch.cuda.get_device_name()}")
    if given.write:
        before, after = around_markers(DOCUMENT, MARKER)
        said = f"`python -m benchmarks.gpu`, {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}."
        tables = "\n\n".join(part if isinstance(part, str) else part.markdown() for part in report.parts)
        DOCUMENT.write_text(f"{before}\n{said}\n\n{tables}\n{after}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
