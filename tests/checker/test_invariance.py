"""A sequence alone, in a batch, padded and continued from a cache: faults are found and named, sound models agree."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.checker import rule
from attemper.checker.evidence import Evidence
from attemper.checker.inputs import prepare
from attemper.checker.load import load
from attemper.checker.measure import measure
from attemper.checker.options import Options
from attemper.checker.thresholds import DEFAULTS
from attemper.report import Finding, Severity
from tests.capture.architectures import build
from tests.checker.plain_models import Language, causal, ids, language

FAULTS = "attemper.examples.faults"


def masks(model: Any, inputs: Any = None) -> list[Finding]:
    """The findings about masks."""
    return list(attemper.check(model, inputs, select="ATT4").findings)


def evidence(model: nn.Module, inputs: Any = None) -> Evidence:
    subject = load(model, Options())
    return measure(subject, prepare(subject, inputs, Options()), DEFAULTS, lambda words, done=0, total=0: None)[0]


@pytest.mark.parametrize(
    ("example", "code"),
    [("nan_in_padding", "ATT404"), ("cache_continues_wrongly", "ATT405"), ("depends_on_batch", "ATT406")],
)
def test_an_example_has_its_fault_and_no_other(example: str, code: str) -> None:
    assert [finding.code for finding in masks(f"{FAULTS}:{example}")] == [code]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "opt", "deepseek_v3", "bloom"])
def test_a_sound_decoder_agrees_with_itself(name: str) -> None:
    model, inputs = build(name, gain=3.0)
    found = evidence(model, dict(inputs))
    assert found.untried == ()
    assert found.continuation is not None
    assert {how for _, how in found.continuation.alignments} == {"bottom-right"}
    assert found.batching is not None
    leaks = [found.continuation.parted, found.batching.right, *([found.batching.left] if name != "bloom" else [])]
    assert all(leak is not None and not leak.leaks for leak in leaks)
    assert found.batching.beside is None


@pytest.mark.parametrize("name", ["bert", "t5", "roberta", "esm"])
def test_a_sound_model_without_a_causal_body_is_run_in_a_batch(name: str) -> None:
    model, inputs = build(name, gain=3.0)
    found = evidence(model, dict(inputs))
    assert found.untried == ()
    assert found.continuation is None
    assert found.batching is not None
    assert found.batching.left is None
    assert found.batching.right is not None
    assert not found.batching.right.leaks


def test_the_cache_is_read_only_where_one_was_asked_for() -> None:
    class Returned(NamedTuple):
        hidden: Tensor

        @property
        def past_key_values(self) -> None:  # transformers' own outputs warn whoever reads it
            raise AssertionError("nobody asked for a cache")

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Returned:
            return Returned(nn.functional.scaled_dot_product_attention(x, x, x))

    assert len(attemper.check(Model(), torch.randn(2, 3, 7, 5)).rows) == 1


class TestCache:
    @pytest.mark.parametrize(("kind", "words"), [("top-left", "starts at the top left"), ("everything", "hides nothing")])
    def test_a_mask_that_is_aligned_wrongly(self, monkeypatch: pytest.MonkeyPatch, kind: str, words: str) -> None:
        from transformers.models.llama import modeling_llama

        def mask(*, inputs_embeds: Tensor, past_key_values: Any = None, cache: Any = None, **_rest: Any) -> Tensor:
            batch, queries = inputs_embeds.shape[:2]
            kept = cache if cache is not None else past_key_values
            keys = queries + (kept.get_seq_length() if kept is not None else 0)
            visible = torch.ones(queries, keys, dtype=torch.bool)
            return (visible if kind == "everything" and keys > queries else visible.tril()).expand(batch, 1, -1, -1)

        monkeypatch.setattr(modeling_llama, "create_causal_mask", mask)
        model, _ = build("llama", gain=3.0)
        found = masks(model, {"input_ids": torch.arange(3, 23)[None]})
        finding = next(each for each in found if each.code == "ATT405")
        assert finding.severity is Severity.ERROR
        assert finding.module == "model.layers.0.self_attn"
        assert words in finding.message

    def test_positions_that_start_again(self) -> None:
        model, _ = build("llama", gain=3.0)

        def restart(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            positions = kwargs["position_ids"]
            return args, kwargs | {"position_ids": positions - positions.min()}

        model.model.rotary_emb.register_forward_pre_hook(restart, with_kwargs=True)
        (finding,) = masks(model, {"input_ids": torch.arange(3, 23)[None]})
        assert finding.code == "ATT405"
        assert finding.severity is Severity.WARNING
        assert "end where they should, so look at positions" in finding.message


class Continued(Language):
    """Keeps keys and values; `form`: how it hands them over. The fault: its mask forgets the newest key of the cache."""

    form: Callable[[Any, Any], Any]
    wrong = False

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        kept = [None] * len(self.layers) if past_key_values is None else past_key_values
        start = 0 if kept[0] is None else kept[0][0].shape[2]
        x, cache = self.words(input_ids) + self.positions(torch.arange(input_ids.shape[1]) + start), []
        for layer, past in zip(self.layers, kept, strict=True):
            y, own = layer(x, past=past)
            x = x + (y.flip(-1) if self.wrong and start else y)
            cache.append(own)
        return self.form(self.head(x), cache) if use_cache else {"logits": self.head(x)}


class TestCacheOfAnotherForm:
    @pytest.mark.parametrize(
        "form",
        [
            lambda logits, cache: {"logits": logits, "past_key_values": cache},
            lambda logits, cache: {"logits": logits, "past_key_values": torch.stack([torch.stack(own) for own in cache])},
            lambda logits, cache: {"logits": logits, "presents": cache},
            lambda logits, cache: (logits, tuple(cache)),
            lambda logits, cache: (logits, (logits, logits), cache),
        ],
        ids=["mapping", "mapping of a tensor", "mapping by another name", "tuple", "tuple beside hidden states"],
    )
    def test_it_is_continued(self, form: Callable[[Any, Any], Any]) -> None:
        class Model(Continued):
            pass

        Model.form = staticmethod(form)
        assert masks(language(causal, causal, kind=Model), {"input_ids": ids()}) == []
        Model.wrong = True
        assert [each.code for each in masks(language(causal, causal, kind=Model), {"input_ids": ids()})] == ["ATT405"]

    def test_one_that_is_not_known_is_told(self) -> None:
        class Model(Continued):
            form = staticmethod(lambda logits, cache: (logits, torch.stack([torch.stack(own) for own in cache])))

        found = evidence(language(causal, kind=Model), {"input_ids": ids()})
        assert found.continuation is None
        assert any("whether a cache continues it was not tried: it takes use_cache, and no" in words for words in found.untried)

    def test_one_that_cannot_be_asked_for_is_told(self) -> None:
        class Model(Language):
            def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Tensor:
                return super().forward(input_ids)

        found = evidence(language(causal, kind=Model), {"input_ids": ids()})
        assert any("it takes past_key_values, and no use_cache to ask for one" in words for words in found.untried)


class TestBatch:
    def test_the_rule_says_what_stands_in_for_it(self) -> None:
        words = rule("ATT406").why
        assert "ATT403 stands in for this code if what is embedded at padded positions leaks" in words
        assert "ATT402 if it is padding on the right alone and the future is seen" in words

    def test_what_sees_the_future_sees_padding_behind_it_and_is_told_once(self) -> None:
        (finding,) = masks(f"{FAULTS}:sees_the_future")
        assert finding.code == "ATT402"

    def test_a_backend_that_ignores_its_mask_is_named_where_the_future_is_seen(self) -> None:
        (finding,) = masks(f"{FAULTS}:argument_ignored")
        assert finding.code == "ATT402"
        assert "the mask hides them, but the backend does not keep to it in attention (ATT105). Held" in finding.message

    def test_padding_alone_is_a_warning(self) -> None:
        model, inputs = build("bert", gain=3.0)
        # A convolution over the tokens, which has never heard of padding.
        model.embeddings.register_forward_hook(lambda _module, _args, output: output + output.roll(-1, dims=1))
        (finding,) = [each for each in masks(model, dict(inputs)) if each.code == "ATT406"]
        assert finding.severity is Severity.WARNING
        assert finding.message.startswith("in a batch, padded on the right, a sequence's outputs part")
        assert finding.message.count("padded on the right") == 1
        assert "beside another of its length, they do not" in finding.message

    def test_positions_that_count_padding(self) -> None:
        model, inputs = build("gpt2", gain=3.0)
        count = lambda _module, args: (torch.arange(args[0].shape[-1]).expand(args[0].shape),)  # noqa: E731
        model.transformer.wpe.register_forward_pre_hook(count)
        found = [each for each in masks(model, {"input_ids": inputs["input_ids"]}) if each.code == "ATT406"]
        assert len(found) == 1
        assert "padded on the left, a sequence's outputs part" in found[0].message
        assert "padded on the right, they do not" in found[0].message

    def test_padding_that_leaks_has_one_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.models.bert import modeling_bert

        monkeypatch.setattr(modeling_bert, "create_bidirectional_mask", lambda **_rest: None)
        model, inputs = build("bert", gain=3.0)
        assert [finding.code for finding in masks(model, dict(inputs))] == ["ATT403"]

    def test_a_model_that_takes_no_other_length_says_so(self) -> None:
        model, inputs = build("bert")

        def only(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if kwargs["input_ids"].shape[1] != inputs["input_ids"].shape[1]:
                raise ValueError("eleven tokens, please")

        model.register_forward_pre_hook(only, with_kwargs=True)
        (note,) = [note for note in attemper.check(model, dict(inputs)).notes if "could not be tried" in note]
        assert "whether a sequence depends on its batch could not be tried" in note
        assert "eleven tokens, please" in note


class TestNan:
    def test_nan_that_reached_a_real_token_is_another_fault(self) -> None:
        model, inputs = build("bert")
        with torch.no_grad():
            model.encoder.layer[1].attention.self.value.bias[0] = math.nan
        assert [finding.code for finding in masks(model, dict(inputs))] == []
        assert "ATT203" in {finding.code for finding in attemper.check(model, dict(inputs)).findings}

    def test_no_finding_where_hidden_values_are_not_multiplied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from attemper.examples import faults

        attend = faults._NanInPadding.attend

        def cleaned(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            hidden = ~self.real[:, None, :, None]
            return attend(self, query, key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0))

        monkeypatch.setattr(faults._NanInPadding, "attend", cleaned)
        assert masks(f"{FAULTS}:nan_in_padding") == []
