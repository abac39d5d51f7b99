"""Faults of masks: which pairs of positions each shows or hides."""

import contextlib
from collections.abc import Callable, Generator

import torch
from torch import Tensor

from benchmarks.check_faults.models import CAUSAL, TOKENS, Tiny
from benchmarks.check_faults.planting import Alter, Call, NotApplicableError, in_calls

Fault = Callable[[Tiny], Alter]
Visible = Callable[[Call], Tensor | None]

BLIND = 5  # a position that is real whatever is padded


def causal_missing(tiny: Tiny) -> Alter:
    """All later keys that are not padding."""
    return _in_causal_calls(tiny, lambda call: _real_keys(tiny, call).expand_as(call.visible))


def one_head_sees(tiny: Tiny) -> Alter:
    """All later keys that are not padding, for head 1 of several."""

    def visible(call: Call) -> Tensor | None:
        heads = call.query.shape[1]
        if heads < 2:
            return None
        seen = call.visible.expand(max(call.visible.shape[0], _real_keys(tiny, call).shape[0]), heads, -1, -1).clone()
        seen[:, 1] = _real_keys(tiny, call)[:, 0].expand_as(seen[:, 1])
        return seen

    return _in_causal_calls(tiny, visible)


def shifted(tiny: Tiny) -> Alter:
    """One key more than the causal rule allows: j ≤ i + 1."""

    def visible(call: Call) -> Tensor:
        seen = torch.cat([call.visible[..., 1:, :], torch.ones_like(call.visible[..., :1, :])], dim=-2)
        return seen & _real_keys(tiny, call)

    return _in_causal_calls(tiny, visible)


def blind_row(tiny: Tiny) -> Alter:
    """No key at all for one real position."""

    def alter(call: Call) -> Call | None:
        if not call.is_self_attention or call.query.shape[2] <= BLIND:
            return None
        seen = call.visible.expand(-1, -1, call.query.shape[2], call.key.shape[2]).clone()
        seen[:, :, BLIND] = False
        return call.with_visible(seen)

    return alter


def padding_seen(tiny: Tiny) -> Alter:
    """The padded keys as well, as far as the causal rule and the window allow."""
    real = tiny.real
    if real is None or tiny.kind not in TOKENS:
        raise NotApplicableError

    def alter(call: Call) -> Call | None:
        if call.visible.shape[0] != real.shape[0] or call.key.shape[2] != real.shape[1]:
            return None
        whole = call.visible[real.all(1)]  # what a sequence without padding may see
        return call.with_visible(whole[:1].expand_as(call.visible))

    return alter


@contextlib.contextmanager
def masked(tiny: Tiny, fault: Fault, where: str) -> Generator[frozenset[str]]:
    """Another mask in all calls, or in the last that can have it."""
    with in_calls(tiny, fault(tiny), where) as modules:
        yield modules


def _in_causal_calls(tiny: Tiny, visible: Visible) -> Alter:
    if tiny.kind not in CAUSAL:
        raise NotApplicableError

    def alter(call: Call) -> Call | None:
        seen = visible(call) if call.is_causal else None
        return None if seen is None else call.with_visible(seen)

    return alter


def _real_keys(tiny: Tiny, call: Call) -> Tensor:
    """[batch or 1, 1, 1, keys]: what is not padding, where the inputs' mask is about these keys."""
    real = tiny.real
    decodes = "decoder_input_ids" in tiny.inputs
    if real is None or decodes or real.shape[1] != call.key.shape[2]:
        return torch.ones(1, 1, 1, call.key.shape[2], dtype=torch.bool)
    return real[:, None, None]
