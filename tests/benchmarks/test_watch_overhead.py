"""The price of watching: every part runs, and what misses a bar is told."""

import re
import sys
from pathlib import Path

import pytest
import transformers

from attemper.kernels import cpu
from benchmarks.watch_overhead import QUICK, Bars, Watched, main
from tests.running import run

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the kernel is not built here (CI insists on it)")

DOCUMENT = (
    "before\n<!-- benchmarks.watch_overhead: begin, by a command -->\nold\n<!-- benchmarks.watch_overhead: end -->\nafter\n"
)


@pytest.mark.slow
def test_every_part_runs_and_is_written_between_the_markers(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text(DOCUMENT, "utf-8")
    printed = run(sys.executable, "-m", "benchmarks.watch_overhead", "--quick", "--threads", "1", "--write", str(document))
    assert printed.splitlines()[-1].startswith("4 of 4 bars held, 0 missed, in ")
    written = document.read_text("utf-8")
    assert written.startswith("before\n<!-- benchmarks.watch_overhead: begin, by a command -->\n")
    assert written.endswith("<!-- benchmarks.watch_overhead: end -->\nafter\n")
    assert "\nold\n" not in written
    assert "`python -m benchmarks.watch_overhead --threads 1 --quick`, 20" in written
    assert f"transformers {transformers.__version__}." in written
    for case in QUICK.cases:
        assert f"### A training step, batch {case.batch}, {case.tokens} tokens" in written
    for name in ('watch, mode "use"', 'watch, mode "observe", rows=8', 'watch, mode "observe", rows=1', "materialised weights"):
        assert len(re.findall(rf"^\| {re.escape(name)}", written, re.MULTILINE)) == 2, name


def test_a_missed_bar_is_listed_and_makes_the_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--threads", "1"], Bars(use=0.0, observe=1e9)) == 1
    *_, first, second, summary = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r'missed: 2 × 32, watch, mode "use": step / step with SDPA: \S+, bar ≤ 0', first)
    assert second.startswith('missed: 1 × 67, watch, mode "use"')
    assert summary.startswith("2 of 4 bars held, 2 missed, in ")


def test_a_watch_that_does_not_measure_everything_is_no_result() -> None:
    step = Watched(QUICK.size, QUICK.cases[0])
    step()
    step.layers += 1
    with pytest.raises(RuntimeError, match=r"last step 0 of 1, rows .* \[\{64\}, \{64\}\] instead of 64 in 3 layers"):
        step.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--threads", "0"], "argument --threads: got 0; expected a number from 1"),
        (["--write", "nowhere.md"], "--write: nowhere.md is not a file"),
        (["--quick", "--write"], "--write without FILE wants the whole run: no --quick"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err
