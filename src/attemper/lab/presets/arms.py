"""The arms of a preset: what they are called, and which fields of the configuration make them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from attemper.errors import LoadError
from attemper.lab.config import Model, Optimiser, RunConfig, Task
from attemper.lab.presets.preset import Effort

USUAL = "1/√d"
TEXT_LIMIT = (
    "One small decoder on one text of a few hundred thousand bytes, trained briefly: larger models and longer trainings may "
    "differ."
)


class Arm(NamedTuple):
    """A name, and the fields by which the arm's runs are known, by their dotted names."""

    name: str
    fields: Mapping[str, Any]

    def over(self, base: RunConfig) -> RunConfig:
        """The configuration with the arm's fields in it."""
        nested = base.model_dump(mode="json")
        for name, value in self.fields.items():
            section, field = name.split(".")
            nested[section][field] = value
        return RunConfig.model_validate(nested)


def rule_arm(name: str, rule: str, qk_norm: bool = False, **model: Any) -> Arm:
    """An arm that is a rule, with or without a norm on q and k."""
    fields = {"rule": rule, "qk_norm": qk_norm, **model}
    return Arm(name, {f"model.{field}": value for field, value in fields.items()})


RULES = (
    rule_arm("none", "none"),
    rule_arm(USUAL, "inverse_sqrt"),
    rule_arm("1/d", "inverse"),
    rule_arm("learned", "learned"),
    rule_arm("QK-norm and 1/√d", "inverse_sqrt", qk_norm=True),
    rule_arm("cosine", "cosine"),
)


def arm_of(arms: Sequence[Arm], config: RunConfig) -> str:
    """The name of the arm that a run belongs to.

    Raises:
        LoadError: it belongs to none.
    """
    for arm in arms:
        if all(_field(config, name) == value for name, value in arm.fields.items()):
            return arm.name
    known = ", ".join(arm.name for arm in arms)
    given = ", ".join(f"{name} = {_field(config, name)!r}" for name in arms[0].fields)
    raise LoadError(
        f"a run with {given}: expected that of one of {known}; vary other fields in a TOML file, with answers of its own"
    )


def head_width(config: RunConfig) -> int:
    """The width of a run's heads, of a preset whose heads are all of one.

    Raises:
        LoadError: they are of several.
    """
    width = config.model.head_dim
    if not isinstance(width, int):
        raise LoadError(
            f"a run with model.head_dim = {list(width)}: expected heads of one width, as all runs of this preset have"
        )
    return width


def _field(config: RunConfig, name: str) -> Any:
    section, field = name.split(".")
    return getattr(getattr(config, section), field)


def text_base(effort: Effort, *, quick_steps: int, full_steps: int, **model: Any) -> RunConfig:
    """A small decoder on text, in the two sizes that most presets use."""
    quick = effort == "quick"
    steps = quick_steps if quick else full_steps
    return RunConfig(
        task=Task(name="text", length=32 if quick else 64),
        model=Model.model_validate({"layers": 2, "heads": 2, "width": 64, "head_dim": 64} | model),
        optimiser=Optimiser(learning_rate=3e-3, warmup=10 if quick else 20),
        steps=steps,
        batch=16,
        evaluate_every=max(1, steps // 8),
        log_every=5 if quick else 10,
    )


def seeded(configs: Iterable[RunConfig], seeds: int) -> list[RunConfig]:
    """Each with the seeds from 0 on."""
    return [config.model_copy(update={"seed": seed}) for config in configs for seed in range(seeds)]
