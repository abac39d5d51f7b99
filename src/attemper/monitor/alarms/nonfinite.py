"""ATT507: a head has logits that are NaN or infinite."""

from attemper.monitor.alarms.layer_rule import AGAIN, CLEAN, LayerRule, State, alarm, are_numbers, heads_of
from attemper.monitor.records import Alarm, LayerRecord


class NonfiniteLogits(LayerRule):
    """Rows with a logit that is no finite number.

    State, one for each head: `fired`, how many rows there were when it fired, 0 where it may fire; `clean`, for how many records
    in a row there was none.
    """

    name = "nonfinite-logits"
    codes = ("ATT507",)

    remembers = frozenset({"fired", "clean"})

    def sound(self, state: State) -> bool:
        """Whether there are two numbers a head."""
        return all(are_numbers(each, len(state["fired"])) for each in state.values())

    def start(self, layer: LayerRecord, step: int) -> State:
        """Nothing has fired."""
        return {"fired": [0] * layer.stats.heads, "clean": [0] * layer.stats.heads}

    def fits(self, layer: LayerRecord, state: State) -> bool:
        """Whether it is about as many heads."""
        return len(state["fired"]) == layer.stats.heads

    def judge(self, layer: LayerRecord, step: int, state: State) -> list[Alarm]:
        """At most one alarm, of the head with the most such rows."""
        rows, fired = layer.stats.nonfinite_rows.tolist(), state["fired"]
        fires = [False] * len(rows)
        for head, count in enumerate(rows):
            state["clean"][head] = 0 if count else state["clean"][head] + 1
            if state["clean"][head] >= CLEAN:
                fired[head] = 0
            fires[head] = count > 0 and (fired[head] == 0 or count >= AGAIN * fired[head])
            if fires[head]:
                fired[head] = count
        if not any(fires):
            return []
        count, worst = max((count, -head) for head, count in enumerate(rows) if fires[head])
        worst, of = -worst, int(layer.stats.rows[-worst])
        return [
            alarm(
                "ATT507",
                "error",
                step,
                layer,
                head=worst,
                figure="nonfinite_rows",
                value=float(count),
                threshold=0.0,
                words=f"{heads_of(worst, fires)} has NaN or infinite logits in {count} of {of} rows",
                advice="NaN spreads through the gradients to every weight: skip the step or go back to a checkpoint from before; "
                "look for an overflow of q·k in 16 bits, or a NaN in the weights or inputs.",
            )
        ]
