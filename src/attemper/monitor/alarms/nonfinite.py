"""ATT507: a head has logits that are NaN or infinite."""

import torch

from attemper.monitor.alarms.layer_rule import AGAIN, CLEAN, LayerRule, State, alarm, armed, heads_of
from attemper.monitor.records import Alarm, LayerRecord


class NonfiniteLogits(LayerRule):
    """Rows with a logit that is no finite number.

    State, [heads]: `fired`, how many rows there were when it fired, 0 where it may fire; `clean`, for how many records in a row
    there was none.
    """

    name = "nonfinite-logits"
    codes = ("ATT507",)

    def start(self, layer: LayerRecord, step: int) -> State:
        """Nothing has fired."""
        return {"fired": armed(layer.stats.heads), "clean": torch.zeros(layer.stats.heads, dtype=torch.int64)}

    def fits(self, layer: LayerRecord, state: State) -> bool:
        """Whether it is about as many heads."""
        return len(state["fired"]) == layer.stats.heads

    def judge(self, layer: LayerRecord, step: int, state: State) -> list[Alarm]:
        """At most one alarm, of the head with the most such rows."""
        rows, fired = layer.stats.nonfinite_rows.double(), state["fired"]
        state["clean"].copy_(torch.where(rows > 0, 0, state["clean"] + 1))
        fired[state["clean"] >= CLEAN] = 0.0
        fires = (rows > 0) & ((fired == 0.0) | (rows >= AGAIN * fired))
        if not bool(fires.any()):
            return []
        fired[fires] = rows[fires]
        worst = int(torch.where(fires, rows, 0.0).argmax())
        count, of = int(rows[worst]), int(layer.stats.rows[worst])
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
