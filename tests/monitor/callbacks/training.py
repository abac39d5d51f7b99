"""What the tests of callbacks train: a tiny Llama over the same batches, in a plain loop and in the loops of others."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from attemper.monitor import FIGURES, RunInfo, StepRecord, watch
from attemper.monitor.clipping import QKClip

VOCABULARY, TOKENS, BATCH, RATE = 61, 11, 3, 0.5
LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")


def llama() -> LlamaForCausalLM:
    """Two layers of four heads over two of keys, of width 10, in training mode; the same one each time."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        max_position_embeddings=32,
        attn_implementation="sdpa",
        use_cache=False,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).train()


def tokens(count: int) -> Tensor:
    """So many sequences, the same each time."""
    return torch.randint(VOCABULARY, (count, TOKENS), generator=torch.Generator().manual_seed(3))


def examples(count: int) -> list[dict[str, Tensor]]:
    """So many sequences as a data set of the Trainer."""
    return [{"input_ids": row, "labels": row} for row in tokens(count)]


def micro_batches(count: int, accumulated: int = 1) -> list[tuple[Tensor, ...]]:
    """So many sequences, in the batches of each step of the optimiser."""
    batches = tokens(count).split(BATCH)
    return [batches[start : start + accumulated] for start in range(0, len(batches), accumulated)]


def plain(steps: list[tuple[Tensor, ...]], *, clip: float | None = None, **watching: Any) -> list[StepRecord]:
    """The records of a loop of one's own, from step 1."""
    records: list[StepRecord] = []
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with watch(model, trackers=records.append, **watching) as watching:
        clipping = None if clip is None else QKClip(model, clip, watch=watching)
        for number, batches in enumerate(steps, 1):
            loss = 0.0
            for batch in batches:
                part = model(input_ids=batch, labels=batch).loss / len(batches)
                part.backward()
                loss += part.item()
            optimizer.step()
            optimizer.zero_grad()
            if clipping is not None:
                clipping.step()
            watching.step(number, loss=loss, **({} if clipping is None else clipping.scalars()))
    return records


def assert_same(found: list[StepRecord], expected: list[StepRecord], within: str = "") -> None:
    """Records of the same steps with the same numbers, but for rounding: loops add losses and gradients in orders of their own.

    Args:
        within: the place of the model in the one that was watched, "net." for one that is its part `net`.
    """
    assert [record.step for record in found] == [record.step for record in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.scalars, other.scalars, rtol=1e-5, atol=0)
        assert [layer.name for layer in one.layers] == [within + layer for layer in LAYERS]
        for mine, theirs in zip(one.layers, other.layers, strict=True):
            assert torch.equal(mine.stats.rows, theirs.stats.rows)
            for figure in FIGURES:
                torch.testing.assert_close(mine.figure(figure.name), theirs.figure(figure.name), rtol=1e-4, atol=1e-6)


class Counting:
    """A tracker that counts."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.begun, self.closed = 0, 0

    def begin(self, run: RunInfo) -> None:
        self.begun += 1

    def log(self, record: StepRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1
