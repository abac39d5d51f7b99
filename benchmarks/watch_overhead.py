"""What `attemper.watch` costs: whole training steps with it beside the same steps without, in one process and in turn.

    python -m benchmarks.watch_overhead [--write]

GPT-2's code from transformers, at random weights, in float32 and without dropout; a step is forward, backward, AdamW, and what
ends it in the watch. Every statistic of every head, at every step. Exit 1 if a bar is missed. `--write` puts the tables into
docs/performance.md.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import attemper
from attemper.monitor import Watch
from benchmarks.machine import Machine, here
from benchmarks.pairs import Pace, compare
from benchmarks.report import Report, around_markers

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
MARKER = "benchmarks.watch_overhead"
STRIDE = 8  # of the rows in mode "observe" that its bar is for


class Size(NamedTuple):
    """A GPT-2."""

    layers: int
    heads: int
    width: int  # of a head
    vocabulary: int


class Bars(NamedTuple):
    """How long a step may take at most, as a multiple of one with SDPA."""

    use: float
    observe: float


class Case(NamedTuple):
    """One shape of the input, with its bars."""

    batch: int
    tokens: int
    bars: Bars

    def __str__(self) -> str:
        return f"{self.batch} × {self.tokens}"


class Effort(NamedTuple):
    """How much work a run is. `judged` is the pace of what has a bar, `told` that of the rest."""

    size: Size
    cases: tuple[Case, ...]
    judged: Pace
    told: Pace


NO_BAR = Bars(math.inf, math.inf)
WHOLE = Effort(
    Size(6, 6, 64, 4096),
    (Case(4, 512, Bars(use=1.00, observe=1.03)), Case(1, 2048, Bars(use=0.90, observe=1.05))),
    Pace(0.0, 21, 11, 90.0),
    Pace(0.0, 7, 5, 30.0),
)
QUICK = Effort(Size(2, 3, 8, 97), (Case(2, 32, NO_BAR), Case(1, 67, NO_BAR)), Pace(0.0, 2, 2, 0.0), Pace(0.0, 1, 1, 0.0))


def main(arguments: list[str] | None = None, bars: Bars | None = None) -> int:
    """Measure, print, and write where asked to; 1 if a bar is missed, else 0. `bars` take the place of every shape's own."""
    began = time.perf_counter()
    options = parse(arguments)
    machine = here()
    if options.write is not None:
        around_markers(options.write, MARKER)  # now, not when all is measured
    effort = QUICK if options.quick else WHOLE
    torch.set_num_threads(options.threads)
    print(f"{machine}, transformers {transformers.__version__}")
    report = Report()
    for case in effort.cases:
        measure(report, effort, case if bars is None else case._replace(bars=bars))
    if options.write is not None:
        before, after = around_markers(options.write, MARKER)
        options.write.write_text(f"{before}\n{document(report, machine, effort, options)}\n{after}", "utf-8")
    for check in report.missed:
        print(f"missed: {check}")
    held = len(report.checks) - len(report.missed)
    took = f"{time.perf_counter() - began:.0f} s"
    print(f"{held} of {len(report.checks)} bars held, {len(report.missed)} missed, in {took}")
    return 1 if report.missed else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser("python -m benchmarks.watch_overhead", description="What attemper.watch costs a step.")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="number of threads (default: 2)")
    parser.add_argument("--quick", action="store_true", help="a small model, no bars: to see that everything runs")
    parser.add_argument(
        "--write", type=Path, nargs="?", const=DOCUMENT, metavar="FILE", help="put the tables into docs/performance.md, or FILE"
    )
    options = parser.parse_args(arguments)
    if options.threads < 1:
        parser.error(f"argument --threads: got {options.threads}; expected a number from 1")
    if options.write is not None and not options.write.is_file():
        parser.error(f"argument --write: {options.write} is not a file; expected a document with the markers of {MARKER}")
    if options.write == DOCUMENT and options.quick:
        parser.error("--write without FILE wants the whole run: no --quick")
    return options


def measure(report: Report, effort: Effort, case: Case) -> None:
    """One table; each line is a pair of its own, against the same plain model."""
    table = report.table(
        f"A training step, batch {case.batch}, {case.tokens} tokens",
        "beside SDPA                                      ",
        "SDPA, ms",
        "this, ms",
        "this / SDPA",
        "middle half",
        "rounds",
        "bar ",
    )
    plain = Plain(effort.size, case)
    plain()

    def add(name: str, step: "Plain", pace: Pace, bar: float | None = None) -> None:
        step()
        timed = compare((plain, step), pace)
        ratios = sorted(other / sdpa for sdpa, other in timed.rounds)
        middle = f"{ratios[len(ratios) // 4]:.3f}–{ratios[-1 - len(ratios) // 4]:.3f}"
        ratio, shown = timed.ratio(1, 0), "–" if bar is None else f"{bar:.2f}"
        milliseconds = (f"{1e3 * timed.seconds(function):.1f}" for function in (0, 1))
        table.add(name, *milliseconds, f"{ratio:.3f}", middle, str(len(ratios)), shown)
        if bar is not None:
            report.at_most(f"{case}, {name}: step / step with SDPA", ratio, bar)
        step.close()

    size = effort.size
    add('watch, mode "use"', Watched(size, case, mode="use"), effort.judged, case.bars.use)
    add(f'watch, mode "observe", rows={STRIDE}', Watched(size, case, rows=STRIDE), effort.judged, case.bars.observe)
    add('watch, mode "observe", rows=1', Watched(size, case), effort.told)
    add("attemper.use alone, without statistics", InUse(size, case), effort.told)
    add("materialised weights, statistics by hand", ByHand(size, case), effort.told)
    add("the same model with SDPA: what timing alone does", Plain(size, case), effort.told)


