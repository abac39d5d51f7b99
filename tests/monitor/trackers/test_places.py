"""A place where nothing can be written is told before training begins, as an error of attemper."""

import re
from pathlib import Path

import pytest

from attemper.errors import ArgumentError, LoadError
from attemper.monitor import JSONLines, MLflow, Parquet, TensorBoard
from attemper.monitor.runs import read_run
from tests.dashboards import environment
from tests.monitored import INFO

KINDS = pytest.mark.parametrize(("kind", "argument"), [(JSONLines, "path"), (Parquet, "folder"), (TensorBoard, "folder")])


@KINDS
@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("file/sub/run", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("x" * 300 + "/run", "File name too long"),
        ("a\0b", "null"),
    ],
    ids=["below a file", "long", "below a long one", "null"],
)
def test_a_place_that_cannot_be(kind: type, argument: str, place: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    given = re.escape(repr(str(tmp_path / place)))
    words = rf"{argument}: got {given}, where nothing can be written \(.*{reason}.*\); expected a place"
    with pytest.raises(ArgumentError, match=words):
        kind(tmp_path / place).begin(INFO)
    assert (tmp_path / "file").read_text() == "mine"


@KINDS
def test_a_folder_without_the_right_to_write(kind: type, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied", "the place")

    # Whoever runs the tests may have every right: the system's answer is put in its place.
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        ArgumentError, match=rf"{argument}: got '{tmp_path}.*', where nothing can be written \(Permission denied\)"
    ):
        kind(tmp_path if argument == "folder" else tmp_path / "run").begin(INFO)


def test_no_place_to_read_from(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"x{300}: File name too long; expected the file of JSONLines or the folder of Parquet"):
        read_run(tmp_path / ("x" * 300))


@pytest.mark.slow
def test_what_mlflow_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=r"uri: got 'bogus://x', where MLflow cannot log \(.*URI 'bogus://x'.*\); expected a"):
        MLflow("bogus://x").begin(INFO)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ArgumentError, match=r"uri: got 'file:.*/file/sub', where MLflow cannot log \(.*\); expected a server"):
        MLflow((tmp_path / "file" / "sub").as_uri()).begin(INFO)
    absent = "0" * 32
    with pytest.raises(ArgumentError, match=rf"run_id: got '{absent}' \(.*not found\); expected the id of a run"):
        MLflow((tmp_path / "store").as_uri(), run_id=absent).begin(INFO)
