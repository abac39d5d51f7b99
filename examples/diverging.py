"""A small decoder at a learning rate that it cannot bear, watched at every step: what is seen before the loss tells, and QKClip.

    python examples/diverging.py --out runs

trains the same decoder from the same seeds on the same batches without QKClip and with it, and prints a table. In the folder
afterwards: `seed-0.jsonl`, `seed-0-clip.jsonl`, …, which `attemper top` and `attemper report` read (also while a run goes on, and
whatever is left of one that was killed); `curves.svg`; `table.md`. `--write` puts the last two into docs.
"""

import argparse
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper import QKClip
from attemper.examples.decoder import Block
from attemper.examples.text import load_corpus
from attemper.monitor import Alarm, watch
from attemper.monitor.trackers import JSONLines

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "diverging.md"
MARKER = "examples/diverging.py"
SEEDS = (0, 1, 2)
STEPS = 600
LEARNING_RATE, WARMUP = 0.11, 350  # of AdamW; the rate rises until this step and stays there
BATCH, CONTEXT = 40, 64
THRESHOLD = 100.0  # of QKClip
ALLOWED = 1.2  # what may be measured, over the threshold: one step of the optimiser comes after each clip
SMOOTHED = 50  # steps in one point of the loss
RISE = 0.1  # nats; what the smoothed loss does from step to step is a tenth of that
BUCKET = 4  # steps in one point of a curve

BYTES, WIDTH, HEADS, HIDDEN, LAYERS = 256, 64, 4, 128, 2


