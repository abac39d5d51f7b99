"""The folder of `Parquet` is read by any reader as it lies, its files are few, and what is not such a folder is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.dataset
import pyarrow.parquet
import pytest

from attemper.errors import ArgumentError, LoadError
from attemper.monitor.records import COLUMNS, FIGURES
from attemper.monitor.runs import read_run
from attemper.monitor.trackers import JSONLines, Parquet
from tests.monitored import INFO, expected, record_of, same


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attemper.monitor.trackers.parquet._ROWS", 40)  # a record has 18 rows
    monkeypatch.setattr("attemper.monitor.trackers.parquet._STEPS", 5)


def written(folder: Path, steps: int = 2) -> Path:
    tracker = Parquet(folder)
    tracker.begin(INFO)
    for step in range(steps):
        tracker.log(record_of(step))
    tracker.close()
    return folder


@pytest.mark.usefixtures("small_files")
def test_files_are_few_and_any_reader_reads_the_folder_as_it_lies(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", 11)
    assert sorted(path.name for path in folder.glob("*.parquet")) == [f"0000-{step:012d}.parquet" for step in (0, 3, 6, 9)]
    assert len(list((folder / "_steps").iterdir())) == 3
    assert not list(folder.rglob("*.tmp"))
    table = pyarrow.parquet.read_table(folder)
    assert repr(table.to_pydict()) == repr(pyarrow.dataset.dataset(folder, format="parquet").to_table().to_pydict())
    assert table.column_names == ["attempt", *COLUMNS]
    columns = table.sort_by([("step", "ascending")]).to_pydict()
    wanted = expected([record_of(step) for step in range(11)])
    assert set(columns.pop("attempt")) == {0}
    assert columns["step"] == wanted["step"]
    assert sorted(map(repr, zip(*columns.values(), strict=True))) == sorted(
        map(repr, zip(*(wanted[name] for name in COLUMNS), strict=True))
    )
    kinds = {field.name: str(field.type) for field in table.schema}
    assert {kinds[figure.name] for figure in FIGURES if figure.whole} == {"int64"}
    assert {kinds[figure.name] for figure in FIGURES if not figure.whole} == {"double"}
    assert json.loads(pyarrow.parquet.read_schema(next(folder.glob("*.parquet"))).metadata[b"attemper.run"])["model"] == "Decoder"


@pytest.mark.usefixtures("small_files")
def test_scalars_and_alarms_are_a_table_of_their_own(tmp_path: Path) -> None:
    table = pyarrow.parquet.read_table(written(tmp_path / "run", 7) / "_steps").sort_by("step").to_pylist()
    assert [row["step"] for row in table] == list(range(7))
    assert [dict(row["scalars"]) for row in table] == [record_of(step).scalars for step in range(7)]
    assert [[alarm["code"] for alarm in row["alarms"]] for row in table[:2]] == [["ATT501", "ATT503"], []]


@pytest.mark.usefixtures("small_files")
def test_the_last_steps_of_a_long_run_are_read_without_the_rest(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", 11)
    for path in [*sorted(folder.glob("*.parquet"))[:-1], *sorted((folder / "_steps").glob("*.parquet"))[:-1]]:
        path.write_bytes(b"")  # had it been read, that would have been an error
    assert same(read_run(folder, after=9).columns, expected([record_of(10)]))
    with pytest.raises(LoadError, match=r"0000-000000000000.parquet: it cannot be read .*expected a run that Parquet wrote"):
        read_run(folder)


def test_the_same_run_is_the_same_from_both_kinds_of_file(tmp_path: Path) -> None:
    lines = JSONLines(tmp_path / "run.jsonl")
    lines.begin(INFO)
    for step in range(3):
        lines.log(record_of(step))
    lines.close()
    first, second = read_run(written(tmp_path / "run", 3)), read_run(tmp_path / "run.jsonl")
    assert same(first.columns, second.columns)
    assert (first.info, first.scalars, first.alarms, first.attempt) == (
        second.info,
        second.scalars,
        second.alarms,
        second.attempt,
    )


def test_a_file_without_a_figure_that_came_later_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    (path,) = folder.glob("*.parquet")
    table = pyarrow.parquet.ParquetFile(path).read()
    pyarrow.parquet.write_table(table.drop_columns(["gain"]), path)
    columns = read_run(folder).columns
    assert repr(set(map(str, columns["gain"]))) == "{'nan'}"
    assert columns["max_logit"] == expected([record_of(0), record_of(1)])["max_logit"]


def _truncate(folder: Path) -> None:
    (path,) = folder.glob("*.parquet")
    path.write_bytes(path.read_bytes()[:-9])


def _foreign_file(folder: Path) -> None:
    (folder / "mine.parquet").write_bytes(b"")


def _no_info(folder: Path) -> None:
    (folder / "_run.json").unlink()


def _other_format(folder: Path) -> None:
    (folder / "_run.json").write_text('{"format": 7}')


def _torn_info(folder: Path) -> None:
    (folder / "_run.json").write_text('{"format": 1, "in')


def _other_columns(folder: Path) -> None:
    (path,) = folder.glob("*.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"step": ["three"]}), path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_truncate, "0000-000000000000.parquet: it cannot be read"),
        (_foreign_file, "mine.parquet is not a file of a run; expected a run that Parquet wrote, and nothing else"),
        (_no_info, "it has no _run.json; expected a run that Parquet wrote"),
        (_other_format, "_run.json: it has format 7; expected 1"),
        (_torn_info, "_run.json: it has a fault"),
        (_other_columns, "a file has a fault"),
    ],
)
def test_a_folder_with_a_fault_is_refused(damage: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    damage(folder)
    with pytest.raises(LoadError, match=words):
        read_run(folder)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ArgumentError, match="where something is already; expected an empty or new folder"):
        Parquet(tmp_path).begin(INFO)
    with pytest.raises(LoadError, match=r"it has no _run\.json"):
        Parquet(tmp_path, resume=True).begin(INFO)
    with pytest.raises(ArgumentError, match=r"folder: got a file, .*thesis\.tex"):
        Parquet(tmp_path / "thesis.tex").begin(INFO)
    with pytest.raises(ArgumentError, match="path: got a folder, "):
        JSONLines(tmp_path).begin(INFO)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
