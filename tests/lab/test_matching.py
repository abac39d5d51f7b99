"""Two sweeps side by side: each run has one like, and what tells the sweeps apart is said."""

from pathlib import Path

import pytest

from attemper.errors import LoadError
from attemper.lab import matching
from attemper.lab.config import Model, RunConfig
from attemper.lab.sweep import Sweep
from tests.lab_runs import made_up, tiny

LOSS = {"none": 3.0, "inverse": 2.0, "inverse_sqrt": 1.0}


def arm(rule: str, seeds: int = 3, **model: object) -> list[RunConfig]:
    given = {"layers": 1, "heads": 2, "head_dim": 4, "width": 8, "rule": rule} | model
    return [tiny(seed, model=Model.model_validate(given)) for seed in range(seeds)]


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch):
    """Sets of runs by the name of their folder, as if all were over."""
    known: dict[Path, list[RunConfig]] = {}
    data: dict[Path, str] = {}

    def results(folder: Path):
        found = [made_up(config, LOSS[config.model.rule] + 0.1 * config.seed**2 * config.model.width) for config in known[folder]]
        for run in found:
            object.__setattr__(run, "data", data.get(folder, "a text"))
        return found

    monkeypatch.setattr(matching, "results", results)
    monkeypatch.setattr(matching, "read", lambda folder: Sweep("s", "", "c", tuple(known[folder])))

    def give(name: str, configs: list[RunConfig], learned: str = "a text") -> Path:
        known[Path(name)], data[Path(name)] = configs, learned
        return Path(name)

    return give


def test_runs_are_compared_at_the_values_that_both_have(sweeps) -> None:
    both = sweeps("both", [*arm("none"), *arm("inverse")])
    one = sweeps("one", arm("none", width=16))
    assert matching.compared(both, sweeps("same", arm("none"))).title.endswith(": nothing at the runs that both have")
    for pair in ((both, one), (one, both)):
        table = matching.compared(*pair)
        assert table.title == "What tells them apart: model.width"
        assert [row[0] for row in table.rows] == ["model.rule = none"]
        assert [row[-2] for row in table.rows] == ["3"]
        assert f"are left out: {3 if pair[0] is both else 0} and {3 if pair[1] is both else 0}." in table.note


def test_no_run_is_counted_twice(sweeps) -> None:
    both, other = sweeps("both", [*arm("none"), *arm("inverse")]), sweeps("other", arm("inverse_sqrt"))
    for pair in ((both, other), (other, both)):
        with pytest.raises(LoadError, match=r"^both: it varies in model\.rule, of which the other sweep has none of the values"):
            matching.compared(*pair)


def test_other_data_tells_apart(sweeps) -> None:
    one, two = sweeps("one", arm("none")), sweeps("two", arm("none"), "the text, edited")
    assert matching.compared(one, two).title == "What tells them apart: the data that they learned from"
    assert matching.compared(one, one).title == "What tells them apart: nothing: they are one sweep"
