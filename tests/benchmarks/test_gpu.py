"""The benchmark on GPUs, where there is none: it says so, and what it does beside timing a GPU runs here."""

import pytest
import torch

from benchmarks import gpu
from benchmarks.report import Report, around_markers


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("benchmarks.gpu: no CUDA device that PyTorch ")
    assert "Run this on a machine with an NVIDIA GPU" in said.err
    assert not said.out


def test_a_table_is_made_of_what_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "flex", lambda setting: gpu.ours(setting.causal))  # which takes a compiler
    monkeypatch.setattr(gpu, "ROUNDS", 2)
    monkeypatch.setattr(gpu, "SECONDS_OF_ROUND", 0.0)
    report = Report()
    gpu.measure(report, [gpu.Setting(1, 2, 33, 16, torch.float32, True, "cpu")], "a rehearsal")
    (table,) = report.parts
    assert not isinstance(table, str)
    assert [row[:3] for row in table.rows] == [("1, 2, 33, 16", "causal", each) for each in ("forward", "backward")]
    for row in table.rows:
        assert row[6] == "–", "no cuDNN without a GPU"
        assert all(float(cell) > 0.0 for place, cell in enumerate(row[3:], 3) if place not in (6, 10))
    assert "left out: " in capsys.readouterr().err


def test_the_page_has_a_place_for_it_and_claims_nothing() -> None:
    before, after = around_markers(gpu.DOCUMENT, gpu.MARKER)
    between = gpu.DOCUMENT.read_text("utf-8")[len(before) : -len(after)]
    assert "not yet measured" in between
    assert len(gpu.all_settings(torch.bfloat16)) == 24
