"""The sub-commands and their options. Results go to stdout, progress and errors to stderr."""

import os
import sys
import traceback
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attemper.checker import RULES, check, rule
from attemper.cli import COULD_NOT_RUN
from attemper.cli.compare import compare_command
from attemper.cli.environment import describe
from attemper.cli.output import close_stdout, progress, silenced, write_json, write_lines, write_report
from attemper.errors import AttemperError

INTERRUPTED = 130  # what shells give a command that Ctrl-C ended


class Format(StrEnum):
    """How a report is written."""

    TEXT = "text"
    JSON = "json"


class FailOn(StrEnum):
    """The severities of `Report.exit_code`, and never."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    NEVER = "never"


class Dtype(StrEnum):
    """What `check` can compute in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


app = typer.Typer(
    name="attemper",
    help="Attention you can see into, and keep in range.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code; an error that attemper raises on purpose becomes one line."""
    _make_writable()
    try:
        app(args=list(arguments), prog_name="attemper")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else COULD_NOT_RUN
    except AttemperError as error:
        _complain(str(error))
        return COULD_NOT_RUN
    except OSError as error:
        _complain(f"could not read or write: {error}")
        close_stdout()
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except Exception:  # noqa: BLE001 - Python's own exit code would be 1, which says that there are findings
        traceback.print_exc()
        _complain("this is a fault in attemper itself; please report it with the lines above and the output of `attemper info`")
        return COULD_NOT_RUN
    return 0


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        from attemper import __version__

        _say([f"attemper {__version__}"])
        raise typer.Exit(0)


@app.command("check")
def _check(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A local Hugging Face folder, a Hub id, or package.module:factory. Without it: the unscaled example.",
            show_default=False,
        ),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(help="A text file, a .safetensors file of named tensors, or module:function.", show_default=False),
    ] = None,
    output_format: Annotated[Format, typer.Option(help="How to write the report.")] = Format.TEXT,
    select: Annotated[
        list[str] | None, typer.Option(help="Only these codes, or codes that begin so; with commas.", show_default=False)
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Not these codes; the longer one wins, and --ignore on a tie.", show_default=False)
    ] = None,
    fail_on: Annotated[FailOn, typer.Option(help="The severity from which the exit code is 1.")] = FailOn.ERROR,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="What to compute in; auto is the checkpoint's own. If not given, float32 for a checkpoint, and a factory's "
            "model as it is.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Cut texts to this many tokens.")] = 2048,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read a pytorch_model.bin, with weights_only=True.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the checkpoint brings along.")
    ] = False,
) -> None:
    """Run a model once and report what is wrong with its attention.

    Exit codes: 0 clean, 1 findings at or above --fail-on, 2 could not run, 3 nothing to check.
    """
    with progress() as tell, silenced():
        report = check(
            model,
            inputs,
            select=select,
            ignore=ignore,
            dtype=dtype,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            max_tokens=max_tokens,
            progress=tell,
        )
    code = report.exit_code(str(fail_on))
    try:
        if output_format == Format.JSON:
            write_json(report.to_dict())
        else:
            write_report(report, {each.code: each.name for each in RULES})
    except BrokenPipeError:
        close_stdout()  # the answer stands, whether or not somebody read all of it
    raise typer.Exit(code)


app.command("compare", short_help="Run one set of weights in two ways and say where and why their attention parts.")(
    compare_command
)


@app.command("rule", short_help="Explain a code such as ATT101, or list all of them.")
def _rule(code: Annotated[str, typer.Argument(help="A code such as ATT101; all of them if none is given.")] = "") -> None:
    """Explain a code: what is found, why it matters, what to do, where the threshold comes from."""
    if not code:
        _say([f"{each.code}  {each.severity!s:<7}  {each.name}: {each.summary}" for each in RULES], hang=17)
        return
    found = rule(code)
    _say(
        [
            f"{found.code} {found.name} ({found.severity})",
            "",
            found.summary,
            "",
            f"Why: {found.why}",
            "",
            f"What to do: {found.remedy}",
            "",
            f"Threshold and source: {found.source}",
        ]
    )


@app.command("info", short_help="Print versions, kernels and extras, for a bug report.")
def _info() -> None:
    """Print versions, kernels, threads and installed extras, for a bug report."""
    _say(describe(), hang=2)


def _say(lines: list[str], hang: int = 0) -> None:
    try:
        write_lines(lines, hang)
    except BrokenPipeError:
        close_stdout()


def _complain(message: str) -> None:
    from attemper.report.names import safe

    sys.stderr.write(f"attemper: {safe(' '.join(message.split()))}\n")


def _make_writable() -> None:
    """A stream that the caller closed swallows what is written; one that cannot write a character writes a question mark."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open as long as the process
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
