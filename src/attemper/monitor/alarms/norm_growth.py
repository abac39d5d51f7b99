"""ATT508: W_q and W_k outgrow W_v: what makes the logits runs away from the rest of the layer."""

from attemper.monitor.alarms.layer_rule import LayerRule, State, alarm, are_numbers, crosses
from attemper.monitor.records import Alarm, LayerRecord


class NormGrowth(LayerRule):
    """sqrt(‖W_q‖·‖W_k‖) / ‖W_v‖ against what it was at the first record.

    State: `fired`, as `crosses` keeps it; `first`, the ratio at the first record with norms, and `at`, its step.
    """

    name = "norm-growth"
    codes = ("ATT508",)

    remembers = frozenset({"fired", "first", "at"})

    def sound(self, state: State) -> bool:
        """Whether all are numbers."""
        return are_numbers(list(state.values()), len(self.remembers))

    def start(self, layer: LayerRecord, step: int) -> State:
        """No ratio is known."""
        return {"fired": 0.0, "first": 0.0, "at": step}

    def judge(self, layer: LayerRecord, step: int, state: State) -> list[Alarm]:
        """At most one alarm."""
        norms = layer.norms
        if norms is None or not norms.value > 0:
            return []
        ratio = (norms.query * norms.key) ** 0.5 / norms.value
        if not state["first"]:
            state["first"], state["at"] = ratio, step
        first, limit = state["first"], self.limits.norm_growth
        grown = ratio / first if first else 0.0
        fires, state["fired"] = crosses(grown, limit, state["fired"])
        if not fires:
            return []
        return [
            alarm(
                "ATT508",
                "warning",
                step,
                layer,
                head=None,
                figure="norm_ratio",
                value=grown,
                threshold=limit,
                words=f"sqrt(‖W_q‖·‖W_k‖) / ‖W_v‖ is {ratio:.3g}, {grown:.3g} times what it was at step {state['at']}",
                advice="The logits grow with its square, and entropy collapses where it runs away: use σReparam, QK-norm or "
                "attemper.QKClip, or a lower learning rate for the query and key projections.",
            )
        ]
