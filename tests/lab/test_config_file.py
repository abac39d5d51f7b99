from pathlib import Path

import pytest

from attemper.errors import ArgumentError, LoadError
from attemper.lab.config import RunConfig
from attemper.lab.config_file import override, parsed, read_configs
from attemper.lab.identity import run_id


def written(folder: Path, text: str) -> Path:
    path = folder / "a.toml"
    path.write_text(text)
    return path


def test_a_file_says_what_differs_from_the_defaults(tmp_path: Path) -> None:
    (config,) = read_configs(
        written(tmp_path, "steps = 7\n[model]\nrule = 'none'\nhead_dim = [4, 12]\n[optimiser]\nqk_clip = 30\n")
    )
    assert (config.steps, config.model.rule, config.model.head_dim, config.optimiser.qk_clip) == (7, "none", (4, 12), 30.0)
    default = RunConfig()
    assert config.model_copy(update={"steps": default.steps, "model": default.model, "optimiser": default.optimiser}) == default
    assert read_configs(written(tmp_path, "")) == (RunConfig(),)


def test_seeds_and_vary_are_combined(tmp_path: Path) -> None:
    text = 'seeds = [3, 5]\n[vary]\n"model.rule" = ["none", "inverse"]\n"model.head_dim" = [8, [4, 12]]\n'
    found = [(config.model.rule, config.model.head_dim, config.seed) for config in read_configs(written(tmp_path, text))]
    assert found == [(rule, width, seed) for rule in ("none", "inverse") for width in (8, (4, 12)) for seed in (3, 5)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps = 0", r"steps: got 0; expected greater than or equal to 1"),
        ("step = 3", r"step: got 3; expected a field that there is: task, model, .*steps"),
        ("[model]\nrules = 'none'", r"model\.rules: got \"none\"; expected a field that there is: layers, heads, .*rule"),
        ("[model]\nrule = 'sqrt'", r"model\.rule: got \"sqrt\"; expected 'none', 'inverse_sqrt'"),
        ("[model]\nhead_dim = 'wide'", r"model\.head_dim: got \"wide\""),
        ("[optimiser]\nlearning_rate = -1", r"optimiser\.learning_rate: got -1; expected greater than 0"),
        ("[optimiser]\nlearning_rate = nan", r"optimiser\.learning_rate: got NaN"),
        ("model = 3", r"model: got 3"),
        ("steps = true", "steps: got true; expected a valid integer"),
        ('batch = "2"', 'batch: got "2"; expected a valid integer'),
        ("seed = 2147483648", "seed: got 2147483648; expected less than or equal to 2147483647"),
        ("[optimiser]\nlearning_rate = 1e31", r"optimiser\.learning_rate: got 1e\+31; expected less than or equal to 1"),
        ('[vary]\nseed = [1]\n"seeds" = [2]', "seeds: got 2; expected a field that there is"),
        ("seeds = [1]\n[vary]\nseed = [1, 2]", r"seeds is \[1\]; expected a list of whole numbers, and no seed beside it"),
        ("seeds = []", r"seeds is \[\]; expected a list of whole numbers"),
        ("seed = 1\nseeds = [1]", r"no seed beside it"),
        ("vary = 3", r"\[vary\] is 3; expected lists by dotted names"),
        ('[vary]\n"steps.many" = [1]\n', r"steps\.many|steps"),
        ('[vary]\nmodel = [{rule = "none"}]\n', r"model: got .*; expected a number, a text or a list"),
        ("steps =", r"expected TOML"),
        ("steps = " + "[" * 100_000, r"expected TOML"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=rf"a\.toml: .*{said}"):
        read_configs(written(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"none\.toml: No such file.*name of a preset"):
        read_configs(tmp_path / "none.toml")
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(LoadError, match=r"b\.toml: .*expected TOML"):
        read_configs(tmp_path / "b.toml")


def test_settings_take_the_place_of_fields() -> None:
    runs = (RunConfig(seed=0), RunConfig(seed=1))
    settings = ["model.rule=none", "model.head_dim=[4, 12]", "steps=9", "precision.loss_scale=dynamic", "task.path="]
    found = override(runs, parsed(settings))
    assert [(run.seed, run.model.rule, run.model.head_dim, run.steps, run.precision.loss_scale) for run in found] == [
        (seed, "none", (4, 12), 9, "dynamic") for seed in (0, 1)
    ]
    assert override(runs, {}) == runs
    assert len(override(runs, {"seed": 4})) == 1  # two that became one


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.rule", "'model.rule'; expected NAME=VALUE"),
        ("model.rule=x", 'model.rule: got "x"'),
        ("rule=none", 'rule: got "none"; expected a field that there is'),
        ("steps.more=1", "a field of a section; steps is none"),
        ("=3", "expected"),
        ("steps=" + "[" * 100_000, r'^steps: got "\[{98}…; expected a valid integer$'),
        ("task.path=\udcff", r"task\.path: got \"\\udcff\"; expected a valid string"),
        ('model={"rule": "none"}', 'model: got {"rule": "none"}; expected .* the fields of a section one by one'),
    ],
)
def test_a_setting_that_does_not_fit(setting: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        override([RunConfig()], parsed([setting]))


def test_runs_are_called_by_all_that_they_are() -> None:
    assert run_id(RunConfig()) == run_id(RunConfig.model_validate_json(RunConfig().model_dump_json()))
    changes = [
        "seed=1",
        "threads=2",
        "model.rule=none",
        "task.length=65",
        "optimiser.qk_clip=9",
        "after.lengths=[64]",
        "steps=301",
    ]
    names = {run_id(run) for setting in changes for run in override([RunConfig()], parsed([setting]))} | {run_id(RunConfig())}
    assert len(names) == len(changes) + 1


def test_the_name_of_the_default_run_has_not_changed() -> None:
    # A field that is added or renamed gives every run another name, so that what was trained would be trained again: it may,
    # but not unnoticed.
    assert run_id(RunConfig()) == "1bccb4262542"
