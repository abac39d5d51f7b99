"""A run as text and on a terminal."""

import dataclasses
import io
import math
import re

import pytest
import torch
from rich.console import Console

from attemper.monitor import LayerRecord
from attemper.report.runs import RunView
from attemper.report.runs.layout import COLUMNS, arrow, sparkline, table
from attemper.report.runs.terminal import run_screen
from attemper.report.runs.text import run_text
from attemper.stats import HeadStats, RowStats
from tests.monitor.runs import INFO, alarm, run_of
from tests.monitor.series import layer, record
from tests.reports import HOSTILE


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([1, 2, 4, 8, 16, 32, 64, 128], "▁▂▃▄▅▆▇█"),
        ([128, 1], "█▁"),
        ([3, 3, 3], "▄▄▄"),
        ([1, math.nan, 128, math.inf], "▁ ██"),
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),  # with a zero there is no logarithm
        ([math.nan], " "),
        ([], ""),
    ],
)
def test_bars(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars


@pytest.mark.parametrize(
    ("values", "way"),
    [([1, 1, 1.05, 1.05], "→"), ([1, 1.3], "↗"), ([1, 4], "↑"), ([1, 0.8], "↘"), ([4, 1], "↓"), ([1], ""), ([math.nan] * 9, "")],
)
def test_arrows(values: list[float], way: str) -> None:
    assert arrow(values) == way


def view(layers: int = 3, name: str = "layers.{}.attention", **options: object) -> RunView:
    made = [
        record(
            step,
            *(layer((10.0 + number, 20.0 * 2**step * (number + 1)), name=name.format(number)) for number in range(layers)),
            loss=4.0,
        )
        for step in range(5)
    ]
    made[3] = dataclasses.replace(made[3], alarms=(alarm(3, **options), alarm(3, layer="layers.1.attention", severity="warning")))
    return RunView.of(run_of(made))


def screen(shown: RunView, width: int = 100, height: int = 24) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(run_screen(shown, height, "a footer"))
    return console.file.getvalue()  # pyrefly: ignore


def test_the_text_has_the_last_step() -> None:
    text = run_text(view())
    lines = text.splitlines()
    assert lines[0] == "run: Decoder, observe, every step, started 2025-06-15 15:06 UTC"
    assert lines[1] == "step: 4 (5 logged steps since 0), loss 4"
    (row,) = [line for line in lines if line.startswith("2 ")]
    assert row.split()[:5] == ["2", "960", "1", "▁▃▅▆█", "↑"]
    (marked,) = [line for line in lines if line.startswith("0 ")]
    assert marked.split()[1] == "✗"
    assert "  error ATT502 step 3: layers.0.attention: head 1 is large." in lines
    assert (
        lines[-1]
        == "3 attention layers, 6 heads, 5 logged steps: 1 error, 1 warning in 2 alarms. Largest |scale·q·k| of them all 960."
    )


def test_a_screen_shows_the_worst_layers_that_fit() -> None:
    shown = view(layers=30)
    lines = screen(shown, height=20).rstrip("\n").splitlines()
    assert len(lines) <= 20
    assert [line.split()[0] for line in lines if "▁" in line] == [str(number) for number in range(30 - 11, 30)]
    assert "and 19 more layers with smaller |s·q·k|" in lines
    assert lines[-1] == "a footer"
    assert max(map(len, screen(shown, width=40).splitlines())) <= 40
    assert table(shown)[2] == 0


def test_nothing_is_logged_yet() -> None:
    empty = RunView.of(run_of([]))
    assert "none logged yet" in run_text(empty)
    assert run_text(empty).endswith("No step has been logged yet.")
    assert "No step has been logged yet." in screen(empty)
    bare = RunView.of(run_of([record(3, loss=2.0)]))
    assert "0 attention layers" in run_text(bare)


def test_what_a_run_brings_along_reaches_no_terminal() -> None:
    name = HOSTILE.replace("{", "").replace("}", "")
    made = [record(0, layer((1.0,), name=name), **{name: 3.0})]
    made = [dataclasses.replace(each, alarms=(alarm(0, layer=name, message=name, code=name),)) for each in made]
    shown = RunView.of(run_of(made, info=dataclasses.replace(INFO, model=name, mode=name)))
    for text in (run_text(shown), screen(shown, width=1000)):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "\\x1b]0;title\\x07" in text
        assert "[bold red]" in text


def test_a_loss_that_became_nan_is_shown() -> None:
    made = [
        record(step, layer((1.0,)), loss=2.0 if step < 3 else math.nan, **({"lr": 0.5} if step < 2 else {})) for step in range(5)
    ]
    for shown in (RunView.of(run_of(made)), RunView.of(run_of(made[:2])).then(RunView.of(run_of(made[2:])), 9)):
        assert "step: 4 (5 logged steps since 0), loss nan, lr 0.5\n" in run_text(shown)
        assert "loss nan" in screen(shown)


def table_on(shown: RunView, width: int) -> list[list[str]]:
    """Heading and rows of the table, split where two spaces are."""
    lines = screen(shown, width).splitlines()
    assert max(map(len, lines)) <= width
    (top,) = [number for number, line in enumerate(lines) if line.startswith("layer ") and "max |s·q·k|" in line]
    return [re.split(r" {2,}", line.rstrip()) for line in lines[top : top + 1 + len(shown.layers)]]


@pytest.mark.parametrize(("width", "columns", "course"), [(120, 9, 24), (80, 9, 11), (60, 6, 18), (40, 4, 14), (20, 2, 0)])
def test_a_narrow_screen_shows_a_shorter_course_and_fewer_columns(width: int, columns: int, course: int) -> None:
    made = [
        record(step, *(layer((12345.0, 1.0 + step), name=f"h.{n}.attn") for n in range(3)), loss=0.12345) for step in range(30)
    ]
    shown = RunView.of(run_of(made))
    (_, *whole) = table_on(shown, 400)
    heading, *rows = table_on(shown, width)
    assert heading == list(COLUMNS[:columns])
    for row, all_cells in zip(rows, whole, strict=True):
        wanted = [cell[-course:] if number == 3 else cell for number, cell in enumerate(all_cells[:columns])]
        assert row == wanted


@pytest.mark.parametrize("width", [60, 80])
def test_a_long_name_leaves_room_for_numbers_and_keeps_its_end_and_mark(width: int) -> None:
    shown = RunView.of(
        run_of(
            [
                dataclasses.replace(
                    record(1, layer((12345.0,), name="x" * 500 + "漢字.attn")), alarms=(alarm(1, layer="x" * 500 + "漢字.attn"),)
                )
            ]
        )
    )
    _, row = table_on(shown, width)
    assert re.fullmatch(r"…x+漢字\.attn ✗", row[0])
    assert row[1:3] == ["12345", "0"]


@pytest.mark.parametrize("width", range(30, 110, 7))
def test_no_line_ends_within_a_number(width: int) -> None:
    made = [record(step, layer((12345.0, 1.0 + step)), **{f"scalar{n}": 0.12345 for n in range(9)}) for step in range(3)]
    for line in screen(RunView.of(run_of(made)), width).splitlines():
        for number in re.findall(r"0\.1\d*", line):
            assert number in ("0.12345", "0.103", "0.152"), line
        assert "…" not in line[1:] or line.rstrip().endswith(" …")


def test_a_layer_of_nan_alone_says_so_and_is_shown_first() -> None:
    nothing = RowStats.from_logits(torch.full((1, 2, 7, 11), math.nan, dtype=torch.float64))
    lost = LayerRecord("layers.9.attention", 0, HeadStats.from_rows(nothing), torch.full((2,), -math.inf, dtype=torch.float64))
    unseen = RowStats.from_logits(torch.zeros(1, 2, 7, 11, dtype=torch.float64), torch.zeros(7, 11, dtype=torch.bool))
    masked = dataclasses.replace(lost, layer="layers.8.attention", stats=HeadStats.from_rows(unseen))
    made = record(1, layer((4.0, 5.0)), masked, lost)
    shown = RunView.of(run_of([record(0, layer((4.0, 5.0))), made]))
    by_name = {cells[0]: cells for cells in table(shown)[1]}
    assert (by_name["9"][1], by_name["9"][5]) == ("nan", "nan")
    assert (by_name["8"][1], by_name["8"][5]) == ("−inf", "−inf")  # it had no key to look at
    assert [cells[0] for cells in table(shown, 1)[1]] == ["9"]
    assert run_text(shown).endswith("Largest |scale·q·k| of them all 5.")
    assert run_text(shown.only(["*.9.*"])).endswith("Largest |scale·q·k| of them all nan.")
