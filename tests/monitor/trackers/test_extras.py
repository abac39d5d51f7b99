"""Without its package a tracker says which extra installs it, before anything is written."""

import sys
from pathlib import Path

import pytest

from attemper.errors import MissingExtraError
from attemper.monitor.runs import read_run
from attemper.monitor.trackers import MLflow, Parquet, TensorBoard, Tracker, Trackio, WandB
from tests.monitored import INFO


@pytest.mark.parametrize(
    ("package", "make", "words"),
    [
        ("pyarrow", Parquet, r"pyarrow is needed to write and read runs as Parquet; .*'attemper\[parquet\]'"),
        ("torch.utils.tensorboard", TensorBoard, r"tensorboard is needed to .*'attemper\[tensorboard\]'"),
        ("wandb", lambda _: WandB(), r"wandb is needed to .*'attemper\[wandb\]'"),
        ("trackio", lambda _: Trackio(), r"trackio is needed to .*'attemper\[trackio\]'"),
        ("mlflow", lambda _: MLflow(), r"mlflow-skinny is needed to .*'attemper\[mlflow\]'"),
    ],
)
def test_a_package_that_is_not_installed(
    package: str, make: type[Tracker], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=words):
        make(tmp_path / "run").begin(INFO)
    assert not (tmp_path / "run").exists()


def test_reading_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match="pyarrow is needed"):
        read_run(tmp_path)
