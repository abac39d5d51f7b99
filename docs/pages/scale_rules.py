"""A page for each scale rule of `attemper.scales`, their index, and the table of who uses which.

Definition and assumptions are the docstring's, users the table's, figures the rule's own answers; what check says is asked of it.
"""

import inspect
import re
from collections.abc import Sequence

import torch

from attemper import scales
from attemper.scales import LogitShape, Scale
from attemper.scales.table import USES
from docs.pages.markdown import contents, table
from docs.pages.scale_rule_texts import RULES, Words
from docs.pages.scale_verdicts import verdicts

_SYMBOLS = (
    "Each is an object of `attemper.scales`; what they share is on [](../scales.md). d is the width of a head, f₀ the factor of "
    "the rule below (`base`), p the query's position from 0, l the layer from 0, n the number of visible keys."
)
_LETTERS = {
    "f_0": "f₀ that of the rule below (`base`)",
    "d": "d the width of a head",
    "l": "l the layer, from 0",
    "f_p": "p the position of the query, from 0",
    "f_n": "n the number of visible keys",
}
_WIDTHS, _WIDTH = (32, 64, 128, 256), 64
_LAYERS = (0, 1, 5, 11, 23)
_POSITIONS = (0, 1023, 8191, 16383, 131071, 1048575)


def scale_rule_pages() -> dict[str, str]:
    """The pages of all rules and their index, by name."""
    return {"index": index()} | {rule.__name__: page(rule, words) for rule, words in RULES.items()}


def made(written: str) -> Scale:
    """The rule that a reader would write so, after `from attemper.scales import *`."""
    return eval(written, {name: getattr(scales, name) for name in scales.__all__})


def index() -> str:
    """All rules in a table."""
    rows = []
    for rule, words in RULES.items():
        _, _, meaning = parts_of(rule)[0].partition("`: ")
        rows.append((f"[{rule.__name__}]({rule.__name__}.md)", f"${words.formula}$", meaning))
    parts = [
        "# Scale rules, one by one",
        _SYMBOLS,
        table(("rule", "factor", "what it is"), rows),
        contents(rule.__name__ for rule in RULES),
    ]
    return "\n\n".join(parts)


def page(rule: type[Scale], words: Words) -> str:
    """One rule as a page."""
    definition, assumes, arguments = parts_of(rule)
    learned = issubclass(rule, torch.nn.Module)
    kind = "Learned: a `torch.nn.Module` with a parameter." if learned else "Fixed: a frozen dataclass."
    parts = [
        f"# {rule.__name__}",
        f"{{py:class}}`attemper.scales.{rule.__name__}`. {definition}",
        f"$$ {words.formula} $$",
        letters(words.formula),
        f"{kind} {assumes}",
        "## When to use it, how to read it",
        words.reading,
        "## Arguments",
        "\n".join(f"- `{names}`: {text}" for names, text in arguments) or "None.",
        "## Figures",
        f"The variance of the logits at initialisation is ${words.variance}$. What the rule says of itself:",
        figures(words.calls),
        "## Who uses it",
        users(rule),
        f"Source: {next(use.source for use in USES if use.rule is rule)}.",
        "## What `attemper check` says",
        verdicts(rule, words, made),
    ]
    return "\n\n".join(parts) + "\n"


def letters(formula: str) -> str:
    """What the letters stand for that the arguments do not explain."""
    used = set(re.findall(r"\\?[A-Za-z]+(?:_\w)?", formula))
    found = [words for letter, words in _LETTERS.items() if letter in used]
    return "f is the factor on q·k" + "".join(f", {words}" for words in found) + "."


def parts_of(rule: type[Scale]) -> tuple[str, str, list[tuple[str, str]]]:
    """Of a docstring: the first sentence without its formula, what follows it, and the arguments with what is said of each."""
    doc = inspect.getdoc(rule) or ""
    body, _, rest = re.split(r"^Source:", doc, flags=re.MULTILINE)[0].partition("\nArgs:\n")
    summary, *further = [" ".join(paragraph.split()) for paragraph in body.strip().split("\n\n")]
    formula, _, definition = summary.partition(": ")
    arguments: list[tuple[str, str]] = []
    several = rf"; (?=(?:{'|'.join(inspect.signature(rule).parameters)}): )"
    for line in re.sub(several, "\n", inspect.cleandoc(rest)).splitlines():
        name, colon, text = line.partition(": ")
        if colon and re.fullmatch(r"[a-z_, ]+", name):
            arguments.append((name.replace(", ", "`, `"), text))
        elif line.strip():
            arguments[-1] = (arguments[-1][0], f"{arguments[-1][1]} {line.strip()}")
    return f"`{formula}`: {definition}", " ".join(further), arguments


def figures(calls: Sequence[str]) -> str:
    """The factor, and the variance that it gives, at a few widths, layers or positions: at those on which the rule depends."""
    rules = [made(call) for call in calls]
    rows = []
    for name, shape in shapes(rules[0]):
        numbers = []
        for rule in rules:
            factor = torch.as_tensor(rule.factor(shape), dtype=torch.float64).detach()
            numbers += [f"{factor.flatten()[0].item():.6g}", f"{rule.logit_variance(shape):.4g}"]
        rows.append((name, *numbers))
    over, at = over_what(rules[0])
    head = [over, *(f"{column} of `{call}`" if len(calls) > 1 else column for call in calls for column in ("factor", "variance"))]
    note = at + (" The variance is that for q and k of length 1." if rules[0].unit_operands else "")
    return f"{table(head, rows)}\n{note}"


def over_what(rule: Scale) -> tuple[str, str]:
    """What a rule's figures are shown over, and what is held."""
    if rule.depends_on_position:
        return "position of the query", f"At width {_WIDTH}, under causal attention: the query at position p sees p + 1 keys."
    if isinstance(rule, scales.InverseLayer):
        return "layer", f"At width {_WIDTH}."
    return "width d of a head", "The same at every position and in every layer."


def shapes(rule: Scale) -> list[tuple[str, LogitShape]]:
    """The shapes at which a rule is asked, with what a row of the table is called."""
    if rule.depends_on_position:
        return [(f"{p}", LogitShape(_WIDTH, heads=1, queries=1, keys=p + 1, offset=p)) for p in _POSITIONS]
    if isinstance(rule, scales.InverseLayer):
        return [(f"{layer}", LogitShape(_WIDTH, heads=1, queries=1, keys=1, layer=layer)) for layer in _LAYERS]
    return [(f"{width}", LogitShape(width, heads=1, queries=1, keys=1)) for width in _WIDTHS]


def users(rule: type[Scale]) -> str:
    """Who uses it, and which test holds that."""
    rows = [
        (f"`{use.written}`", use.architectures, ", ".join(f"`{name}`" for name in use.held) or "—")
        for use in USES
        if use.rule is rule
    ]
    words = (
        "What is held by a case of `tests/scales/test_huggingface.py`: a tiny model of the architecture, run by its own eager "
        "attention, gives what `attemper.attention` gives under the rule."
    )
    return table(("written", "used by", "held by the cases"), rows) + f"\n{words}"


def uses_table() -> str:
    """The table of scale rules and of who uses them."""
    return table(
        ("rule", "formula", "used by", "held by", "source"),
        (
            (
                f"[`{use.written}`](scale-rules/{use.rule.__name__}.md)",
                use.formula,
                use.architectures,
                ", ".join(use.held) or "—",
                use.source,
            )
            for use in USES
        ),
    )
