"""Makes names that come from a checkpoint safe to show: no control character reaches a terminal."""

import unicodedata

# Cc: ESC, BEL, newlines and the rest of C0 and C1. Cf: bidirectional overrides, zero-width characters. Zl, Zp: line separators.
_UNSAFE = frozenset({"Cc", "Cf", "Zl", "Zp", "Cs", "Co"})


def safe(text: str) -> str:
    r"""The text with every control, formatting or private character written out, such as \x1b or \u202e."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_written_out(c) if unicodedata.category(c) in _UNSAFE else c for c in text)


def shortened(name: str, most: int = 100) -> str:
    """A name of bearable width: what is too much is left out of the middle, as both ends tell more."""
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}…{name[-end:]}"


def _written_out(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
