"""`QKClip`: after each step of the optimiser, the heads whose logits went over a threshold are scaled back by their weights.

What it must hold:
- every process makes the same edits, from maxima that are the same on all of them;
- a maximum is used once: it was measured at weights that the edit changes;
- a NaN or infinite maximum never reaches a weight;
- what is over the threshold and cannot be clipped is said, never passed over.
"""

import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from attemper.errors import ArgumentError, AttemperError, UnsupportedError
from attemper.monitor.choosing import innermost
from attemper.monitor.watching import Watch, watch
from attemper.weights import ClipReport, Projections, qk_clip_
from attemper.weights.clip import Operand, check_clip, check_threshold, clipped_parameters
from attemper.weights.families import find_known


class Maxima(Protocol):
    """What tells how large the logits were, as a `Watch` does."""

    def maxima(self) -> Mapping[str, Tensor]:
        """float64 [heads] of each layer, since the last call: the largest |scale·q·k|; −inf where nothing was measured."""


# By the identity of the watch: each measurement is told once, so two that ask would take it from one another.
_clips: weakref.WeakValueDictionary[int, "QKClip"] = weakref.WeakValueDictionary()


class QKClip:
    """Hold each head's largest |scale·q·k| at or under a threshold while a model trains.

        with attemper.QKClip(model, threshold=100.0) as clip:
            for batch in batches:
                loss(model(batch)).backward()
                optimizer.step()
                clip.step()
                optimizer.zero_grad()

    A head whose largest logit of the step, before softcap, bias and mask, was over the threshold has its products multiplied by
    γ = threshold / largest through W_q and W_k, or the gains of the norms behind them: see `attemper.weights.qk_clip_`. The
    optimiser's state is left alone. A context manager; `remove()` does the same as leaving it.

    Args:
        model: whose weights are clipped; of a DistributedDataParallel or a compiled module the one inside is meant. Where an
            optimiser steps float32 copies of 16-bit weights, the module that holds those.
        threshold: above 0, in units of a logit.
        watch: which measures; None: the model's own (`Watch.of(model)`), and one that is started here where it has none, which
            measures every row of every step and is removed with this. Clipping holds for the rows and steps that it measures.
        on: as in `qk_clip_`.
        layouts: of modules that the table of families does not know, or knows wrongly, by name; see `find_projections`.

    Attributes:
        clipped: how many heads the last `step` clipped. min_factor: the smallest γ among them, 1.0 where there was none.
        skipped: how many layers the last `step` left alone for a NaN or infinite maximum.
        total: layer → int64 [heads], how often each head was clipped since the start.
        smallest: the smallest γ since the start. nonfinite: layer → how often it was skipped.
        unclipped: attention modules that cannot be clipped → the reason.

    Raises:
        ArgumentError: threshold or on is unusable, or no module of the model can be clipped; the reasons are told.
        UnsupportedError: a part of the model is a FullyShardedDataParallel; the watch was removed, or another QKClip asks it.

    Source: Kimi Team 2025 (Kimi K2, arXiv 2507.20534), section 2.1, MuonClip.
    """

    def __init__(
        self,
        model: nn.Module,
        threshold: float = 100.0,
        *,
        watch: Maxima | None = None,
        on: Operand = "auto",
        layouts: Mapping[str, Projections] | None = None,
    ) -> None:
        qk_clip_(model, {}, threshold, on=on)  # says what is wrong with these
        model = innermost(model)
        self._model, self._on = model, on
        self.threshold = threshold
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise UnsupportedError(
                "model: FullyShardedDataParallel flattens weights, which leaves no heads to clip; use fully_shard"
            )
        known, self.unclipped = find_known(model, layouts)
        self._layouts: dict[str, Projections] = {}
        self._groups: list[tuple[str, ...]] = []
        for group in _tied(model, known, on, self.unclipped):
            try:
                _check_group(model, {name: known[name] for name in group}, on)
            except AttemperError as error:
                self.unclipped |= dict.fromkeys(group, str(error))
            else:
                self._groups.append(group)
                self._layouts |= {name: known[name] for name in group}
        if not self._layouts:
            reasons = "; ".join(f"{name or 'the model'}: {reason}" for name, reason in self.unclipped.items())
            expected = "a model with attention modules of a known layout, or layouts={name: Projections(...)}"
            raise ArgumentError(
                "model", f"{type(model).__name__} without any that can be clipped ({reasons or 'none'})", expected
            )
        self._warned: set[str] = set()
        self.clipped, self.min_factor, self.skipped, self.smallest = 0, 1.0, 0, 1.0
        self.total = {name: torch.zeros(one.heads, dtype=torch.int64, device="cpu") for name, one in self._layouts.items()}
        self.nonfinite = dict.fromkeys(self._layouts, 0)
        self._watch, self._own = (watch, None) if watch is not None else _watch_of(model)
        _check_watch(self._watch)
        if id(self._watch) in _clips:
            raise UnsupportedError(
                "model: a QKClip asks this watch already, and the two would take the maxima from one another; remove() it first"
            )
        _clips[id(self._watch)] = self
        self._watch.maxima()  # from now on: what was measured before belongs to weights that have been stepped since

    @property
    def threshold(self) -> float:
        """What no logit should exceed; may be changed while training. Setting it raises ArgumentError as making a QKClip does."""
        return self._threshold

    @threshold.setter
    def threshold(self, threshold: float) -> None:
        check_threshold(threshold)
        self._threshold = float(threshold)

    def step(self) -> ClipReport | None:
        """Clip by what was measured since the last call; after the optimiser's step. Every process calls it.

        Returns:
            What was clipped; None where nothing was measured.

        Raises:
            ArgumentError: a layer was measured with another number of heads than its layout has.
            UnsupportedError: this, or the watch that it asks, was removed; or a projection has got an adapter since.
        """
        if _clips.get(id(self._watch)) is not self:
            raise UnsupportedError("QKClip: it was removed, and clips no more; make a new one")
        _check_watch(self._watch)
        measured = self._watch.maxima()
        self.clipped, self.min_factor, self.skipped = 0, 1.0, 0
        over: dict[str, Tensor] = {}
        anything = False
        for group in self._groups:
            largest = self._largest(group, measured)
            if largest is None:
                continue
            anything = True
            if bool((largest.isnan() | (largest == math.inf)).any()):
                self._skip(group)
            elif bool((largest > self.threshold).any()):
                over |= dict.fromkeys(group, largest.clamp_min(0.0))
        self._tell_of_others(measured)
        if not anything:
            self._tell_of_unmeasured()
            return None
        report = qk_clip_(self._model, over, self.threshold, on=self._on, layouts=self._layouts)
        for clip in report.clips:
            self.total[clip.module][list(clip.heads)] += 1
            self.clipped += len(clip.heads)
            self.min_factor = min(self.min_factor, clip.factor)
        self.smallest = min(self.smallest, self.min_factor)
        return report

    def scalars(self) -> dict[str, float]:
        """Of the last `step`, for `watch.step(**clip.scalars())`: clipped_heads, min_factor, skipped_layers."""
        numbers = {"clipped_heads": self.clipped, "min_factor": self.min_factor, "skipped_layers": self.skipped}
        return {name: float(number) for name, number in numbers.items()}

    def state_dict(self) -> dict[str, Any]:
        """The counts since the start, to be saved with the model."""
        total = {name: counts.clone() for name, counts in self.total.items()}
        return {"total": total, "smallest": self.smallest, "nonfinite": dict(self.nonfinite)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from what `state_dict` gave.

        Raises:
            ArgumentError: it is not what `state_dict` gives, or of a model with other layers or heads. Nothing was changed then.
        """
        _check_state(state)
        shapes = {name: list(counts.shape) for name, counts in self.total.items()}
        given = {name: list(counts.shape) for name, counts in state["total"].items()}
        if given != shapes or set(state["nonfinite"]) != set(shapes):
            wrong = next((name for name in {**shapes, **given} if given.get(name) != shapes.get(name)), "nonfinite")
            expected = f"counts of {shapes.get(wrong, 'no such layer')} there, from a QKClip of the same model"
            raise ArgumentError("state", f"{given.get(wrong, 'nothing')} for {wrong!r}", expected)
        self.total = {name: state["total"][name].to("cpu", torch.int64, copy=True) for name in self.total}
        self.smallest, self.nonfinite = float(state["smallest"]), dict(state["nonfinite"])

    def remove(self) -> None:
        """Clip no more, and stop measuring, where this started it. The weights stay as they are."""
        if _clips.get(id(self._watch)) is self:
            del _clips[id(self._watch)]
        if self._own is not None:
            self._own.remove()
            self._own = None

    def _largest(self, group: tuple[str, ...], measured: Mapping[str, Tensor]) -> Tensor | None:
        """float64 [heads] over the modules that share what is clipped; None where none of them was measured."""
        seen = []
        for name in group:
            if name in measured:
                heads = self._layouts[name].heads
                if measured[name].shape != (heads,):
                    expected = f"[{heads}], its heads; pass layouts={{{name!r}: Projections(...)}} where these are wrong"
                    raise ArgumentError(f"watch.maxima()[{name!r}]", list(measured[name].shape), expected)
                seen.append(measured[name].double().cpu())
        if not seen:
            return None
        largest = torch.stack(seen).amax(0)  # which keeps NaN
        return None if bool((largest == -math.inf).all()) else largest

    def _skip(self, group: tuple[str, ...]) -> None:
        self.skipped += len(group)
        for name in group:
            self.nonfinite[name] += 1
        self._warn(group[0], f"{group[0] or 'the model'}: its logits are NaN or infinite, which no clipping brings back; skipped")

    def _tell_of_others(self, measured: Mapping[str, Tensor]) -> None:
        for name, maxima in measured.items():
            if name in self._layouts:
                continue
            reason = self.unclipped.setdefault(
                name, "where its q and k are made is not known; pass layouts={name: Projections(...)}"
            )
            if not bool((maxima <= self.threshold).all()):
                largest = float(maxima.max())
                self._warn(
                    name, f"{name or 'the model'}: a logit of {largest:.4g} is over {self.threshold:g}, unclipped: {reason}"
                )

    def _tell_of_unmeasured(self) -> None:
        """Nothing was measured: where the watch has reasons, this is no step without a forward pass."""
        unseen = getattr(self._watch, "unseen", tuple)()
        if unseen:
            reasons = "; ".join(f"{each.module or 'the model'}: {each.reason}" for each in unseen)
            self._warn(" unmeasured", f"no logits were measured, so nothing is clipped ({reasons})")

    def _warn(self, name: str, message: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"QKClip: {message}", stacklevel=4)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"QKClip(threshold={self.threshold:g}, layers={len(self._layouts)}, unclipped={len(self.unclipped)})"


def _check_watch(watch: Maxima) -> None:
    if isinstance(watch, Watch) and Watch.of(watch._model) is not watch:
        raise UnsupportedError("watch: it was removed, and measures nothing more; make a QKClip of one that lasts as long as it")


def _check_state(state: object) -> None:
    """Refuse what `state_dict` never gives, whatever the model."""
    expected = "the dict that QKClip.state_dict gave: total, smallest, nonfinite"
    if not isinstance(state, Mapping):
        raise ArgumentError("state", f"a {type(state).__name__}", expected)
    if missing := [name for name in ("total", "smallest", "nonfinite") if name not in state]:
        raise ArgumentError("state", f"nothing for {', '.join(map(repr, missing))}", expected)
    for name, kind in (("total", Tensor), ("nonfinite", int)):
        parts = state[name]
        wrong = [parts] if not isinstance(parts, Mapping) else [part for part in parts.values() if not isinstance(part, kind)]
        if wrong:
            raise ArgumentError(f"state[{name!r}]", repr(wrong[0])[:80], f"{kind.__name__} of each layer, as in {expected}")
    if not isinstance(state["smallest"], int | float):
        raise ArgumentError("state['smallest']", repr(state["smallest"])[:80], f"a number, as in {expected}")


def _watch_of(model: nn.Module) -> tuple[Maxima, Any]:
    """The watch that measures, and the same where it was started for this."""
    found = Watch.of(model)
    if found is not None:
        return found, None
    own = watch(model)
    return own, own


def _tied(model: nn.Module, known: Mapping[str, Projections], on: Operand, unclipped: dict[str, str]) -> list[tuple[str, ...]]:
    """Modules by what they share: those that hold one parameter are clipped together, by the largest of their maxima."""
    groups: dict[str, list[str]] = {}
    holders: dict[int, list[str]] = defaultdict(list)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, projections in known.items():
        try:
            names = clipped_parameters(name, projections, on)
        except AttemperError as error:
            unclipped[name] = str(error)
            continue
        groups[name] = [name]
        for parameter in names:
            holders[id(parameters.get(parameter))].append(name)
    holders.pop(id(None), None)
    for first, *others in holders.values():
        for other in others:
            if groups[other] is not groups[first]:
                groups[first].extend(groups[other])
                for name in groups[other]:
                    groups[name] = groups[first]
    return list(dict.fromkeys(tuple(group) for group in groups.values()))


def _check_group(model: nn.Module, layouts: Mapping[str, Projections], on: Operand) -> None:
    heads = {name: projections.heads for name, projections in layouts.items()}
    if len(set(heads.values())) > 1:
        raise ArgumentError("model", f"modules with one parameter and {heads} heads", "as many heads in each of them")
    check_clip(model, layouts, on)