class Decoder(nn.Module):
    """Predicts the next byte of a text: pre-norm, rotary positions, softmax(q·kᵀ/√d), no norm on q and k."""

    def __init__(self) -> None:
        super().__init__()
        scale = (WIDTH // HEADS) ** -0.5
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS, HIDDEN, scale) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[batch, tokens] bytes -> [batch, tokens, 256] logits over the next one."""
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


@dataclass(frozen=True)
class Run:
    """What one run came to.

    Attributes:
        losses: of each step. maxima: of each step, the largest |scale·q·k| of any row, head and layer.
        alarms: all that fired. clipped: heads that were clipped, summed over the steps.
    """

    seed: int
    clip: bool
    losses: list[float]
    maxima: list[float]
    alarms: list[Alarm]
    clipped: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"seed-{self.seed}" + ("-clip" if self.clip else "")

    def smoothed(self) -> list[float]:
        """Mean loss of the `SMOOTHED` steps up to each."""
        return [statistics.fmean(self.losses[max(0, step + 1 - SMOOTHED) : step + 1]) for step in range(len(self.losses))]

    def diverged_at(self) -> int | None:
        """From which step on the smoothed loss stays `RISE` above the lowest that it was before; None where it does not.

        Said of a step without knowing what comes later, this could be noise; here it is judged when the run is over.
        """
        since, lowest = None, float("inf")
        for step, loss in list(enumerate(self.smoothed()))[SMOOTHED - 1 :]:
            lowest = min(lowest, loss)
            if loss < lowest + RISE:  # never true of NaN
                since = None
            elif since is None:
                since = step
        return since

    def lowest(self) -> tuple[int, float]:
        """Where the smoothed loss is lowest, and how low."""
        smoothed = self.smoothed()
        step = min(range(min(SMOOTHED, len(smoothed)) - 1, len(smoothed)), key=lambda step: smoothed[step])
        return step, smoothed[step]

    def alarm(self, *codes: str) -> Alarm | None:
        """The first alarm of these codes; of any, without."""
        return next((alarm for alarm in self.alarms if not codes or alarm.code in codes), None)


def train(seed: int, clip: bool, text: Tensor, options: argparse.Namespace) -> Run:
    """One run. The same seed gives the same weights at first, and the same batches, with and without the clip."""
    torch.manual_seed(seed)
    model = Decoder()
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    window = torch.arange(CONTEXT + 1)
    run = Run(seed, clip, [], [], [], 0)
    path = options.out / f"{run.name}.jsonl"
    path.unlink(missing_ok=True)
    clipped = 0
    with watch(model, trackers=JSONLines(path), on_alarm=run.alarms.append) as watching:
        clipper = QKClip(model, threshold=THRESHOLD) if clip else None
        for _ in range(options.steps):
            tokens = text[torch.randint(len(text) - CONTEXT, (options.batch, 1), generator=order) + window]
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            scalars = {"loss": loss.item()}
            if clipper is not None:
                clipper.step()
                clipped += clipper.clipped
                scalars |= clipper.scalars()
            record = watching.step(**scalars)
            assert record is not None, "every step is logged"
            run.losses.append(scalars["loss"])
            run.maxima.append(max(float(layer.scaled_max.max()) for layer in record.layers))
    return Run(seed, clip, run.losses, run.maxima, run.alarms, clipped)


class Column(NamedTuple):
    """A line of the table, which has a column for each run."""

    words: str
    cells: list[str]


def table(runs: list[Run]) -> str:
    """The runs side by side, in Markdown."""

    def steps_before(run: Run, *codes: str) -> str:
        fired, diverged = run.alarm(*codes), run.diverged_at()
        if fired is None:
            return "–"
        return f"{fired.code}, step {fired.step}" + ("" if diverged is None else f", {diverged - fired.step} before")

    def shown(step: int | None) -> str:
        return "no" if step is None else f"step {step}"

    lines = [
        Column("QKClip", [f"{THRESHOLD:g}" if run.clip else "none" for run in runs]),
        Column("first alarm", [steps_before(run) for run in runs]),
        Column("alarm of \\|scale·q·k\\| above 100", [steps_before(run, "ATT501", "ATT502", "ATT503") for run in runs]),
        Column("alarm of \\|scale·q·k\\| above 1e3", [steps_before(run, "ATT502", "ATT503") for run in runs]),
        Column("the loss diverges", [shown(run.diverged_at()) for run in runs]),
        Column("largest \\|scale·q·k\\|", [f"{max(run.maxima):.4g}" for run in runs]),
        Column("lowest smoothed loss", ["{1:.3f}, step {0}".format(*run.lowest()) for run in runs]),
        Column("smoothed loss at the end", [f"{run.smoothed()[-1]:.3f}" for run in runs]),
        Column("heads clipped, a step", [f"{run.clipped / len(run.losses):.2f}" if run.clip else "–" for run in runs]),
    ]
    head = ["", *(f"seed {run.seed}" for run in runs)]
    rows = [head, ["---"] * len(head), *([line.words, *line.cells] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(runs: list[Run], path: Path) -> None:
    """The curves, as SVG. Needs the extra: pip install 'attemper[html]'."""
    import altair as alt

    points = []
    for run in runs:
        smoothed = run.smoothed()
        for start in range(0, len(run.losses), BUCKET):
            bucket = slice(start, start + BUCKET)
            step = min(start + BUCKET, len(run.losses)) - 1
            loss = smoothed[step] if step >= SMOOTHED - 1 else None
            points.append({"step": step, "run": run.name, "kind": kind(run), "max": max(run.maxima[bucket]), "loss": loss})
    kinds = [kind(run) for run in (runs[0], runs[-1])]
    color = alt.Color(
        "kind:N", title=None, scale=alt.Scale(domain=kinds, range=["#b4472f", "#2f5fb4"]), legend=alt.Legend(orient="top")
    )
    lines = alt.Chart(alt.Data(values=points)).mark_line(strokeWidth=1, opacity=0.85)
    x = alt.X("step:Q", title="step")
    decades = alt.Axis(values=[10.0**power for power in range(10)], format="~s")
    largest = lines.encode(
        x=x, y=alt.Y("max:Q", title="largest |scale·q·k|", scale=alt.Scale(type="log"), axis=decades), color=color, detail="run:N"
    )
    bars = (THRESHOLD, 1e3)
    rules = alt.Chart(alt.Data(values=[{"y": bar} for bar in bars])).mark_rule(strokeDash=[4, 3], color="#77727f").encode(y="y:Q")
    losses = lines.encode(
        x=x,
        y=alt.Y("loss:Q", title=f"loss, mean of {SMOOTHED} steps", scale=alt.Scale(zero=False)),
        color=color,
        detail="run:N",
    )
    size = {"width": 640, "height": 220}
    chart = alt.vconcat(alt.layer(rules, largest).properties(**size), losses.properties(**size))
    chart.configure(background="#ffffff", font="sans-serif").configure_view(stroke=None).save(str(path))


def kind(run: Run) -> str:
    """In the legend."""
    return f"with QKClip({THRESHOLD:g})" if run.clip else "without"


def main(arguments: list[str] | None = None) -> int:
    """Train, print, draw; 1 if a run with QKClip was measured above what is allowed, else 0."""
    options = parse(arguments)
    if options.write:
        around_markers(DOCUMENT)  # now, not when all is trained
    torch.set_num_threads(1)  # more would add in another order, and a small model gains nothing
    corpus = torch.tensor(list(load_corpus().train))
    options.out.mkdir(parents=True, exist_ok=True)
    runs = []
    for clip in (False, True) if options.clip is None else (options.clip,):
        for seed in options.seeds:
            runs.append(train(seed, clip, corpus, options))
            last = runs[-1]
            sys.stderr.write(f"{last.name}: largest |scale·q·k| {max(last.maxima):.4g}, loss {last.smoothed()[-1]:.3f}\n")
    figures = table(runs)
    print(figures)
    (options.out / "table.md").write_text(figures + "\n", "utf-8")
    draw(runs, options.out / "curves.svg")
    if options.write:
        DOCUMENT.with_name("watch-diverging.svg").write_bytes((options.out / "curves.svg").read_bytes())
        before, after = around_markers(DOCUMENT)
        DOCUMENT.write_text(f"{before}\n{figures}\n\n{after}", "utf-8")
    over = [run.name for run in runs if run.clip and not max(run.maxima) < ALLOWED * THRESHOLD]
    for name in over:
        sys.stderr.write(f"{name}: a step was measured at {ALLOWED:g} times the threshold or more\n")
    return 1 if over else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser("python examples/diverging.py", description="A run that diverges, and one that does not.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the records, the table and the curves go")
    parser.add_argument(
        "--clip", action=argparse.BooleanOptionalAction, help="only the runs with QKClip, or only those without (default: both)"
    )
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="training steps (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, metavar="N", help="(default: 0 1 2)")
    parser.add_argument("--batch", type=int, default=BATCH, metavar="N", help="texts in a batch (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=LEARNING_RATE, metavar="X", help="learning rate (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="put the table and the curves into docs")
    options = parser.parse_args(arguments)
    if min(options.steps, options.batch) < 1:
        parser.error(f"argument --steps, --batch: got {options.steps}, {options.batch}; expected numbers from 1")
    whole = (None, STEPS, SEEDS, BATCH, LEARNING_RATE)
    if options.write and (options.clip, options.steps, tuple(options.seeds), options.batch, options.rate) != whole:
        parser.error("--write wants the whole: no other option but --out")
    return options


def around_markers(document: Path) -> tuple[str, str]:
    """What stands before and behind the place of the table."""
    parts = re.fullmatch(
        rf"(.*<!-- {MARKER}: begin[^>]*-->\n).*(<!-- {MARKER}: end -->.*)", document.read_text("utf-8"), re.DOTALL
    )
    if parts is None:
        raise SystemExit(f"{document}: the comments '{MARKER}: begin' and '{MARKER}: end' are not there")
    return parts[1], parts[2]


if __name__ == "__main__":
    sys.exit(main())
