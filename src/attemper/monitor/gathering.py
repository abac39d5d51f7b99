"""The statistics of a step from all ranks and heads, in one place: packed, one all-reduce per kind, one transfer to the host.

What it must hold:
- a usual step costs one MAX and one SUM all-reduce, of one buffer each, and one copy of both to the host;
- ranks may have seen different layers, or none (stages of a pipeline, a rank without data): all must read a buffer alike;
- no collective depends on what one rank alone knows, or the others would wait for ever.

So the ranks agree on a layout: which layers, of how many heads, in which order, and which part of the heads each rank has. It
begins empty, it changes on all ranks at once, and it stays until some rank has what it does not hold. That rank raises a flag in
the MAX buffer, and leaves out what the layout has no place for. Everybody sees the flag, so everybody exchanges what it has (the
only time that objects are gathered), draws the same new layout from it, and reduces again. Of a layer that a rank did not see it
leaves neutral numbers in the place, and raises no flag.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from attemper.errors import ArgumentError
from attemper.monitor import packing
from attemper.monitor.layout import Key, Plan
from attemper.monitor.records import LayerRecord
from attemper.stats import HeadStats


class LocalLayer(NamedTuple):
    """One attention module in one of its calls, as this rank alone saw it, with the heads that this rank has.

    Attributes:
        layer, call: as in `LayerRecord`.
        stats: of this rank's rows and heads, on the device.
        scaled_max: float64 [heads of this rank], the largest |scale·q·k|, on the device; −inf without rows.
        norms: [3], ‖W_q‖, ‖W_k‖ and ‖W_v‖ of the whole layer, on the device, where this rank knows them; else None.
    """

    layer: str
    call: int
    stats: HeadStats
    scaled_max: Tensor
    norms: Tensor | None = None


def gather(layers: Sequence[LocalLayer], plan: Plan) -> tuple[LayerRecord, ...]:
    """The records of a step over all ranks and of all heads, on the CPU of every rank. A collective: every rank calls it.

    Counts, histograms, maxima and minima are those of a run on one process, bit for bit; sums differ by the order of addition.

    Args:
        layers: what this rank saw, each (layer, call) once; may be empty.
        plan: what the ranks agreed on so far.

    Raises:
        ArgumentError: on every rank alike, where the ranks have different numbers of heads of one layer and nothing says that it
            is sharded, or a part of its heads is on no rank.
    """
    mine = {(one.layer, one.call): one for one in layers}
    added = _Kind(packing.ADDED_ROWS, 0.0, lambda key: packing.added(mine[key].stats))
    largest = _Kind(packing.LARGEST_ROWS, -math.inf, lambda key: packing.largest(*mine[key][2:]))
    heads = {key: one.stats.heads for key, one in mine.items()}
    device = next((one.scaled_max.device for one in layers), torch.device("cpu"))
    return tuple(
        LayerRecord(*key, *packing.unpacked(sums, maxima))
        for key, maxima, sums in _reduced(plan, heads, device, largest, added)
        if packing.seen(sums)
    )


def gather_maxima(maxima: Mapping[Key, Tensor], plan: Plan) -> dict[str, Tensor]:
    """The largest of each head over all ranks, float64 [heads] on the CPU. A collective: every rank calls it.

    Args:
        maxima: layer and call → float64 [heads of this rank] on the device; may lack layers, or be empty.
        plan: what the ranks agreed on so far.

    Returns:
        Every layer that was seen on some rank, now or before, in the model's order; −inf where no rank has a number for it now,
        +inf where a rank has NaN. Of a layer of several calls the largest over them, head by head; where they have other numbers
        of heads, as those of a layer whose heads differ in width, the heads of all calls, one call after the other.
    """
    largest = _Kind(1, -math.inf, lambda key: packing.without_nan(maxima[key].unsqueeze(0), math.inf))
    heads = {key: values.shape[0] for key, values in maxima.items()}
    device = next((values.device for values in maxima.values()), torch.device("cpu"))
    calls: dict[str, list[Tensor]] = {}
    for (layer, _), found, _ in _reduced(plan, heads, device, largest, None):
        calls.setdefault(layer, []).append(found[0].clone())
    return {layer: torch.stack(parts).amax(0) if _alike(parts) else torch.cat(parts) for layer, parts in calls.items()}


def _alike(parts: Sequence[Tensor]) -> bool:
    return len({part.shape for part in parts}) == 1


class _Kind(NamedTuple):
    """One kind of reduction: how many numbers a head has, what stands where this rank has none, and its own, [rows, heads]."""

    rows: int
    neutral: float
    of: Callable[[Key], Tensor]


def _reduced(
    plan: Plan, mine: Mapping[Key, int], device: torch.device, largest: _Kind, added: _Kind | None
) -> list[tuple[Key, Tensor, Tensor]]:
    """(layer and call, the largest, the sums) over the ranks for every entry of the layout: [rows, all heads] on the CPU.

    Args:
        mine: how many heads this rank has of what it saw. device: where that lies; of no account where a group says another.
    """
    group = _group(plan)
    if group is None and not plan.fits(mine):  # nobody to tell
        plan.agree(mine, None)
    device = device if group is None else _device(group)
    while True:
        flag = torch.full((1,), float(not plan.fits(mine)), dtype=torch.float64, device=device)
        maxima = torch.cat([flag, *_laid_out(plan, mine, largest, device)])
        sums = None if added is None else torch.cat([flag, *_laid_out(plan, mine, added, device)])
        if group is not None:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
            if sums is not None:
                dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
        host = (maxima if sums is None else torch.cat([maxima, sums])).cpu()
        if not host[0]:
            break
        plan.agree(mine, group)
    of_maxima = host[1 : len(maxima)].split([largest.rows * entry.heads for entry in plan.layout])
    rows = 0 if added is None else added.rows
    of_sums = host[len(maxima) + 1 :].split([rows * entry.heads for entry in plan.layout])
    return [
        (entry.key, one.view(largest.rows, entry.heads), other.view(rows, entry.heads))
        for entry, one, other in zip(plan.layout, of_maxima, of_sums, strict=True)
    ]


def _laid_out(plan: Plan, mine: Mapping[Key, int], kind: _Kind, device: torch.device) -> Iterable[Tensor]:
    """The numbers of each entry of the layout in one row: this rank's heads in their places, neutral ones in all others."""
    for entry in plan.layout:
        place = plan.place(entry, mine[entry.key]) if entry.key in mine else None
        if place == slice(0, entry.heads):
            yield kind.of(entry.key).to(device).flatten()
            continue
        whole = torch.full((kind.rows, entry.heads), kind.neutral, dtype=torch.float64, device=device)
        if place is not None:
            whole[:, place] = kind.of(entry.key).to(device)
        yield whole.flatten()


def _group(plan: Plan) -> dist.ProcessGroup | None:
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = dist.group.WORLD if plan.group is None else plan.group
    if dist.get_rank(group) < 0:
        raise ArgumentError("group", "a process group without this process", "one that it is in, or None for all")
    return group


def _device(group: dist.ProcessGroup) -> torch.device:
    """Where a group reduces, which every rank must answer alike, also one that has nothing."""
    accelerator = torch.accelerator.current_accelerator()
    served = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    if accelerator is not None and accelerator.type in served:
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
