"""What the API page shows of a module: every name of its `__all__`, the ones that are loaded on demand included."""

import importlib
import inspect
import types
from collections.abc import Collection, Iterator

# Modules of which the API page shows all that is public, and those whose own page does.
MODULES = (
    "attemper",
    "attemper.nn",
    "attemper.checker",
    "attemper.report",
    "attemper.capture.using",
    "attemper.monitor",
)
ELSEWHERE = {"attemper.scales": "scales", "attemper.weights": "weights", "attemper.monitor.alarms": "alarms"}

DATA = {
    "attemper.checker.BY_CODE": "Every rule by its code: those of a check, and the alarms of a training run.",
    "attemper.checker.RULES": "The rules of a check, in order of their codes.",
    "attemper.monitor.FIGURES": "The figures of a head that records, tables and trackers have, each a `Figure`.",
}


def api_files() -> dict[str, str]:
    """For each module of `MODULES` a file to include, by its name without ending.

    A thing that several modules have is shown once, where it comes first; the others name the place.
    """
    shown: dict[int, str] = {}
    made = {}
    for module in (*ELSEWHERE, *MODULES):
        here, links = [], []
        for name, thing in public(module):
            if id(thing) in shown:
                links.append((name, shown[id(thing)]))
            else:
                shown[id(thing)] = f"{module}.{name}"
                here.append((name, thing))
        if module in MODULES:
            made[f"api_{module.replace('.', '_')}"] = _block(module, here, links)
    return made


def public(module: str) -> Iterator[tuple[str, object]]:
    """The names of a module's `__all__` that are no modules themselves, with what they name."""
    loaded = importlib.import_module(module)
    for name in loaded.__all__:
        thing = getattr(loaded, name)
        if not isinstance(thing, types.ModuleType):
            yield name, thing


def _block(module: str, here: Collection[tuple[str, object]], links: Collection[tuple[str, str]]) -> str:
    lines = []
    for name, thing in here:
        if inspect.isclass(thing):
            lines.append(f".. autoclass:: {module}.{name}\n   :members:\n")
        elif callable(thing):
            lines.append(f".. autofunction:: {module}.{name}\n")
        else:
            lines.append(f".. py:data:: {module}.{name}\n\n   {DATA[f'{module}.{name}']}\n")
    text = "```{eval-rst}\n" + "\n".join(lines) + "```\n"
    if links:
        also = ", ".join(f"{{py:obj}}`{name} <{place}>`" for name, place in links)
        text += f"\nAlso there: {also}.\n"
    return text
