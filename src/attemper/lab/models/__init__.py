"""The lab's models: a decoder, an image classifier, and an encoder with a decoder, in which attention is the dial."""
