"""The application: its sub-commands, and what becomes of errors. Results go to stdout, progress and errors to stderr."""

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from attemper.cli import COULD_NOT_RUN, INTERRUPTED, check, compare, explain, fix, info, lab, report, rule, top
from attemper.cli.output import close_stdout, say
from attemper.errors import AttemperError, in_one_line
from attemper.report.names import safe

app = typer.Typer(
    name="attemper",
    help="Attention you can see into, and keep in range.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("check")(check.command)
app.command("compare", short_help="Run one set of weights in two ways and say where and why their attention parts.")(
    compare.command
)
app.command("fix", short_help="Do what check proposes to a copy of the weights.")(fix.command)
app.command("top", short_help="Show a training run that attemper.watch writes, live in the terminal.")(top.command)
app.command("report", short_help="Summarise a training run that attemper.watch wrote, as a table or a page.")(report.command)
app.add_typer(lab.app, name="lab", short_help="Train small transformers that differ in one thing, and compare them.")
app.command("explain", short_help="Explain why attention is scaled, with figures measured now.")(explain.command)
app.command("rule", short_help="Explain a code such as ATT101, or list all of them.")(rule.command)
app.command("info", short_help="Print versions, kernels and extras, for a bug report.")(info.command)


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code; an error that attemper raises on purpose becomes one line."""
    closed = sys.stdout is None
    _make_writable()
    if closed:
        _complain("stdout is closed, so that no result can be written; expected it open (/dev/null drops what is written)")
        return COULD_NOT_RUN
    try:
        code = app(args=list(arguments), prog_name="attemper", standalone_mode=False)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else COULD_NOT_RUN
    except TyperException as error:
        _complain_of_usage(error)
        return COULD_NOT_RUN
    except AttemperError as error:
        _complain(_as_typed(str(error), arguments))
        return COULD_NOT_RUN
    except OSError as error:
        _complain(f"could not read or write: {error}")
        if error.filename is None:  # it may be stdout's, which the interpreter would write to once more when it ends
            close_stdout()
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except Exception:  # noqa: BLE001 - Python's own exit code would be 1, which says that there are findings
        traceback.print_exc()
        _complain("this is a fault in attemper itself; please report it with the lines above and the output of `attemper info`")
        return COULD_NOT_RUN
    if code == INTERRUPTED:  # what typer makes of KeyboardInterrupt, without a word
        _complain("interrupted")
    return code or 0


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        from attemper import __version__

        say([f"attemper {__version__}"])
        raise typer.Exit(0)


def _as_typed(message: str, arguments: Sequence[str]) -> str:
    """The message, which begins with the name of an argument, under the name of the option that was typed for it."""
    name, colon, rest = message.partition(":")
    option = f"--{name.replace('_', '-')}"
    typed = {each.partition("=")[0] for each in arguments}
    return next((f"{each}{colon}{rest}" for each in (option, f"{option}s") if each in typed), message)


def _complain(message: str) -> None:
    sys.stderr.write(f"attemper: {safe(in_one_line(message))}\n")


def _complain_of_usage(error: Any) -> None:
    message = error.format_message()
    if "\n" in message:  # the help, for a command without arguments
        sys.stderr.write(f"{message}\n")
        return
    command = error.ctx.command_path if getattr(error, "ctx", None) is not None else "attemper"
    _complain(f"{message.rstrip('.')}; see {command} --help")


def _make_writable() -> None:
    """A stream that the caller closed swallows what is written; one that cannot write a character writes a question mark."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open as long as the process
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
