"""A page for each statistic of a row, and their index."""

import inspect

import torch

from attemper import HeadStats, RowStats
from attemper.monitor.records import BY_NAME
from docs.pages.markdown import code_links, contents, table
from docs.pages.measured_statistics import DEVIATIONS, KEYS, extremes, means, value_of
from docs.pages.pictures import curves
from docs.pages.running import ran
from docs.pages.statistic_texts import STATISTICS, Statistic

RECORD = """\
import torch
import attemper

torch.manual_seed(0)
query, key, value = torch.randn(3, 1, 8, 512, 64)  # [batch, heads, positions, d]
_, rows = attemper.attention(query, key, value, is_causal=True, return_stats=True)
"""

_INTRODUCTION = (
    "Each page has the formula, how to read it, its extremes, what it comes to for normal logits, and an example. The words, and "
    "how records merge, are on [](../statistics.md)."
)


def statistic_pages() -> dict[str, str]:
    """The pages of all statistics and their index, by name."""
    return {"index": index()} | {each.name: page(each) for each in STATISTICS}


def called(statistic: Statistic) -> str:
    """The statistic as code has it: with brackets where it is a method."""
    method = callable(getattr(RowStats, statistic.name, None))
    return f"{statistic.name}({'dtype' if statistic.argument else ''})" if method else statistic.name


def index() -> str:
    """All statistics in two tables: what a record stores, and what is derived from it."""
    stored = [each for each in STATISTICS if "(" not in called(each)]
    derived = [each for each in STATISTICS if each not in stored]
    head = ("statistic", "formula", "range", "what it is")

    def rows(of: list[Statistic]) -> list[tuple[str, ...]]:
        return [(f"[`{called(each)}`]({each.name}.md)", f"${each.formula}$", each.range, each.definition) for each in of]

    parts = [
        "# Statistics, one by one",
        _INTRODUCTION,
        "## Stored",
        table(head, rows(stored)),
        "## Derived",
        table(head, rows(derived)),
        contents(each.name for each in STATISTICS),
    ]
    return "\n\n".join(parts)


def page(statistic: Statistic) -> str:
    """One statistic as a page."""
    parts = [
        f"# {called(statistic)}",
        statistic.definition,
        f"$$ {statistic.formula} $$",
        facts(statistic),
        "## How to read it",
        statistic.reading,
    ]
    if statistic.codes:
        parts.append(f"**Findings and alarms that stand on it:** {code_links(statistic.codes)}.")
    parts += ["## Its extremes", extremes_table(statistic), f"**With a sink.** {statistic.sink}"]
    if statistic.picture:
        parts += ["## Of normal logits", drawn(statistic)]
    parts += ["## In code", ran(f"{RECORD}\n{statistic.lines}")]
    if statistic.heads or statistic.figures:
        parts += ["## Of a head", of_a_head(statistic)]
    return "\n\n".join(parts) + "\n"


def facts(statistic: Statistic) -> str:
    """What can be asked of a record: where the statistic comes from, its type, whether it has a gradient."""
    logits = torch.zeros(1, 1, 2, requires_grad=True)
    value = value_of(RowStats.from_logits(logits), statistic)
    stored = "(" not in called(statistic)
    rows = [
        ("kind", "stored in the record" if stored else "derived from the record, by a method"),
        ("shape", "[…, heads, queries]"),
        ("dtype", f"{str(value.dtype).removeprefix('torch.')}{', float64 for float64 inputs' * value.is_floating_point()}"),
        ("gradient", "yes, one derivative" if value.requires_grad else "none"),
        ("range", statistic.range),
    ]
    return table(("", ""), rows)


def extremes_table(statistic: Statistic) -> str:
    """Uniform weights, one-hot weights and no key: in general, and of 512 keys as measured."""
    measured = {name: value_of(rows, statistic).flatten()[0].item() for name, rows in extremes().items()}
    cases = (
        ("n logits that are all c (uniform weights)", statistic.uniform, "512 logits of 1", "uniform"),
        ("one logit far above the others (one-hot weights)", statistic.one_hot, "one logit of 200, 511 of 0", "one_hot"),
        ("no visible key (an empty row)", shown(measured["empty"]), "512 keys, none of them visible", "empty"),
    )
    rows = [(case, general, of, shown(measured[name])) for case, general, of, name in cases]
    made = table(("the row", "in general", "measured", "value"), rows)
    if not of_products(statistic):
        return made.rstrip()
    return f"{made}\ns is the scale, 1/8 in the row that was measured; there is no softcap and no bias."


def of_products(statistic: Statistic) -> bool:
    """Whether it is about q·k before the scale."""
    return statistic.name.startswith(("product", "headroom"))


def shown(value: float) -> str:
    """A number as a page writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.5g}".replace("inf", "∞").replace("nan", "NaN").replace("-", "−")


def drawn(statistic: Statistic) -> str:
    """The mean over rows against the standard deviation of the logits: a picture, and the numbers behind it."""
    measured = means(statistic)
    named = {f"{keys} keys": values for keys, values in measured.items()}
    picture = curves(
        DEVIATIONS,
        named,
        x_label="standard deviation of the logits",
        y_label=f"{statistic.name} over the standard deviation of the logits, for {', '.join(map(str, KEYS))} keys",
        log=statistic.picture == "log",
    )
    rows = [
        (f"{deviation:g}", *(shown(measured[keys][place]) for keys in KEYS))
        for place, deviation in enumerate(DEVIATIONS)
        if place % 2 == 0
    ]
    words = "The mean over rows whose logits are independent and normal, drawn when this page was made (seed 0)."
    if of_products(statistic):
        words += " Products are 8 times the logits, as under 1/√d at width 64."
    return f"{words}\n\n{picture}\n{table(('standard deviation', *named), rows)}"


def of_a_head(statistic: Statistic) -> str:
    """Where summaries of heads and the tables of a watched run have it."""
    rows = [(f"`HeadStats.{name}`", first_sentence(getattr(HeadStats, name))) for name in statistic.heads]
    watched = "in the tables and trackers of [`attemper.watch`](../watch.md)"
    rows += [(f"`{name}` {watched}", BY_NAME[name].words) for name in statistic.figures]
    return table(("name", "what it is"), ((name, words.replace("|", "\\|")) for name, words in rows))


def first_sentence(documented: object) -> str:
    """What a docstring begins with."""
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
