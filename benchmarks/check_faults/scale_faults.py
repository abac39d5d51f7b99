"""Faults of the scale: what each makes of the factor that a sound model puts on q·k, and how it gets there."""

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.check_faults.models import Tiny
from benchmarks.check_faults.planting import Call, NotApplicableError, in_calls

# These multiply q by the scale themselves, or q and k by its root, and pass 1.0.
_PRESCALED = ("opt", "whisper", "esm", "openai_privacy_filter")
# These compute attention in their own code, and keep 1/√d in an attribute.
_IN_AN_ATTRIBUTE = {
    "bloom": "inv_norm_factor",
    "mpt": "softmax_scale",
    "xglm": "scaling",
    "fsmt": "scaling",
    "mvp": "scaling",
    "xlnet": "scale",
    "vitdet": "scale",
}
_STRETCHED = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "granite", "granite_swa", "cohere"),
    *("olmo2", "starcoder2", "smollm3", "exaone4", "gpt_oss"),
)
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}


@dataclass(frozen=True)
class Site:
    """One place where a scale is applied: its value, the width of a head, and the width of the model."""

    scale: float
    width: int
    model_width: int

    @property
    def is_usual(self) -> bool:
        """Whether the scale is 1/√d, as far as a float tells."""
        return abs(self.scale / self.width**-0.5 - 1) < 1e-6


Rule = Callable[[Site], float | None]  # the faulty scale; None where the fault makes no sense


def missing(site: Site) -> float | None:
    """1.0, where the architecture has a scale."""
    return None if site.scale == 1.0 else 1.0


def twice(site: Site) -> float | None:
    """The scale, and the default of the called function, 1/√d, once more."""
    return None if site.scale == 1.0 else site.scale * site.width**-0.5


def of_model_width(site: Site) -> float | None:
    """1/√d_model, where 1/√d belongs."""
    return site.model_width**-0.5 if site.is_usual and site.model_width != site.width else None


def inverse(site: Site) -> float | None:
    """1/d."""
    return None if site.scale == 1 / site.width else 1 / site.width


def multiplied(site: Site) -> float | None:
    """√d, where 1/√d belongs."""
    return site.width**0.5 if site.is_usual else None


def off(site: Site) -> float | None:
    """1.37 times the scale, which no known mistake explains."""
    return 1.37 * site.scale


def rounded(site: Site) -> float | None:
    """The scale as bfloat16 holds it."""
    value = torch.tensor(site.scale, dtype=torch.bfloat16).item()
    return None if value == site.scale else value


def usual_instead(site: Site) -> float | None:
    """1/√d, where the architecture has a rule of its own."""
    return None if site.is_usual else site.width**-0.5


@contextlib.contextmanager
def scaled(tiny: Tiny, rule: Rule, where: str = "all") -> Generator[frozenset[str]]:
    """Another scale in all modules or in the last one: in what they pass, in q where they scale it, or in their attribute."""
    attribute = _IN_AN_ATTRIBUTE.get(tiny.name)
    if attribute is not None:
        yield _set(tiny, attribute, rule, where)
        return
    carried = tiny.name in _PRESCALED

    def alter(call: Call) -> Call | None:
        before = call.scale * call.width**-0.5 if carried else call.scale
        scale = rule(Site(before, call.width, _model_width(tiny.model)))
        if scale is None or not carried:
            return None if scale is None else call.with_scale(scale)
        return replace(call, query=call.query * (scale / before))

    with in_calls(tiny, alter, where) as modules:
        yield modules


def calls_for_factor(name: str) -> dict[str, Any]:
    """Fields of the configuration that call for a factor beside 1/√d; none where it has one already, or there is none."""
    if name in _STRETCHED:
        return {"rope_parameters": dict(_YARN), "max_position_embeddings": 128}
    return by_layer(name)


def by_layer(name: str) -> dict[str, Any]:
    """GPT-2's option of dividing by the number of the layer too."""
    return {"scale_attn_by_inverse_layer_idx": True} if name == "gpt2" else {}


@contextlib.contextmanager
def factor_missing(tiny: Tiny) -> Generator[frozenset[str]]:
    """Leave out what `calls_for_factor` calls for: YaRN's factor, 1/(layer+1), mscale², or the growth with position."""
    if tiny.name in _STRETCHED:
        tables = [
            (module, name) for module in tiny.model.modules() for name in vars(module) if name.endswith("attention_scaling")
        ]
        for module, name in tables:
            setattr(module, name, 1.0)
        yield frozenset(tiny.attention)
    elif tiny.name == "llama4":
        tuned = [name for name in tiny.attention if not getattr(tiny.model.get_submodule(name), "use_rope", True)]
        for name in tuned:
            setattr(tiny.model.get_submodule(name), "attn_temperature_tuning", False)  # noqa: B010 - no field of nn.Module
        yield frozenset(tuned)
    elif tiny.name in ("deepseek_v3", "gpt2"):
        with scaled(tiny, usual_instead) as modules:
            yield modules
    else:
        raise NotApplicableError


def _set(tiny: Tiny, attribute: str, rule: Rule, where: str) -> frozenset[str]:
    changed = []
    for name in tiny.attention if where == "all" else tiny.attention[-1:]:
        module = tiny.model.get_submodule(name)
        before = getattr(module, attribute)
        scale = rule(Site(before, round(before**-2), _model_width(tiny.model)))
        if scale is not None:
            setattr(module, attribute, scale)
            changed.append(name)
    if not changed:
        raise NotApplicableError
    return frozenset(changed)


def _model_width(model: nn.Module) -> int:
    settings = model.config
    for part in (settings, getattr(settings, "text_config", None), getattr(settings, "decoder", None)):
        for name in ("hidden_size", "d_model", "n_embd", "dim"):
            found = getattr(part, name, None)
            if isinstance(found, int):
                return found
    raise NotApplicableError
