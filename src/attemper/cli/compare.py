"""The sub-command `compare`."""

from typing import Annotated, Literal

import typer

from attemper.checker import compare
from attemper.cli.output import close_stdout, progress, silenced, write_json, write_text


def command(
    a: Annotated[
        str, typer.Argument(help="A local Hugging Face folder, a Hub id, or package.module:factory.", show_default=False)
    ],
    b: Annotated[
        str | None,
        typer.Argument(help="The same. Without it: A a second time, with --attn or --dtypes.", show_default=False),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(help="A text file, a .safetensors file of named tensors, or module:function, for both.", show_default=False),
    ] = None,
    inputs_b: Annotated[
        str | None,
        typer.Option(help="The same for B alone, where its arguments have other names.", show_default=False),
    ] = None,
    attn: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Attention implementations of A and of B, such as: eager sdpa.", show_default=False, metavar="A B"),
    ] = None,
    dtypes: Annotated[
        tuple[str, str] | None,
        typer.Option(
            help="What A and B compute in: auto, float32, float16 or bfloat16. If not given, float32 for checkpoints, and a "
            "factory's model as it is.",
            show_default=False,
            metavar="A B",
        ),
    ] = None,
    output_format: Annotated[Literal["text", "json"], typer.Option(help="How to write the comparison.")] = "text",
    max_tokens: Annotated[int, typer.Option(help="Cut texts to this many tokens.")] = 512,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read a pytorch_model.bin, with weights_only=True.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that a checkpoint brings along.")
    ] = False,
) -> None:
    """Run one set of weights in two ways on the same inputs and say where their attention parts, by which factor, and why.

    Exit codes: 0 alike within rounding, 1 they part, 2 could not run, 3 no attention was seen.
    """
    with progress() as tell, silenced():
        found = compare(
            a,
            b,
            inputs,
            attn=attn,
            dtypes=dtypes,
            inputs_b=inputs_b,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            max_tokens=max_tokens,
            progress=tell,
        )
    try:
        if output_format == "json":
            write_json(found.to_dict())
        else:
            write_text(f"{found}\n")
    except BrokenPipeError:
        close_stdout()  # the answer stands, whether or not somebody read all of it
    raise typer.Exit(found.exit_code())
