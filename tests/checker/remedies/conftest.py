"""Fixtures of these tests."""

from tests.folders import llama_folder

__all__ = ["llama_folder"]
