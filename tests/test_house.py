"""The house rules that no other tool holds: sizes, imports, the public face, the words of errors, nothing of this machine."""

import ast
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import attemper
from tests.running import ROOT, named, run

SOURCES = sorted((ROOT / "src" / "attemper").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
OPTIONAL = (
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "safetensors",
    "typer",
    "click",
    "rich",
    "jinja2",
    "altair",
    "vl_convert",
    "markdown_it",
    "pyarrow",
    "tensorboard",
    "wandb",
    "trackio",
    "mlflow",
    "triton",
)


def test_no_source_file_is_two_ideas_long() -> None:
    assert SOURCES
    lengths = {named(path): len(path.read_text("utf-8").splitlines()) for path in SOURCES}
    assert not {path: length for path, length in lengths.items() if length > 500}


def test_importing_attemper_asks_for_torch_alone() -> None:
    code = f"""
import importlib.abc, sys, warnings
asked = []
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {(*OPTIONAL, "numpy")!r}:
            asked.append(name.partition(".")[0])
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Block())
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
asked.clear()  # torch may try what it likes
import attemper
asked += [name for name in ("torch._dynamo",) if name in sys.modules]  # the compiler: it takes longer to load than torch
for name in attemper.__all__:
    getattr(attemper, name)
print(*asked)
"""
    assert run(sys.executable, "-c", code).split() == []


def test_the_root_has_at_most_twelve_names_listed_in_one_place() -> None:
    assert 1 <= len(attemper.__all__) <= 12
    assert len(set(attemper.__all__)) == len(attemper.__all__)
    assert all(hasattr(attemper, name) for name in attemper.__all__)


@pytest.mark.parametrize("name", attemper.__all__)
def test_a_public_name_says_what_it_takes(name: str) -> None:
    thing = getattr(attemper, name)
    assert inspect.getdoc(thing), f"attemper.{name} has no docstring"
    if isinstance(thing, types.ModuleType) or not callable(thing):
        return
    doc = inspect.getdoc(thing) or ""
    own = thing.__doc__ or ""
    assert own, f"attemper.{name} inherits its docstring"
    takes = [parameter for parameter in inspect.signature(thing).parameters if parameter != "self"]
    assert not takes or "Args:" in doc or "Attributes:" in doc, f"attemper.{name} does not list its arguments"
    missing = [parameter for parameter in takes if not re.search(rf"\b{parameter}(, \w+)*:", doc)]
    assert not missing, f"the docstring of attemper.{name} leaves out {missing}"
    if "Tensor" in str(inspect.signature(thing)):
        assert re.search(r"\[[^\]]*\b(queries|heads|batch)\b[^\]]*\]", doc), f"the docstring of attemper.{name} shows no shape"


def raises_without_match(source: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in {"pytest.raises", "pytest.warns"}:
            continue
        if not any(keyword.arg == "match" for keyword in node.keywords):
            yield node.lineno


def test_the_words_of_every_expected_error_are_tested() -> None:
    assert list(raises_without_match("with pytest.raises(ValueError):\n    f()")) == [1]
    found = [f"{named(path)}:{line}" for path in TESTS for line in raises_without_match(path.read_text("utf-8"))]
    assert not found, f"without match=: {found}"


def test_memory_that_attemper_allocates_and_does_not_write_shows() -> None:
    module = types.ModuleType("attemper.imagined")
    code = (
        "import torch\ndef f(x):\n    return torch.empty(3), torch.empty_like(x), x.new_empty(5), torch.empty_strided((2,), (1,))"
    )
    exec(code, module.__dict__)
    assert all(tensor.isnan().all() for tensor in module.f(torch.ones(2)))


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git repository: an unpacked sdist has no list of tracked files")
    return [ROOT / name for name in run("git", "ls-files", "-z").split("\0") if name]


def test_no_tracked_file_names_a_machine() -> None:
    # The slash is put in here, so that this file passes its own rule.
    pattern = re.compile(r"(?<![\w.$\]-])@(?:home|root|Users|work)@\w|\bfile:@@|\bpypi[.]org|\bnpmjs[.]".replace("@", "/"))
    for bad in ("@home@me@x", "see file:@@x", "from pypi" + ".org"):
        assert pattern.search(bad.replace("@", "/")), bad
    found = []
    for path in tracked():
        try:
            text = path.read_text("utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # weights; a file deleted but not yet committed
            continue
        found += [f"{named(path)}:{number}" for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    assert not found
