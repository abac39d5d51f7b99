"""The lab's models: a decoder, an image classifier, and an encoder with a decoder, in which attention is the dial."""

from attemper.lab.models.build import attention_layers, build, logits_times

__all__ = ["attention_layers", "build", "logits_times"]
