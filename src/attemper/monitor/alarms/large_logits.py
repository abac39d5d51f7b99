"""ATT501, ATT502, ATT503: the largest |scale·q·k| of a head passes 100, 1e3, 1e4.

The product is taken before softcap, bias and mask: an ALiBi bias makes logits of −1000 at a distance, which are meant.
"""

import torch

from attemper.monitor.alarms.layer_rule import RECEDED, LayerRule, State, alarm, are_numbers, crosses, heads_of
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

    State, three each: `fired`, as `crosses` keeps it; `low`, the last step at which all heads were at most at half of the
    threshold, −1 where they never were.
    """

    name = "large-logits"
    codes = ("ATT501", "ATT502", "ATT503")

    remembers = frozenset({"fired", "low"})

    def sound(self, state: State) -> bool:
        """Whether there are three numbers each."""
        return all(are_numbers(each, len(self.codes)) for each in state.values())

    def start(self, layer: LayerRecord, step: int) -> State:
        """Nothing has fired, nothing was low."""
        return {"fired": [0.0] * 3, "low": [-1] * 3}

    def judge(self, layer: LayerRecord, step: int, state: State) -> list[Alarm]:
        """At most one alarm."""
        values = torch.nan_to_num(layer.scaled_max, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).tolist()
        largest = max(values, default=-torch.inf)
        if largest == -torch.inf:  # no rows: nothing grew, and nothing receded
            return []
        sizes = (self.limits.alarming_logit, self.limits.hurting_logit, self.limits.diverging_logit)
        found: list[Alarm] = []
        for number, size in enumerate(sizes):
            if largest <= size * RECEDED:
                state["low"][number] = step
            fires, state["fired"][number] = crosses(largest, size, state["fired"][number])
            if largest > size:  # the highest that was passed speaks, if it is the one that fires
                found = [self._alarm(number, size, layer, step, values, state["low"][number])] if fires else []
        return found

    def _alarm(self, number: int, size: float, layer: LayerRecord, step: int, values: list[float], last: int) -> Alarm:
        worst, above = values.index(max(values)), [value > size for value in values]
        since = f"at most {size * RECEDED:g} until step {last}" if last >= 0 else "and never below half of that"
        return alarm(
            self.codes[number],
            "warning" if number == 0 else "error",
            step,
            layer,
            head=worst,
            figure="max_scaled_product",
            value=values[worst],
            threshold=size,
            words=f"{heads_of(worst, above)} has a largest |scale·q·k| of {values[worst]:.4g}, above {size:g} ({since})",
            advice=_ADVICE[self.codes[number]],
        )
