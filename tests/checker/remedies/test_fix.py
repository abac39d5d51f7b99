"""`fix`: what it edits, in which families, and that its word about the result holds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import attemper
from attemper.checker.remedies import FixReport, fix, plain_text
from attemper.errors import ArgumentError, UnsupportedError
from tests import checkpoints, real_models


def family(name: str, **changes: Any) -> nn.Module:
    """A tiny model whose query projections (or gains) of one layer were multiplied, so that its logits pass 100."""
    import transformers as hf

    torch.manual_seed(7)
    sizes = {
        "vocab_size": 311,
        "hidden_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 53,
        "max_position_embeddings": 61,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    } | changes
    grouped = sizes | {"num_key_value_heads": 2, "head_dim": 10}
    if name == "llama":
        model, loud = hf.LlamaForCausalLM(hf.LlamaConfig(**grouped)), "model.layers.1.self_attn.q_proj.weight"
    elif name == "granite":
        config = hf.GraniteConfig(**sizes, num_key_value_heads=2, attention_multiplier=0.1)
        model, loud = hf.GraniteForCausalLM(config), "model.layers.1.self_attn.q_proj.weight"
    elif name == "gpt2":
        config = hf.GPT2Config(vocab_size=311, n_positions=61, n_embd=40, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
        model, loud = hf.GPT2LMHeadModel(config), "transformer.h.1.attn.c_attn.weight"
    elif name == "gemma3":
        model = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**grouped, query_pre_attn_scalar=10))
        loud = "model.layers.1.self_attn.q_norm.weight"
    else:
        latent = {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
        config = hf.DeepseekV3Config(**sizes, **latent, num_key_value_heads=4, first_k_dense_replace=2)
        model, loud = hf.DeepseekV3ForCausalLM(config), "model.layers.1.self_attn.q_b_proj.weight"
    with torch.no_grad():
        weight = model.get_parameter(loud)
        if name == "gemma3":
            weight.fill_(300.0)
        elif name == "gpt2":
            weight[:, :40] *= 3e3
        else:
            weight *= 3e4 if name == "deepseek" else 3e3
    return model.eval()


def save(model: nn.Module, folder: Path, **settings: Any) -> Path:
    return checkpoints.save(model, folder, **settings)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def same_but_for(before: Path, after: Path, names: set[str]) -> None:
    """Every tensor has its bits and its dtype, but those that were to change; every other file is the same."""
    old, new = weights(before), weights(after)
    assert old.keys() == new.keys()
    assert {name: value.dtype for name, value in old.items()} == {name: value.dtype for name, value in new.items()}
    assert {name for name in old if not torch.equal(old[name], new[name])} == names
    others = {file.name for file in before.iterdir() if file.suffix != ".safetensors"}
    assert {file.name for file in after.iterdir() if file.suffix != ".safetensors"} == others
    assert all((before / name).read_bytes() == (after / name).read_bytes() for name in others)


def codes(report: FixReport) -> tuple[set[str], set[str]]:
    assert report.after is not None
    return {each.code for each in report.before.findings}, {each.code for each in report.after.findings}


class TestClip:
    @pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "deepseek"])
    def test_a_family(self, tmp_path: Path, name: str) -> None:
        folder = save(family(name), tmp_path / "model")
        report = fix(folder, tmp_path / "fixed", clip=100.0)
        before, after = codes(report)
        assert "ATT202" in before
        assert "ATT202" not in after
        assert report.before.totals.max_logit > 100
        again = attemper.check(tmp_path / "fixed")
        assert report.after is not None
        assert again.totals == report.after.totals
        assert again.totals.max_logit <= 100
        assert {clip.module.rpartition(".")[0][-1] for clip in report.clips} == {"1"}
        same_but_for(folder, tmp_path / "fixed", {each.tensor for each in report.changed})
        assert report.outputs is not None
        assert report.outputs.largest > 0

    def test_the_outputs_that_it_compares(self, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        folder = save(family("llama"), tmp_path / "model")
        ids = torch.randint(3, 311, (1, 41))
        checkpoints.tensors(tmp_path / "ids.safetensors", input_ids=ids)
        change = fix(folder, tmp_path / "fixed", str(tmp_path / "ids.safetensors"), clip=50.0).outputs
        assert change is not None
        with torch.no_grad():
            old, new = (
                AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager")(ids, labels=ids)
                for place in (folder, tmp_path / "fixed")
            )
        p, q = old.logits.double().log_softmax(-1), new.logits.double().log_softmax(-1)
        assert change.what == "logits"
        assert change.positions == 41
        assert change.largest == pytest.approx(float((old.logits - new.logits).abs().max()), rel=1e-3)
        assert change.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
        assert change.loss_before == pytest.approx(float(old.loss), rel=1e-5)
        assert change.loss_after == pytest.approx(float(new.loss), rel=1e-5)

    def test_bfloat16_shards_keep_their_dtype_and_their_places(self, tmp_path: Path) -> None:
        folder = save(family("llama").bfloat16(), tmp_path / "model", max_shard_size="30KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
        report = fix(folder, tmp_path / "fixed", clip=100.0)
        same_but_for(folder, tmp_path / "fixed", {"model.layers.1.self_attn.q_proj.weight"})
        (changed,) = report.changed
        assert changed.dtype == "bfloat16"
        assert 2**-10 < changed.rounding <= 2**-8 + 1e-6
        assert "ATT202" not in codes(report)[1]
        index = "model.safetensors.index.json"
        assert (folder / index).read_bytes() == (tmp_path / "fixed" / index).read_bytes()

    def test_computed_in_bfloat16_the_float32_weights_stay_float32(self, tmp_path: Path) -> None:
        folder = save(family("llama"), tmp_path / "model")
        report = fix(folder, tmp_path / "fixed", clip=100.0, dtype="bfloat16")
        same_but_for(folder, tmp_path / "fixed", {"model.layers.1.self_attn.q_proj.weight"})
        assert report.before.dtype == "bfloat16"

    def test_pickle_becomes_safetensors(self, tmp_path: Path) -> None:
        model = family("gpt2")
        folder = save(model, tmp_path / "model")
        (folder / "model.safetensors").unlink()
        torch.save(model.transformer.state_dict(), folder / "pytorch_model.bin")  # as the first checkpoints were: no prefix
        torch.save({"lr": 0.1}, folder / "optimizer.pt")
        report = fix(folder, tmp_path / "fixed", clip=100.0, allow_pickle=True)
        assert {file.suffix for file in (tmp_path / "fixed").iterdir()} == {".json", ".safetensors"}
        assert [each.tensor for each in report.changed] == ["h.1.attn.c_attn.weight"]
        assert any("were pickle" in note for note in report.notes)
        assert any("optimizer.pt" in note for note in report.notes)
        assert "ATT202" not in codes(report)[1]

    def test_nothing_over_the_threshold_changes_nothing(self, tmp_path: Path, llama_folder: Path) -> None:
        report = fix(llama_folder, tmp_path / "fixed", clip=100.0)
        assert not report.changed
        assert report.outputs is not None
        assert report.outputs.largest == 0.0
        assert report.outputs.kl == 0.0
        same_but_for(llama_folder, tmp_path / "fixed", set())
        assert "no head is over the threshold" in plain_text(report)

    def test_an_unknown_layout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from attemper.weights import families

        monkeypatch.setattr(families, "FAMILIES", ())
        folder = save(family("llama"), tmp_path / "model")
        with pytest.raises(UnsupportedError, match=r"has no row in the table: pass layouts="):
            fix(folder, tmp_path / "fixed", clip=100.0)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["model"]


class TestFold:
    @pytest.mark.parametrize("name", ["granite", "gemma3"])
    def test_where_the_configuration_says_the_scale(self, tmp_path: Path, name: str) -> None:
        folder = save(family(name), tmp_path / "model")
        applied = 0.1 if name == "granite" else 10**-0.5
        report = fix(folder, tmp_path / "fixed", fold=(str(applied), "0.25"))
        assert report.outputs is not None
        assert report.outputs.relative < 1e-5
        setting = {"granite": "attention_multiplier", "gemma3": "query_pre_attn_scalar"}[name]
        assert json.loads((tmp_path / "fixed" / "config.json").read_text())[setting] == pytest.approx(
            {"granite": 0.25, "gemma3": 16.0}[name]
        )
        assert report.after is not None
        assert [row.scale for row in report.after.rows] == [pytest.approx(0.25)] * 2
        assert [each.least for each in report.changed] == [pytest.approx(applied / 0.25)] * 2

    def test_for_another_engine(self, tmp_path: Path) -> None:
        folder = save(family("llama"), tmp_path / "model")
        report = fix(folder, tmp_path / "fixed", fold=("inverse-sqrt", "none"))
        names = {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)}
        same_but_for(folder, tmp_path / "fixed", names)
        old, new = weights(folder), weights(tmp_path / "fixed")
        for name in names:
            torch.testing.assert_close(new[name], old[name] / 10**0.5)
        assert any("for an engine that applies 1;" in note for note in report.notes)

    def test_neither_rule_is_the_model_s(self, tmp_path: Path, llama_folder: Path) -> None:
        with pytest.raises(ArgumentError, match=r"fold: got none:inverse .* to be what the model applies, 0\.353553"):
            fix(llama_folder, tmp_path / "fixed", fold=("none", "inverse"))

    @pytest.mark.parametrize("word", ["sqrt", "0", "nan", ""])
    def test_no_rule(self, tmp_path: Path, llama_folder: Path, word: str) -> None:
        with pytest.raises(ArgumentError, match=rf"fold: got '{word}'; expected none, inverse-sqrt, inverse or a finite number"):
            fix(llama_folder, tmp_path / "fixed", fold=("none", word))

    def test_a_missing_scale_is_proposed_to_be_folded(self) -> None:
        from attemper.checker.remedies.proposals import proposals

        report = attemper.check(None)
        (proposal,) = proposals(report)
        assert proposal.codes == ("ATT101",)
        assert proposal.option == f"--fold {report.findings[0].threshold:.8g}:1"


class TestRealModels:
    def test_minilm(self, tmp_path: Path) -> None:
        folder = real_models.unpack_minilm(tmp_path / "model")
        report = fix(folder, tmp_path / "fixed", clip=40.0, max_tokens=128)
        assert report.clips
        assert report.after is not None
        scale = 32**-0.5
        assert report.before.totals.product_absmax * scale > 40
        assert report.after.totals.product_absmax * scale <= 40
        assert report.outputs is not None
        assert report.outputs.what == "hidden states"
        assert 0 < report.outputs.relative < 0.1

    def test_rxnmapper(self, tmp_path: Path) -> None:
        folder = real_models.find("rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k")
        ids = checkpoints.tensors(
            tmp_path / "ids.safetensors", input_ids=torch.tensor([[12, 16, 16, 17, 22, 19, 18, 28, 24, 13]])
        )
        before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
        report = fix(folder, tmp_path / "fixed", str(ids), clip=20.0, allow_pickle=True)
        assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
        assert report.clips
        # One module runs twelve times: each head is clipped once, by its largest call.
        assert len({(clip.module, clip.heads) for clip in report.clips}) == len(report.clips)
        again = attemper.check(tmp_path / "fixed", str(ids))  # safetensors now
        assert report.after is not None
        assert again.totals.product_absmax == report.after.totals.product_absmax < report.before.totals.product_absmax
