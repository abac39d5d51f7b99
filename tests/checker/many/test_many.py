"""`check --all`: each model in a process of its own, and one table whatever becomes of them."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from attemper.checker.many import ManyReport, ModelResult, check_many, find_models, plain_text, process
from attemper.errors import ArgumentError, LoadError
from tests import checkpoints

REPORT: dict[str, Any] = {
    "counts": {"error": 1, "warning": 2, "info": 0},
    "totals": {"calls": 3, "max_logit": 12.5, "headroom_float16": "inf"},
    "findings": [{"code": "ATT101"}, {"code": "ATT202"}],
}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """In place of the real command one that does what the model's name says."""
    script = tmp_path / "command.py"
    script.write_text(
        "import json, os, pathlib, signal, sys, time\n"
        "*options, dashes, model = sys.argv[1:]\n"
        "assert dashes == '--', sys.argv\n"
        "kind, _, rest = model.partition(' ')\n"
        "if kind == 'sleep':\n"
        "    pathlib.Path(rest).write_text(str(os.getpid()))\n"
        "    time.sleep(60)\n"
        "if kind == 'killed': os.kill(os.getpid(), signal.SIGKILL)\n"
        "if kind == 'crash': sys.exit('Segmentation\\nor so')\n"
        "if kind == 'refused': print('attemper: no such folder', file=sys.stderr); sys.exit(2)\n"
        "if kind == 'garbled': print('{'); sys.exit(0)\n"
        f"report = {REPORT!r} | {{'options': options, 'threads': os.environ['OMP_NUM_THREADS'], 'began': time.time()}}\n"
        "time.sleep(0.3)\n"
        "print(json.dumps(report | {'ended': time.time()}))\n"
        "sys.exit(int(rest or 0))\n"
    )
    shell = tmp_path / "python"
    shell.write_text(f'#!/bin/sh\nshift 3\nexec "{sys.executable}" -S "{script}" "$@"\n')
    shell.chmod(0o755)
    monkeypatch.setattr(process.sys, "executable", str(shell))
    return tmp_path


class TestFinding:
    def test_folders_with_a_configuration_and_weights(self, tmp_path: Path) -> None:
        for name in ("b", "a/deep", "a"):
            checkpoints.config_only(tmp_path / name)
            (tmp_path / name / "model.safetensors").touch()
        checkpoints.config_only(tmp_path / "no-weights")
        (tmp_path / "link").symlink_to(tmp_path / "a")
        assert find_models(tmp_path) == tuple(str(tmp_path / name) for name in ("a", "a/deep", "b"))

    def test_a_list(self, tmp_path: Path) -> None:
        (tmp_path / "list").write_text("# mine\norg/name\n\n  package.module:factory  \norg/name\n")
        assert find_models(tmp_path / "list") == ("org/name", "package.module:factory")

    @pytest.mark.parametrize(("content", "words"), [(b"", "names no model"), (b"\xff\xfe", "is not UTF-8 text")])
    def test_a_list_that_is_none(self, tmp_path: Path, content: bytes, words: str) -> None:
        (tmp_path / "list").write_bytes(content)
        with pytest.raises(LoadError, match=words):
            find_models(tmp_path / "list")

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(LoadError, match="nowhere: no such file or folder"):
            find_models(tmp_path / "nowhere")
        with pytest.raises(LoadError, match="names no model"):
            find_models(tmp_path)


