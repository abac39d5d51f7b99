"""What a preset makes of its trained models: once, when they are over, as files in the sweep's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attemper.errors import ArgumentError
from attemper.lab.presets.preset import Product
from attemper.lab.store.results import RunResult


def make_product(folder: Path, product: Product | None, results: Sequence[RunResult]) -> None:
    """Make it unless it is there; nothing without a product.

    Args:
        folder: of the sweep. product: of its preset. results: the runs that ended.

    Raises:
        ArgumentError: the folder cannot be written. LoadError: a run's weights or its text cannot be read.
    """
    if product is None or (folder / product.last).exists():
        return
    try:
        product.make(results, folder)
    except OSError as error:
        raise ArgumentError("out", f"{folder} ({error.strerror})", "a folder that can be written") from error
