"""Where a set of example weights comes from: written into its file when it was trained, read back with the weights."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Provenance:
    """What is needed to train an example model again, and what came out when it was done.

    Attributes:
        script, command: what trained it.
        text, text_sha256: what it learned from, and the hash of both splits of that.
        python, torch, machine: versions and processor of the run; other ones may round differently.
        scale: the factor on q·k.
        seed, steps, batch, context, learning_rate, warmup, weight_decay, gradient_clip: the recipe.
        train_loss, validation_loss, passage_loss: nats a byte, of the weights as stored, on the beginning of the training
            text, on the held-out text, and on the passage of `example_inputs`.
    """

    script: str
    command: str
    text: str
    text_sha256: str
    python: str
    torch: str
    machine: str
    scale: float
    seed: int
    steps: int
    batch: int
    context: int
    learning_rate: float
    warmup: int
    weight_decay: float
    gradient_clip: float
    train_loss: float
    validation_loss: float
    passage_loss: float

    def to_json(self) -> str:
        """The record as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Provenance:
        """The record that `to_json` wrote.

        Raises:
            ValueError: the text is no such record.
        """
        values = json.loads(text)
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise ValueError(f"provenance: got {text[:60]!r}; expected a JSON object with script, command, scale and so on")
        if not isinstance(values["scale"], float):
            raise ValueError(f"scale: got {values['scale']!r}; expected a number with a decimal point")  # noqa: TRY004
        return cls(**values)
