"""A callback for the Trainer of Hugging Face transformers."""

import functools
import inspect
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch

from attemper.errors import MissingExtraError, UnsupportedError
from attemper.monitor.callbacks.session import HasSession, Session
from attemper.monitor.records import Severity

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise MissingExtraError("transformers", "hf,accelerate", "use the callback for its Trainer") from error

_FILE = "attemper.pt"  # in the folder of a checkpoint


class AttemperCallback(HasSession, TrainerCallback):
    """Watch the model that a Trainer trains.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[AttemperCallback(every=10, trackers="parquet:runs/a")])
        trainer.train()

    A step is an update of the weights with all its micro-batches, under the Trainer's own number of it: 1, 2, …. The first step
    of a training is logged, and each whose number `every` divides. Beside its record is its loss, as the Trainer adds it up on
    this process. Evaluations are not counted. The Trainer's logs, and what `report_to` names, get `attention/FIGURE`, the worst
    head of the model in the last record. The watch is removed when `train` ends, by an exception too.

    Args:
        clip: the threshold of a `QKClip`, which edits the weights right after each step of the optimiser; None: they are left
            alone.
        stop_on: "error", "warning" or "info": stop training at the first alarm that is as severe or more. None: go on.
        watching: the arguments of `attemper.watch` but the model: every, layers, mode, rows, trackers, on_alarm, ….

    Attributes:
        watch: of the training that runs, or that ran last. clip: the same of its QKClip.
        alarm: which stopped the training; None if none did.

    Raises:
        ArgumentError: clip or stop_on is unusable; when a training begins, what `watch` and `QKClip` raise.
        TypeError: `watch` has no argument of that name.
        UnsupportedError: when a training begins in one process on several GPUs.
    """

    def __init__(self, *, clip: float | None = None, stop_on: Severity | None = None, **watching: Any) -> None:
        self._session = Session(clip, stop_on, watching)
        self._joined: weakref.WeakSet[Trainer] = weakref.WeakSet()
        self._resumed: Path | None = None
        self._unlogged: dict[str, float] = {}

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The Trainer has been made."""
        self._join()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Watch the model: the one inside of what accelerate and torch wrap around it; the wrapper where that is FSDP."""
        if args.n_gpu > 1:
            raise UnsupportedError(
                f"args: one process on {args.n_gpu} GPUs (DataParallel) runs copies of the model, which cannot be watched; "
                "start one process a GPU (torchrun, accelerate launch), or name one GPU in CUDA_VISIBLE_DEVICES"
            )
        self._join()
        self._unlogged = {}
        self._session.begin(model, self._saved(args, state))

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Clip, and end the step. The optimiser has stepped before this event; `global_step` is counted up after it."""
        self._unlogged = self._session.step(state.global_step + 1) or self._unlogged
        if self._session.alarm is not None:
            control.should_training_stop = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave what a training that goes on needs in the folder of the checkpoint."""
        folder = _checkpoint(args, state)
        if state.is_world_process_zero and folder.is_dir():
            torch.save(self._session.state(), folder / _FILE)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop watching."""
        self.remove()

    def remove(self) -> None:
        """Stop watching before the training ends, or where what runs it is not a Trainer and fails."""
        self._session.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _join(self) -> None:
        """Have the Trainer tell what it tells no callback: each loss, its logs before others have written them, and its end.

        It gives callbacks no reference to itself, calls those that `report_to` names before others, and none after an exception.
        So three methods, which it lets subclasses override, are extended on the one Trainer that is calling.
        """
        trainer = _calling(self)
        if trainer is None or trainer in self._joined:
            return
        self._joined.add(trainer)
        training_step, log, train = trainer.training_step, trainer.log, trainer.train

        @functools.wraps(training_step)
        def with_loss(*args: Any, **kwargs: Any) -> Any:
            loss = training_step(*args, **kwargs)
            self._session.add_loss(loss)
            return loss

        @functools.wraps(log)
        def with_figures(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs:  # not in those of an evaluation, which are its result too
                logs |= self._unlogged
                self._unlogged = {}
            log(logs, *args, **kwargs)

        @functools.wraps(train)
        def with_end(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            named = isinstance(resume_from_checkpoint, str | os.PathLike)
            self._resumed = Path(resume_from_checkpoint) if named else None
            try:
                return train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self.remove()

        extended: dict[str, Callable[..., Any]] = {"training_step": with_loss, "log": with_figures, "train": with_end}
        vars(trainer).update(extended)

    def _saved(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any] | None:
        if state.global_step == 0:
            return None
        file = (self._resumed or _checkpoint(args, state)) / _FILE
        return torch.load(file, weights_only=True) if file.exists() else None


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def _calling(callback: TrainerCallback) -> Trainer | None:
    """The Trainer whose event this is."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and any(each is callback for each in found.callback_handler.callbacks):
            return found
        frame = frame.f_back
    return None
