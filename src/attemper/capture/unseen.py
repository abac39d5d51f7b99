"""What capture did not see: attention-like modules that ran, or never ran, without a call, and why."""

import re
from collections import Counter
from typing import Protocol

import torch
from torch import Tensor, nn

from attemper.capture.record import Unseen

_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_PART = re.compile(r"(norm|dropout|embeddings?|bias|mask|output)$", re.IGNORECASE)  # parts that carry the word and do not attend
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
NEVER_RAN = "it never ran"
NOTHING_SEEN = "it ran, and neither a call that capture sees nor a softmax over logits was seen in it"
_IN_SCRIPT = re.compile(r"softmax|scaled_dot_product_attention|multi_head_attention|baddbmm")


class Watcher(Protocol):
    """What somebody who watched a model run has seen, by module names.

    Attributes:
        covered: modules with a known call in them or below. refused: calls that were seen and left alone, with the reason.
        softmaxes: modules whose own code ran a softmax over logits, with the reason why that was not told.
        doubts: known calls, whether what is known of them disagrees with the model, and what to say then.
        ran: how often a module ran.
    """

    covered: set[str]
    refused: dict[str, str]
    softmaxes: dict[str, str]
    doubts: list[tuple[str, Tensor, str]]
    ran: Counter[str]


def find_unseen(model: nn.Module, recorder: Watcher) -> tuple[Unseen, ...]:
    """One entry for each place, the innermost that is known, in the model's own order."""
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            reasons |= _of_script(name, module, reasons)
        elif name in recorder.refused:
            reasons[name] = recorder.refused[name]
        elif name in recorder.softmaxes and name not in recorder.covered:
            reasons[name] = recorder.softmaxes[name]
    reasons |= {name: doubt for name, mismatch, doubt in recorder.doubts if not mismatch.is_meta and bool(mismatch)}
    if "" in recorder.refused:
        reasons[""] = recorder.refused[""]
    alike = {name: module for name, module in model.named_modules() if _is_attention(module) and name not in recorder.covered}
    for name in alike:
        if name in reasons or _any_inside(name, reasons) or _inside_any(name, reasons):
            continue
        if recorder.ran[name]:
            reasons[name] = NOTHING_SEEN
        elif not _any_inside(name, recorder.ran):
            reasons[name] = NEVER_RAN
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return tuple(Unseen(name, reasons[name]) for name in sorted(reasons, key=lambda name: order.get(name, 0)))


def _is_attention(module: nn.Module) -> bool:
    kind = type(module).__name__
    return bool(_ATTENTION.search(kind)) and not _PART.search(kind) and not isinstance(module, _CONTAINERS)


def _of_script(name: str, module: torch.jit.ScriptModule, reasons: dict[str, str]) -> dict[str, str]:
    if _inside_any(name, reasons):
        return {}
    graph = getattr(module, "inlined_graph", None)
    if graph is None or not _IN_SCRIPT.search(str(graph)):
        return {}
    return {name: "it is compiled by TorchScript, which runs outside Python: calls inside it cannot be seen"}


def _any_inside(name: str, names: "dict[str, str] | dict[str, int]") -> bool:
    """Whether one of `names` lies below `name`."""
    prefix = f"{name}." if name else ""
    return any(each.startswith(prefix) and each != name for each in names)


def _inside_any(name: str, names: dict[str, str]) -> bool:
    """Whether `name` lies below one of `names`."""
    return any(name.startswith(f"{each}.") for each in names if each)
