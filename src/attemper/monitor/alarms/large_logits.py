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
    "ATT502": "Runs forced to logits this large train worse, and those that go on diverge: hold them with attemper.QKClip "
    "now, and restart with a lower learning rate or QK-norm if the loss has risen.",
    "ATT503": "In a study of many sizes every run that passed 1e4 diverged: go back to a checkpoint from before, and train "
    "on with attemper.QKClip, a lower learning rate or QK-norm.",
}


class LargeLogits(LayerRule):
    """The largest |scale·q·k| of a layer's worst head against three thresholds; of those passed at once, the highest speaks.

    The heads of a layer follow one another over a threshold, so that a layer speaks once for all of them.

    State, [3]: `fired`, as `crossings` keeps it; `low`, the last step at which all heads were at most at half of the threshold,
    −1 where they never were.
    """

    name = "large-logits"
    codes = ("ATT501", "ATT502", "ATT503")

    def start(self, layer: LayerRecord, step: int) -> State:
        """Nothing has fired, nothing was low."""
        return {"fired": armed(3), "low": torch.full((3,), -1, dtype=torch.int64)}

    def judge(self, layer: LayerRecord, step: int, state: State) -> list[Alarm]:
        """At most one alarm."""
        values = torch.nan_to_num(layer.scaled_max, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        sizes = torch.tensor(
            [self.limits.alarming_logit, self.limits.hurting_logit, self.limits.diverging_logit], dtype=torch.float64
        )
        largest = values.max()
        if largest == -torch.inf:  # no rows: nothing grew, and nothing receded
            return []
        state["low"][largest <= sizes * RECEDED] = step
        fires = crossings(largest.expand(3), sizes, state["fired"])
        passed = int((largest > sizes).sum())
        if passed and bool(fires[passed - 1]):
            return [self._alarm(passed - 1, float(sizes[passed - 1]), layer, step, values, int(state["low"][passed - 1]))]
        return []

    def _alarm(self, number: int, size: float, layer: LayerRecord, step: int, values: Tensor, last: int) -> Alarm:
        worst = int(values.argmax())
        since = f"at most {size * RECEDED:g} until step {last}" if last >= 0 else "and never below half of that"
        return alarm(
            self.codes[number],
            "warning" if number == 0 else "error",
            step,
            layer,
            head=worst,
            figure="max_scaled_product",
            value=float(values[worst]),
            threshold=size,
            words=f"{heads_of(worst, values > size)} has a largest |scale·q·k| of {float(values[worst]):.4g}, above {size:g} "
            f"({since})",
            advice=_ADVICE[self.codes[number]],
        )
