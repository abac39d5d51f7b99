"""`lab run` and `lab resume`."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attemper.cli.lab.extras import require_lab
from attemper.cli.lab.page import check_page, write_page
from attemper.cli.output import write_text
from attemper.cli.signals import ended_as_interrupted
from attemper.errors import ArgumentError, LoadError

if TYPE_CHECKING:
    from attemper.lab.sweep import Sweep

Jobs = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Runs at a time, each in a process of its own where more than one (default: as many as there are processors).",
        show_default=False,
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help='Train on the Ray cluster there; "local" starts one here.', show_default=False),
]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Where the page goes (default: DIR/page.html).", show_default=False)
]


def run(
    what: Annotated[str, typer.Argument(metavar="PRESET|CONFIG", help="A preset (see attemper lab list), or a TOML file.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where the runs go (default: lab/NAME).", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The small form of a preset, of minutes.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Set a field of every run, such as model.rule=none. May be given several times.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Seeds 0 to N − 1 of each run.", show_default=False)
    ] = None,
    jobs: Jobs = None,
    ray: Ray = None,
    html: Html = None,
) -> None:  # fmt: skip
    """Train every run of a preset, or of a TOML file, then answer the preset's question in a sentence and as a page.

    A run is kept under the hash of its configuration: what is over is not trained again, and what was interrupted goes on
    where it stood. Exit codes: 0 all runs are over, 2 could not run, 130 interrupted.
    """
    require_lab()
    _check_options(jobs, ray, html)
    from attemper.lab import sweep as sweeps

    asked = _sweep(what, quick, settings or [], seeds)
    folder = out if out is not None else Path("lab") / asked.name
    sweeps.begin(folder, asked)
    _train(folder, jobs, ray, html)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the sweep.")],
    jobs: Jobs = None,
    ray: Ray = None,
    html: Html = None,
) -> None:
    """Go on with a sweep that was interrupted or killed: the table that it ends with is that of one that ran through.

    Exit codes: 0 all runs are over, 2 could not run, 130 interrupted.
    """
    require_lab()
    _check_options(jobs, ray, html)
    _train(folder, jobs, ray, html)


def _sweep(what: str, quick: bool, settings: Sequence[str], seeds: int | None) -> "Sweep":
    from attemper.lab.config_file import check_varied, override, parsed, read_configs
    from attemper.lab.presets import NAMES, preset
    from attemper.lab.presets.changing import check_settings
    from attemper.lab.sweep import Sweep

    values = parsed(settings)
    if seeds is not None and "seed" in values:
        raise ArgumentError("--seeds", f"{seeds} beside --set seed={values['seed']}", "one of the two")
    product = None
    if what in NAMES:
        name, effort, asked = what, "quick" if quick else "full", preset(what)
        check_settings(asked, effort, values)
        configs, product = tuple(asked.runs(effort)), asked.product
    elif what.endswith(".toml") or os.path.exists(what):  # noqa: PTH110 - a name of any kind, such as ""
        if quick:
            raise ArgumentError("--quick", "beside a file", "a preset, which alone has a small form")
        name, effort, configs = Path(what).stem, "", read_configs(Path(what))
        check_varied(configs, values)
    else:
        raise LoadError(f"{what}: neither a preset nor a file; expected one of {', '.join(NAMES)}, or a TOML file")
    if seeds is not None:
        configs = tuple(config.model_copy(update={"seed": seed}) for config in configs for seed in range(seeds))
        configs = tuple(dict.fromkeys(configs))
    before, configs = len(configs), override(configs, values)
    if len(configs) < before:
        sys.stderr.write(
            f"--set {' '.join(settings)}: of {before} runs {len(configs)} remain, as the others differ in that alone\n"
        )
    if product is not None:
        product.check(configs)
    command = ["attemper", "lab", "run", what, *(["--quick"] if quick else [])]
    command += [part for setting in settings for part in ("--set", setting)] + (["--seeds", str(seeds)] if seeds else [])
    return Sweep(name, effort, shlex.join(command), configs)


def _check_options(jobs: int | None, ray: str | None, html: Path | None) -> None:
    """Before anything is written or trained."""
    if ray is not None and jobs is not None:
        raise ArgumentError("--jobs", jobs, "nothing beside --ray, whose cluster deals the runs out")
    if html is not None:
        check_page(html)


def _train(folder: Path, jobs: int | None, ray: str | None, html: Path | None) -> None:
    from attemper.cli.lab.progress import progress
    from attemper.lab import sweep as sweeps
    from attemper.lab.viewing import view_of
    from attemper.report.sweep_text import sweep_text

    asked = sweeps.read(folder)
    over = len(sweeps.results(folder))
    with progress(len(asked.runs), over) as tell, ended_as_interrupted():
        sweeps.run(folder, jobs or _processors(), tell, ray)
    view = view_of(folder)
    write_text(sweep_text(view, tables=False) + "\n")  # first, so that a page that cannot be written takes nothing with it
    page = write_page(view, folder / "page.html" if html is None else html, asked_for=html is not None)
    sys.stderr.write(f"{folder}: {len(asked.runs)} runs, {len(asked.runs) - over} of them trained now; {page}\n")


def _processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
