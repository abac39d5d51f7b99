"""ATT505, ATT506: the softmax of a whole layer collapses: its entropy falls to nothing, or the gain of nearly all its heads.

One head that becomes sharp is often what was to be learned, and most start out uniform; so both rules are about a layer, and
about a fall: against the highest that the same figure was in the run, and for several records in a row.
"""

import torch

from attemper.monitor.alarms.layer_rule import CLEAN, RECEDED, LayerRule, State, alarm, armed
from attemper.monitor.records import Alarm, LayerRecord


class _Collapse(LayerRule):
    """A figure of a layer that falls.

    State, all [1]: `fired`, whether it has fired since it recovered; `highest` and `at`, the highest so far and at
    which step; `records` and `well`, for how many in a row it has been low, and has been well.
    """

    def start(self, layer: LayerRecord, step: int) -> State:
        """Nothing has been seen."""
        return {
            "fired": armed(1),
            "highest": torch.zeros(1, dtype=torch.float64),
            "at": torch.full((1,), step, dtype=torch.int64),
            "records": torch.zeros(1, dtype=torch.int64),
            "well": torch.zeros(1, dtype=torch.int64),
        }

    def fallen(self, value: float, low: bool, threshold: float, step: int, state: State) -> bool:
        """Whether the alarm is to be given now.

        Args:
            value: of the layer. low: whether it is as low as the rule asks.
            threshold: twice which it must pass to have recovered.
        """
        if value > float(state["highest"]):
            state["highest"].fill_(value)
            state["at"].fill_(step)
        low = low and value * self.limits.collapse_fall <= float(state["highest"])
        state["records"].copy_((state["records"] + 1) * low)
        state["well"].copy_((state["well"] + 1) * (value > threshold / RECEDED))
        if int(state["well"]) >= CLEAN:
            state["fired"].fill_(0.0)
        if int(state["records"]) < self.limits.collapse_records:
            return False
        if bool(state["fired"]):
            return False
        state["fired"].fill_(1.0)
        return True


class EntropyCollapse(_Collapse):
    """The mean over a layer's heads of their normalized entropy."""

    name = "entropy-collapse"
    codes = ("ATT505",)

    def judge(self, layer: LayerRecord, step: int, state: State) -> list[Alarm]:
        """At most one alarm."""
        entropies = layer.stats.mean_normalized_entropy
        value, threshold = float(entropies.nanmean()), self.limits.collapsed_entropy
        if not self.fallen(value, value < threshold, threshold, step, state):
            return []
        return [
            alarm(
                "ATT505",
                "warning",
                step,
                layer,
                head=None,
                figure="normalized_entropy",
                value=value,
                threshold=threshold,
                words=f"the normalized entropy of its heads is {value:.3g} on average, below {threshold:g}, and was "
                f"{float(state['highest']):.3g} at step {int(state['at'])}",
                advice="Collapse to 0 comes before divergence: lower the learning rate, hold the logits with attemper.QKClip, or "
                "use QK-norm or σReparam.",
            )
        ]


class GainCollapse(_Collapse):
    """The mean gain of nearly all heads of a layer."""

    name = "gain-collapse"
    codes = ("ATT506",)

    def judge(self, layer: LayerRecord, step: int, state: State) -> list[Alarm]:
        """At most one alarm."""
        gains, threshold = layer.stats.mean_gain, self.limits.collapsed_gain
        known = gains[gains.isfinite()]
        if not len(known):
            return []
        value, collapsed = float(known.mean()), int((known < threshold).sum())
        if not self.fallen(value, collapsed >= self.limits.collapsed_heads * len(known), threshold, step, state):
            return []
        return [
            alarm(
                "ATT506",
                "warning",
                step,
                layer,
                head=None,
                figure="gain",
                value=value,
                threshold=threshold,
                words=f"{collapsed} of {len(known)} heads have a mean gain below {threshold:g}; the layer's is {value:.3g}, and "
                f"was {float(state['highest']):.3g} at step {int(state['at'])}",
                advice="Next to no gradient reaches queries and keys, so the layer stays as it is: go back to before, and lower "
                "the learning rate, hold the logits with attemper.QKClip, or use QK-norm.",
            )
        ]
