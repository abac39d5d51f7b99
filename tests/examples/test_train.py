"""The script that trained the example models: its text, its recipe, and that it does the same thing twice."""

import sys
from pathlib import Path

import pytest
import torch

from attemper import examples
from attemper.errors import LoadError
from attemper.examples import train as script
from attemper.examples.decoder import CONTEXT, Decoder
from attemper.examples.passage import PASSAGE, passage_inputs
from attemper.examples.text import PINNED_SHA256, Corpus, comparable, load_corpus, split, unique_paragraphs
from attemper.examples.train import Recipe, evaluate, main, schedule, train
from attemper.examples.weights import load

SHORT = Recipe(steps=3, batch=2, context=31, warmup=2)


def paragraphs(part: bytes) -> set[str]:
    return {comparable(paragraph) for paragraph in part.decode().split("\n\n")}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """A text that trains in a moment, in the place of the help topics."""
    lines = [f"Paragraph {number} counts {number * number} things, and then it ends." for number in range(600)]
    corpus = split(lines)
    monkeypatch.setattr(script, "load_corpus", lambda: corpus)
    return corpus


# The text


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
    model = load(examples.FOLDER / f"{name}.safetensors")
    assert model.provenance is not None
    assert evaluate(model, corpus.validation) == pytest.approx(model.provenance.validation_loss, abs=2e-4)


# The training


def test_the_same_seed_gives_the_same_weights(small: Corpus) -> None:
    first, second = (train(0.125, small, SHORT).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = train(0.125, small, Recipe(**vars(SHORT) | {"seed": 11})).state_dict()
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_training_starts_from_unit_variance_queries_and_moves_every_weight(small: Corpus) -> None:
    torch.manual_seed(SHORT.seed)
    start = Decoder(0.125)
    query = start.blocks[0].attention.q_proj(torch.randn(997, 128))
    assert query.std().item() == pytest.approx(1, abs=0.05)
    trained = train(0.125, small, SHORT).state_dict()
    assert not [name for name, weights in start.state_dict().items() if torch.equal(weights, trained[name])]


def test_training_lowers_the_loss(small: Corpus) -> None:
    lines: list[str] = []
    recipe = Recipe(steps=30, batch=4, context=31, warmup=3, learning_rate=3e-3)
    before, after = (
        evaluate(train(0.125, small, r), small.validation[:2048]) for r in (Recipe(**vars(recipe) | {"steps": 0}), recipe)
    )
    assert after < before - 1.5
    train(0.125, small, SHORT, lines.append)
    assert [line.partition(":")[0] for line in lines] == ["scale 0.125, step 1 of 3", "scale 0.125, step 3 of 3"]


def test_the_learning_rate_warms_up_and_ends_at_a_twentieth() -> None:
    recipe = Recipe(steps=1103, warmup=100)
    assert [schedule(step, recipe) for step in (0, 49, 99, 100)] == pytest.approx([0.01, 0.5, 1.0, 1.0])
    assert schedule(1102, recipe) == pytest.approx(0.05, abs=1e-4)
    rates = [schedule(step, recipe) for step in range(100, 1103)]
    assert rates == sorted(rates, reverse=True)


def test_loss_is_over_whole_rows() -> None:
    model = examples.scaled()
    content = (PASSAGE * 12).encode()[: 17 * CONTEXT]
    rows = torch.tensor(list(content)).reshape(17, CONTEXT)
    with torch.no_grad():
        each = [script.next_byte_loss(model, row[None]).item() for row in rows]
    assert evaluate(model, content + b"left over") == pytest.approx(sum(each) / 17, abs=1e-5)


# The command


def test_the_command_writes_both_models_and_their_provenance(
    tmp_path: Path, small: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "new"), "--any-text", "--steps", "1"]) == 0
    folder = tmp_path / "new"
    assert sorted(path.name for path in folder.iterdir()) == ["PROVENANCE.md", "scaled.safetensors", "unscaled.safetensors"]
    record = load(folder / "unscaled.safetensors").provenance
    assert record is not None
    assert (record.scale, record.steps, record.text_sha256) == (1.0, 1, small.sha256)
    assert "## unscaled" in (folder / "PROVENANCE.md").read_text("utf-8")
    out, err = capsys.readouterr()
    assert out == ""
    assert "scale 1, step 1 of 1: loss" in err


def test_the_command_refuses_another_text(tmp_path: Path, small: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "new"), "--steps", "1"]) == 2
    assert not (tmp_path / "new").exists()
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert small.sha256 in err
    assert PINNED_SHA256 in err
    assert "--any-text" in err


def test_the_command_says_where_it_cannot_write(tmp_path: Path, small: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way", "utf-8")
    assert main([str(tmp_path / "file"), "--any-text", "--steps", "1"]) == 2
    assert "file" in capsys.readouterr().err
