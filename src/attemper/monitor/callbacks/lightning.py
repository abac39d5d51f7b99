"""A callback for the Trainer of PyTorch Lightning, by either of its names: `pytorch_lightning` or `lightning.pytorch`."""

import contextlib
import functools
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from torch import nn

from attemper.errors import MissingExtraError, UnsupportedError
from attemper.monitor.callbacks.session import HasSession, Session
from attemper.monitor.records import Severity

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:

    def _callback() -> type:
        """The base class of that name which the program uses: the two packages take only their own."""
        names = ("pytorch_lightning", "lightning.pytorch")
        for name in names:
            if name in sys.modules:
                return sys.modules[name].Callback
        for name in names:
            if importlib.util.find_spec(name.partition(".")[0]) is not None:
                return importlib.import_module(name).Callback
        raise MissingExtraError("pytorch-lightning", "lightning", "use the callback for its Trainer")

    Callback = _callback()


class AttemperCallback(HasSession, Callback):
    """Watch the module that a Trainer trains.

        trainer = Trainer(max_epochs=3, callbacks=[AttemperCallback(every=10, trackers="parquet:runs/a")])
        trainer.fit(module, data)

    A step is a batch at whose end optimisers have stepped, with the micro-batches before it; steps are counted from 1, as
    `global_step` is where there is one optimiser. The first step of a training is logged, and each whose number `every` divides.
    Beside its record is its loss, as Lightning adds it up on this process. The whole of `training_step` is measured, whatever it
    calls; validation is not counted, nor is the check of it before training. In the steps that Lightning logs
    (`log_every_n_steps`) its loggers get `attention/FIGURE`, the worst head of the model. The watch is removed at the end, by an
    exception too.

    Args:
        clip: the threshold of a `QKClip`, which edits the weights right after each step; None: they are left alone.
        stop_on: "error", "warning" or "info": stop training at the first alarm that is as severe or more. None: go on.
        watching: the arguments of `attemper.watch` but the model: every, layers, mode, rows, trackers, on_alarm, ….

    Attributes:
        watch: of the training that runs, or that ran last. clip: the same of its QKClip.
        alarm: which stopped the training; None if none did.

    Raises:
        ArgumentError: clip or stop_on is unusable; when a training begins, what `watch` and `QKClip` raise.
        TypeError: `watch` has no argument of that name.
        UnsupportedError: when a training begins whose `training_step` is compiled as a whole.
    """

    def __init__(self, *, clip: float | None = None, stop_on: Severity | None = None, **watching: Any) -> None:
        self._session = Session(clip, stop_on, watching)
        self._saved: dict[str, Any] = {}
        self._steps = 0
        self._stepped = 0  # the Trainer's global_step at the last of them
        self._undo = contextlib.ExitStack()

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Watch the module; validation has been checked before this."""
        self._end()
        if hasattr(pl_module.training_step, "_torchdynamo_orig_callable"):
            # What is inside would be told twice: by its graph, and by the capture of the forward pass around it.
            raise UnsupportedError(
                f"pl_module: the training_step of {type(pl_module).__name__} is compiled as a whole, which cannot be watched; "
                "compile the part that attends: module.NAME.compile() in place of torch.compile(module)"
            )
        self._stepped = trainer.global_step
        self._steps = self._saved.get("steps", self._stepped)
        root = _step_of(pl_module)
        self._session.begin(root, self._saved)
        self._saved = {}

        @functools.wraps(pl_module.training_step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            return root(*args, **kwargs)

        self._undo.callback(_restore, pl_module, vars(pl_module).get("training_step"))
        pl_module.training_step = training_step

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step, if optimisers have stepped."""
        self._session.add_loss(outputs.get("loss") if isinstance(outputs, dict) else outputs)
        if trainer.global_step == self._stepped:
            return
        self._stepped = trainer.global_step
        self._steps += 1
        figures = self._session.step(self._steps)
        if figures:
            pl_module.log_dict(figures, on_step=True, on_epoch=False)
        if self._session.alarm is not None:
            trainer.should_stop = True

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Stop watching."""
        self._end()

    def on_exception(self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
        """Stop watching."""
        self._end()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the count of steps, what the alarms remember, and the counts of QKClip."""
        return {"steps": self._steps, **self._session.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was made, when the training begins."""
        self._saved = dict(state_dict)

    def _end(self) -> None:
        self._session.end()
        self._undo.close()


def _step_of(module: "LightningModule") -> nn.Module:
    """A module with the parts of this one, whose forward pass is its `training_step`.

    Lightning calls that method past the module's own forward pass, unless it wraps the module; and the method may call any part.
    """
    step = module.training_step

    class Step(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return step(*args, **kwargs)

    Step.__name__ = type(module).__name__  # as the run is called
    root = Step()
    vars(root)["_modules"] = module._modules
    return root


def _restore(module: nn.Module, method: Any) -> None:
    if method is None:
        del module.training_step
    else:
        module.training_step = method
