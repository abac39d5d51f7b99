"""What the presets compute, against closed forms; and one sweep that is real."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from attemper.lab import sweep as sweeps
from attemper.lab.comparing import paired
from attemper.lab.further import NAME, further_rows
from attemper.lab.presets import preset
from attemper.lab.presets.bounded import HeadEntropy, entropies, entropy_bound
from attemper.lab.presets.costs import BATCH, costs
from attemper.lab.presets.logit_threshold import broken_at
from attemper.lab.presets.lr_sensitivity import sensitivity
from attemper.lab.presets.remedies import SIZES, roundings
from attemper.lab.presets.telling import few_seeds, verdict
from attemper.lab.presets.width_transfer import lowest
from attemper.lab.store.files import to_parquet
from attemper.lab.sweep import Sweep
from attemper.lab.training import train
from attemper.lab.viewing import view_of
from attemper.memory import PeakMemory
from tests.lab_runs import MODEL, Task, tiny


def entropy(logits: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(logits.softmax(-1)).sum(-1)


@pytest.mark.parametrize("keys", [2, 3, 17])
def test_the_bound_is_the_entropy_of_the_sharpest_row_of_its_norm(keys: int) -> None:
    for sigma in (0.0, 0.5, 3.0, 11.0):
        row = torch.full((keys,), -sigma / math.sqrt(keys * (keys - 1)), dtype=torch.float64)
        row[0] = sigma * math.sqrt((keys - 1) / keys)
        assert row.norm().item() == pytest.approx(sigma)
        assert entropy_bound(torch.tensor(sigma).double(), keys).item() == pytest.approx(entropy(row).item(), abs=1e-12)


def test_no_row_is_below_the_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5000, 7, generator=generator, dtype=torch.float64) * torch.logspace(-2, 2, 5000)[:, None].double()
    rows = rows - rows.mean(-1, keepdim=True)
    assert (entropy(rows) >= entropy_bound(rows.norm(dim=-1), 7) - 1e-12).all()
    assert entropy_bound(torch.ones(3), 1).tolist() == [0, 0, 0]


def test_a_row_of_one_key_has_no_entropy_to_measure_by(tmp_path: Path) -> None:
    run = train(tiny(task=Task(length=1), model=MODEL.model_copy(update={"position": "none"}), steps=1), tmp_path)
    found = list(entropies(run, 3))
    assert len(found) == 2 * MODEL.layers * MODEL.heads
    assert all(math.isnan(row.normalized) for row in found)


def test_sensitivity_is_the_mean_above_the_best() -> None:
    assert sensitivity({1e-3: 2.0, 1e-2: 1.0, 1e-1: 6.0}) == 2.0
    assert sensitivity({1e-3: 2.0, 1e-2: 2.0}) == 0.0


def test_where_the_loss_breaks() -> None:
    losses = {factor: 2.0 + 0.05 * math.log2(factor) for factor in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)}
    assert broken_at(losses) == pytest.approx(4.0)
    assert broken_at(losses, 0.125) == pytest.approx(2**2.5)
    assert broken_at({1.0: 2.0, 2.0: 2.05, 4.0: math.nan}) == 4.0
    assert broken_at({1.0: 2.0, 2.0: 2.05}) == math.inf


def test_the_lowest_point_of_a_parabola() -> None:
    assert lowest({x: 3 * (x + 5.3) ** 2 for x in (-10.0, -8.0, -6.0, -4.0)}) == pytest.approx(-5.3)
    assert lowest({x: 3 * (x + 7.1) ** 2 for x in (-12.0, -8.0, -6.0, -4.0)}) == pytest.approx(-7.1)  # at -10 it diverged
    assert lowest(dict.fromkeys((-10.0, -8.0, -6.0), 1.0)) == -10.0
    assert lowest({-10.0: 2.0, -8.0: 1.0, -6.0: 1.0}) == pytest.approx(-7.0)
    assert lowest({x: x for x in (-10.0, -8.0, -6.0)}) == -10.0  # at the end of the grid
    assert lowest({-7.0: 1.0}) == -7.0


def test_a_verdict_needs_its_test() -> None:
    clear, unclear = paired([2.0, 2.1, 2.2], [1.0, 1.1, 1.21]), paired([2.0, 2.1, 2.2], [2.1, 2.0, 2.2])
    assert verdict(clear, "more", "less") == "more"
    assert verdict(paired([1.0, 1.1, 1.21], [2.0, 2.1, 2.2]), "more", "less") == "less"
    assert verdict(unclear, "more", "less") == "is not told apart from"
    assert verdict(paired([], []), "more", "less") == "cannot be compared with"
    assert "p = 0.25" in few_seeds({"a": [None] * 3})  # of three differences of one sign: 2 · ½³
    assert "no test is possible" in few_seeds({"a": [None]})


def test_remedies_break_where_float16_ends() -> None:
    found = roundings()
    by = {(row.remedy, row.size): row for row in found}
    for size in SIZES:
        overflows = by["naive", size].logit > 65504
        # Products are rounded to float16 before anything can be subtracted from them.
        assert (by["maximum subtracted, 16 bits", size].broken > 0) == overflows
        assert (by["maximum subtracted, float32", size].broken > 0) == overflows
        assert (by["naive", size].broken > 0) == (by["naive", size].logit > math.log(65504))
        assert by["QK-norm and scale", size].broken == 0
        # Capped at 10, e^10 = 22026 is in range and the sum of three is not: such a row is zeros, and no infinity tells.
        assert (by["softcap", size].broken > 0.8) == (size >= 1)
    assert by["scale on q, maximum subtracted", 16.0].broken == 0 < by["scale after the product", 16.0].broken
    assert all(row.error < 0.01 for row in found if row.size <= 0.5 and not row.broken)


def test_costs_have_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    found = costs((7, 11), (5,), 1)
    assert [(row.attention, row.n) for row in found][:4] == [
        ("dot, written out", 7),
        ("dot, attemper.attention", 7),
        ("additive, written out", 7),
        ("additive, in tiles", 7),
    ]
    assert all(row.milliseconds > 0 for row in found)
    monkeypatch.setattr("attemper.lab.presets.costs.MOST", 10)
    left_out = [row.attention for row in costs((7,), (5,), 1) if math.isnan(row.milliseconds)]
    assert left_out == ["additive, written out"]


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell the most that a process held")
def test_memory_is_what_a_kind_needs_whatever_ran_before() -> None:
    costs((300,), (32,), 1)
    mib = {row.attention: row.mib for row in costs((512,), (32,), 1)}
    one = 4 * BATCH * 512 * 512 / 2**20  # a logit for each pair, once
    assert mib["additive, written out"] > 32 * one > mib["additive, in tiles"]
    assert 16 * one > mib["dot, written out"] > one > mib["dot, attemper.attention"]


def test_memory_is_unknown_where_the_system_keeps_one_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    status.write_text("VmHWM:\t  2048 kB\n")
    monkeypatch.setattr("attemper.memory._STATUS", status)
    monkeypatch.setattr("attemper.memory._RESET", tmp_path / "none" / "clear_refs")
    assert all(math.isnan(row.mib) for row in costs((7,), (5,), 1))
    with PeakMemory() as memory:
        pass
    assert memory.mib == 2.0


def test_a_real_sweep_is_answered_and_its_measurement_kept(tmp_path: Path) -> None:
    asked = preset("entropy-bound")
    small = {"steps": 2, "evaluate_every": 2, "log_every": 1}
    runs = tuple(config.model_copy(update=small) for config in asked.runs("quick") if config.seed < 2)
    folder = tmp_path / "sweep"
    sweeps.begin(folder, Sweep("entropy-bound", "quick", "a command", runs))
    found = sweeps.run(folder)
    view = view_of(folder)
    assert "0 of all rows fall below the first" in view.answer.sentence
    kept = (folder / NAME).read_bytes()
    rows = further_rows(folder, asked.further, found, "quick")
    assert (folder / NAME).read_bytes() == kept
    assert {row.run for row in rows} == {run.id for run in found}
    # The watch saw the same logits that the measurement made anew: without a scale entropies are far lower.
    rules = {run.id: run.config.model.rule for run in found}
    mean = {rule: [row.entropy for row in rows if rules[row.run] == rule] for rule in ("none", "inverse")}
    assert max(mean["none"]) < min(mean["inverse"])
    assert all(row.from_sigma <= row.from_row <= row.entropy + 1e-6 for row in rows)
    others = [row._replace(run="another") for row in rows]
    torn = kept[: len(kept) // 2] + bytes(len(kept) // 2 - 200) + kept[-200:]
    for content in (b"no table", kept[:-9], torn, of(rows, entropy="high"), of(others), of([fields_of_another(rows[0])])):
        (folder / NAME).write_bytes(content)
        assert view_of(folder).answer == view.answer
        assert (folder / NAME).read_bytes() == kept


def of(rows: Sequence[Any], **fields: object) -> bytes:
    """A measurement as a file, with other values in some columns."""
    columns = {name: [fields.get(name, getattr(row, name)) for row in rows] for name in rows[0]._fields}
    return to_parquet(pa.table(columns))


def fields_of_another(row: Any) -> Any:
    """A row of another preset's measurement, of the same run."""
    return HeadEntropy(row.run, "after", 0, 0, 8, 0.5)
