"""A run as TensorBoard shows it: scalars of each layer, pictures of all heads, alarms as text."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from attemper.errors import ArgumentError, MissingExtraError
from attemper.monitor.records import RunInfo, StepRecord
from attemper.monitor.trackers.heatmap import heatmap
from attemper.monitor.trackers.places import make_folder
from attemper.monitor.trackers.rows import fields_of
from attemper.monitor.trackers.summary import SCALARS, Summary, text_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Writes event files, which are complete up to the last logged step whenever the process is killed.

    Args:
        folder: of this run.
        images_every: steps that are logged from one set of pictures to the next; 0 for none.
        most: scalars of one step; see `Summary`.
        resume: go on with the run that is there. TensorBoard then hides what was logged from the first new step on.

    Raises:
        ArgumentError: by `begin`, if event files are there already and `resume` is not set, or nothing can be written there.
        MissingExtraError: by `begin`, without tensorboard.
    """

    def __init__(
        self, folder: "str | os.PathLike[str]", *, images_every: int = 50, most: int = 500, resume: bool = False
    ) -> None:
        if images_every < 0:
            raise ArgumentError("images_every", images_every, "a number of steps, or 0 for no pictures")
        self.folder, self.images_every, self.resume = Path(folder), images_every, resume
        self._summary = Summary(most, "TensorBoard")
        self._writer: SummaryWriter | None = None
        self._info: RunInfo | None = None
        self._last: int | None = None
        self._count = 0

    def begin(self, run: RunInfo) -> None:
        """Find out whether events can be written there."""
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("tensorboard", "tensorboard", "write runs for TensorBoard") from error
        make_folder("folder", self.folder)
        if not self.resume and any(self.folder.glob("*tfevents*")):
            given = f"{self.folder}, where event files are already"
            raise ArgumentError("folder", given, "a folder without them, or resume=True to go on with that run")
        self._info = run

    def log(self, record: StepRecord) -> None:
        """Write the scalars, every `images_every` times the pictures, and the alarms."""
        writer = self._writer_for(record)
        for tag, value in self._summary.scalars(record).items():
            writer.add_scalar(tag, value, record.step, walltime=record.time)
        if self.images_every and self._count % self.images_every == 0:
            self._draw(writer, record)
        for alarm in record.alarms:
            _add_text(writer, "attention/alarms", text_of(alarm), record)
        writer.flush()
        self._count, self._last = self._count + 1, record.step

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()

    def _writer_for(self, record: StepRecord) -> "SummaryWriter":
        """A new event file at the first step and wherever training goes back: TensorBoard then hides what came after."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None or (self._last is not None and record.step <= self._last):
            self.close()
            again = self._writer is not None or self.resume
            self._writer = SummaryWriter(str(self.folder), purge_step=record.step if again else None)
            if self._info is not None:
                _add_text(self._writer, "attention/run", json.dumps(fields_of(self._info)), record)
        return self._writer

    def _draw(self, writer: "SummaryWriter", record: StepRecord) -> None:
        legend = []
        for figure in SCALARS:
            drawn = heatmap(record, figure)
            if drawn is not None:
                writer.add_image(f"attention_heads/{figure.name}", drawn.image, record.step, walltime=record.time)
                legend.append(f"{figure.name}: {figure.words}, from {drawn.low:.4g} (dark) to {drawn.high:.4g} (bright)")
        if legend:
            rows = ", ".join(layer.name or "model" for layer in record.layers)
            _add_text(writer, "attention_heads/legend", "\n".join([*legend, f"rows, from the top: {rows}"]), record)


def _add_text(writer: "SummaryWriter", tag: str, text: str, record: StepRecord) -> None:
    # TensorBoard reads Markdown, in which an indented line is shown as it is.
    writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), record.step, walltime=record.time)
