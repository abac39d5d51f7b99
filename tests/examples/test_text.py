"""The text that the example models learned from, and their losses on it."""

import sys

import pytest
import torch

from attemper import examples
from attemper.errors import LoadError
from attemper.examples.decoder import CONTEXT
from attemper.examples.figures import next_byte_loss
from attemper.examples.losses import text_loss
from attemper.examples.passage import PASSAGE, passage_inputs
from attemper.examples.text import PINNED_SHA256, Corpus, comparable, load_corpus, split, unique_paragraphs


def paragraphs(part: bytes) -> set[str]:
    return {comparable(paragraph) for paragraph in part.decode().split("\n\n")}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def test_the_splits_share_no_paragraph(corpus: Corpus) -> None:
    assert len(corpus.train) > 8 * len(corpus.validation) > 100_000
    assert not paragraphs(corpus.train) & paragraphs(corpus.validation)


def test_a_paragraph_counts_once_whatever_its_white_space() -> None:
    documents = ["One  two\nthree.\n\nFour.", "  one two three.\n \n\nFive.", "", "four."]
    assert unique_paragraphs(documents) == ["One  two\nthree.", "Four.", "Five."]


def test_every_tenth_section_is_held_out() -> None:
    lines = [f"line {number}" for number in range(12 * 21)]
    held_out = {int(line.removeprefix("line ")) // 12 for line in paragraphs(split(lines).validation)}
    assert held_out == {9, 19}
    assert paragraphs(split(lines).train) | paragraphs(split(lines).validation) == set(lines)


def test_the_hash_covers_both_splits() -> None:
    lines = [f"line {number}" for number in range(12 * 10)]
    hashes = {split(lines).sha256, split([*lines[:-1], "other"]).sha256, split(["other", *lines[1:]]).sha256}
    assert len(hashes) == 3


def test_the_examples_learned_from_the_pinned_text() -> None:
    for model in (examples.scaled(), examples.unscaled()):
        assert model.provenance is not None
        assert model.provenance.text_sha256 == PINNED_SHA256


def test_the_passage_was_not_learned_from(corpus: Corpus) -> None:
    seen = paragraphs(corpus.train) | paragraphs(corpus.validation)
    assert not {comparable(paragraph) for paragraph in PASSAGE.split("\n\n")} & seen
    rows = passage_inputs(13)
    assert rows.dtype == torch.int64
    assert bytes(rows.flatten().tolist()) == PASSAGE.encode()[: rows.numel()]
    assert 0 <= len(PASSAGE.encode()) - rows.numel() < 13


def test_a_python_without_topics_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    with pytest.raises(LoadError, match=r"pydoc_data\.topics: not in this Python"):
        load_corpus()


@pytest.mark.parametrize("name", ["scaled", "unscaled"])
def test_the_losses_are_the_recorded_ones(corpus: Corpus, name: str) -> None:
    if corpus.sha256 != PINNED_SHA256:
        pytest.skip("this Python's help topics are not those that the examples were trained on")
    model = {"scaled": examples.scaled, "unscaled": examples.unscaled}[name]()
    assert model.provenance is not None
    assert text_loss(model, corpus.validation) == pytest.approx(model.provenance.validation_loss, abs=2e-4)


def test_loss_is_over_whole_rows() -> None:
    model = examples.scaled()
    content = (PASSAGE * 12).encode()[: 17 * CONTEXT]
    rows = torch.tensor(list(content)).reshape(17, CONTEXT)
    with torch.no_grad():
        each = [next_byte_loss(model, row[None]).item() for row in rows]
    assert text_loss(model, content + b"left over") == pytest.approx(sum(each) / 17, abs=1e-5)
