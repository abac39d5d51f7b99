"""Examples that are run when their page is written: what a page shows as printed was printed."""

import contextlib
import io
from collections.abc import Mapping
from typing import Any


def ran(code: str, given: Mapping[str, Any] | None = None) -> str:
    """A block of Python, and what it printed.

    Args:
        code: lines of Python that print something.
        given: names that they find.

    Returns:
        MyST.

    Raises:
        RuntimeError: nothing was printed: such an example shows nothing.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "<a page's example>", "exec"), dict(given or {}))
    if not printed.getvalue():
        raise RuntimeError(f"an example prints nothing:\n{code}")
    return f"```python\n{code}\n```\n\nIt prints:\n\n```text\n{printed.getvalue().rstrip()}\n```\n"
