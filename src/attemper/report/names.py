"""Makes names that come from a checkpoint safe to show: no control character reaches a terminal."""

import unicodedata

# Cc: ESC, BEL, newlines and the rest of C0 and C1. Cf: bidirectional overrides, zero-width characters. Zl, Zp: line separators.
_UNSAFE = frozenset({"Cc", "Cf", "Zl", "Zp", "Cs", "Co"})


def safe(text: str) -> str:
    r"""The text with every control, formatting or private character written out, such as \x1b or \u202e."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_written_out(c) if unicodedata.category(c) in _UNSAFE else c for c in text)


def _written_out(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
