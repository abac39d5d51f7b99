"""Who is told of calls of `attention`: capture listens here, and whoever watches a model."""

from collections.abc import Callable
from typing import NamedTuple

from attemper.ops.arguments import Problem
from attemper.ops.dispatch import compiling
from attemper.stats import RowStats


class Listener(NamedTuple):
    """Told of every call once it is done.

    Attributes:
        hear: given the problem and the record of its logits, None where nobody wanted it.
        wants_rows: every call makes the record, for this listener.
        traced: told of the calls that a compiler traces, which must be able to trace it, and of no others.
    """

    hear: Callable[[Problem, RowStats | None], None]
    wants_rows: bool = False
    traced: bool = False


LISTENERS: list[Listener] = []


def rows_wanted() -> bool:
    """Whether a listener wants the record of the call that is about to run."""
    tracing = compiling()
    return any(listener.wants_rows and listener.traced == tracing for listener in LISTENERS)


def tell(problem: Problem, rows: RowStats | None, *, shared: bool) -> None:
    """Tell the listeners of a call that is done.

    Args:
        shared: whether the caller gets the record too, and may write into it: then listeners, who may keep it, get another.
    """
    tracing = compiling()
    listeners = [listener for listener in LISTENERS if listener.traced == tracing]
    if shared and rows is not None and listeners and not tracing:
        rows = RowStats(rows.lse.clone(), rows.entropy.clone(), rows.rest.clone(), rows.sink)
    for listener in listeners:
        listener.hear(problem, rows)