class TestRunning:
    def test_none_stops_the_others(self, command: Path) -> None:
        done: list[str] = []
        models = ["fine", "killed", "crash", "refused", "garbled", "fine 1", "fine 3", "zero\0byte"]
        report = check_many(models, ["--fail-on=error"], jobs=3, done=lambda result: done.append(result.model))
        assert [result.model for result in report.results] == models
        assert sorted(done) == sorted(models)
        assert [result.exit for result in report.results] == [0, 2, 2, 2, 2, 1, 3, 2]
        errors = [result.error for result in report.results]
        assert errors[:5] == [
            "",
            "its process was ended by SIGKILL; out of memory?",
            "or so",
            "no such folder",
            "exit code 0 and no report",
        ]
        assert "embedded null byte" in errors[-1]
        assert report.results[0].report is not None
        assert report.results[0].report["options"] == ["--output-format", "json", "--fail-on=error"]

    def test_one_that_takes_too_long_is_ended(self, command: Path) -> None:
        begin = time.monotonic()
        (result,) = check_many([f"sleep {command / 'pid'}"], timeout=2.0).results
        assert time.monotonic() - begin < 20
        assert (result.exit, result.error) == (2, "no answer within 2 seconds; ended")
        with pytest.raises(ProcessLookupError, match="No such process"):
            os.kill(int((command / "pid").read_text()), 0)

    def test_as_many_at_a_time_as_asked_for(self, command: Path) -> None:
        def most(jobs: int) -> int:
            reports = [result.report or {} for result in check_many([f"fine {0}"] * 4, jobs=jobs).results]
            return max(sum(each["began"] <= other["began"] < each["ended"] for each in reports) for other in reports)

        assert most(1) == 1
        assert most(4) >= 2

    def test_an_interruption_ends_them(self, command: Path) -> None:
        def interrupt(_result: ModelResult) -> None:
            deadline = time.monotonic() + 20
            while not (command / "pid").exists() or not (command / "pid").read_text():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            raise KeyboardInterrupt

        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            check_many(["fine", f"sleep {command / 'pid'}", "fine"], jobs=2, done=interrupt)
        assert time.monotonic() - begin < 30
        with pytest.raises(ProcessLookupError, match="No such process"):
            os.kill(int((command / "pid").read_text()), 0)

    @pytest.mark.parametrize(("options", "words"), [({"jobs": 0}, "jobs: got 0"), ({"timeout": 0.0}, "timeout: got 0")])
    def test_arguments(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(ArgumentError, match=words):
            check_many(["x"], **options)


class TestReport:
    @pytest.mark.parametrize(
        ("codes", "worst"), [((0, 0), 0), ((0, 1), 1), ((0, 3), 0), ((3, 3), 3), ((1, 2), 2), ((0, 2, 3), 2)]
    )
    def test_the_exit_code_is_the_worst(self, codes: tuple[int, ...], worst: int) -> None:
        assert ManyReport(tuple(ModelResult("m", code, 1.0) for code in codes)).exit_code() == worst

    def test_the_table(self) -> None:
        by_weights = REPORT | {"totals": {"calls": 0, "max_logit": None, "headroom_float16": "inf"}, "weights": [{}]}
        results = (
            ModelResult("a\x1b[2J", 1, 1.0, REPORT),
            ModelResult("b", 2, 1.0, error="gone\x1b"),
            ModelResult("c", 1, 1.0, by_weights),
        )
        text = plain_text(ManyReport(results))
        assert "\x1b" not in text
        lines = [line.split() for line in text.splitlines()]
        assert ["a\\x1b[2J", "3", "1", "2", "ATT101", "12.5", "inf×", "1"] in lines
        assert ["b", *["—"] * 6, "2"] in lines
        assert ["c", "—", "1", "2", "ATT101", "—", "—", "1"] in lines
        assert "  b: gone\\x1b" in text
        assert text.endswith("3 models: 0 clean, 2 with findings, 1 could not be checked, 0 without attention.")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own, about files and sockets that it leaves to the end of the process
def test_on_a_ray_cluster() -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'attemper[ray]'")
    models = ["attemper.examples:scaled", "attemper.examples:unscaled", "nowhere:at_all"]
    done: list[str] = []
    report = check_many(models, ["--max-tokens=64"], ray="local", timeout=200.0, done=lambda result: done.append(result.model))
    assert [result.exit for result in report.results] == [0, 1, 2]
    assert sorted(done) == sorted(models)
    assert report.results[1].report is not None
    assert report.results[1].report["findings"][0]["code"] == "ATT101"
    assert "'nowhere:at_all' could not be imported" in report.results[2].error


def test_without_ray_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ImportError, match=r"ray is needed to check models on a Ray cluster; install it with: pip install 'attemper\[ray\]'"
    ):
        check_many(["x"], ray="local")


def test_a_cluster_that_does_not_answer() -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'attemper[ray]'")
    with pytest.raises(LoadError, match=r"ray: no cluster could be reached at '127\.0\.0\.1:1': ConnectionRefusedError"):
        check_many(["x"], ray="127.0.0.1:1")
