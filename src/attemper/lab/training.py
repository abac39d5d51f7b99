"""Trains one run, from its configuration to its result; what it is told of progress, it tells; where it stood, it goes on."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import LoadError, in_one_line
from attemper.lab.arithmetic import LossScale, computing
from attemper.lab.config import RunConfig
from attemper.lab.identity import run_id
from attemper.lab.models import attention_layers, build, logits_times
from attemper.lab.optimisers import Optimisers
from attemper.lab.room import memory_told
from attemper.lab.store.files import RunFiles
from attemper.lab.store.recorder import Recorder
from attemper.lab.store.results import Evaluation, RunResult
from attemper.lab.store.state import State, load, pack_optimisers, save, unpack_optimisers
from attemper.lab.tasks import IGNORED, Batch, Task, load_task
from attemper.memory import PeakMemory
from attemper.monitor import QKClip, Watch, watch
from attemper.nn.heads import lay_out

SAVE_EVERY = 20.0  # seconds from one checkpoint to the next

Progress = Callable[[int, float], object]  # (steps done, loss)


def train(config: RunConfig, folder: Path, progress: Progress = lambda _step, _loss: None) -> RunResult:
    """Train the run, or go on with it, or read what it came to.

    Args:
        config: the run.
        folder: of the sweep; the run's own is below it, under its name.
        progress: told after each step.

    Raises:
        ArgumentError: the task's model does not have these dials, there is no memory for it, or another process trains this run.
        LoadError: data or checkpoint cannot be read.
    """
    files = RunFiles(folder, run_id(config))
    found = files.result()
    if found is not None:
        return found
    with files.opened(config), threads(config.threads), memory_told():
        found = files.result()  # another process may have ended it before this one had the lock
        return Trial(config, files).run(progress) if found is None else found


@torch.no_grad()
def rehearse(config: RunConfig, task: Task) -> None:
    """Build the model and measure one example of each length that is asked for, so that nothing impossible shows after hours.

    Raises:
        ArgumentError: the task's model does not have these dials, or cannot be measured at such a length.
    """
    with torch.random.fork_rng(devices=[]):
        model = build(config, task)

    for length in dict.fromkeys((None, *config.after.lengths)):
        batch = task.validation(length)[0]
        with computing(config.precision.arithmetic):
            model(**{name: tensor[:1] for name, tensor in batch.inputs.items()})


class Trial:
    """One training: model, optimisers, order of the examples, curves."""

    def __init__(self, config: RunConfig, files: RunFiles) -> None:
        self.config, self.files = config, files
        self.task: Task = load_task(config.task)
        torch.manual_seed(config.seed)
        self.model: nn.Module = build(config, self.task)
        # Its own generator: every rule, width and arithmetic sees the same examples in the same order.
        self.order = torch.Generator().manual_seed(config.seed)
        self.optimisers = Optimisers(self.model, config)
        self.loss_scale = LossScale(config.precision)
        self.layers = attention_layers(self.model)
        dials = config.model
        self.recorder = Recorder(tuple(self.layers), lay_out(dials.width, dials.heads, None, dials.head_dim).order)
        self.evaluations: list[Evaluation] = []
        self.step, self.seconds = 0, 0.0
        self.stepping, self.peak = 0.0, 0.0  # seconds within steps, and the largest resident size, of all parts of the training

    def run(self, progress: Progress) -> RunResult:
        """To the end, from the checkpoint if there is one."""
        if self.files.checkpoint.exists():
            state = load(self.files.checkpoint)
            try:
                self.restore(state)
            except (KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
                given = f"{self.files.checkpoint}: {type(error).__name__}: {in_one_line(error)}"
                raise LoadError(f"{given}; expected the checkpoint of this run; delete it to train the run anew") from error
        threshold = self.config.optimiser.qk_clip
        began, saved, before = time.perf_counter(), time.perf_counter(), self.seconds
        diverged = False
        # The examples' attention is PyTorch's, bit for bit: there the watch looks on, elsewhere its kernel is the model's own.
        mode = "observe" if self.config.model.attention == "example" else "use"
        with PeakMemory() as memory, watch(self.model, every=self.config.log_every, mode=mode, history=1) as watching:
            watching.load_state_dict(watching.state_dict() | {"next": self.step})
            clip = None if threshold is None else QKClip(self.model, threshold)
            while self.step < self.config.steps:
                started = time.perf_counter()
                loss = self.train_step(watching, clip)
                self.stepping += time.perf_counter() - started
                self.step += 1
                progress(self.step, loss)
                diverged = not math.isfinite(loss)
                due = self.step % self.config.evaluate_every == 0 or self.step == self.config.steps
                if diverged:
                    break
                if due:
                    self.evaluations.append(self.evaluate("validation", self.step, self.task.validation()))
                    # The last step may leave weights that no further training loss would tell of.
                    diverged = self.step == self.config.steps and not math.isfinite(self.evaluations[-1].loss)
                now = time.perf_counter()
                if now - saved > SAVE_EVERY and self.step < self.config.steps:
                    self.seconds, self.peak = before + now - began, larger(self.peak, memory.so_far())
                    save(self.files.checkpoint, self.state())
                    saved = now
        self.seconds, self.peak = before + time.perf_counter() - began, larger(self.peak, memory.mib)
        if not diverged:
            self.measure_after()
        scored = self.config.batch * self.task.batch(1, torch.Generator().manual_seed(0)).targets.numel()
        result = RunResult(
            id=self.files.id,
            config=self.config,
            status="diverged" if diverged else "done",
            ended=self.step - 1,
            evaluations=tuple(self.evaluations),
            seconds=self.seconds,
            tokens_per_second=scored * self.step / self.stepping,
            peak_mib=self.peak,
            machine=f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {in_words(self.config.threads)}",
            versions={"attemper": version("attemper"), "torch": torch.__version__, "python": platform.python_version()},
            data=self.task.data,
            folder=self.files.folder,
        )
        self.files.finish(result, self.recorder, self.model)
        return result

    def train_step(self, watching: Watch, clip: QKClip | None) -> float:
        """One step; its loss."""
        rate = self.optimisers.set_rate(self.step)
        factor = self.loss_scale.factor
        loss = self.loss(self.task.batch(self.config.batch, self.order))
        self.optimisers.zero_grad()
        (loss * factor if factor != 1.0 else loss).backward()
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        may = self.loss_scale.take_off([parameter.grad for parameter in parameters if parameter.grad is not None])
        into = self.gradients() if self.step % self.config.log_every == 0 else None
        most = self.config.optimiser.gradient_clip
        norm = nn.utils.clip_grad_norm_(parameters, math.inf if most is None else most)
        if may:
            for optimiser in self.optimisers.all:
                optimiser.step()
        if clip is not None:
            clip.step()
        value = loss.item()
        record = watching.step()
        if record is not None and into is not None:
            self.recorder.log(record, *into)
        self.recorder.step(value, norm.item(), rate, factor)
        return value

    def loss(self, batch: Batch) -> Tensor:
        """Mean of −ln p(right class) over the scored positions."""
        with computing(self.config.precision.arithmetic):
            logits = self.model(**batch.inputs)
        return F.cross_entropy(logits.float().flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORED)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Frobenius norms of the gradients in the weights that make q and k, each [layers]."""
        weights = [(layer.q_proj.weight.grad, layer.k_proj.weight.grad) for layer in self.layers.values()]
        norms = [[math.nan if each is None else torch.linalg.vector_norm(each.double()) for each in pair] for pair in weights]
        q, k = torch.tensor(norms, dtype=torch.float64).reshape(-1, 2).unbind(1)
        return q, k

    @torch.no_grad()
    def evaluate(self, kind: str, at: float, batches: Sequence[Batch]) -> Evaluation:
        """Loss and accuracy over fixed examples."""
        self.model.eval()
        total, right, scored = 0.0, 0, 0
        for batch in batches:
            with computing(self.config.precision.arithmetic):
                logits = self.model(**batch.inputs).float()
            total += F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum").item()
            right += int((logits.argmax(-1) == batch.targets).sum())
            scored += int((batch.targets != IGNORED).sum())
        self.model.train()
        return Evaluation(kind, at, total / scored, right / scored)

    def measure_after(self) -> None:
        """What the configuration wants of the trained model."""
        for factor in self.config.after.logit_factors:
            with logits_times(self.model, factor):
                self.evaluations.append(self.evaluate("logit_factor", factor, self.task.validation()))
        for length in self.config.after.lengths:
            self.evaluations.append(self.evaluate("length", length, self.task.validation(length)))

    def state(self) -> State:
        """Everything that the next step depends on."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        packed, words = pack_optimisers(self.optimisers.state())
        tensors |= packed
        tensors |= {f"curve.{name}": tensor for name, tensor in self.recorder.tensors().items()}
        tensors |= {"generator.order": self.order.get_state(), "generator.torch": torch.get_rng_state()}
        rest = {
            "optimisers": words,
            "loss_scale": [self.loss_scale.factor, self.loss_scale.clean],
            "evaluations": [vars(evaluation) for evaluation in self.evaluations],
            "seconds": self.seconds,
            "stepping": self.stepping,
            "peak": self.peak,
            "data": self.task.data,
        }
        return State(self.step, tensors, rest)

    def restore(self, state: State) -> None:
        """The inverse of `state`.

        Raises:
            LoadError: the data is not what the run began with.
        """
        # A checkpoint of before data was kept in it has none.
        if state.words.get("data", self.task.data) != self.task.data:
            given = f"{self.files.checkpoint}: trained on {state.words['data']}, and now there is {self.task.data}"
            raise LoadError(f"{given}; expected the same data; put it back, or delete {self.files.folder}")
        self.step, self.seconds = state.step, state.words["seconds"]
        # A checkpoint of before these were kept in it tells neither: both are unknown then.
        self.stepping, self.peak = (state.words.get(name, math.nan) for name in ("stepping", "peak"))

        def under(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): tensor for name, tensor in state.tensors.items() if name.startswith(prefix)}

        self.model.load_state_dict(under("model."))
        self.optimisers.load(unpack_optimisers(state.tensors, state.words["optimisers"]))
        self.recorder.restore(under("curve."))
        self.order.set_state(state.tensors["generator.order"])
        torch.set_rng_state(state.tensors["generator.torch"])
        self.loss_scale.factor, self.loss_scale.clean = state.words["loss_scale"]
        self.evaluations = [Evaluation(**fields) for fields in state.words["evaluations"]]


def in_words(threads: int) -> str:
    """How many threads computed."""
    return "one thread" if threads == 1 else f"{threads} threads"


def larger(one: float, other: float) -> float:
    """The larger of two; NaN where one is."""
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


@contextmanager
def threads(number: int) -> Generator[None]:
    """Compute with so many threads while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
