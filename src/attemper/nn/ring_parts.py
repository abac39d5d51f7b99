"""One part of ring attention: which queries meet which keys, and what a part's gradients are, given those of the whole."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.kernels.spec import Forward, Inputs, Rules, Upstream, keys_in_reach
from attemper.nn.ring_travel import Passing, Ring
from attemper.nn.sequence_parts import Run

_KEYS, _GRADIENTS = 0, 1  # tags of messages


class Parts(NamedTuple):
    """Who holds what.

    Attributes:
        queries: the runs of this rank's queries; keys: of each rank's keys. rules: of the whole sequence.
    """

    ring: Ring
    queries: tuple[Run, ...]
    keys: list[tuple[Run, ...]]
    rules: Rules

    def pass_on(self, held: Sequence[Tensor], step: int) -> Passing | None:
        """Send keys and values to the next rank, and receive those of the step after this one; None in the last step."""
        if step == self.ring.size - 1:
            return None
        return Passing(self.ring, held, self._shapes(held, step + 1), _KEYS)

    def send_after(self, gradients: Sequence[Tensor], step: int) -> Passing:
        """Send the gradients after the keys and values to which they belong; in the last step that is home."""
        return Passing(self.ring, gradients, self._shapes(gradients, step + 1), _GRADIENTS)

    def _shapes(self, like: Sequence[Tensor], step: int) -> list[tuple[int, ...]]:
        count = sum(run.length for run in self.keys[self.ring.origin(step)])
        return [(*tensor.shape[:2], count, tensor.shape[-1]) for tensor in like]

    def meetings(
        self, step: int, query: Tensor, held: Sequence[Tensor], scale: Tensor
    ) -> Iterator[tuple[int, Run, Inputs, Rules]]:
        """What is to be computed in this step: number of the run of queries, run of keys, and the problem of the two.

        Pairs of runs in which nobody sees anybody are left out.
        """
        for keys in self.keys[self.ring.origin(step)]:
            k, v = (tensor[..., keys.slice, :].to(scale.dtype) for tensor in held)
            for place, run in enumerate(self.queries):
                rules = self.rules._replace(offset=self.rules.offset + run.start - keys.start)
                first, end = keys_in_reach(rules, 0, run.length, keys.length) if run.length else (0, 0)
                if first < end:
                    q = query[..., run.slice, :].to(scale.dtype)
                    factor = scale if scale.shape[-1] == 1 else scale[..., run.slice]
                    yield place, keys, Inputs(q, k, v, None, factor, None), rules


class Whole(NamedTuple):
    """What is known of the whole sequence for this rank's queries: results, lse and entropy in float64, and what flows in."""

    output: Tensor
    lse: Tensor
    entropy: Tensor
    d_output: Tensor | None
    d_lse: Tensor | None
    d_entropy: Tensor | None

    def upstream(self, part: Forward, rows: slice) -> Upstream:
        """What flows into the results of a part.

        With w = e^(lse of the part − lse), the share that the part has of the weights:
        d output of the part = w·d output, d entropy of the part = w·d entropy, and
        d lse of the part = w·((output of the part − output)·d output + d lse + d entropy·(entropy of the part − ln w − entropy)).
        """
        log_share, share = self._share(part.lse.double(), rows)
        d_lse = share * self._of_lse(part.output, part.entropy, log_share, rows)
        dtype = part.lse.dtype
        return Upstream(
            None if self.d_output is None else (share.unsqueeze(-1) * self.d_output[..., rows, :]).to(dtype),
            d_lse.to(dtype),
            None if self.d_entropy is None else (share * self.d_entropy[..., rows]).to(dtype),
        )

    def of_sinks(self, sinks: Tensor) -> Tensor:
        """The gradient of the sinks, [heads]: each is a part of its own, without an output and without entropy."""
        rows = slice(None)
        log_share, share = self._share(sinks.double().unsqueeze(-1).expand_as(self.lse), rows)
        flow = share * self._of_lse(None, torch.zeros_like(self.lse), log_share, rows)
        return flow.sum((0, 2)).to(sinks.dtype)

    def _share(self, lse: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """ln w and w; 0 and 0 for a part that has nothing of a row."""
        whole = self.lse[..., rows]
        nothing = lse == -math.inf
        log_share = torch.where(nothing, 0.0, lse - torch.where(nothing, 0.0, whole))
        return log_share, torch.where(nothing, 0.0, torch.exp(log_share))

    def _of_lse(self, output: Tensor | None, entropy: Tensor, log_share: Tensor, rows: slice) -> Tensor:
        """What flows into the lse of a part, divided by its share."""
        flow = torch.zeros_like(log_share)
        if self.d_output is not None:
            apart = -self.output[..., rows, :].double() if output is None else output.double() - self.output[..., rows, :]
            flow = (apart * self.d_output[..., rows, :]).sum(-1)
        if self.d_lse is not None:
            flow = flow + self.d_lse[..., rows]
        if self.d_entropy is not None:
            flow = flow + self.d_entropy[..., rows] * (entropy - log_share - self.entropy[..., rows])
        return flow
