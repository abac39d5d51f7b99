"""Fixtures of these tests."""

from tests.browser import browser, show

__all__ = ["browser", "show"]
