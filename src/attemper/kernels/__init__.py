"""The implementations of attention. They share `spec` and `dropout`, and do not import one another."""
