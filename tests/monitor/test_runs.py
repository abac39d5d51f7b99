"""What the two trackers of files write is what `read_run` reads, from the first step to a run that went back."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from attemper.errors import ArgumentError, LoadError
from attemper.monitor import StepRecord
from attemper.monitor.runs import read_run
from attemper.monitor.trackers import parquet_folder
from attemper.monitor.trackers.json_lines import JSONLines
from attemper.monitor.trackers.parquet import Parquet
from tests.monitored import INFO, expected, record_of, same

BOTH = pytest.mark.parametrize("tracker", [JSONLines, Parquet])
Make = Callable[..., Any]


def write(tracker: Make, path: Path, records: list[StepRecord], **options: Any) -> None:
    written = tracker(path, **options)
    written.begin(INFO)
    for record in records:
        written.log(record)
    written.close()


@BOTH
def test_a_run_is_read_back_to_the_bit(tracker: Make, tmp_path: Path) -> None:
    records = [record_of(step) for step in (0, 1, 2, 3, 7)]
    write(tracker, tmp_path / "run", records)
    run = read_run(tmp_path / "run")
    assert run.info == INFO
    assert any(math.isnan(value) for value in run.columns["entropy"])
    assert any(value == math.inf for value in run.columns["min_logit"])
    assert same(run.columns, expected(records))
    assert run.scalars == {record.step: record.scalars for record in records}
    assert run.alarms == tuple(alarm for record in records for alarm in record.alarms)
    assert run.attempt == 0


@BOTH
def test_a_run_is_read_while_it_is_written(tracker: Make, tmp_path: Path) -> None:
    writing = tracker(tmp_path / "run")
    writing.begin(INFO)
    assert read_run(tmp_path / "run").scalars == {}
    for step in range(5):
        writing.log(record_of(step))
        assert list(read_run(tmp_path / "run").scalars) == list(range(step + 1))
        assert same(read_run(tmp_path / "run", after=step - 1).columns, expected([record_of(step)]))
        assert read_run(tmp_path / "run", after=step).columns["step"] == []
    writing.close()


@BOTH
def test_a_resumed_run_goes_on(tracker: Make, tmp_path: Path) -> None:
    write(tracker, tmp_path / "run", [record_of(step) for step in (0, 1, 2)])
    write(tracker, tmp_path / "run", [record_of(step) for step in (3, 4)], resume=True)
    run = read_run(tmp_path / "run")
    assert same(run.columns, expected([record_of(step) for step in range(5)]))
    assert run.attempt == 0


@BOTH
def test_training_that_goes_back_supersedes_what_was_logged_from_there_on(tracker: Make, tmp_path: Path) -> None:
    write(tracker, tmp_path / "run", [record_of(step, loss=1.0) for step in (0, 2, 4, 6, 8)])
    again = [record_of(step, loss=2.0) for step in (3, 4, 5)]
    write(tracker, tmp_path / "run", again, resume=True)
    run = read_run(tmp_path / "run")
    assert same(run.columns, expected([record_of(0), record_of(2), *again]))
    assert run.scalars == {step: {"loss": loss} for step, loss in ((0, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0))}
    assert run.attempt == 1
    assert list(read_run(tmp_path / "run", after=0).scalars) == [2, 3, 4, 5]
    write(tracker, tmp_path / "run", [record_of(5), record_of(6), record_of(1)], resume=True)  # the last goes back on its own
    assert list(read_run(tmp_path / "run").scalars) == [0, 1]
    assert read_run(tmp_path / "run").attempt == 3


@BOTH
def test_the_last_steps_alone(tracker: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attemper.monitor.trackers.parquet._ROWS", 40)
    monkeypatch.setattr("attemper.monitor.trackers.parquet._STEPS", 2)
    write(tracker, tmp_path / "run", [record_of(step, loss=1.0) for step in (0, 2, 4, 6, 8)])
    write(tracker, tmp_path / "run", [record_of(step, loss=2.0) for step in (5, 7, 9)], resume=True)
    whole = [record_of(0), record_of(2), record_of(4), *(record_of(step) for step in (5, 7, 9))]
    for last in (1, 2, 3, 4, 5, 6, 7, 100):
        run = read_run(tmp_path / "run", last=last)
        assert same(run.columns, expected(whole[-last:]))
        assert list(run.scalars) == [record.step for record in whole[-last:]]
        assert [alarm.step for alarm in run.alarms] == [alarm.step for record in whole[-last:] for alarm in record.alarms]
        assert run.attempt == 1
    assert list(read_run(tmp_path / "run", after=4, last=2).scalars) == [7, 9]
    assert list(read_run(tmp_path / "run", after=7, last=2).scalars) == [9]
    with pytest.raises(ArgumentError, match="last: got 0; expected a number of steps, from 1"):
        read_run(tmp_path / "run", last=0)


@BOTH
def test_what_is_before_the_last_steps_is_not_read(tracker: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attemper.monitor.trackers.json_lines._BLOCK", 4096)
    monkeypatch.setattr("attemper.monitor.trackers.parquet._ROWS", 1)
    monkeypatch.setattr("attemper.monitor.trackers.parquet._STEPS", 1)
    path = tmp_path / "run"
    write(tracker, path, [record_of(step) for step in range(4)])
    if tracker is JSONLines:
        damaged(path, b'{"kind": "step", "step": 1', b'{"kind": "walk", "step": 1')
    else:
        for folder in (path, path / "_steps"):
            (folder / "0000-000000000001.parquet").write_bytes(b"no longer")
    assert list(read_run(path, last=2).scalars) == [2, 3]
    with pytest.raises(LoadError, match=r"0000-000000000001|walk"):
        read_run(path, last=3)


@BOTH
def test_resuming_what_is_not_there_begins(tracker: Make, tmp_path: Path) -> None:
    write(tracker, tmp_path / "new" / "run", [record_of(0)], resume=True)
    assert list(read_run(tmp_path / "new" / "run").scalars) == [0]


@BOTH
def test_a_run_that_is_there_is_left_alone(tracker: Make, tmp_path: Path) -> None:
    write(tracker, tmp_path / "run", [record_of(0)])
    before = read_run(tmp_path / "run")
    with pytest.raises(ArgumentError, match=r"run, wh\w+ .*already; expected .*resume=True to go on"):
        tracker(tmp_path / "run").begin(INFO)
    with pytest.raises(ArgumentError, match="run, a run of Decoder; expected a run of Encoder"):
        tracker(tmp_path / "run", resume=True).begin(dataclasses.replace(INFO, model="Encoder"))
    assert same(read_run(tmp_path / "run").columns, before.columns)


@BOTH
@pytest.mark.parametrize("resume", [False, True])
def test_a_start_that_failed_before_its_first_step_is_not_in_the_way(tracker: Make, resume: bool, tmp_path: Path) -> None:
    for model in ("Encoder", "Other"):
        failed = tracker(tmp_path / "run")
        failed.begin(dataclasses.replace(INFO, model=model))
        failed.close()
    write(tracker, tmp_path / "run", [record_of(0)], resume=resume)
    run = read_run(tmp_path / "run")
    assert (run.info, list(run.scalars), run.attempt) == (INFO, [0], 0)


@BOTH
def test_what_is_no_run_is_not_taken_for_one_that_failed(tracker: Make, tmp_path: Path) -> None:
    path = tmp_path / "run" / "_run.json" if tracker is Parquet else tmp_path / "run"
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"kind": "run", "mine": 1}\n')
    with pytest.raises(ArgumentError, match=r"run, wh\w+ .*already"):
        tracker(tmp_path / "run").begin(INFO)
    assert path.read_text() == '{"kind": "run", "mine": 1}\n'


@BOTH
def test_a_step_without_layers_is_a_step(tracker: Make, tmp_path: Path) -> None:
    write(tracker, tmp_path / "run", [StepRecord(3, 5.0, (), (), {"loss": math.nan, "rate": math.inf})])
    run = read_run(tmp_path / "run")
    assert run.columns["step"] == []
    assert repr(run.scalars) == "{3: {'loss': nan, 'rate': inf}}"


def test_nothing_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="absent: nothing is there; expected the file of JSONLines or the folder of Parquet"):
        read_run(tmp_path / "absent")


def test_lines_are_json_that_strict_parsers_read(tmp_path: Path) -> None:
    write(JSONLines, tmp_path / "run.jsonl", [record_of(0), record_of(1)])

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "step", "step"]
    figures = lines[2]["layers"][3]["figures"]
    assert figures["entropy"] == [None] * 5
    assert figures["min_logit"] == ["inf"] * 5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "run.jsonl: it is empty"),
        (b'{"kind": "run"', "first line is not complete"),
        (b"loss,step\n1,2\n", "a complete line cannot be read: 'loss,step"),
        (b"\xff\xfe\x00\n", "a complete line cannot be read"),
        (b"[" * 100000 + b"\n", "a complete line cannot be read"),
        (b"[3]\n", r"a line is no object: '\[3\]"),
        (b'{"kind": "run", "format": 99}\n', "format 99; expected a run that JSONLines wrote: kind 'run', format 1"),
        (b'{"kind": "run", "format": 1, "info": {"model": "X"}}\n', "first line has a fault .*missing"),
    ],
)
def test_a_file_that_is_no_run_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=words):
        read_run(path)


def damaged(path: Path, find: bytes, put: bytes) -> Path:
    content = path.read_bytes()
    assert find in content
    path.write_bytes(content.replace(find, put, 1))
    return path


@pytest.mark.parametrize(
    ("find", "put", "words"),
    [
        (b'{"kind": "step", "step": 0', b'{"kind": "step", "step": 0, !', "a complete line cannot be read"),
        (b'{"kind": "step", "step": 0', b'{"kind": "walk", "step": 0', "neither a run nor a step"),
        (b'{"kind": "step", "step": 0', b'{"kind": "step", "step": "0"', "neither a run nor a step"),
        (b'"max_logit": [', b'"max_logit": [7.0, ', "step 0 has a fault .* of 3 heads beside 4"),
        (b'"scalars": {"loss": ', b'"scalars": {"loss": "low", "rate": ', "step 0 has a fault .*low"),
        (b'"code": ', b'"kind": ', "step 0 has a fault .*kind"),
        (b'"code": "ATT501"', b'"code": 7', "run.jsonl: code of an alarm at step 0 is 7, not text"),
        (b'"severity": "error"', b'"severity": "grave"', "severity of an alarm at step 0 is 'grave', not one of error, warn"),
        (b'"head": 4', b'"head": "q"', "head of an alarm at step 0 is 'q', not a whole number or nothing"),
        (b'"layer": "blocks.0.attn", "call": 0, "norms"', b'"layer": 5, "call": 0, "norms"', "layer at step 0 is 5, not text"),
        (b'"call": 0, "norms"', b'"call": null, "norms"', "call at step 0 is None, not a whole number"),
        (b'"rows": [14', b'"rows": ["14"', "rows at step 0 is '14', not a whole number or nothing"),
        (b'"started": 1700000000.5', b'"started": "x"', "run.jsonl: started of the run is 'x', not a number or a whole number"),
        (b'"started": 1700000000.5', b'"started": null', "started of the run is None, not a number"),
        (b'"started": 1700000000.5', b'"started": 1e30', r"started of the run is 1e\+30, no time in seconds since the epoch"),
        (b'"every": 1', b'"every": "q"', "every of the run is 'q', not a whole number"),
        (b'"min_logit": [', b'"min_logit": [1' + b"0" * 400 + b", ", "step 0 has a fault"),
    ],
)
def test_a_line_with_a_fault_is_named(find: bytes, put: bytes, words: str, tmp_path: Path) -> None:
    write(JSONLines, tmp_path / "run.jsonl", [record_of(0), record_of(1)])
    with pytest.raises(LoadError, match=words):
        read_run(damaged(tmp_path / "run.jsonl", find, put))


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("head", -1, "run: head of layer '' at step 0 is -1, not 0 or one more than that before it"),
        ("head", 10**9, "run: head of layer '' at step 0 is 1000000000, not 0 or one more"),
        ("layer", None, "run: layer at step 0 is None, not text"),
        ("call", None, "run: call at step 0 is None, not a whole number"),
    ],
)
def test_a_column_with_a_fault_is_named(column: str, value: object, words: str, tmp_path: Path) -> None:
    write(Parquet, tmp_path / "run", [record_of(0), record_of(1)])
    path = tmp_path / "run" / "0000-000000000000.parquet"
    table = parquet_folder.table_of(path)
    place = table.schema.get_field_index(column)
    changed = pa.array([value] * len(table), table.schema.field(place).type)
    parquet_folder.write_table(path, table.set_column(place, column, changed))
    with pytest.raises(LoadError, match=words):
        read_run(tmp_path / "run")


def test_a_torn_last_line_counts_as_not_written_and_resuming_takes_it_away(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(JSONLines, path, [record_of(0), record_of(1)])
    whole = path.read_bytes()
    second = whole.rindex(b"\n", 0, -1) + 1
    for end in (second, second + 1, second + 3000, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert list(read_run(path).scalars) == [0]
    write(JSONLines, path, [record_of(1)], resume=True)
    assert same(read_run(path).columns, expected([record_of(0), record_of(1)]))


def test_a_process_killed_in_its_first_line_left_no_run_and_nothing_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"kind": "run", "form')
    write(JSONLines, path, [record_of(0)], resume=True)
    assert list(read_run(path).scalars) == [0]
    path.write_bytes(b"notes of mine")
    with pytest.raises(LoadError, match="no line of it is complete"):
        JSONLines(path, resume=True).begin(INFO)
    assert path.read_bytes() == b"notes of mine"


def test_lines_longer_than_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attemper.monitor.trackers.json_lines._BLOCK", 611)
    records = [record_of(step) for step in range(3)]
    write(JSONLines, tmp_path / "run.jsonl", records)
    assert same(read_run(tmp_path / "run.jsonl").columns, expected(records))
