"""ATT501, ATT502, ATT503: the largest |scale·q·k| of a head passes 100, 1e3, 1e4.

The product is taken before softcap, bias and mask: an ALiBi bias makes logits of −1000 at a distance, which are meant.
"""

import torch
from torch import Tensor

from attemper.monitor.alarms.layer_rule import RECEDED, LayerRule, State, alarm, armed, crossings, heads_of
from attemper.monitor.records import Alarm, LayerRecord

_ADVICE = {
    "ATT501": "Heads saturate at this size and logits that go on to 1e3 hurt training: hold them with attemper.QKClip, or take a "
    "lower learning rate or QK-norm.",
    "ATT502": "Runs forced to logits this large train worse, and those that go on diverge: hold them with attemper.QKClip now, "
    "and restart with a lower learning rate or QK-norm if the loss has risen.",
    "ATT503": "Every run in the literature that passed 1e4 diverged: go back to a checkpoint from before, and train on with "
    "attemper.QKClip, a lower learning rate or QK-norm.",
}


class LargeLogits(LayerRule):
    """A head's largest |scale·q·k| against three thresholds; of those that it passes at once, the highest speaks.

    State: `fired` [3, heads], as `crossings` keeps it; `low` [3, heads], the last step at which it was at most half of the
    threshold, −1 where it never was.
    """

    name = "large-logits"
    codes = ("ATT501", "ATT502", "ATT503")

    def start(self, layer: LayerRecord, step: int) -> State:
        """Nothing has fired, nothing was low."""
        heads = layer.stats.heads
        return {"fired": torch.stack([armed(heads)] * 3), "low": torch.full((3, heads), -1, dtype=torch.int64)}

    def judge(self, layer: LayerRecord, step: int, state: State) -> list[Alarm]:
        """At most one alarm a threshold, of the worst head."""
        sizes = (self.limits.alarming_logit, self.limits.hurting_logit, self.limits.diverging_logit)
        value = layer.scaled_max
        for size, low in zip(sizes, state["low"], strict=True):
            low[value <= size * RECEDED] = step
        found = []
        taken = torch.zeros(len(value), dtype=torch.bool)
        for number in reversed(range(3)):
            fires = crossings(value, sizes[number], state["fired"][number]) & ~taken
            taken |= value > sizes[number]
            if fires.any():
                found.append(self._alarm(number, sizes[number], layer, step, fires, state["low"][number]))
        return found

    def _alarm(self, number: int, size: float, layer: LayerRecord, step: int, fires: Tensor, low: Tensor) -> Alarm:
        value = torch.where(fires, layer.scaled_max, -torch.inf)
        worst = int(value.argmax())
        last = int(low[worst])
        since = f"at most {size * RECEDED:g} until step {last}" if last >= 0 else "and never below half of that"
        return alarm(
            self.codes[number],
            "warning" if number == 0 else "error",
            step,
            layer,
            head=worst,
            figure="max_scaled_product",
            value=float(value[worst]),
            threshold=size,
            words=f"{heads_of(worst, fires)} has a largest |scale·q·k| of {float(value[worst]):.4g}, above {size:g} ({since})",
            advice=_ADVICE[self.codes[number]],
        )
