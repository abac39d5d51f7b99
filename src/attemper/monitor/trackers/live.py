"""A run on the terminal: a table that is drawn over at each step, or a line a step where there is no terminal."""

import math
import sys
from typing import TYPE_CHECKING, TextIO

from attemper.errors import MissingExtraError
from attemper.monitor.records import Alarm, LayerRecord, RunInfo, StepRecord, shown
from attemper.monitor.trackers.summary import SCALARS, text_of, worst_of

if TYPE_CHECKING:
    from rich.live import Live as RichLive
    from rich.table import Table

_ALARMS = 5  # the last ones, below the table


class Live:
    """Shows the last step: for each layer the worst head of each figure, and the last alarms.

    Args:
        most: layers in the table; of more, those with the largest |scale·q·k|.
        stream: where to; standard output by default.

    Raises:
        MissingExtraError: by `begin`, if it is a terminal and rich is not installed.
    """

    def __init__(self, *, most: int = 24, stream: TextIO | None = None) -> None:
        self.most = most
        self._stream = stream
        self._live: RichLive | None = None
        self._alarms: list[Alarm] = []

    def begin(self, run: RunInfo) -> None:
        """Take hold of the terminal, if there is one."""
        stream = self._stream or sys.stdout
        if not stream.isatty():
            return
        try:
            from rich.console import Console
            from rich.live import Live as RichLive
        except ImportError as error:
            raise MissingExtraError("rich", "cli", "show a live table") from error
        self._live = RichLive(console=Console(file=stream), auto_refresh=False)
        self._live.start()

    def log(self, record: StepRecord) -> None:
        """Draw the table, or write the line and the alarms below it."""
        self._alarms = [*self._alarms, *record.alarms][-_ALARMS:]
        if self._live is not None:
            self._live.update(self._table(record), refresh=True)
            return
        stream = self._stream or sys.stdout
        stream.write("\n".join([str(record), *(f"  {shown(text_of(alarm))}" for alarm in record.alarms)]) + "\n")
        stream.flush()

    def close(self) -> None:
        """Leave the last table where it is."""
        if self._live is not None:
            self._live.stop()

    def _table(self, record: StepRecord) -> "Table":
        from rich.table import Table
        from rich.text import Text

        title = f"step {record.step}" + "".join(f" · {shown(name)} {value:.6g}" for name, value in record.scalars.items())
        layers = self._chosen(record)
        left = len(record.layers) - len(layers)
        below = [f"and {left} more layers"] * bool(left) + [shown(text_of(alarm)) for alarm in self._alarms]
        table = Table(title=Text(title), caption=Text("\n".join(below)), box=None, caption_justify="left", title_justify="left")
        table.add_column("layer", overflow="fold")
        for figure in SCALARS:
            table.add_column(Text(figure.name.replace("_", " ")), justify="right")
        for layer in layers:
            numbers = [worst_of(layer.figure(figure.name), figure.worst) for figure in SCALARS]
            cells = ["–" if math.isnan(number) else f"{number:.4g}" for number in numbers]
            table.add_row(Text(shown(layer.name) or "model"), *map(Text, cells))
        return table

    def _chosen(self, record: StepRecord) -> list[LayerRecord]:
        ranked = sorted(record.layers, key=lambda layer: -float(layer.scaled_max.max()))
        kept = {layer.name for layer in ranked[: self.most]}
        return [layer for layer in record.layers if layer.name in kept]
