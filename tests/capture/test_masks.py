"""Padding, causality, windows and sinks as the records show them, and generation with a cache."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper.capture import AttentionCall, capture
from attemper.capture.record import AttentionCall as Record
from tests.capture.architectures import BATCH, PADDED_ROW, PADDING, TOKENS, build
from tests.capture.watching import agrees, logged_results

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def calls_of(name: str, **options: Any) -> list[AttentionCall]:
    model, inputs = build(name, **options)
    calls: list[AttentionCall] = []
    with torch.no_grad(), capture(model, calls.append):
        model(**inputs)
    return calls


def real_tokens(padding: str) -> Tensor:
    real = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    real[PADDED_ROW, TOKENS - PADDING :] = padding != "right"
    real[PADDED_ROW, :PADDING] = padding != "left"
    return real


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "bert", "albert", "distilbert", "opt", "modernbert", "gemma3"])
def test_padding_is_read_off_the_mask(name: str, padding: str, attn: str) -> None:
    for call in calls_of(name, attn=attn, padding=padding):
        mask = call.query_mask()
        assert mask is not None
        assert torch.equal(mask, real_tokens(padding))
        count = call.row_stats().count
        assert (count.transpose(1, 2)[mask] > 0).all()


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_without_padding_every_query_is_real(attn: str) -> None:
    for call in calls_of("llama", attn=attn, padding="none"):
        mask = call.query_mask()
        assert mask is None or mask.all()
        assert torch.equal(call.row_stats().count[0, 0], torch.arange(1, TOKENS + 1))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_window_hides_what_lies_before_it(attn: str) -> None:
    call, _ = calls_of("mistral", attn=attn, padding="none")
    assert torch.equal(call.row_stats().count[0, 0], torch.arange(1, TOKENS + 1).clamp(max=3))


def test_cross_attention_says_nothing_of_its_queries() -> None:
    model, inputs = build("t5")
    inputs["decoder_input_ids"] = inputs["input_ids"]  # as many queries as keys: only the name tells
    calls: list[AttentionCall] = []
    with torch.no_grad(), capture(model, calls.append):
        model(**inputs)
    cross = [call for call in calls if not call.self_attention]
    assert [call.module for call in cross] == [f"decoder.block.{layer}.layer.1.EncDecAttention" for layer in range(2)]
    assert all(call.query_mask() is None for call in cross)
    assert all(call.row_stats().count[PADDED_ROW].max() == TOKENS - PADDING for call in cross)
    encoder = calls[0].query_mask()
    assert encoder is not None
    assert torch.equal(encoder, real_tokens("right"))


@pytest.mark.parametrize("written", [-1e4, -65504.0, float("-inf"), torch.finfo(torch.float32).min])
def test_what_older_models_write_hides_too(written: float) -> None:
    mask = torch.zeros(1, 1, 1, 5)
    mask[..., 3:] = written
    query, key = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 5, 3)
    call = Record("m", 0, 0, "sdpa", query, key, key, mask, is_causal=False, scale=1.0)
    assert torch.equal(call.row_stats().count, torch.full((1, 2, 5), 3))
    real = call.query_mask()
    assert real is not None
    assert real.tolist() == [[True] * 3 + [False] * 2]
    assert Record("m", 0, 0, "sdpa", query, key, key, mask + 20000, is_causal=False, scale=1.0).row_stats().count.min() >= 3


def test_a_query_mask_holds_the_position_rules_too() -> None:
    query = torch.randn(1, 1, 5, 3)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[4, 4] = False  # under the causal rule only query 4 could see key 4
    call = Record("m", 0, 0, "sdpa", query, query, query, mask, is_causal=True, scale=1.0)
    real = call.query_mask()
    assert real is not None
    assert real.tolist() == [[True] * 4 + [False]]
    mask[4, 4], mask[3, 3] = True, False  # a window of one leaves a key to its own query alone
    call = Record("m", 0, 0, "sdpa", query, query, query, mask, is_causal=False, scale=1.0, window=(0, 0))
    real = call.query_mask()
    assert real is not None
    assert real.tolist() == [[True] * 3 + [False, True]]


def test_softcap_and_sinks_reach_the_record() -> None:
    assert {call.softcap for call in calls_of("gemma2")} == {5.0}
    for name in ("gpt_oss", "granite_swa", "openai_privacy_filter"):
        model, inputs = build(name)
        calls: list[AttentionCall] = []
        with torch.no_grad(), capture(model, calls.append):
            model(**inputs)
        for call in calls:
            assert call.sinks is not None
            assert torch.equal(call.sinks, model.get_submodule(call.module).sinks)
            assert not call.sinks.requires_grad


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("llama", 10**-0.5),
        ("gemma2", 17**-0.5),
        ("t5", 1.0),
        ("granite", 0.0625),
        ("zamba2", 6**-0.5),
        ("whisper", 1.0),
        ("gemma4", 1.0),
    ],
)
def test_the_scale_is_the_one_that_was_passed(name: str, scale: float) -> None:
    assert {round(float(call.scale), 6) for call in calls_of(name)} == {round(scale, 6)}


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("name", "padding"), [("llama", "left"), ("gpt2", "left"), ("qwen3", "none"), ("t5", "right"), ("mistral", "left")]
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_is_the_same_and_offsets_follow_the_cache(name: str, padding: str, attn: str, cache: str) -> None:
    model, inputs = build(name, attn=attn, padding=padding, gain=4.0)
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings |= {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    if name == "t5":
        inputs.pop("decoder_input_ids")
    with torch.no_grad():
        plain = model.generate(**inputs, **settings)
        calls: list[AttentionCall] = []
        # A preallocated cache is written over by later steps: keep what it held at the call.
        keep = lambda call: calls.append(replace(call, key=call.key.clone(), value=call.value.clone()))  # noqa: E731
        with capture(model, keep), logged_results() as results:
            output = model.generate(**inputs, **settings)
    assert torch.equal(plain, output)
    assert len(calls) == len(results) == (18 if name == "t5" else 8)
    for call, result in zip(calls, results, strict=True):
        agrees(call, result)
    if cache == "static" and (name, attn) == ("qwen3", "sdpa"):  # no mask: the causal rule over what is filled of the cache
        assert [(call.is_causal, call.key.shape[2], call.offset) for call in calls[:2]] == [(True, TOKENS, 0)] * 2
    if cache == "dynamic":
        own = [call for call in calls if call.self_attention][-2:]
        assert [call.query.shape[2] for call in own] == [1, 1]
        assert [call.offset for call in own] == [own[0].key.shape[2] - 1] * 2 != [0, 0]
        assert {call.offset for call in calls if not call.self_attention} <= {0}
