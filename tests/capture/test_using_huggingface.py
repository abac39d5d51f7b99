"""Hugging Face models in use, in everything else that is done with a model: saved, copied, compiled, checkpointed, captured."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.capture import AttentionCall, capture
from attemper.capture.using import Kept, Use
from tests.capture.architectures import build
from tests.capture.watching import same, tensors

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

NEAR = {"rtol": 1e-5, "atol": 1e-5}


def implementation(model: Any) -> str:
    return model.config._attn_implementation


def test_a_saved_model_loads_where_attemper_is_not(tmp_path: Path) -> None:
    model, _ = build("llama")
    model.save_pretrained(tmp_path / "before")
    attemper.use(model)
    assert implementation(model) == "attemper"
    model.save_pretrained(tmp_path / "in use")
    names = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert sorted(path.name for path in (tmp_path / "in use").iterdir()) == names
    for name in names:
        assert (tmp_path / "in use" / name).read_bytes() == (tmp_path / "before" / name).read_bytes()
    assert implementation(type(model).from_pretrained(tmp_path / "in use")) == "sdpa"


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_is_in_use_too_and_undone_by_itself(way: str) -> None:
    model, inputs = build("llama")
    with torch.no_grad():
        plain = model(**inputs)
        used = attemper.use(model)
        output = model(**inputs)
        other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
        of_other = Use.of(other)
        assert of_other is not None
        assert of_other is not used
        assert same(output, other(**inputs))
        of_other.undo()
        assert (implementation(other), implementation(model)) == ("sdpa", "attemper")
        assert same(plain, other(**inputs))
        assert same(output, model(**inputs))
        used.undo()
        assert same(plain, model(**inputs))
    assert of_other.replaced == used.replaced


def test_two_models_that_share_a_config_are_told_apart() -> None:
    model, inputs = build("llama", gain=3.0)
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    assert twin.config is model.config
    with torch.no_grad():
        plain = twin(**inputs)
        used = attemper.use(model, impl="reference")
        assert same(plain, twin(**inputs))
        assert not same(plain, model(**inputs))
        with attemper.use(twin) as second:
            assert second.replaced == ()
            assert {each.reason for each in second.kept} == {
                "another model in use has the same config object; give this one its own, by copy.deepcopy"
            }
        assert implementation(model) == "attemper"
        used.undo()
        assert implementation(twin) == "sdpa"


def test_two_models_in_use_keep_their_own_kernels() -> None:
    one, inputs = build("llama", gain=3.0)
    two, _ = build("llama", gain=3.0)
    with attemper.use(one, impl="reference"), attemper.use(two, impl="blocked"), torch.no_grad():
        seen = [one(**inputs), two(**inputs), one(**inputs)]
    assert same(seen[0], seen[2])
    assert not same(seen[0], seen[1])
    torch.testing.assert_close(seen[0].logits[0], seen[1].logits[0], **NEAR)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_compiled_model_is_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model, inputs = build(name, padding="none" if name == "t5" else "right")
    used = attemper.use(model)
    with torch.no_grad():
        plain = model(**inputs, use_cache=False)
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        output = compiled(**inputs, use_cache=False)
    torch.testing.assert_close(output.logits[0], plain.logits[0], **NEAR)
    assert used.kept == ()
    torch._dynamo.reset()


def test_a_model_compiled_before_is_compiled_anew() -> None:
    torch._dynamo.reset()
    model, inputs = build("llama", gain=3.0)
    compiled: Any = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        before = compiled(**inputs)
        with attemper.use(model, impl="reference"):
            plain, output = model(**inputs), compiled(**inputs)
        assert not same(before, output)
        torch.testing.assert_close(output.logits, plain.logits, rtol=1e-6, atol=1e-6)
        assert same(before, compiled(**inputs))
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_under_checkpointing_are_those_without_it(reentrant: bool) -> None:
    gradients = []
    for checkpointing in (False, True):
        model, inputs = build("llama", dropout=0.25)
        attemper.use(model)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(3)
        model(**inputs, use_cache=False).logits.square().mean().backward()
        gradients.append([weight.grad for weight in model.parameters()])
    assert same(*gradients)


def test_dropout_is_drawn_in_training_alone() -> None:
    model, inputs = build("bert", dropout=0.3)
    attemper.use(model)

    def hidden(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(**inputs).last_hidden_state

    with torch.no_grad():
        assert torch.equal(hidden(1), hidden(2))
        model.train()
        assert torch.equal(hidden(1), hidden(1))
        assert not torch.equal(hidden(1), hidden(2))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_autocast_is_followed(name: str) -> None:
    results = []
    for using in (False, True):
        model, inputs = build(name, padding="none")
        if using:
            attemper.use(model)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            results.append(model(**inputs).logits)
    assert results[0].dtype == results[1].dtype
    torch.testing.assert_close(results[0], results[1], rtol=0.05, atol=0.05)


def test_on_the_meta_device() -> None:
    model, inputs = build("llama", padding="none")
    model = model.to("meta")
    attemper.use(model)
    output = model(**{name: tensor.to("meta") for name, tensor in inputs.items()})
    assert output.logits.device.type == "meta"
    assert output.logits.shape == (3, 11, 61)


@pytest.mark.parametrize(("name", "calls"), [("llama", 2), ("gpt_oss", 2), ("t5", 6), ("siglip", 3), ("falcon", 2)])
def test_capture_is_told_of_each_call_once(name: str, calls: int) -> None:
    model, inputs = build(name, gain=3.0)
    used = attemper.use(model)
    seen: list[AttentionCall] = []
    with torch.no_grad():
        plain = model(**inputs)
        with capture(model, seen.append) as capturing:
            output = model(**inputs)
    assert same(plain, output)
    assert len(seen) == calls
    assert {call.seam for call in seen} == {"attemper"}
    assert {call.module for call in seen} == {each.module for each in used.replaced}
    assert capturing.unseen() == ()


def test_an_implementation_that_somebody_registered_is_kept() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    model, inputs = build("llama")
    AttentionInterface.register("theirs", AttentionInterface()["sdpa"])
    AttentionMaskInterface.register("theirs", AttentionMaskInterface()["sdpa"])
    try:
        model.config._attn_implementation = "theirs"
        with attemper.use(model) as used, torch.no_grad():
            model(**inputs)
        assert implementation(model) == "theirs"
        reason = "its attention implementation, 'theirs', is none of transformers' own"
        assert used.kept == tuple(Kept(f"model.layers.{layer}.self_attn", reason) for layer in (0, 1))
    finally:
        del AttentionInterface._global_mapping["theirs"], AttentionMaskInterface._global_mapping["theirs"]


def test_an_eager_function_that_does_more_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gemma2 import modeling_gemma2

    def eager_attention_forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        weights = torch.sigmoid(query @ key.transpose(2, 3).repeat_interleave(2, 1))
        return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2), weights

    monkeypatch.setattr(modeling_gemma2, "eager_attention_forward", eager_attention_forward)
    model, inputs = build("gemma2")
    with torch.no_grad():
        plain = model(**inputs)
        used = attemper.use(model)
        assert same(plain, model(**inputs))
    assert used.replaced == ()
    assert [each.reason for each in used.kept] == [
        "its eager attention function eager_attention_forward uses repeat_interleave, which attemper does not know"
    ] * 2


@pytest.mark.parametrize(
    ("name", "attn", "ours"),
    [
        ("llama", "sdpa", "attemper"),
        ("llama", "eager", "attemper_eager"),
        ("gemma2", "eager", "attemper_eager"),  # SDPA has no softcap: its masks are its eager code's
        ("gemma4", "sdpa", "attemper_eager"),  # asks for "sdpa" where a mask may be left out; for any other name none is
        ("gpt2", "eager", "attemper"),  # asks for "eager" where it upcasts; any other name is SDPA to it
    ],
)
def test_a_name_of_ours_is_taken_for_what_it_stands_in_for(name: str, attn: str, ours: str) -> None:
    model, _ = build(name, attn=attn)
    attemper.use(model)
    assert implementation(model) == ours


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_model_whose_code_asks_for_names_is_kept(attn: str) -> None:
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    from tests.capture.architectures import _MLA

    torch.manual_seed(1)
    config = DeepseekV32Config(**_MLA, index_n_heads=2, index_head_dim=8, index_topk=3)
    model = DeepseekV32ForCausalLM._from_config(config, attn_implementation=attn).eval()
    ids = torch.randint(3, 61, (2, 7))
    with torch.no_grad():
        plain = model(ids).logits
        used = attemper.use(model)
        assert torch.equal(plain, model(ids).logits)
    assert used.replaced == ()
    assert {each.reason for each in used.kept} == {
        "its code asks by name for transformers' own functions, and computes something else for any other name"
    }


def test_a_call_that_goes_back_to_the_model_is_named() -> None:
    model, inputs = build("gpt_oss", gain=3.0)
    with torch.no_grad():
        plain = model(**inputs, output_attentions=True)
        used = attemper.use(model)
        model(**inputs)
        assert used.kept == ()
        output = model(**inputs, output_attentions=True)
    assert same(plain, output)
    assert [each.module for each in used.kept] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert used.kept[0].reason.startswith(
        "its weights were asked for, which models with sinks give in ways of their own; it called"
    )


def test_what_ours_refuses_goes_to_the_models_own_function() -> None:
    model, inputs = build("llama", padding="none")
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"attention_mask": torch.zeros(3, 1, 11, 7)}), with_kwargs=True
    )
    used = attemper.use(model)
    with torch.no_grad(), pytest.raises(RuntimeError, match="7"):  # in SDPA's words
        model(**inputs, use_cache=False)
    assert [each.module for each in used.kept] == ["model.layers.1.self_attn"]
    assert "attn_mask" in used.kept[0].reason


def test_a_model_that_ran_on_sdpa_gives_weights_where_sdpa_does_not() -> None:
    eager, inputs = build("bert", attn="eager")
    model, _ = build("bert", attn="sdpa")
    attemper.use(model)
    with torch.no_grad():
        expected, given = (each(**inputs, output_attentions=True).attentions for each in (eager, model))
    for one, other in zip(expected, given, strict=True):
        torch.testing.assert_close(one, other, **NEAR)


@pytest.mark.parametrize("origin", ["flash_attention_2", "flex_attention", None])
def test_whatever_of_transformers_own_a_model_ran_on_comes_back(origin: str | None) -> None:
    expected, inputs = build("gemma2", gain=3.0)
    model, _ = build("gemma2", gain=3.0)
    model.config._attn_implementation_internal = origin
    with torch.no_grad(), attemper.use(model) as used:
        output = model(**inputs)
        torch.testing.assert_close(output.logits[0], expected(**inputs).logits[0], **NEAR)
        assert len(used.replaced) == 2
    assert model.config._attn_implementation_internal == origin


def test_a_name_set_meanwhile_stays_and_is_told() -> None:
    model, _ = build("llama", attn="sdpa")
    with attemper.use(model) as used:
        model.set_attn_implementation("eager")
        assert used.replaced == ()
        reason = "its attention implementation was set to 'eager' while it was in use; undo(), and use() again"
        assert used.kept == tuple(Kept(f"model.layers.{layer}.self_attn", reason) for layer in (0, 1))
    assert implementation(model) == "eager"


def test_a_config_that_asks_for_weights_is_kept_since_it_could_not_be_saved(tmp_path: Path) -> None:
    model, inputs = build("llama", attn="eager")
    model.config.output_attentions = True
    used = attemper.use(model)
    model.save_pretrained(tmp_path)
    assert len(model(**inputs).attentions) == 2
    assert used.replaced == ()
    assert {each.reason for each in used.kept} == {
        "its config has output_attentions=True, which transformers takes for 'eager' alone; ask for them in each call"
    }


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_a_boolean_mask_of_the_users_means_what_it_meant(attn: str) -> None:
    """SDPA hides by it. Eager code adds it, so that it hides nothing: a fault of the user's, not to be mended unasked."""
    model, inputs = build("llama", attn=attn, gain=3.0, padding="none")
    tokens = inputs["input_ids"].shape[1]
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(3, 1, -1, -1)
    with torch.no_grad():
        plain = model(inputs["input_ids"], attention_mask=mask).logits
        attemper.use(model)
        torch.testing.assert_close(model(inputs["input_ids"], attention_mask=mask).logits, plain, **NEAR)


def test_positions_that_see_nothing_give_nought() -> None:
    """Right padding under a window: the last padded rows attend nothing; eager gives the mean of the values there."""
    model, inputs = build("mistral", padding="right")
    outputs: list[Tensor] = []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: outputs.append(args[0]))
    with torch.no_grad():
        model(**inputs)
        attemper.use(model)
        model(**inputs)
    assert outputs[1][1, -1].abs().max() == 0
    torch.testing.assert_close(outputs[0][0], outputs[1][0], **NEAR)


def test_nothing_is_warned_of() -> None:
    model, inputs = build("llama")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        used = attemper.use(model)
        used.undo()
    assert [str(each.message) for each in caught] == []
    assert tensors(model(**inputs))
