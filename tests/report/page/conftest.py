"""Fixtures of these tests."""

from tests.browser import browser

__all__ = ["browser"]
