"""The sub-command `lab`: train small transformers under every scale rule, and say what came of it."""

import typer

from attemper.cli.lab import reading, running

app = typer.Typer(
    help="Train small transformers that differ in one thing, such as the factor on q·k, and compare them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("run", short_help="Train the runs of a preset or of a TOML file, and answer its question.")(running.run)
app.command("resume", short_help="Go on with a sweep that was interrupted.")(running.resume)
app.command("list", short_help="List the presets, or the runs of a folder.")(reading.list_)
app.command("report", short_help="Say again what a sweep came to, as text or as a page.")(reading.report)
app.command("compare", short_help="Two sweeps side by side, seed by seed.")(reading.compare)
