"""The sub-command `fix`: its options, and its two forms of output."""

import sys
from enum import StrEnum
from typing import Annotated

import typer

from attemper.checker.options import DTYPES
from attemper.cli.output import progress, silenced, write_json
from attemper.cli.signals import ended_as_interrupted
from attemper.errors import ArgumentError


class Form(StrEnum):
    """How the report is written."""

    TEXT = "text"
    JSON = "json"


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="A local Hugging Face folder or a Hub id, never written to; or package.module:factory, to list and to try."
        ),
    ],
    out: Annotated[
        str | None, typer.Option(help="The new folder, absent or empty. It appears when it is complete.", show_default=False)
    ] = None,
    clip: Annotated[bool, typer.Option("--clip", help="Clip heads whose largest scale·q·k exceeds the threshold.")] = False,
    threshold: Annotated[float, typer.Option(help="What no head's largest scale·q·k should exceed.")] = 100.0,
    fold: Annotated[
        str | None,
        typer.Option(
            metavar="FROM:TO",
            help="Multiply q's projections by FROM/TO; each a number, none, inverse-sqrt or inverse.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and write nothing.")] = False,
    inputs: Annotated[
        str | None,
        typer.Option(help="A text file, a .safetensors file of named tensors, or module:function.", show_default=False),
    ] = None,
    output_format: Annotated[Form, typer.Option(help="How to write the report.")] = Form.TEXT,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="|".join(DTYPES), help="What to compute the checks in; float32 if not given.", show_default=False),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Cut texts to this many tokens.")] = 2048,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read a pytorch_model.bin, with weights_only=True.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the checkpoint brings along.")
    ] = False,
) -> None:
    """Do what check proposes to a copy of the weights, check it again, and say how far the outputs moved.

    Without --clip or --fold: list what check proposes. Exit codes: 0 done (or listed), 1 what was written still has errors,
    2 could not run and nothing was written.
    """
    from attemper.checker.remedies import fix, plain_text

    with progress() as tell, silenced(), ended_as_interrupted():
        report = fix(
            model,
            out,
            inputs,
            clip=threshold if clip else None,
            fold=None if fold is None else _two(fold),
            dry_run=dry_run,
            dtype=dtype,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            max_tokens=max_tokens,
            progress=tell,
        )
    if output_format == Form.JSON:
        write_json(report.to_dict())
    else:
        sys.stdout.write(plain_text(report) + "\n")
        sys.stdout.flush()
    raise typer.Exit(report.exit_code())


def _two(fold: str) -> tuple[str, str]:
    one, colon, other = fold.partition(":")
    if not colon:
        raise ArgumentError("--fold", repr(fold), "FROM:TO, such as none:inverse-sqrt")
    return one, other
