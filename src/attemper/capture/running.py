"""Whether a function is still running: told by its frame, since a KeyboardInterrupt passes by every hook that would tell it."""

import types


class Running:
    """A call of a function, from while it runs on.

    Args:
        frame: of the call.
    """

    def __init__(self, frame: types.FrameType) -> None:
        self._frame = frame

    def over(self) -> bool:
        """Whether it runs no more."""
        try:
            self._frame.clear()
        except RuntimeError:  # a frame that runs cannot be cleared
            return False
        return True
