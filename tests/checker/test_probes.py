"""Who is held to be causal: by the configuration, unless the call itself says whether it decodes."""

import pytest
import torch
from torch import nn

import attemper
from attemper.report import Report

TOKENS, WORDS = 11, 61


def blip(head: str) -> nn.Module:
    """A text model of BLIP, whose configuration says is_decoder whatever it is used for."""
    from transformers import BlipTextConfig
    from transformers.models.blip import modeling_blip_text

    torch.manual_seed(0)
    config = BlipTextConfig(
        vocab_size=WORDS,
        hidden_size=24,
        encoder_hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=37,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        sep_token_id=2,
    )
    assert config.is_decoder
    return getattr(modeling_blip_text, head)(config).eval()


def checked(model: nn.Module, **inputs: object) -> Report:
    ids = torch.randint(3, WORDS, (3, TOKENS), generator=torch.Generator().manual_seed(1))
    return attemper.check(model, {"input_ids": ids, **inputs}, select="ATT402")


@pytest.mark.parametrize(
    ("head", "inputs", "claims"),
    [
        ("BlipTextModel", {}, False),
        ("BlipTextModel", {"is_decoder": True}, True),
        ("BlipTextLMHeadModel", {}, True),
        ("BlipTextLMHeadModel", {"is_decoder": False}, False),
    ],
)
def test_the_argument_decides_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, head: str, inputs: dict[str, bool], claims: bool
) -> None:
    from transformers.models.blip import modeling_blip_text

    report = checked(blip(head), **inputs)
    assert report.findings == ()
    assert any("nothing says that it is causal" in note for note in report.notes) is not claims
    monkeypatch.setattr(modeling_blip_text, "create_causal_mask", lambda **_rest: None)
    found = checked(blip(head), **inputs).findings
    assert [finding.code for finding in found] == ["ATT402"] * claims
    assert all("because it is run with is_decoder" in finding.message for finding in found)
