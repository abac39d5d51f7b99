"""Which fields of a preset's runs may be set to something else, so that its question still has an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attemper.errors import ArgumentError
from attemper.lab.presets.preset import Effort, Preset
from attemper.lab.table import flat

# Every preset says its loss in the unit of its task.
ALWAYS_GIVEN = ("task.name",)


def check_settings(preset: Preset, effort: Effort, values: Mapping[str, Any]) -> None:
    """Refuse, before anything is trained, what the preset's answer could not be read from afterwards.

    A field in which its runs differ, but for the seed, tells them apart: with one value for all nothing is left to compare.

    Args:
        preset: whose runs are to be changed.
        effort: of these runs.
        values: what fields are set to, by their dotted names.

    Raises:
        ArgumentError: the answer rests on one of the fields.
    """
    rows = [flat(config.model_dump(mode="json")) for config in preset.runs(effort)]
    rests_on = [name for name in rows[0] if name != "seed" and len({row[name] for row in rows}) > 1]
    rests_on += [name for name in (*ALWAYS_GIVEN, *preset.given) if name not in rests_on]
    for name, value in values.items():
        one = name in preset.free and isinstance(value, int)
        if name in rests_on and not one:
            kept = [f"{each} (but to one number)" if each in preset.free else each for each in rests_on]
            raise ArgumentError(
                "--set",
                f"{name} for the preset {preset.name}",
                f"a field on which its answer does not rest, so none of {', '.join(kept)}; or runs of your own, in a TOML file",
            )
