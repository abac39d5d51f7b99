"""One forward pass of a model, as hooks on the model follow it from its beginning to its end.

What it must hold:
- a model that calls itself makes one pass;
- a pass that an exception ended is told from one that came to its end, also where another is being handled around it;
- one that a KeyboardInterrupt ended is over, though torch calls no hook then.
"""

import sys
import types

from attemper.capture.running import Running

_INSIDE = 3  # functions from `_caller` up to whoever called the hook: a method of the pass, the hook's own, `Hook.__call__`


class ForwardPass:
    """A pass that begins. It is made, and asked, in methods that a `Hook` calls."""

    def __init__(self) -> None:
        # Not the frame of the caller, which has ended where hooks are called after an exception: the one around it.
        self._frame = _caller().f_back
        assert self._frame is not None, "torch calls hooks from within the call of a module"
        self._call = Running(self._frame)
        self._handled = sys.exc_info()[1]

    def over(self) -> bool:
        """Whether it runs no more; may be asked anywhere."""
        return self._call.over()

    def ends(self) -> bool:
        """Whether the hook is called at its end, not at that of a call of the model by itself."""
        caller = _caller()
        return self._frame in (caller, caller.f_back)

    def raised(self) -> bool:
        """Whether an exception ends it."""
        return sys.exc_info()[1] is not self._handled


def _caller() -> types.FrameType:
    return sys._getframe(_INSIDE + 1)
