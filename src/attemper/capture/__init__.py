"""Sees every attention call that a model makes, without the model's help, and says what it could not see."""

from attemper.capture.capturing import Capture, capture
from attemper.capture.record import AttentionCall, Unseen, Written

__all__ = ["AttentionCall", "Capture", "Unseen", "Written", "capture"]
