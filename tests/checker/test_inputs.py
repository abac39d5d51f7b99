"""What a model is run on when nothing, or something unusual, is given."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attemper
from attemper.checker import made_up
from attemper.checker.inputs import Inputs, prepare
from attemper.checker.load import load
from attemper.checker.options import Options
from attemper.errors import ArgumentError, LoadError
from tests import checkpoints
from tests.capture.architectures import ARCHITECTURES, build


def default(model: str | nn.Module, **options: Any) -> Inputs:
    asked = Options(**options)
    return prepare(load(model, asked), None, asked)


class TestText:
    def test_two_texts_of_which_one_is_padded(self, llama_folder: Path) -> None:
        inputs = default(str(llama_folder), max_tokens=59)
        ids, mask = inputs.kwargs["input_ids"], inputs.kwargs["attention_mask"]
        assert ids.shape == (2, 59)
        assert mask[0].all()
        assert "padded on the right" in inputs.description

    def test_no_token_for_padding(self, tmp_path: Path) -> None:
        folder = checkpoints.save(checkpoints.llama(), tmp_path, tokenizer=False)
        tokenizer = checkpoints.word_tokenizer()
        tokenizer.pad_token = None
        tokenizer.save_pretrained(folder)
        inputs = default(str(folder))
        assert inputs.kwargs["input_ids"].shape == (1, 61)
        assert "padded" not in inputs.description

    def test_a_tokenizer_that_knows_none_of_the_words(self, tmp_path: Path) -> None:
        # transformers builds a tokenizer like this one where a folder's own is of a kind that it does not know.
        folder = checkpoints.save(checkpoints.llama(), tmp_path, tokenizer=False)
        checkpoints.word_tokenizer("Q8 R9 S10 T11 U12 V13 W14").save_pretrained(folder)
        inputs = default(str(folder))
        assert inputs.description == "random token ids, 61 tokens"
        assert "next to nothing but unknown tokens of the built-in passage" in inputs.notes[0]

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        inputs = default(str(checkpoints.save(checkpoints.llama(), tmp_path, tokenizer=False)))
        assert inputs.description == "random token ids, 61 tokens"
        assert inputs.notes == ("inputs are random token ids: the folder holds no tokenizer",)

    def test_ids_that_the_model_does_not_have(self, tmp_path: Path) -> None:
        folder = checkpoints.save(checkpoints.llama(vocab_size=200), tmp_path)
        inputs = default(str(folder))
        assert inputs.kwargs["input_ids"].max() < 200
        assert "the tokenizer gives ids up to" in inputs.notes[0]
        assert "the model has 200" in inputs.notes[0]

    def test_positions_that_begin_behind_the_padding_id(self) -> None:
        model, _ = build("roberta")
        limit = made_up.longest(model, model.config)
        assert limit == model.config.max_position_embeddings - model.config.pad_token_id - 1
        assert default(model).kwargs["input_ids"].shape[1] == limit
        attemper.check(model)


class TestMadeUp:
    @pytest.mark.parametrize("name", sorted(ARCHITECTURES))
    def test_every_architecture_can_be_run_on_them(self, name: str) -> None:
        model, given = build(name)
        inputs = default(model)
        assert set(given) - {"attention_mask", "decoder_attention_mask"} <= set(inputs.kwargs)
        with torch.no_grad():
            model(**inputs.kwargs)

    def test_they_are_the_same_each_time(self) -> None:
        for name in ("llama", "vit", "whisper", "wav2vec2"):
            model, _ = build(name)
            first = default(model).kwargs
            torch.rand(3)
            for key, value in default(model).kwargs.items():
                assert torch.equal(value, first[key])

    def test_padding_is_padding(self) -> None:
        kwargs = default(checkpoints.bert()).kwargs
        assert torch.equal(kwargs["input_ids"] == 0, kwargs["attention_mask"] == 0)
        assert kwargs["attention_mask"].sum(-1).tolist() == [61, 46]

    def test_in_the_dtype_of_the_model(self) -> None:
        model, _ = build("vit")
        assert default(model.half()).kwargs["pixel_values"].dtype == torch.float16

    def test_an_image_has_mean_0_and_deviation_1(self) -> None:
        model, _ = build("vit")
        image = default(model).kwargs["pixel_values"]
        assert abs(float(image.mean())) < 1e-5
        assert abs(float(image.std()) - 1) < 1e-3


class Products(nn.Module):
    """Takes its three tensors in order."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class TestGiven:
    tensors = (torch.randn(2, 3, 5, 7), torch.randn(2, 3, 11, 7), torch.randn(2, 3, 11, 13))

    def test_a_sequence(self) -> None:
        report = attemper.check(Products(), self.tensors)
        assert report.inputs == "3 positional arguments"
        assert report.totals.rows == 2 * 3 * 5

    def test_a_dictionary(self) -> None:
        report = attemper.check(Products(), dict(zip("qkv", self.tensors, strict=True)))
        assert report.inputs == "given: q [2, 3, 5, 7], k [2, 3, 11, 7], v [2, 3, 11, 13]"

    def test_one_tensor(self) -> None:
        layer = nn.TransformerEncoderLayer(20, 5, 29, batch_first=True).eval()
        report = attemper.check(layer, torch.randn(2, 11, 20))
        assert report.inputs == "a tensor of shape (2, 11, 20)"
        assert len(report.rows) == 1

    def test_an_encoder_decoder_gets_something_to_decode(self) -> None:
        model, _ = build("t5")
        report = attemper.check(model, {"input_ids": torch.arange(3, 20).unsqueeze(0)})
        assert "decoder tokens" in report.inputs

    @pytest.mark.parametrize("given", [3, object(), 2.5])
    def test_what_it_is_not(self, given: Any) -> None:
        with pytest.raises(LoadError, match=f"inputs: got {type(given).__name__}; expected a dict of tensors"):
            attemper.check(Products(), given)

    def test_nothing_for_a_model_that_offers_nothing(self) -> None:
        with pytest.raises(LoadError, match=r"none given, and Products has no example_inputs\(\)"):
            attemper.check(Products())

    def test_example_inputs_that_are_none(self) -> None:
        class Wrong(Products):
            def example_inputs(self) -> int:
                return 1

        with pytest.raises(LoadError, match=r"example_inputs\(\) returned int; expected a dict"):
            attemper.check(Wrong())

    @pytest.mark.parametrize("form", [dict, tuple, list])
    def test_example_inputs_in_every_form_that_inputs_may_have(self, form: type) -> None:
        class Offering(Products):
            def example_inputs(self) -> Any:
                named = dict(zip("qkv", TestGiven.tensors, strict=True))
                return named if form is dict else form(named.values())

        report = attemper.check(Offering())
        assert report.inputs == "the model's own example_inputs()"
        assert len(report.rows) == 1

    def test_example_inputs_that_are_one_tensor(self) -> None:
        layer = nn.TransformerEncoderLayer(20, 5, 29, batch_first=True)
        layer.example_inputs = lambda: torch.randn(2, 11, 20)  # pyrefly: ignore
        assert len(attemper.check(layer).rows) == 1

    def test_nothing_in_particular(self) -> None:
        with pytest.raises(LoadError, match="could not be run on given: nothing: TypeError"):
            attemper.check(Products(), {})

    def test_example_inputs_that_fail(self) -> None:
        class Broken(Products):
            def example_inputs(self) -> Any:
                raise KeyError("no_such_input")

        with pytest.raises(LoadError, match=r"Broken.example_inputs\(\) failed: KeyError: 'no_such_input'"):
            attemper.check(Broken())