class Plain:
    """One training step a call, with SDPA. All of them start at the same weights and see the same batch."""

    implementation = "sdpa"

    def __init__(self, size: Size, case: Case) -> None:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=size.vocabulary,
            n_positions=case.tokens,
            n_embd=size.heads * size.width,
            n_layer=size.layers,
            n_head=size.heads,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation=self.implementation)
        self.model: nn.Module = model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.ids = torch.randint(size.vocabulary, (case.batch, case.tokens))
        self.loss = math.nan

    def __call__(self) -> None:
        """Forward, backward, optimiser."""
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.item()

    def forward(self) -> Tensor:
        """The loss."""
        return self.next_token_loss(self.model(self.ids).logits)

    def next_token_loss(self, logits: Tensor) -> Tensor:
        """Mean of −ln p(next token)."""
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), self.ids[:, 1:].flatten())

    def close(self) -> None:
        """See that what was measured was there."""


class Watched(Plain):
    """With a watch."""

    def __init__(self, size: Size, case: Case, mode: Literal["observe", "use"] = "observe", rows: int = 1) -> None:
        super().__init__(size, case)
        self.watching: Watch = attemper.watch(self.model, mode=mode, rows=rows)
        self.rows = case.batch * -(-case.tokens // rows)
        self.layers, self.steps = size.layers, 0

    def __call__(self) -> None:
        """A step, and the end of it in the watch."""
        super().__call__()
        self.watching.step(loss=self.loss)
        self.steps += 1

    def close(self) -> None:
        """End the watch.

        Raises:
            RuntimeError: a layer, a step or a row was not measured.
        """
        last, unseen = self.watching.last, self.watching.unseen()
        self.watching.remove()
        rows = [] if last is None else [set(layer.stats.rows.tolist()) for layer in last.layers]
        step = -1 if last is None else last.step
        if step != self.steps - 1 or rows != [{self.rows}] * self.layers or unseen:
            raise RuntimeError(
                f"not everything was measured: last step {step} of {self.steps}, rows of each layer's heads {rows} instead of "
                f"{self.rows} in {self.layers} layers, unseen {unseen}"
            )


class InUse(Plain):
    """With attemper's kernel and no statistics."""

    def __init__(self, size: Size, case: Case) -> None:
        super().__init__(size, case)
        self.used = attemper.use(self.model)

    def close(self) -> None:
        """Give the model its attention back."""
        self.used.undo()


class ByHand(Plain):
    """With the weights that transformers materialises where it is asked for them, and three statistics of those.

    Logits are gone by then, so this measures less than the others do.
    """

    implementation = "eager"

    def forward(self) -> Tensor:
        """The loss, and statistics that are read back at once, as in `Watch.step`."""
        found = self.model(self.ids, output_attentions=True)
        with torch.no_grad():
            figures = [torch.stack([f(weights).mean((0, 2)) for f in BY_HAND]) for weights in found.attentions]
            torch.stack(figures).tolist()
        return self.next_token_loss(found.logits)


def _entropy(weights: Tensor) -> Tensor:
    return -torch.special.xlogy(weights, weights).sum(-1)


def _gain(weights: Tensor) -> Tensor:
    return 1.0 - weights.square().sum(-1)


def _peak(weights: Tensor) -> Tensor:
    return weights.amax(-1)


BY_HAND: tuple[Callable[[Tensor], Tensor], ...] = (_entropy, _gain, _peak)


def document(report: Report, machine: Machine, effort: Effort, options: argparse.Namespace) -> str:
    """What goes between the markers."""
    command = f"python -m benchmarks.watch_overhead --threads {options.threads}" + (" --quick" if options.quick else "")
    size = effort.size
    model = (
        f"A GPT-2 of {size.layers} layers and {size.heads} heads of width {size.width}, vocabulary {size.vocabulary}, "
        "float32, no dropout; AdamW."
    )
    versions = f"{machine}, transformers {transformers.__version__}"
    return f"`{command}`, {datetime.now(UTC).date()}, on: {versions}.\n\n{model}\n\n{report.markdown()}"


if __name__ == "__main__":
    sys.exit(main())
