"""Trains the two example models: one recipe, one seed, one text, two factors on q·k.

    python -m attemper.examples.train FOLDER

writes `scaled.safetensors`, `unscaled.safetensors` and `PROVENANCE.md` into FOLDER. It needs torch and safetensors and takes
about fifteen minutes on one core. The same versions on the same kind of processor give the same weights.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from attemper.errors import ArgumentError, AttemperError
from attemper.examples.decoder import CONTEXT, HEADS, WIDTH, Decoder
from attemper.examples.figures import next_byte_loss
from attemper.examples.provenance import Provenance
from attemper.examples.summary import summary
from attemper.examples.text import PINNED_SHA256, PINNED_TEXT, Corpus, load_corpus
from attemper.examples.weights import load, save

SCALES = {"scaled": (WIDTH // HEADS) ** -0.5, "unscaled": 1.0}


@dataclass(frozen=True)
class Recipe:
    """Everything that training depends on besides the text and the factor on q·k; the defaults made the weights that ship."""

    seed: int = 2017
    steps: int = 1600
    batch: int = 16
    context: int = CONTEXT
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.1
    gradient_clip: float = 1.0


def train(scale: float, corpus: Corpus, recipe: Recipe, log: Callable[[str], object] = lambda _line: None) -> Decoder:
    """A decoder trained from scratch: AdamW, linear warm-up, then a cosine to a twentieth of the learning rate.

    Args:
        scale: the factor on q·k.
        corpus: the text.
        recipe: seed, sizes and rates.
        log: called with a line of progress now and then.
    """
    # A generator of its own for the batches: both models see the same ones in the same order.
    torch.manual_seed(recipe.seed)
    model = Decoder(scale)
    order = torch.Generator().manual_seed(recipe.seed)
    text = as_tensor(corpus.train)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=recipe.weight_decay)
    window = torch.arange(recipe.context + 1)
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * schedule(step, recipe)
        starts = torch.randint(len(text) - recipe.context, (recipe.batch, 1), generator=order)
        loss = next_byte_loss(model, text[starts + window])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_clip)
        optimizer.step()
        if step % 100 == 0 or step + 1 == recipe.steps:
            log(f"scale {scale:g}, step {step + 1} of {recipe.steps}: loss {loss.item():.3f}")
    return model.eval()


def schedule(step: int, recipe: Recipe) -> float:
    """The share of the learning rate that a step uses."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def evaluate(model: Decoder, text: bytes) -> float:
    """Mean of −ln p(next byte) over a text cut into rows of the model's context, in nats."""
    rows = as_rows(text)
    with torch.no_grad():
        losses = torch.stack([next_byte_loss(model, chunk) * len(chunk) for chunk in rows.split(16)])
    return (losses.sum() / len(rows)).item()


def as_rows(text: bytes) -> Tensor:
    """A text cut into whole rows of the model's context: int64, [rows, tokens]."""
    return as_tensor(text)[: len(text) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)


def as_tensor(text: bytes) -> Tensor:
    """A text as int64 bytes, [tokens]."""
    return torch.tensor(list(text), dtype=torch.int64)


def make(name: str, folder: Path, corpus: Corpus, recipe: Recipe, log: Callable[[str], object]) -> Decoder:
    """Trains one example, writes its file, and returns the model as it is read back from there.

    Args:
        name: "scaled" or "unscaled".
        folder: where the file goes.
        corpus: the text.
        recipe: seed, sizes and rates.
        log: called with a line of progress now and then.
    """
    model = train(SCALES[name], corpus, recipe, log)
    # The figures are those of the weights as stored: rounded to float16.
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    record = Provenance(
        script="attemper/examples/train.py",
        command="python -m attemper.examples.train FOLDER",
        text="pydoc_data.topics, repeated paragraphs removed",
        text_sha256=corpus.sha256,
        python=platform.python_version(),
        torch=torch.__version__,
        machine=f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, one thread",
        scale=SCALES[name],
        train_loss=evaluate(model, corpus.train[: len(corpus.validation)]),
        validation_loss=evaluate(model, corpus.validation),
        passage_loss=next_byte_loss(model, model.example_inputs()["input_ids"]).item(),
        **asdict(recipe),
    )
    path = folder / f"{name}.safetensors"
    save(model, path, record)
    return load(path)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; see the head of this module."""
    parser = argparse.ArgumentParser(prog="python -m attemper.examples.train", description="Train the two example models.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the weights and PROVENANCE.md go")
    parser.add_argument("--any-text", action="store_true", help="train on the help topics of this Python, whatever its version")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="training steps (%(default)s)")
    options = parser.parse_args(arguments)
    # More threads would add in another order, and so give other weights on another machine.
    torch.set_num_threads(1)
    try:
        corpus = load_corpus()
        if corpus.sha256 != PINNED_SHA256 and not options.any_text:
            raise ArgumentError(
                "text",
                f"the help topics of Python {platform.python_version()}, sha256 {corpus.sha256}",
                f"those of {PINNED_TEXT}, sha256 {PINNED_SHA256}; run that Python, or pass --any-text for other weights",
            )
        options.folder.mkdir(parents=True, exist_ok=True)
        models = {name: make(name, options.folder, corpus, Recipe(steps=options.steps), tell) for name in SCALES}
        (options.folder / "PROVENANCE.md").write_text(summary(models, as_rows(corpus.validation)[:64]), "utf-8")
    except (AttemperError, OSError) as error:
        tell(f"error: {error}")
        return 2
    return 0


def tell(line: str) -> None:
    """Progress goes where it can be seen and not be piped."""
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
