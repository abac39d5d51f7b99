"""What the dashboards' own stores hold, of a run that was closed and of one that was killed."""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attemper.errors import ArgumentError
from attemper.monitor.records import StepRecord
from attemper.monitor.trackers import MLflow, TensorBoard
from attemper.monitor.trackers.summary import Summary, text_of
from tests.dashboards import RECORDS, environment
from tests.monitored import INFO, record_of
from tests.running import ROOT

ALARMS = ["ATT501", "ATT503"]


def scalars_of(records: list[StepRecord]) -> dict[str, dict[int, float]]:
    """Tag -> step -> number."""
    summary, found = Summary(500, ""), {}
    for record in records:
        for tag, value in summary.scalars(record).items():
            found.setdefault(tag, {})[record.step] = value
    return found


def log(name: str, folder: Path) -> None:
    variables = os.environ | environment(folder) | {"PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", "tests.dashboards", name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=variables)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


def events_in(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    events.Reload()
    return events


def scalars_in(folder: Path) -> dict[str, dict[int, float]]:
    events = events_in(folder)
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def float32(values: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    return {tag: {step: struct.unpack("f", struct.pack("f", x))[0] for step, x in steps.items()} for tag, steps in values.items()}


@pytest.mark.slow
def test_tensorboard(tmp_path: Path) -> None:
    log("tensorboard", tmp_path)
    for run in ("closed", "killed"):
        assert scalars_in(tmp_path / run) == float32(scalars_of(RECORDS))
        events = events_in(tmp_path / run)
        images = events.Images("attention_heads/max_logit")
        assert [image.step for image in images] == [0, 2]
        assert (images[0].width, images[0].height) == (5 * 32, 4 * 32)
        assert images[0].encoded_image_string.startswith(b"\x89PNG")
        alarms = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("attention/alarms/text_summary")]
        assert [alarm.split()[2] for alarm in alarms] == ALARMS
        (legend, _) = events.Tensors("attention_heads/legend/text_summary")
        assert b"rows, from the top: model, blocks.0.attn" in legend.tensor_proto.string_val[0]
        (about,) = events.Tensors("attention/run/text_summary")
        assert json.loads(about.tensor_proto.string_val[0])["model"] == "Decoder"


def test_tensorboard_hides_what_training_went_back_over(tmp_path: Path) -> None:
    steps = [[0, 1, 2, 3], [2, 3, 1]]  # the second resumes, and goes back on its own
    for number, each in enumerate(steps):
        tracker = TensorBoard(tmp_path, resume=number > 0)
        tracker.begin(INFO)
        for step in each:
            tracker.log(record_of(step, loss=float(number)))
        tracker.close()
    assert scalars_in(tmp_path)["watch/loss"] == {0: 0.0, 1: 1.0}


def test_tensorboard_leaves_a_run_alone(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1.host").touch()
    with pytest.raises(ArgumentError, match="where event files are already; expected a folder without them, or resume=True"):
        TensorBoard(tmp_path).begin(INFO)
    with pytest.raises(ArgumentError, match="images_every: got -1"):
        TensorBoard(tmp_path, images_every=-1)


@pytest.mark.slow
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log("mlflow", tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("attemper")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert {name: run.info.status for name, run in runs.items()} == {"closed": "FINISHED", "killed": "RUNNING"}
    for run in runs.values():
        assert run.data.tags["attemper.model"] == "Decoder"
        found = {
            tag: {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, tag)}
            for tag in run.data.metrics
        }
        assert found == scalars_of(RECORDS)
        path = client.download_artifacts(run.info.run_id, "attemper/alarms.txt", str(tmp_path))
        assert [line.split()[2] for line in Path(path).read_text().splitlines()] == ALARMS


@pytest.mark.slow
def test_mlflow_keeps_the_alarms_of_a_run_that_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    from mlflow import MlflowClient

    store = (tmp_path / "store").as_uri()
    client = MlflowClient(store)
    run = client.create_run(client.create_experiment("mine")).info.run_id
    for step in (0, 1, 2):
        tracker = MLflow(store, run_id=run)
        tracker.begin(INFO)
        tracker.log(record_of(3 * step))
        tracker.close()
    path = client.download_artifacts(run, "attemper/alarms.txt", str(tmp_path))
    wanted = [text_of(alarm) for step in (0, 1, 2) for alarm in record_of(3 * step).alarms]
    assert len(wanted) == 6
    assert Path(path).read_text().splitlines() == wanted


@pytest.mark.slow
def test_trackio(tmp_path: Path) -> None:
    log("trackio", tmp_path)
    read = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("attemper")
logs = {run: SQLiteStorage.get_logs("attemper", run) for run in runs}
alarms = {run: [alert["title"] for alert in SQLiteStorage.get_alerts("attemper", run)] for run in runs}
json.dump([logs, alarms], sys.stdout)
"""
    variables = os.environ | environment(tmp_path)
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True, env=variables)
    logs, alarms = json.loads(done.stdout)
    assert sorted(logs) == ["closed", "killed"]
    for run, rows in logs.items():
        found: dict[str, dict[int, float]] = {}
        for row in rows:
            for tag, value in row.items():
                if tag not in ("step", "timestamp"):
                    found.setdefault(tag, {})[row["step"]] = value
        assert found == scalars_of(RECORDS)
        assert sorted(alarms[run]) == [f"attemper {code}" for code in ALARMS]


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: blocks of 32 KiB, in which each part has a checksum, a length and which part it is."""
    from wandb.proto import wandb_internal_pb2

    data, position, whole = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, part = struct.unpack("<IHB", data[position : position + 7])
        position += 7 + length
        if position > len(data):
            return
        whole += data[position - length : position]
        if part in (1, 4):  # the whole, or the last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


@pytest.mark.slow
def test_wandb(tmp_path: Path) -> None:
    log("wandb", tmp_path)
    for run in ("closed", "killed"):
        (path,) = tmp_path.glob(f"wandb/offline-run-*-{run}/run-{run}.wandb")
        records = list(wandb_records(path))
        found: dict[str, dict[int, float]] = {}
        for record in records:
            if record.WhichOneof("record_type") == "history":
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                for tag in row.keys() - {"watch/step", "_step", "_timestamp", "_runtime", "_wandb"}:
                    found.setdefault(tag, {})[row["watch/step"]] = row[tag]
        assert found == scalars_of(RECORDS)
        assert [record.alert.title.split()[1] for record in records if record.WhichOneof("record_type") == "alert"] == ALARMS
        axes = {
            record.metric.glob_name: record.metric.step_metric
            for record in records
            if record.WhichOneof("record_type") == "metric"
        }
        assert axes.get("attention/*") == axes.get("watch/*") == "watch/step"


@pytest.mark.slow
def test_a_run_of_the_callers_own_is_used_and_left_open(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
import mlflow, trackio, wandb
from attemper.monitor.trackers import MLflow, Trackio, WandB
from tests.monitored import INFO, record_of

folder = Path(sys.argv[1])
mlflow.set_tracking_uri((folder / "mlruns").as_uri())
runs = wandb.init(dir=str(folder), id="mine"), trackio.init("mine", name="mine", embed=False), mlflow.start_run(run_name="mine")
for tracker in (WandB(), Trackio(), MLflow(), WandB(runs[0]), Trackio(runs[1]), MLflow(run_id=runs[2].info.run_id)):
    tracker.begin(INFO)
    tracker.log(record_of(3))
    tracker.close()
assert (wandb.run, trackio.context_vars.current_run.get()) == runs[:2]
assert mlflow.active_run().info.run_id == runs[2].info.run_id
for run in runs[:2]:
    run.log({"mine": 1.0})
    run.finish()
client = mlflow.MlflowClient()
mlflow.end_run()
assert [run.info.run_name for run in client.search_runs(["0"])] == ["mine"]
assert client.get_experiment_by_name("attemper") is None
from trackio.sqlite_storage import SQLiteStorage
assert [len(row) > 2 for row in SQLiteStorage.get_logs("mine", "mine")] == [True, True, True]
"""
    variables = os.environ | environment(tmp_path)
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
