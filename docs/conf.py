"""Sphinx settings, and what is written from tables in the code: the check's rules and thresholds, scale rules, weights' families.

The example on a rule's page is run when the page is written: what it shows is what the command prints.
"""

import importlib
import inspect
import warnings
from pathlib import Path
from types import ModuleType

from sphinx.application import Sphinx

import attemper
from attemper.checker.codes import BY_CODE, RULES, Rule
from attemper.checker.rules import TRAINING
from attemper.checker.thresholds import THRESHOLDS, Threshold, used_by
from attemper.monitor.alarms.thresholds import ALARM_THRESHOLDS
from attemper.report.text import plain_text
from attemper.scales.table import USES
from attemper.weights.families import FAMILIES as WEIGHT_FAMILIES

HERE = Path(__file__).resolve().parent

project = "attemper"
author = copyright = "the attemper developers"
release = version = attemper.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "generated"]
html_theme = "furo"
html_title = f"attemper {release}"
html_theme_options = {"footer_icons": []}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings give shapes and dtypes, which annotations cannot
autoclass_content = "class"
add_module_names = False
napoleon_use_ivar = True
default_role = "code"

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


def rule_page(rule: Rule) -> str:
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
    rows = [
        f"| `{each.name}` | {each.default:g} | {each.meaning.unit} | {each.meaning.words} | {each.meaning.source} |"
        for each in thresholds
    ]
    return "| name | default | unit | meaning | source of the default |\n|---|---|---|---|---|\n" + "\n".join(rows) + "\n"


def rules_index() -> str:
    """The table of all rules, by family."""
    parts = ["# Rules\n\n`attemper rule CODE` prints the same text. A code never changes its meaning.\n"]
    for digit, title in FAMILIES.items():
        rules = [rule for rule in BY_CODE.values() if rule.code[3] == digit]
        if rules:
            rows = "\n".join(
                f"| [{rule.code}]({rule.code}.md) | {rule.name} | {rule.severity} | {rule.summary} |" for rule in rules
            )
            parts.append(f"## {title}\n\n| code | name | severity | what is found |\n|---|---|---|---|\n{rows}\n")
    toctree = "\n".join(BY_CODE)
    parts.append(f"```{{toctree}}\n:hidden:\n\n{toctree}\n```\n")
    return "\n".join(parts)


def alarm_rules() -> str:
    """The table of the alarms of a training run."""
    rows = [
        f"| [{rule.code}](rules/{rule.code}.md) | {rule.name} | {rule.severity} | {rule.summary} | {rule.source} |"
        for rule in TRAINING
    ]
    return "| code | name | severity | what is found | source |\n|---|---|---|---|---|\n" + "\n".join(rows) + "\n"


def write_rules(folder: Path) -> None:
    """Write the pages that changed and remove those whose rule is gone."""
    pages = {"index.md": rules_index()} | {f"{rule.code}.md": rule_page(rule) for rule in BY_CODE.values()}
    for path in folder.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        write(folder / name, text)


def scale_rules() -> str:
    """The table of scale rules and of who uses them."""
    rows = [
        f"| `{use.written}` | {use.formula} | {use.architectures} | {', '.join(use.held) or '—'} | {use.source} |" for use in USES
    ]
    head = "| rule | formula | used by | held by | source |\n|---|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def weight_families() -> str:
    """The table of the families whose projections are known."""
    rows = []
    for family in WEIGHT_FAMILIES:
        names = ", ".join(f"`{name}`" for name in dict.fromkeys((family.query, family.key, family.value)))
        layout = "apart" if family.split is None else " ".join((family.split.__doc__ or "").split()).rstrip(".")
        rows.append(f"| {names} | {layout} | {family.models} |")
    rows.append("| `q_b_proj` or `q_proj`, `kv_b_proj` | MLA | deepseek_v2, deepseek_v3 and others with their layout |")
    rows.append("| `in_proj_weight` | [q; k; v] | torch.nn.MultiheadAttention, attemper.nn.MultiheadAttention |")
    return "| projections | outputs | models |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def write(path: Path, text: str) -> None:
    """Write a file, unless it says this already: Sphinx would read it anew."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


unplaced = [code for code in BY_CODE if code[3] not in FAMILIES]
if unplaced:
    raise RuntimeError(f"no family in docs/conf.py for {unplaced}")
write_rules(HERE / "rules")
write(HERE / "generated" / "scale_rules.md", scale_rules())
write(HERE / "generated" / "thresholds.md", thresholds_table(THRESHOLDS))
write(HERE / "generated" / "alarm_thresholds.md", thresholds_table(ALARM_THRESHOLDS))
write(HERE / "generated" / "alarms.md", alarm_rules())
write(HERE / "generated" / "weight_families.md", weight_families())


def keep_bars(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """|x| is an absolute value in a docstring, not a substitution."""
    lines[:] = [line.replace("|", "\\|") for line in lines]


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", keep_bars)
