"""Seam: attemper's own `attention`, which tells of its calls itself."""

import contextlib
import math
from collections.abc import Generator

from torch import Tensor

from attemper.capture.functional import crosses
from attemper.capture.recorder import Recorder
from attemper.ops import LISTENERS, Problem


@contextlib.contextmanager
def installed(recorder: Recorder) -> Generator[None]:
    """Listen to every call of `attemper.attention`."""

    def tell(problem: Problem, scale: float | Tensor | None) -> None:
        if recorder.listening:
            _tell(recorder, problem, scale)

    LISTENERS.append(tell)
    try:
        yield
    finally:
        LISTENERS.remove(tell)


def _tell(recorder: Recorder, problem: Problem, scale: float | Tensor | None) -> None:
    inputs, rules, name = problem.inputs, problem.rules, recorder.running()
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
    )
