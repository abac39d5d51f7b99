"""`attemper check`: its options, what is in force of them, and where the results go."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from attemper.checker import RULES, check
from attemper.checker.load import names_factory
from attemper.checker.selection import Selection, layer_ignores
from attemper.checker.thresholds import THRESHOLDS, Thresholds
from attemper.cli.config import Format, Settings, settings, shown
from attemper.cli.output import close_stdout, progress, say, silenced, write_report, write_text
from attemper.cli.page import page_writer
from attemper.cli.rendering import FILE_FORMATS, Rendering, format_of
from attemper.errors import ArgumentError
from attemper.files import check_distinct, check_writable, write_whole
from attemper.report import Report, baseline
from attemper.report.explanations import Section, explained

FailOn = Literal["error", "warning", "info", "never"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A local Hugging Face folder, a Hub id, or package.module:factory. Without it: the unscaled example.",
            show_default=False,
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            help="A text file, a .safetensors file of named tensors, or module:function; may be given several times.",
            show_default=False,
        ),
    ] = None,
    passages: Annotated[int, typer.Option(metavar="N", help="Cut texts into N passages, each an input of its own.")] = 1,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Make no forward pass: bound the logits by the weights' spectral norms.")
    ] = False,
    output_format: Annotated[
        Format | None, typer.Option(help="How to write the report to stdout; text.", show_default=False)
    ] = None,
    output: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Write the report to this file too, as its ending says: {', '.join(FILE_FORMATS)}.", show_default=False
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write a report page: one HTML file, with a map of every head.", show_default=False)
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(metavar="CODES", help="Only these codes, or codes that begin so; with commas.", show_default=False),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="CODES", help="Not these codes; the longer one wins, and --ignore on a tie.", show_default=False),
    ] = None,
    per_layer_ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB:CODES", help="Not these codes in modules whose whole name the glob fits.", show_default=False),
    ] = None,
    threshold: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="A threshold; `attemper rule CODE` shows those of a code.", show_default=False),
    ] = None,
    fail_on: Annotated[
        FailOn | None, typer.Option(help="The severity from which the exit code is 1; error.", show_default=False)
    ] = None,
    baseline_file: Annotated[
        str | None,
        typer.Option(
            "--baseline", metavar="FILE", help="A file of old findings, which are put aside and do not fail.", show_default=False
        ),
    ] = None,
    write_baseline: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write what is found to this file; from then on it is old.", show_default=False),
    ] = None,
    show_suppressed: Annotated[bool, typer.Option("--show-suppressed", help="List the old findings in the text report.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say what every number of the text report is.")] = False,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="What to compute in; auto is the checkpoint's own. If not given, float32 for a checkpoint, and a factory's "
            "model as it is.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Cut texts to this many tokens; 2048.", show_default=False)] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(
            help="What the process may take, such as 16GB; larger checkpoints are read block by block.", show_default=False
        ),
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read a pytorch_model.bin, with weights_only=True.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the checkpoint brings along.")
    ] = False,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A configuration file, in place of the one found upwards from here.", show_default=False
        ),
    ] = None,
    isolated: Annotated[bool, typer.Option("--isolated", help="Read no configuration file.")] = False,
    every: Annotated[
        str | None,
        typer.Option(
            "--all",
            metavar="DIR|LIST",
            help="Check every checkpoint below a folder, or every line of a text file, each in its own process.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="With --all: how many at a time.")] = 1,
    timeout: Annotated[float | None, typer.Option(help="With --all: seconds that one may take.", show_default=False)] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="With --all: on this Ray cluster; local starts one.", show_default=False),
    ] = None,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print what is in force, as TOML, and exit.")] = False,
) -> None:
    """Run a model once and report what is wrong with its attention.

    Exit codes: 0 clean, 1 findings at or above --fail-on, 2 could not run, 3 nothing to check.
    """
    flags = {
        "select": select,
        "ignore": ignore,
        "per-layer-ignores": None if per_layer_ignore is None else layer_ignores(per_layer_ignore),
        "thresholds": None if threshold is None else _numbers(threshold),
        "fail-on": fail_on,
        "dtype": dtype,
        "max-tokens": max_tokens,
        "max-memory": max_memory,
        "output-format": output_format,
        "baseline": baseline_file,
    }
    force = settings(flags, file=config, isolated=isolated)
    if show_config:
        say(shown(force))
        return
    if every is not None:
        alone = {"MODEL": model, "--output": output, "--html": html, "--write-baseline": write_baseline, "--explain": explain}
        for name, value in alone.items():
            if value:
                raise ArgumentError(name, repr(value), "none beside --all")
        from attemper.cli.many import check_all

        passed = {
            "inputs": inputs,
            "passages": None if passages == 1 else passages,
            "weights-only": weights_only,
            "select": select,
            "ignore": ignore,
            "per-layer-ignore": per_layer_ignore,
            "threshold": threshold,
            "fail-on": fail_on,
            "baseline": baseline_file,
            "dtype": dtype,
            "max-tokens": max_tokens,
            "max-memory": max_memory,
            "allow-pickle": allow_pickle,
            "trust-remote-code": trust_remote_code,
            "config": config,
            "isolated": isolated,
        }
        form, asked = force["output-format"], output_format is not None
        raise typer.Exit(check_all(every, passed, output_format=form, asked=asked, jobs=jobs, timeout=timeout, ray=ray))
    if ray is not None or timeout is not None or jobs != 1:
        raise ArgumentError("--jobs, --timeout, --ray", "one of them", "--all with it")
    if explain and force["output-format"] != "text":
        raise ArgumentError(
            "--explain",
            f"output-format {force['output-format']}",
            "--output-format text beside it: the text report is what it explains",
        )
    files = {Path(name): format_of(name) for name in output or ()}
    named = [("--output", Path(name)) for name in output or ()]
    named += [("--write-baseline", Path(write_baseline))] if write_baseline else []
    for option, path in named:
        check_writable(path, option)
    write_page = page_writer(html)
    check_distinct([*named, *([("--html", html)] if html else [])])
    known = baseline.read(Path(force["baseline"])) if force["baseline"] else None

    report = _checked(model, inputs, passages, weights_only, force, allow_pickle, trust_remote_code)
    if write_baseline and report.looked_at:  # nothing that could be looked at is no reason to forget what was found before
        known = baseline.known(report.findings)
        write_whole(Path(write_baseline), baseline.written(known))
    if known is not None:
        report = baseline.compare(report, known, _sought(force, weights_only))
    rendering = Rendering(report, force["fail-on"], model, compared=known is not None, docs_url=force["docs-url"])
    written = {path: rendering.text(form) for path, form in files.items()}
    for path, text in written.items():
        write_whole(path, text)
    write_page(report)
    code = report.exit_code(force["fail-on"])
    try:
        if force["output-format"] == "text":
            write_report(report, rendering.names, _extra(report, force, show_suppressed, explain))
        else:
            write_text(rendering.text(force["output-format"]))
    except BrokenPipeError:
        close_stdout()  # the answer stands, whether or not somebody read all of it
    raise typer.Exit(code)


def _checked(
    model: str | None,
    inputs: list[str] | None,
    passages: int,
    weights_only: bool,
    force: Settings,
    allow_pickle: bool,
    trust_remote_code: bool,
) -> Report:
    everywhere = force.origins["max-memory"] != "command line"  # what a file wants of all checks, where it applies
    with progress() as tell, silenced():
        return check(
            model,
            inputs,
            passages=passages,
            weights_only=weights_only,
            select=force["select"],
            ignore=force["ignore"],
            per_layer_ignores=force["per-layer-ignores"],
            severities=force["severities"],
            thresholds=force["thresholds"],
            dtype=force["dtype"],
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            max_tokens=force["max-tokens"],
            max_memory=None if everywhere and names_factory(model) else force["max-memory"],
            progress=tell,
        )


def _sought(force: Settings, weights_only: bool) -> Callable[[baseline.Known], bool]:
    """Whether a check with these options looks for what an entry of a baseline names."""
    selection = Selection.of(force["select"], force["ignore"], force["per-layer-ignores"])
    by_weights = {rule.code for rule in RULES if rule.options == "--weights-only"}
    return lambda entry: selection.wants(entry.code, entry.module) and (entry.code in by_weights) == weights_only


def _extra(report: Report, force: Settings, show_suppressed: bool, explain: bool) -> list[Section]:
    from attemper.report import layout

    sections: list[Section] = []
    if show_suppressed and report.suppressed:
        sections.append(("in the baseline", layout.suppressed(report)))
    if explain:
        sections += explained(report, RULES, _thresholds(force["thresholds"]))
    return sections


def _thresholds(given: Mapping[str, Any]) -> list[str]:
    values = Thresholds.of(given).by_name()
    return [
        f"{each.name} = {values[each.name]:g} ({each.meaning.unit}; {', '.join(each.meaning.codes)}): {each.meaning.words} "
        f"Default {each.default:g}: {each.meaning.source}."
        for each in THRESHOLDS
    ]


def _numbers(given: list[str]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for each in given:
        name, _, value = each.partition("=")
        try:
            numbers[name.strip()] = float(value)
        except ValueError:
            raise ArgumentError("--threshold", repr(each), "NAME=NUMBER, such as large-logit=50") from None
    return numbers
