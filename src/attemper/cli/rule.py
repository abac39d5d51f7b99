"""`attemper rule`: what there is to say about a code, or the list of all."""

from typing import Annotated

import typer

from attemper.checker import BY_CODE, rule
from attemper.checker.thresholds import used_by
from attemper.cli.output import say
from attemper.report import Rule


def command(code: Annotated[str, typer.Argument(help="A code such as ATT101; all of them if none is given.")] = "") -> None:
    """Explain a code: what is found, why it matters, an example, what to do, when to ignore it, its thresholds."""
    if not code:
        say([f"{each.code}  {each.severity!s:<7}  {each.name}: {each.summary}" for each in BY_CODE.values()], hang=17)
        return
    say(described(rule(code)))


def described(found: Rule) -> list[str]:
    """One rule as paragraphs with empty lines between them."""
    paragraphs = [f"{found.code} {found.name} ({found.severity})", found.summary, f"Why: {found.why}"]
    if found.measured:
        paragraphs.append(f"Measured: {found.measured}")
    if found.example:
        paragraphs.append(f"Example: attemper check {found.example} {found.options}".rstrip())
    paragraphs.append(f"What to do: {found.remedy}")
    if found.ignore_when:
        paragraphs.append(f"When to ignore: {found.ignore_when}")
    if not found.example:
        paragraphs.append("Found by: attemper.watch, over the steps of a training run; attemper check does not look for it.")
    for each in used_by(found.code):
        meaning = each.meaning
        paragraphs.append(f"Threshold {each.name} = {each.default:g} ({meaning.unit}): {meaning.words} Source: {meaning.source}.")
    paragraphs.append(f"Threshold and source: {found.source}")
    return [line for paragraph in paragraphs for line in (paragraph, "")][:-1]
