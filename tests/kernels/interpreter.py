"""A plugin of pytest for a process in which Triton interprets its kernels: what makes that bearable.

At every call within a kernel the interpreter gives Triton's language its own meaning anew, which takes most of its time. Here
once for each module does: nothing else runs in this process.
"""

from typing import Any

import pytest
from triton.runtime import interpreter

_give_meaning = interpreter._patch_lang
_given: set[int] = set()


def _once(function: Any) -> Any:
    module = id(function.__globals__)
    if module not in _given:
        _given.add(module)
        _give_meaning(function)
    return interpreter._LangPatchScope()  # of nothing, so that nothing is taken back


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before any kernel runs."""
    interpreter._patch_lang = _once
    # The interpreter computes with numpy, which warns where a GPU is silent.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")
