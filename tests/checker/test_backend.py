"""A backend that does not do what its call says is found by `check` alone, by its output; one that does gives nothing."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attemper
from attemper.capture import AttentionCall
from attemper.checker.backend import measure_output
from attemper.report import Finding, Report, Severity
from tests.capture.architectures import build
from tests.checker.test_scale import YARN

transformers = pytest.importorskip("transformers")
NAME = "attemper-test-backend"
Backend = Callable[..., tuple[Tensor, None]]


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def put(backend: Backend, added: bool = False) -> None:
        ALL_ATTENTION_FUNCTIONS.register(NAME, backend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask if added else sdpa_mask)

    yield put
    ALL_ATTENTION_FUNCTIONS._global_mapping.pop(NAME, None)
    ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(NAME, None)


def backend(ignores: str) -> Backend:
    """SDPA as an attention function of transformers, without one of its arguments."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, None]:
        scale = None if ignores == "scaling" else given.get("scaling")
        mask = None if ignores == "attention_mask" else attention_mask
        causal = mask is None and query.shape[2] > 1 and bool(getattr(module, "is_causal", False))
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        if ignores == "value":
            value = value + 0.01
        output = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale)
        return output.transpose(1, 2), None

    return attend


def checked(name: str, ignores: str, register: Callable[..., None], **config: Any) -> Report:
    register(backend(ignores))
    model, inputs = build(name, gain=3.0, padding="left", **config)
    model.set_attn_implementation(NAME)
    return attemper.check(model, dict(inputs), select="ATT1")


def of(report: Report, code: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.code == code]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "gemma3", "granite", "opt"])
def test_a_backend_that_does_as_it_is_told_gives_nothing(name: str, register: Callable[..., None]) -> None:
    assert checked(name, "", register).findings == ()


def test_gpt2_by_a_backend_that_ignores_its_scale(register: Callable[..., None]) -> None:
    report = checked("gpt2", "scaling", register, scale_attn_by_inverse_layer_idx=True)
    (ignored,) = of(report, "ATT105")  # the first layer is divided by 1
    assert (ignored.module, ignored.severity) == ("transformer.h.1.attn", Severity.ERROR)
    assert "it does not apply the scale that it is given of 0.20412: its output shows 0.40825" in ignored.message
    (wrong,) = of(report, "ATT104")
    assert (wrong.module, wrong.severity) == ("transformer.h.1.attn", Severity.ERROR)
    assert "flag ignored: scale_attn_by_inverse_layer_idx of the config" in wrong.message
    assert wrong.measured / wrong.threshold == pytest.approx(2.0, rel=1e-3)
    assert len(report.findings) == 2


def test_opt_by_a_backend_whose_default_scale_stays_on(register: Callable[..., None]) -> None:
    report = checked("opt", "scaling", register)
    assert len(of(report, "ATT105")) == 2
    assert [(each.severity, "applied twice" in each.message) for each in of(report, "ATT102")] == [(Severity.ERROR, True)] * 2


def test_deepseek_v2_by_a_backend_without_mscale(register: Callable[..., None]) -> None:
    rope = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    report = checked("deepseek_v2", "scaling", register, rope_parameters=rope)
    found = of(report, "ATT104")
    assert len(found) == 2
    for finding in found:
        assert finding.severity is Severity.ERROR
        assert "mscale^2 = 1.4591 is missing" in finding.message
        assert finding.threshold / finding.measured == pytest.approx((0.1 * math.log(8.0) + 1) ** 2, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "ignores", "words"),
    [
        ("gemma2", "softcap", "it ignores its softcap of 5"),
        ("gpt_oss", "s_aux", "it ignores its sinks"),
        ("bert", "attention_mask", "it ignores its mask"),
        ("llama", "attention_mask", "it puts the causal rule"),
        ("granite", "scaling", "it does not apply the scale"),
    ],
)
def test_an_argument_that_is_ignored_is_named(name: str, ignores: str, words: str, register: Callable[..., None]) -> None:
    found = of(checked(name, ignores, register), "ATT105")
    assert found
    assert all(words in finding.message and finding.severity is Severity.ERROR for finding in found)


def test_a_softcap_that_is_passed_on_without_being_named_gives_nothing(register: Callable[..., None]) -> None:
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    def passes_on(*args: Any, **given: Any) -> Any:
        return eager_attention_forward(*args, **given)

    register(passes_on, added=True)
    model, inputs = build("gemma2", gain=3.0, padding="left")
    model.set_attn_implementation(NAME)
    assert attemper.check(model, dict(inputs), select="ATT1").findings == ()


def test_an_output_that_nothing_explains_is_a_warning(register: Callable[..., None]) -> None:
    found = of(checked("llama", "value", register), "ATT105")
    assert [finding.severity for finding in found] == [Severity.WARNING] * 2
    assert all(finding.measured > 1 for finding in found)


def test_some_rows_are_enough() -> None:
    queries = 131
    q, k, v = (torch.randn(1, 2, queries, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    output = F.scaled_dot_product_attention(q, k, v, scale=0.5)
    call = AttentionCall("", 0, 0, "sdpa", q, k, v, None, False, 1.0, output=output)
    shown = measure_output(call, torch.ones(1, queries, dtype=torch.bool))
    assert shown.cause == "scale"
    assert float(torch.as_tensor(shown.scale).mean()) == pytest.approx(0.5, rel=1e-3)
    right = AttentionCall("", 0, 0, "sdpa", q, k, v, None, False, 0.5, output=output)
    assert measure_output(right, torch.ones(1, queries, dtype=torch.bool)).cause == ""
    hidden = AttentionCall("", 0, 0, "sdpa", q, k, v, None, False, 1.0)
    assert measure_output(hidden, torch.ones(1, queries, dtype=torch.bool)).cause == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "gpt_oss"])
def test_rounding_is_no_ignored_argument(name: str, dtype: torch.dtype) -> None:
    model, inputs = build(name, gain=3.0)
    assert not of(attemper.check(model.to(dtype), dict(inputs)), "ATT105")
