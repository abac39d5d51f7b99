"""Hugging Face's interface beyond the sweep: other implementations, mixed ones, other precisions, other ways to run."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper.capture import AttentionCall, Written, capture
from tests.capture.architectures import TOKENS, build
from tests.capture.watching import agrees, logged_results, same

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def run(model: Any, inputs: dict[str, Any]) -> list[AttentionCall]:
    """Insist on equal outputs, and that each record gives the result of its call again."""
    calls: list[AttentionCall] = []
    with torch.no_grad():
        plain = model(**inputs)
        with capture(model, lambda call: None) as seen:
            captured = model(**inputs)
        with capture(model, calls.append), logged_results() as results:
            model(**inputs)
    assert same(plain, captured)
    assert seen.calls == len(calls) == len(results)
    for call, result in zip(calls, results, strict=True):
        agrees(call, result)
    return calls


def test_a_function_that_somebody_registered() -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import AttentionInterface

    def theirs(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("theirs", theirs)
    try:
        # They registered no mask function: the padding mask never arrives, and the record says so.
        calls = run(*build("llama", attn="theirs", gain=4.0))
    finally:
        del AttentionInterface._global_mapping["theirs"]
    assert {(call.attn_mask, call.is_causal) for call in calls} == {(None, True)}
    assert torch.equal(calls[0].row_stats().count[1, 0], torch.arange(1, TOKENS + 1))


def test_two_towers_with_an_implementation_each() -> None:
    model, inputs = build("clip", gain=4.0)
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    calls = run(model, inputs)
    masks = {call.module.split(".")[0]: call.attn_mask is None or call.attn_mask.dtype for call in calls}
    assert masks == {"text_model": torch.float32, "vision_model": True}
    assert model.config.text_config._attn_implementation == "eager"


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype, attn: str) -> None:
    for name in ("llama", "t5", "gpt2"):
        model, inputs = build(name, attn=attn)
        calls = run(model.to(dtype), inputs)
        assert {call.query.dtype for call in calls} == {dtype}
        assert {call.written for call in calls} == {Written(dtype, scaled_first=False) if attn == "eager" else None}


def test_an_eager_function_that_multiplies_in_float32() -> None:
    from transformers.modeling_utils import AttentionInterface

    def eager(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> tuple[Tensor, None]:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        weights = (query.float() @ key.float().mT * scaling).softmax(-1).to(query.dtype)
        return (weights @ value).transpose(1, 2), None

    AttentionInterface.register("eager_in_float32", eager)
    try:
        model, inputs = build("llama", attn="eager_in_float32")
        calls = run(model.bfloat16(), inputs)
    finally:
        del AttentionInterface._global_mapping["eager_in_float32"]
    assert {call.written for call in calls} == {Written(torch.float32, scaled_first=False)}


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_autocast(attn: str) -> None:
    model, inputs = build("llama", attn=attn, gain=4.0)
    with torch.autocast("cpu", torch.bfloat16):
        calls = run(model, inputs)
    assert {call.query.dtype for call in calls} == {torch.bfloat16}


@pytest.mark.parametrize("mode", [torch.inference_mode, contextlib.nullcontext])
def test_with_weights_and_hidden_states_returned(mode: Any) -> None:
    model, inputs = build("bert", attn="eager")
    with mode():
        plain = model(**inputs, output_attentions=True, output_hidden_states=True)
        calls: list[AttentionCall] = []
        with capture(model, calls.append):
            captured = model(**inputs, output_attentions=True, output_hidden_states=True)
    assert len(plain.attentions) == 2
    assert same(plain, captured)


@pytest.mark.slow
def test_flex_attention_and_its_block_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention
    from transformers.integrations import flex_attention as integration

    def unfused(*qkv: Tensor, training: bool, **options: Any) -> Any:
        return flex_attention(*qkv, **options)

    # The fused form gives the same, half a minute of compiling later.
    monkeypatch.setattr(integration, "compile_friendly_flex_attention", unfused)
    model, inputs = build("gemma2", attn="flex_attention", gain=4.0, head_dim=16)
    with torch.no_grad():
        plain = model(**inputs)
        calls: list[AttentionCall] = []
        with capture(model, calls.append), logged_results() as results:
            assert same(plain, model(**inputs))
    for call, result in zip(calls, results, strict=True):
        agrees(call, result)
        assert call.softcap == 5.0
        real = call.query_mask()
        assert real is not None
        assert torch.equal(real, inputs["attention_mask"].bool())


def test_a_model_with_layers_of_its_own_between_modules() -> None:
    """A module that is not part of the model, called inside it, goes under the name of the module that runs."""
    model, inputs = build("llama")
    outside, _ = build("llama", seed=8)
    model.model.layers[1].mlp.forward = lambda x: outside.model.layers[0].self_attn(
        x, position_embeddings=model.model.rotary_emb(x, torch.arange(x.shape[1])[None]), attention_mask=None
    )[0]
    calls: list[AttentionCall] = []
    with torch.no_grad(), capture(model, calls.append):
        model(**inputs)
    assert [call.module for call in calls] == ["model.layers.0.self_attn", "model.layers.1.self_attn", "model.layers.1.mlp"]
