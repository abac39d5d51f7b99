"""The kinds of faults, and which code each is to be found under."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from attemper.report import Finding, Report, Severity
from benchmarks.check_faults import backend_faults as backends
from benchmarks.check_faults import mask_faults as masks
from benchmarks.check_faults import scale_faults as scales
from benchmarks.check_faults import weight_faults as weights
from benchmarks.check_faults.models import Tiny

Modules = frozenset[str]
Judge = Callable[[Report, Modules], bool]


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        name: in words; plant: puts it into a fresh model for as long as the context lasts, and gives the modules it is in.
        codes: any of these is the right one.
        found: whether a report names it, given the modules that it is in; None: a finding with such a code in one of them.
        padding: of the inputs, "left" or "right"; None: left for decoders, where padding that leaks is behind no causal rule.
        config: further fields of the configuration, by the architecture's name.
    """

    name: str
    codes: tuple[str, ...]
    plant: Callable[[Tiny], AbstractContextManager[Modules]]
    found: Judge | None = None
    padding: str | None = "right"
    config: Callable[[str], Mapping[str, Any]] = lambda _name: {}

    def is_in(self, report: Report, modules: Modules) -> bool:
        """Whether the report names the fault."""
        if self.found is not None:
            return self.found(report, modules)
        return any(_in(finding, modules) for finding in report.findings if finding.code in self.codes)


_SHARP = ("ATT301", "ATT304")  # of one head one of them is told


def _in(finding: Finding, modules: Modules) -> bool:
    return any(finding.module == module or finding.module.startswith(f"{module}.") for module in modules)


def _only_in(codes: tuple[str, ...]) -> Judge:
    """Findings in the modules that have the fault, and none like them elsewhere."""

    def judge(report: Report, modules: Modules) -> bool:
        named = [finding for finding in report.findings if finding.code in codes]
        return bool(named) and all(_in(finding, modules) for finding in named)

    return judge


def _rounding(report: Report, modules: Modules) -> bool:
    """Called what it is, and no error."""
    named = [finding for finding in report.findings if finding.code == "ATT104" and _in(finding, modules)]
    return bool(named) and all(
        finding.severity is Severity.INFO and "rounded to bfloat16" in finding.message for finding in named
    )


def _missing_factor(report: Report, modules: Modules) -> bool:
    return any(
        finding.code == "ATT104" and finding.severity is Severity.ERROR and _in(finding, modules) for finding in report.findings
    )


def _one_head(report: Report, modules: Modules) -> bool:
    return any(f.code == "ATT402" and _in(f, modules) and f.heads == (1,) for f in report.findings)


def _not_attention(report: Report, modules: Modules) -> bool:
    return any(f.code == "ATT203" and "this is not attention" in f.message and _in(f, modules) for f in report.findings)


def _no_saturation(report: Report, modules: Modules) -> bool:
    """The offset is named, at the lowest severity, and nothing is called sharp or saturated."""
    large = [finding for finding in report.findings if finding.code == "ATT202"]
    calm = all(finding.severity is Severity.INFO and "This is not saturation" in finding.message for finding in large)
    return any(_in(f, modules) for f in large) and calm and not any(f.code in _SHARP for f in report.findings)


def _anywhere(code: str) -> Judge:
    return lambda report, _modules: any(finding.code == code for finding in report.findings)


def _scaled(rule: scales.Rule, where: str = "all") -> Callable[[Tiny], AbstractContextManager[Modules]]:
    return partial(scales.scaled, rule=rule, where=where)


def _masked(fault: masks.Fault, where: str = "last") -> Callable[[Tiny], AbstractContextManager[Modules]]:
    return partial(masks.masked, fault=fault, where=where)


KINDS: tuple[Kind, ...] = (
    Kind("no scale", ("ATT101",), _scaled(scales.missing)),
    Kind("scale applied twice", ("ATT102",), _scaled(scales.twice)),
    Kind("1/√d_model for 1/√d", ("ATT103",), _scaled(scales.of_model_width)),
    # Where 1/√d belongs, 1/d is the scale applied twice: one number, two names.
    Kind("1/d for the scale", ("ATT102", "ATT104"), _scaled(scales.inverse)),
    Kind("√d for 1/√d", ("ATT104",), _scaled(scales.multiplied)),
    Kind("1/√d for the architecture's own rule", ("ATT104", "ATT102"), _scaled(scales.usual_instead)),
    Kind(
        "scale wrong in one layer", ("ATT104",), _scaled(scales.off, "last"), _only_in(("ATT101", "ATT102", "ATT103", "ATT104"))
    ),
    Kind("scale rounded to bfloat16", ("ATT104",), _scaled(scales.rounded), _rounding),
    Kind(
        "factor of the configuration missing",
        ("ATT104",),
        scales.factor_missing,
        _missing_factor,
        config=scales.calls_for_factor,
    ),
    Kind("products overflow float16", ("ATT201",), weights.overflowing, _only_in(("ATT201",))),
    Kind("saturated heads", _SHARP, weights.saturated, _only_in(_SHARP)),
    Kind("NaN in a projection", ("ATT203",), weights.not_a_number),
    Kind("overflow outside attention", ("ATT203",), weights.overflow_outside, _not_attention),
    Kind("offset of 300, no saturation", ("ATT202",), weights.offset, _no_saturation),
    Kind("causal mask missing in one layer", ("ATT402",), _masked(masks.causal_missing)),
    Kind("one head sees the future", ("ATT402",), _masked(masks.one_head_sees), _one_head),
    Kind("causal mask shifted by one", ("ATT402",), _masked(masks.shifted, "all")),
    Kind("mask ignored by the backend", ("ATT402",), backends.mask_ignored, _anywhere("ATT402")),
    Kind("padding mask dropped", ("ATT403",), _masked(masks.padding_seen, "all"), padding=None),
    Kind("real token sees nothing", ("ATT401",), _masked(masks.blind_row)),
    Kind(
        "scale, softcap or sinks ignored by the backend",
        ("ATT105",),
        backends.ignored,
        config=scales.by_layer,
    ),
)

_BELOW_ROUNDING = "the leak moves outputs by less than √ε of the largest one, which `leak-roundings` allows"

# What is known not to be found, and why. (kind, architecture; "" for all of them)
KNOWN: dict[tuple[str, str], str] = {
    **dict.fromkeys(
        (
            ("scale rounded to bfloat16", name)
            for name in ("opt", "xglm", "esm", "openai_privacy_filter", "whisper", "fsmt", "mvp", "vitdet", "gpt_oss")
        ),
        "the factor is multiplied into q or k and measured there; below 1 % (`scale-measured`) it passes for rounding of q",
    ),
    ("one head sees the future", "pegasus"): _BELOW_ROUNDING,
    ("padding mask dropped", "pegasus"): _BELOW_ROUNDING,
    **dict.fromkeys(
        (("scale, softcap or sinks ignored by the backend", name) for name in ("gemma2", "t5gemma")),
        "under a cap of 50, the small logits of these random models change by less than rounding may",
    ),
    ("padding mask dropped", "esm"): (
        "the model sets padding to zero behind its embedding: what stands there cannot leak, only that something does"
    ),
}
