"""Every task: seeded batches, fixed held-out examples that are never learned from, and the best that can be had."""

import math
from pathlib import Path

import pytest
import torch

from attemper.errors import ArgumentError, LoadError
from attemper.examples.text import load_corpus
from attemper.lab import config
from attemper.lab.presets.arms import TEXT_LIMIT
from attemper.lab.tasks import IGNORED, load_task
from attemper.lab.tasks.task import Batch, Task

SMALL = {
    "text": config.Task(name="text", length=13),
    "digits": config.Task(name="digits"),
    "recall": config.Task(name="recall", length=7, symbols=11),
    "reversal": config.Task(name="reversal", length=7, symbols=11),
}


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(batch: Batch) -> set[tuple[float, ...]]:
    first = next(iter(batch.inputs.values()))
    return set(map(tuple, first.flatten(1).tolist()))


@pytest.fixture(scope="module", params=sorted(SMALL))
def task(request: pytest.FixtureRequest) -> Task:
    return load_task(SMALL[request.param])


def test_the_generator_alone_decides_on_the_examples(task: Task) -> None:
    one, same, other = (task.batch(5, generator(seed)) for seed in (3, 3, 4))
    assert all(torch.equal(one.inputs[name], same.inputs[name]) for name in one.inputs)
    assert torch.equal(one.targets, same.targets)
    assert rows(one) != rows(other)


def test_held_out_examples_are_fixed_and_never_learned_from(task: Task) -> None:
    held_out = set[tuple[float, ...]]().union(*map(rows, task.validation()))
    assert held_out == set[tuple[float, ...]]().union(*map(rows, task.validation()))
    order = generator()
    if task.vocabulary != 256:  # of a text bytes may well repeat: its paragraphs are looked at below
        assert not any(rows(task.batch(101, order)) & held_out for _ in range(20))


def test_shapes_and_ranges(task: Task) -> None:
    for batch in [task.batch(5, generator()), *task.validation()]:
        assert batch.targets.dtype == torch.int64
        assert batch.targets.ndim == 2
        scored = batch.targets[batch.targets != IGNORED]
        assert len(scored)
        assert 0 <= scored.min() <= scored.max() < task.classes
        for name, tensor in batch.inputs.items():
            assert len(tensor) == len(batch.targets)
            if name == "images":
                assert tensor.shape[1:] == (8, 8)
            else:
                assert tensor.shape[1] == task.tokens
                assert tensor.max() < task.vocabulary


@pytest.mark.parametrize(("name", "tokens"), [("text", 29), ("recall", 59), ("reversal", 29)])
def test_held_out_examples_of_another_length(name: str, tokens: int) -> None:
    task = load_task(SMALL[name])
    longer = task.validation(29)
    assert {tensor.shape[1] for batch in longer for tensor in batch.inputs.values()} == {tokens}
    assert torch.equal(longer[0].targets, task.validation(29)[0].targets)


def test_a_text_predicts_its_next_byte_and_keeps_to_the_limit_of_positions() -> None:
    task = load_task(SMALL["text"])
    for batch in [task.batch(5, generator()), *task.validation()]:
        assert torch.equal(batch.inputs["tokens"][:, 1:], batch.targets[:, :-1])
    assert 2**13 < sum(batch.targets.numel() for batch in task.validation()) <= 2**14
    with pytest.raises(ArgumentError, match="9999999"):
        task.validation(9_999_999)


def test_the_text_of_the_presets_is_as_long_as_their_answers_say() -> None:
    corpus = load_corpus()
    assert "one text of a few hundred thousand bytes" in TEXT_LIMIT
    assert 200_000 < len(corpus.train) + len(corpus.validation) < 900_000


def test_digits_are_stratified() -> None:
    task = load_task(SMALL["digits"])
    (held_out,) = task.validation()
    counts = held_out.targets.flatten().bincount()
    assert counts.min() >= 34
    assert counts.max() <= 36
    with pytest.raises(ArgumentError, match="17"):
        task.validation(17)


def test_what_recall_asks_was_read_before() -> None:
    symbols = SMALL["recall"].symbols
    batch = load_task(SMALL["recall"]).batch(211, generator())
    tokens, targets = batch.inputs["tokens"].tolist(), batch.targets.tolist()
    for read, asked in zip(tokens, targets, strict=True):
        known: dict[int, int] = {}
        for place, token in enumerate(read):
            if place % 2:
                assert asked[place] == IGNORED
                assert known.setdefault(read[place - 1], token - symbols) == token - symbols
            else:
                assert asked[place] == known.get(token, IGNORED)
        assert asked[-1] != IGNORED


def test_reversal_is_backwards_and_the_decoder_does_not_see_what_it_should_write() -> None:
    batch = load_task(SMALL["reversal"]).batch(5, generator())
    source, target = batch.inputs["source"], batch.inputs["target"]
    assert batch.targets.tolist() == [list(reversed(row)) for row in source.tolist()]
    assert target[:, 0].tolist() == [SMALL["reversal"].symbols] * 5
    assert torch.equal(target[:, 1:], batch.targets[:, :-1])


def test_guessing_symbols_costs_what_is_said() -> None:
    targets = load_task(SMALL["reversal"]).batch(2003, generator()).targets
    shares = targets.flatten().bincount().double() / targets.numel()
    assert -(shares * shares.log()).sum().item() == pytest.approx(math.log(11), abs=2e-3)


@pytest.mark.parametrize("name", ["recall", "reversal"])
def test_too_few_sequences_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"got (8|16) different sequences"):
        load_task(config.Task.model_validate({"name": name, "length": 3, "symbols": 2}))


def paragraphs(count: int) -> list[str]:
    return [f"Paragraph {number:03} is about {number * 7919 % 1009}." for number in range(count)]


def test_an_own_text_is_split_by_paragraphs_whatever_its_files(tmp_path: Path) -> None:
    texts = paragraphs(60)
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.txt").write_text("\n\n".join(texts[:30]), "utf-8")
    # The same paragraphs again, with other line ends, and one in another encoding.
    (tmp_path / "inner" / "b.txt").write_bytes("\r\n\r\n".join([*texts, "Ein Maß für Größe"]).encode("latin-1"))
    task = load_task(config.Task(path=str(tmp_path), length=16))
    train = bytes(task._train.tolist()).decode()  # type: ignore[attr-defined]
    held_out = bytes(task._held_out.tolist()).decode()  # type: ignore[attr-defined]
    assert "Größe" in train + held_out
    for text in texts:
        assert (text in train) + (text in held_out) == 1
    assert held_out.count("Paragraph") == 6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"a\.txt: 0 different paragraphs"),
        (b"one\n\ntwo", r"a\.txt: 2 different paragraphs"),
        (b"\0\1\2", "bytes of value 0"),
        ("\n\n".join(paragraphs(20)).encode(), r"516 bytes to learn from; expected at least 1025"),
    ],
)
def test_what_is_no_text_or_too_little_of_it_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(LoadError, match=message):
        load_task(config.Task(path=str(tmp_path / "a.txt"), length=1024))


def test_a_text_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"nowhere\.txt: No such file"):
        load_task(config.Task(path=str(tmp_path / "nowhere.txt")))
