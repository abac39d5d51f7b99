"""Two small language models, trained alike but for one number: the factor on q·k in their attention.

`scaled` divides the products by √64, as is usual; `unscaled` leaves them as they are, as is easily forgotten. Both read a
text byte by byte and were trained with one seed, one recipe and one text, so that what differs between them is what the
missing factor does. They come with the package: nothing is downloaded, and loading them runs no code from the file.
PROVENANCE.md beside this file has their figures; `attemper lab run examples --out DIR` trains them again.
"""

from pathlib import Path

from attemper.examples.decoder import Decoder
from attemper.examples.weights import load

__all__ = ["scaled", "unscaled"]

FOLDER = Path(__file__).parent


def scaled() -> Decoder:
    """The example whose attention is softmax(q·kᵀ / √64) v.

    Returns:
        the model in eval mode, float32; `example_inputs()` of it gives text to run it on, `provenance` says how it was trained.

    Raises:
        LoadError: the weights are missing or damaged.
        MissingExtraError: safetensors is not installed.
    """
    return load(FOLDER / "scaled.safetensors")


def unscaled() -> Decoder:
    """The example whose attention is softmax(q·kᵀ) v: the factor 1/√64 was left out, in training as in use.

    Returns:
        the model in eval mode, float32; `example_inputs()` of it gives text to run it on, `provenance` says how it was trained.

    Raises:
        LoadError: the weights are missing or damaged.
        MissingExtraError: safetensors is not installed.
    """
    return load(FOLDER / "unscaled.safetensors")
