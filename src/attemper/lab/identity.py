"""What a run is called: a hash of its configuration, so that the same run is never trained twice and two runs never mix."""

from __future__ import annotations

import hashlib
import json

from attemper.lab.config import RunConfig

LETTERS = 12


def run_id(config: RunConfig) -> str:
    """The first 12 hexadecimal digits of the sha256 of the configuration as JSON, keys in order, defaults written out."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:LETTERS]
