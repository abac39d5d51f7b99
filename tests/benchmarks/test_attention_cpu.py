import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attemper.kernels import cpu
from benchmarks.attention_cpu.__main__ import main
from benchmarks.attention_cpu.bars import SMOKE, ZEN5, Bars, Speed, bars_for
from benchmarks.attention_cpu.cases import SHAPES, Setting
from benchmarks.machine import Machine
from benchmarks.pairs import Pace, compare
from benchmarks.report import Check, around_markers
from tests.running import ROOT, run

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the kernel is not built here (CI insists on it)")

DOCUMENT = (
    "before\n<!-- benchmarks.attention_cpu: begin, written by a command -->\nold\n<!-- benchmarks.attention_cpu: end -->\nafter\n"
)

NOTHING = Speed(0, 0, 0, 0, 0, 0)


@pytest.mark.slow
def test_every_part_runs_and_is_written_between_the_markers(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text(DOCUMENT, "utf-8")
    printed = run(sys.executable, "-m", "benchmarks.attention_cpu", "--quick", "--threads", "1", "--write", str(document))
    assert " bars held, 0 missed, in " in printed.splitlines()[-1]
    written = document.read_text("utf-8")
    assert written.startswith("before\n<!-- benchmarks.attention_cpu: begin, written by a command -->\n")
    assert written.endswith("<!-- benchmarks.attention_cpu: end -->\nafter\n")
    assert "\nold\n" not in written
    for title in (
        "Speed on 1 thread",
        "Variants on 1 thread",
        "A tiny call",
        "Peers on 1 thread",
        "Memory",
        "Largest error",
        "Bars",
    ):
        assert f"\n### {title}" in written
    assert "| 1, 2, 1, 131, 64 | float16 | full |" in written
    assert "`python -m benchmarks.attention_cpu --threads 1 --quick`, 20" in written


def test_a_missed_bar_is_listed_and_makes_the_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--threads", "1", "--sections", "tiny"]
    assert main(arguments, replace(SMOKE, tiny=0.0)) == 1
    *_, missed, summary = capsys.readouterr().out.splitlines()
    assert missed.startswith("missed: tiny call, 1 thread: ours / SDPA: ")
    assert missed.endswith(", bar ≤ 0")
    assert summary.startswith("0 of 1 bars held, 1 missed, in ")
    assert main(arguments, SMOKE) == 0


@pytest.mark.parametrize(
    ("section", "bars", "missed"),
    [
        (
            "speed",
            replace(SMOKE, speed={"float32": NOTHING._replace(decode=1e9)}),
            "(1, 2, 1, 131, 64) float32 full, 1 thread: SDPA / ours, forward",
        ),
        (
            "speed",
            replace(SMOKE, speed={"float32": NOTHING._replace(share=1e9)}),
            "(1, 2, 257, 257, 64) float32 full, 1 thread: share of peak",
        ),
        ("variants", replace(SMOKE, kept=1e9), "(1, 2, 257, 257, 64) learned scale, 1 thread: share of speed, with backward"),
        ("memory", replace(SMOKE, backward_mib=-1e9), "memory, heads 1, float32, 1 thread, MiB: backward, a thread"),
        ("errors", replace(SMOKE, error=0.0), "(67, 67, 32) float32 causal: error, ours / SDPA"),
    ],
)
def test_each_section_holds_its_bars(section: str, bars: Bars, missed: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--threads", "1", "--sections", section, "--dtypes", "float32"]
    assert main(arguments, bars) == 1
    assert any(line.startswith(f"missed: {missed}: ") for line in capsys.readouterr().out.splitlines())


def test_without_a_compiler_the_shares_are_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    assert main(["--quick", "--threads", "1", "--sections", "speed", "--dtypes", "float32", "--shapes", "24x64"]) == 0
    printed = capsys.readouterr().out
    assert "shares of it are left out: no C++ compiler was found." in printed
    assert not re.search(r"^ *2, 3, 24, 24, 64 .*%.*%", printed, re.MULTILINE)  # the only share is the cost of the statistics


def machine(**what: Any) -> Machine:
    flags = frozenset({"avx512f", "avx512_bf16"})
    return replace(Machine("a processor", "AuthenticAMD", 26, flags, 2, "avx512"), **what)


def test_speeds_are_held_where_they_were_set() -> None:
    assert bars_for(machine()).speed == ZEN5
    assert bars_for(machine()).parity == 0.0
    for other in (machine(family=25), machine(instruction_set="avx2"), machine(flags=frozenset({"avx512f"}))):
        assert not bars_for(other).speed
        assert bars_for(other).parity == 0.0
    intel = bars_for(machine(vendor="GenuineIntel", family=6))
    assert not intel.speed
    assert intel.parity == 1.0


def test_each_shape_has_its_own_bars() -> None:
    bars = bars_for(machine())
    found = {}
    for shape in SHAPES:
        setting = Setting(shape, "bfloat16", causal=False, threads=1)
        speed = bars.speed_of(setting)
        found[shape.name] = (None if speed is None else speed.forward(shape, causal=False), bars.cost_of(shape))
    assert found == {
        "2048x128": (4.0, 0.08),
        "4096x64": (4.0, 0.08),
        "128x64": (4.0, 0.08),
        "1x4096x128": (8.0, 0.08),
        "2048x80": (4.0, 0.08),
        "2048x32": (None, 0.10),
    }
    assert ZEN5["float16"].forward(SHAPES[0], causal=True) == 3.4


def test_a_figure_that_is_not_a_number_holds_no_bar() -> None:
    assert Check("x", 1.0, 1.0, at_most=True).held
    assert Check("x", 1.0, 1.0, at_most=False).held
    assert not Check("x", 1.1, 1.0, at_most=True).held
    assert not Check("x", 0.9, 1.0, at_most=False).held
    assert not Check("x", float("nan"), 1.0, at_most=True).held
    assert not Check("x", float("nan"), 1.0, at_most=False).held


def test_functions_take_turns() -> None:
    calls: list[str] = []
    timed = compare((lambda: calls.append("a"), lambda: calls.append("b")), Pace(0.0, 3, 3, 0.0))
    assert len(timed.rounds) == 3
    assert calls[-6:] == ["a", "b"] * 3
    assert timed.ratio(0, 0) == 1.0
    assert timed.seconds(1) > 0.0


def test_a_document_without_markers_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "bare.md"
    document.write_text(DOCUMENT.replace(": end", ""), "utf-8")
    with pytest.raises(
        SystemExit, match=r"bare\.md: expected the comments 'benchmarks\.attention_cpu: begin' and .*found 0 pairs"
    ):
        main(["--quick", "--write", str(document)])
    assert capsys.readouterr().out == ""


def test_the_document_has_markers() -> None:
    before, after = around_markers(ROOT / "docs" / "performance.md", "benchmarks.attention_cpu")
    assert before.startswith("# Performance\n")
    assert after.startswith("<!-- benchmarks.attention_cpu: end -->\n")


def test_the_document_names_the_bars_that_its_own_tables_miss() -> None:
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    over = set()
    for threads, table in re.findall(r"^### Speed on (\d+ threads?)\n\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL):
        for line in table.splitlines()[2:]:
            shape, dtype, mask, *figures = [cell.strip() for cell in line.strip("|").split("|")]
            bar = 8 if int(shape.split(", ")[-1]) >= 64 else 10
            if float(figures[4].rstrip("%")) > bar:
                over.add(f"({shape}) {dtype} {mask}, {threads}")
    named = set(re.findall(r"^- (\(.+\) .+, \d+ threads?): cost of statistics: ", text, re.MULTILINE))
    assert over == named
    for missed, lines in re.findall(r"\d+ bars, (\d+) missed:\n\n+((?:- .*\n)*)", text):
        assert lines.count("\n") == int(missed)


def test_the_document_is_written_by_whole_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--quick", "--write"])
    assert "--write without FILE wants the whole run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--sections", "variants", "--shapes", "128x64"],
            "got 128x64, of which variants measures none; it has 2048x128, 4096x64",
        ),
        (["--sections", "tiny", "peers", "--shapes", "2048x80"], "got 2048x80, of which peers measures none"),
        (["--shapes", "257x64"], "got 257x64, of which speed measures none"),
        (["--quick", "--shapes", "2048x80"], "got 2048x80, of which speed measures none; it has 257x64, 24x64"),
    ],
)
def test_a_section_that_would_measure_nothing_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert told in capsys.readouterr().err
