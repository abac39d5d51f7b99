"""Seam: attemper's own `attention`, which tells of its calls itself."""

import contextlib
import math
from collections.abc import Generator

from torch import Tensor

from attemper.capture.recorder import Recorder, crosses
from attemper.ops import LISTENERS, Listener, Problem
from attemper.stats import RowStats


@contextlib.contextmanager
def installed(recorder: Recorder, *, wants_rows: bool) -> Generator[None]:
    """Listen to every call of `attemper.attention`, and have each make its record where that is wanted."""

    def hear(problem: Problem, rows: RowStats | None) -> None:
        if recorder.listening:
            _tell(recorder, problem, rows)

    listener = Listener(hear, wants_rows)
    LISTENERS.append(listener)
    try:
        yield
    finally:
        LISTENERS.remove(listener)


def _tell(recorder: Recorder, problem: Problem, rows: RowStats | None) -> None:
    inputs, rules, name, scale = problem.inputs, problem.rules, recorder.running(), problem.scale
    assert inputs.value is not None
    number = 1 / math.sqrt(max(inputs.query.shape[-1], 1)) if scale is None else scale
    recorder.tell(
        name,
        seam="attemper",
        query=inputs.query,
        key=inputs.key,
        value=inputs.value,
        attn_mask=inputs.mask,
        is_causal=rules.is_causal,
        scale=inputs.scale if isinstance(number, Tensor) else float(number),
        scale_given=scale,
        softcap=rules.softcap,
        sinks=inputs.sinks,
        window=rules.window,
        offset=rules.offset,
        dropout_p=rules.dropout_p,
        self_attention=not crosses(recorder, name),
        rows=None if rows is None else in_batches(rows, inputs.query.shape[0]),
    )


def in_batches(rows: RowStats, batch: int) -> RowStats:
    """The record in the normal form, [batch, heads, queries], without its graph."""
    shape = (batch, *rows.lse.shape[-2:])
    lse, entropy = rows.lse.detach().reshape(shape), rows.entropy.detach().reshape(shape)
    return RowStats(lse, entropy, rows.rest.reshape(rows.rest.shape[0], *shape), rows.sink)
