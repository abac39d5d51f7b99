"""A page for each finding code and alarm, their index, and the tables of thresholds.

The example on a rule's page is run when the page is written: what it shows is what the command prints.
"""

import importlib
import inspect
import warnings
from types import ModuleType

import attemper
from attemper.checker.codes import BY_CODE, RULES, Rule
from attemper.checker.rules import TRAINING
from attemper.checker.thresholds import Threshold, used_by
from attemper.report.text import plain_text
from docs.pages.markdown import contents, table

FAMILIES = {
    "1": "Scale",
    "2": "Range",
    "3": "Health of the softmax",
    "4": "Masks",
    "5": "Training dynamics",
}

WATCHED = (
    "**Found by.** [`attemper.watch`](../alarms.md), over the steps of a training run; `attemper check` does not look for it."
)


def finding_pages() -> dict[str, str]:
    """The pages of all codes and their index, by name."""
    unplaced = [code for code in BY_CODE if code[3] not in FAMILIES]
    if unplaced:
        raise RuntimeError(f"no family in docs/pages/findings.py for {unplaced}")
    return {"index": index()} | {rule.code: page(rule) for rule in BY_CODE.values()}


def page(rule: Rule) -> str:
    """One rule as a page."""
    parts = [
        f"# {rule.code} {rule.name}",
        rule.summary,
        f"**Severity:** {rule.severity}",
        f"**Why it matters, and how it is decided.** {rule.why}",
    ]
    if rule.measured:
        parts.append(f"**What is measured.** {rule.measured}")
    parts += [f"**What to do.** {rule.remedy}", f"**When to ignore it.** {rule.ignore_when}"]
    parts.append(f"**Threshold and source.** {rule.source}")
    if thresholds := used_by(rule.code):
        parts += ["**Thresholds that can be set**", thresholds_table(thresholds)]
    return "\n\n".join([*parts, *(example(rule) if rule.example else [WATCHED])]) + "\n"


def example(rule: Rule) -> list[str]:
    """A model with the fault, its source, and what the command prints of it."""
    module_name, _, name = rule.example.partition(":")
    module = importlib.import_module(module_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = attemper.check(rule.example, select=rule.code, weights_only="--weights-only" in rule.options)
    printed = plain_text(report, {each.code: each.name for each in RULES})
    return [
        "## Example",
        f"In `{module_name}`:",
        f"```python\n{source(module, name)}\n```",
        f"```console\n$ attemper check {rule.example} {rule.options and rule.options + ' '}--select {rule.code}\n{printed}\n```",
    ]


def source(module: ModuleType, name: str) -> str:
    """The source of a factory, and of what it names that is the module's own and private: the faulty part."""
    factory = getattr(module, name)
    parts = [getattr(module, used) for used in factory.__code__.co_names if used.startswith("_") and used != "_model"]
    return "\n\n".join(inspect.getsource(part).strip() for part in [*parts, factory])


def thresholds_table(thresholds: tuple[Threshold, ...]) -> str:
    """Thresholds with their meaning, as a table."""
    return table(
        ("name", "default", "unit", "meaning", "source of the default"),
        (
            (f"`{each.name}`", f"{each.default:g}", each.meaning.unit, each.meaning.words, each.meaning.source)
            for each in thresholds
        ),
    )


def index() -> str:
    """The table of all rules, by family."""
    parts = ["# Finding codes\n\n`attemper rule CODE` prints the same text. A code never changes its meaning.\n"]
    for digit, title in FAMILIES.items():
        rules = [rule for rule in BY_CODE.values() if rule.code[3] == digit]
        if rules:
            rows = ((f"[{rule.code}]({rule.code}.md)", rule.name, str(rule.severity), rule.summary) for rule in rules)
            parts.append(f"## {title}\n\n" + table(("code", "name", "severity", "what is found"), rows))
    return "\n".join([*parts, contents(BY_CODE)])


def alarms_table() -> str:
    """The table of the alarms of a training run."""
    return table(
        ("code", "name", "severity", "what is found", "source"),
        ((f"[{rule.code}](rules/{rule.code}.md)", rule.name, str(rule.severity), rule.summary, rule.source) for rule in TRAINING),
    )
