"""Says which pairs only one of two calls lets through: padding, the future, a window, another alignment of the causal rule."""

import torch
from torch import Tensor

from attemper.checker.applying.logits import View


def describe(a: View, b: View, real: Tensor, padding: Tensor | None) -> str:
    """In words, what is visible to one call alone.

    Args:
        real: bool [batch, queries]; padding: bool [batch, keys], True where the inputs say that a key is real, or None.
    """
    queries, keys = a.shape[2:]
    shift = keys - queries
    counts = dict.fromkeys(("padding", "future", "past"), 0)
    sides, apart = {"A": 0, "B": 0}, 0
    distances: list[int] = []
    realigned = shift != 0
    hidden = None if padding is None else ~padding[:, None, None, :]
    for rows in a.tiles():
        one, two = a.logits(rows).visible, b.logits(rows).visible
        counted = real[:, None, rows, None]
        only_a, only_b = one & ~two & counted, two & ~one & counted
        either = only_a | only_b
        sides["A"] += int(only_a.sum())
        sides["B"] += int(only_b.sum())
        apart += int(either.sum())
        query = torch.arange(rows.start, rows.stop, device=either.device).unsqueeze(-1)
        distance = torch.arange(keys, device=either.device) - query
        ahead = distance - (shift if a.call.self_attention else 0)
        on_padding = either & hidden if hidden is not None else torch.zeros_like(either)
        counts["padding"] += int(on_padding.sum())
        counts["future"] += int((either & ~on_padding & (ahead > 0)).sum())
        counts["past"] += int((either & ~on_padding & (ahead <= 0)).sum())
        if bool((either & ~on_padding & (ahead <= 0)).any()):
            past = (either & ~on_padding).any(0).any(0) & (ahead <= 0)
            distances += [int(-ahead[past].max()), int(-ahead[past].min())]
        realigned = realigned and bool((either == (((distance <= 0) ^ (distance <= shift)) & counted)).all())
    who = "B alone" if not sides["A"] else "A alone" if not sides["B"] else "one of them alone"
    if realigned and apart:
        lower = "B" if (shift > 0) == (sides["A"] > 0) else "A"
        other = "A" if lower == "B" else "B"
        return (
            f"the causal rule is aligned top-left in {lower} (key ≤ query) and bottom-right in {other} "
            f"(key ≤ query + {shift}): {apart} pairs are visible to {who}"
        )
    parts = []
    if counts["padding"]:
        parts.append(f"{counts['padding']} pairs with padded keys")
    if counts["future"]:
        parts.append(f"{counts['future']} pairs with keys behind the query's own position")
    if counts["past"]:
        parts.append(f"{counts['past']} pairs with earlier keys")
    text = f"{' and '.join(parts)} are visible to {who}"
    if counts["past"] == apart and min(distances) > 0:
        text += f", all {min(distances)} or more positions back: a window of {min(distances)} keys that only one of them has"
    return text
