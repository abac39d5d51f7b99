"""ATT505, ATT506: the softmax of a whole layer collapses: its entropy falls to nothing, or the gain of nearly all its heads.

One head that becomes sharp is often what was to be learned, and most start out uniform; so both rules are about a layer, and
about a fall: against the highest that the same figure was in the run, and for several records in a row.
"""

from attemper.monitor.alarms.layer_rule import CLEAN, RECEDED, LayerRule, State, alarm, are_numbers
from attemper.monitor.records import Alarm, LayerRecord


class _Collapse(LayerRule):
    """A figure of a layer that falls.

    State: `fired`, whether it has fired since it recovered; `highest` and `at`, the highest so far and at
    which step; `records` and `well`, for how many in a row it has been low, and has been well.
    """

    remembers = frozenset({"fired", "highest", "at", "records", "well"})

    def sound(self, state: State) -> bool:
        """Whether all are numbers."""
        return are_numbers(list(state.values()), len(self.remembers))

    def start(self, layer: LayerRecord, step: int) -> State:
        """Nothing has been seen."""
        return {"fired": False, "highest": 0.0, "at": step, "records": 0, "well": 0}

    def fallen(self, value: float, low: bool, threshold: float, step: int, state: State) -> bool:
        """Whether the alarm is to be given now.

        Args:
            value: of the layer. low: whether it is as low as the rule asks.
            threshold: twice which it must pass to have recovered.
        """
        if value > state["highest"]:
            state["highest"], state["at"] = value, step
        low = low and value * self.limits.collapse_fall <= state["highest"]
        state["records"] = state["records"] + 1 if low else 0
        state["well"] = state["well"] + 1 if value > threshold / RECEDED else 0
        if state["well"] >= CLEAN:
            state["fired"] = False
        if state["fired"] or state["records"] < self.limits.collapse_records:
            return False
        state["fired"] = True
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
                f"{state['highest']:.3g} at step {state['at']}",
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
                f"was {state['highest']:.3g} at step {state['at']}",
                advice="Next to no gradient reaches queries and keys, so the layer stays as it is: go back to before, and lower "
                "the learning rate, hold the logits with attemper.QKClip, or use QK-norm.",
            )
        ]