class TestOptions:
    def test_codes_that_are_no_text(self) -> None:
        with pytest.raises(ArgumentError, match="select: got 101; expected codes"):
            attemper.check(Products(), TestGiven.tensors, select=101)  # pyrefly: ignore

    def test_an_unknown_dtype(self) -> None:
        with pytest.raises(ArgumentError, match="dtype: got 'int8'; expected one of auto, float32, float16, bfloat16"):
            attemper.check(Products(), TestGiven.tensors, dtype="int8")

    def test_a_module_is_not_converted_in_place(self) -> None:
        model = checkpoints.llama()
        with pytest.raises(LoadError, match="dtype: got 'float16' for a module"):
            attemper.check(model, dtype="float16")
        assert model.dtype == torch.float32
        attemper.check(model, dtype="float32")
        attemper.check(model, dtype="auto")

    @pytest.mark.parametrize(("dtype", "computed"), [(None, "float32"), ("auto", "bfloat16"), ("float16", "float16")])
    def test_a_checkpoint_is_read_in_what_was_asked_for(self, tmp_path: Path, dtype: str | None, computed: str) -> None:
        folder = checkpoints.save(checkpoints.llama().bfloat16(), tmp_path)
        report = attemper.check(str(folder), dtype=dtype)
        assert report.dtype == computed
        assert ("the checkpoint is bfloat16; computed in" in " ".join(report.notes)) == (computed != "bfloat16")
