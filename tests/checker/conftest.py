"""Fixtures of these tests."""

from tests.folders import bert_folder, llama_folder

__all__ = ["bert_folder", "llama_folder"]
