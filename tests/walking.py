"""Walks a page of the documents: runs its code blocks in order, in an empty folder, and tells what each prints.

    python -m tests.walking docs/tutorials/check.md           # whether the page shows what is printed
    python -m tests.walking docs/tutorials/check.md --write   # puts into the page what is printed

A block of `python` is run in one namespace with those before it, and prints what the block of `text` after "It prints:" shows.
A block whose first line is a comment with the name of a file is that file. In a block of `console` each line with `$ ` is a
command, and the lines below it are what it prints. Blocks of `sh` are for the reader, and are not run. Numbers may differ by a
twentieth, or by what a line before the block says, <!-- within 50 % -->, where they measure rounding itself.

What a page needs beside the package is named in its first line, <!-- needs: minilm peers -->: `minilm` is the folder of that
model, `peers` are the packages of tests/peers.txt.
"""

import argparse
import contextlib
import importlib
import io
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BLOCK = re.compile(
    r"^(?:<!-- within (\d+) % -->\n)?```(python|toml|console)\n(.*?)^```\n(?:\nIt prints:\n\n```text\n(.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
NAMED = re.compile(r"# ([\w-]+\.(?:py|toml))\n")
FORK = multiprocessing.get_context("fork")  # a new Python would take seconds to import torch, for each command
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
PART = 0.05  # numbers may differ by so much: another processor rounds otherwise
# torchvision, which timm imports, finds its operators only beside a torch that is built for GPUs; no model here calls them.
OPERATORS = (
    "nms qnms roi_align _roi_align_backward roi_pool _roi_pool_backward ps_roi_align _ps_roi_align_backward ps_roi_pool"
    " _ps_roi_pool_backward qroi_align deform_conv2d _deform_conv2d_backward"
)


class Step(NamedTuple):
    """One thing that was run: its code or command, what the page shows of it, what it printed, how far numbers may part."""

    code: str
    shown: str
    printed: str
    part: float

    def agrees(self) -> bool:
        """Whether the page shows what was printed, numbers within rounding."""
        return _words(self.shown) == _words(self.printed) and all(
            _close(*pair, self.part) for pair in zip(NUMBER.findall(self.shown), NUMBER.findall(self.printed), strict=True)
        )


def needs(page: Path) -> list[str]:
    """What a page needs beside the package."""
    found = re.match(r"<!-- needs: (.*) -->", page.read_text("utf-8"))
    return found.group(1).split() if found else []


def walk(text: str) -> Iterator[Step]:
    """Run the blocks of a page in the current folder."""
    space: dict[str, object] = {"__name__": "__main__"}
    status = 0
    for within, language, body, shown in BLOCK.findall(text):
        part = int(within) / 100 if within else PART
        name = NAMED.match(body)
        if language == "console":
            for command, output in COMMAND.findall(body):
                printed, status = _command(command, status)
                yield Step(command, output, printed, part)
        elif name:
            Path(name.group(1)).write_text(body, "utf-8")
        elif language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(body, "<block>", "exec"), space)
            yield Step(body, shown, printed.getvalue(), part)


def _command(command: str, status: int) -> tuple[str, int]:
    """What a command prints to stdout, and its exit code; `$?` in it is the one before."""
    if command.startswith("attemper "):
        own, *behind = command.split(" | ", 1)
        with tempfile.NamedTemporaryFile("r", encoding="utf-8") as printed:
            process = FORK.Process(target=_attemper, args=(shlex.split(own)[1:], printed.name))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks where there are threads, since Python 3.12
                process.start()
            process.join()
            text, code = printed.read(), process.exitcode or 0
        if behind:
            text = subprocess.run(["sh", "-c", behind[0]], capture_output=True, text=True, check=True, input=text).stdout
    else:
        done = subprocess.run(["sh", "-c", f"(exit {status}); {command}"], capture_output=True, text=True, check=False)
        text, code = done.stdout, done.returncode
    if code not in (0, 1):
        raise SystemExit(f"{command} exited {code}:\n{text}")
    return re.sub(" +$", "", text, flags=re.MULTILINE), code


def _attemper(words: list[str], printed: str) -> None:
    """Be the command, in a process that has imported what it needs already."""
    os.dup2(os.open(printed, os.O_WRONLY), 1)
    from attemper.cli import main

    code = main(words)
    sys.stdout.flush()
    sys.exit(code)


def _words(text: str) -> str:
    """A text without its numbers, and with one space for several, since columns are as wide as their numbers."""
    return re.sub(r"-{3,}", "---", re.sub(r"[ \t]+", " ", re.sub(r" +$", "", NUMBER.sub("0", text), flags=re.MULTILINE)))


def _close(shown: str, printed: str, part: float) -> bool:
    """Whether two numbers differ by a unit of their last place, or a small part, at most."""
    places = len(shown.partition("e")[0].partition(".")[2])
    a, b = float(shown), float(printed)
    unit = 0.0 if "." not in shown and "e" not in shown else 10.0**-places * 10.0 ** float(shown.partition("e")[2] or 0)
    return abs(a - b) <= 1.001 * max(unit, part * abs(a))


def written(text: str, steps: list[Step]) -> str:
    """The page with what was printed in the places of what it shows."""
    rest = iter(steps)

    def block(match: re.Match[str]) -> str:
        within, language, body, _ = match.groups()
        before = f"<!-- within {within} % -->\n" if within else ""
        if language == "console":
            shown = "".join(f"$ {command}\n{next(rest).printed}" for command, _ in COMMAND.findall(body))
            return f"{before}```console\n{shown}```\n"
        if language == "toml" or NAMED.match(body):
            return match.group(0)
        printed = next(rest).printed
        return f"{before}```{language}\n{body}```\n" + (f"\nIt prints:\n\n```text\n{printed}```\n" if printed else "")

    return BLOCK.sub(block, text)


def declare_operators() -> None:
    """Give torchvision's operators their names, so that it can be imported where its library cannot be loaded."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS.split():
        library.define(f"{name}() -> ()")
    declare_operators.library = library  # type: ignore[attr-defined]  # what it declares ends with it


def main() -> int:
    """The command; 1 where the page shows something else than what was printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    page = given.page.resolve()
    text = page.read_text("utf-8")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"COLUMNS": "130", "NO_COLOR": "1", "TERM": "dumb"}
    # Before torch is imported: a fork of a process whose OpenMP, or whose tokenizers, have threads hangs.
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if "peers" in needs(page):
        from tests.peers import find as find_peers

        sys.path.append(str(find_peers()))
        declare_operators()
        for theirs in (DeprecationWarning, FutureWarning):  # of what they call in torch
            warnings.simplefilter("ignore", theirs)
    with tempfile.TemporaryDirectory() as folder:
        if "minilm" in needs(page):
            from tests.real_models import unpack_minilm

            unpack_minilm(Path(folder) / "minilm")
            importlib.import_module("transformers.models.bert.modeling_bert")  # here, and not in each command
        os.chdir(folder)
        sys.path.insert(0, folder)
        steps = list(walk(text))
        os.chdir("/")
    if given.write:
        page.write_text(written(text, steps), "utf-8")
        return 0
    wrong = [step for step in steps if not step.agrees()]
    for step in wrong:
        sys.stdout.write(f"{step.code}\n--- shown:\n{step.shown}--- printed:\n{step.printed}\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
