"""Replaces the attention inside a model by attemper's, says what it replaced and what it left alone, and undoes it."""

from attemper.capture.using.in_use import Use, use
from attemper.capture.using.notes import Kept, Replaced

__all__ = ["Kept", "Replaced", "Use", "use"]
