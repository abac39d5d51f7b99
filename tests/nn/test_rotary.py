"""RotaryEmbedding against transformers' own, rule by rule; norms, distances, precision."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as turn_neighbours
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as turn_halves

from attemper.errors import ArgumentError
from attemper.nn import LinearRope, Llama3Rope, NTKRope, RopeRule, RotaryEmbedding, YarnRope

HEAD, BASE, LENGTH = 22, 5000.0, 2048

RULES: dict[str, tuple[RopeRule | None, dict[str, Any]]] = {
    "none": (None, {"rope_type": "default"}),
    "linear": (LinearRope(3.0), {"rope_type": "linear", "factor": 3.0}),
    "dynamic": (NTKRope(3.0, LENGTH), {"rope_type": "dynamic", "factor": 3.0}),
    "yarn": (YarnRope(4.0, 512), {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}),
    "yarn, ramp": (
        YarnRope(4.0, 512, 17.0, 2.0, attention_factor=1.3, truncate=False),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 17.0,
            "beta_slow": 2.0,
            "attention_factor": 1.3,
            "truncate": False,
        },
    ),
    "yarn, mscale": (
        YarnRope(4.0, 512, mscale=0.7, mscale_all_dim=1.9),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "mscale": 0.7, "mscale_all_dim": 1.9},
    ),
    "yarn, short text": (YarnRope(4.0, 7), {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 7}),
    "llama3": (
        Llama3Rope(8.0, 512, 1.0, 4.0),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 512,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
}


def config(parameters: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=3 * HEAD,
        num_attention_heads=3,
        head_dim=HEAD,
        max_position_embeddings=LENGTH,
        rope_parameters=parameters | {"rope_theta": BASE},
    )


@pytest.mark.parametrize("name", RULES)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    rule, parameters = RULES[name]
    own = RotaryEmbedding(HEAD, base=BASE, rule=rule)
    if name == "none":
        return torch.testing.assert_close(own.frequencies, LlamaRotaryEmbedding(config(parameters)).inv_freq)
    expected, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config(parameters), torch.device("cpu"))
    torch.testing.assert_close(own.frequencies, expected)
    assert own.rule.amplitude == pytest.approx(amplitude)
    return None


@pytest.mark.parametrize("length", [LENGTH - 5, LENGTH + 1, 3 * LENGTH])
def test_a_rule_that_depends_on_the_length_does_as_in_transformers(length: int) -> None:
    rule, parameters = RULES["dynamic"]
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config(parameters), torch.device("cpu"), seq_len=length)
    rope = RotaryEmbedding(HEAD, base=BASE, rule=rule)
    torch.testing.assert_close(rope.rule.frequencies(HEAD, BASE, length).float(), expected)
    # However the length comes: by the last position, as a number or as a tensor.
    x = torch.randn(2, 3, 5, HEAD)
    given = rope(x, offset=length - 5)
    positions = torch.arange(length - 5, length)
    torch.testing.assert_close(rope(x, positions=positions), given)
    torch.testing.assert_close(rope(x, positions=positions, length=torch.tensor(length)), given)
    short = RotaryEmbedding(HEAD, base=BASE)(x, offset=length - 5)
    assert torch.equal(short, given) == (length <= LENGTH)


def test_a_fixed_stretch_of_the_base_leaves_the_first_pair_and_divides_the_last() -> None:
    plain, stretched = (RotaryEmbedding(HEAD, base=BASE, rule=rule).frequencies for rule in (None, NTKRope(3.0)))
    torch.testing.assert_close(stretched[0], plain[0])
    torch.testing.assert_close(stretched[-1], plain[-1] / 3.0)
    torch.testing.assert_close(stretched, (BASE * 3.0 ** (HEAD / (HEAD - 2))) ** -(torch.arange(0, HEAD, 2) / HEAD))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_rotation_is_that_of_transformers(name: str, interleaved: bool) -> None:
    rule, parameters = RULES[name]
    query, key = torch.randn(2, 3, 7, HEAD), torch.randn(2, 3, 7, HEAD)
    positions = torch.stack([torch.arange(7), torch.arange(7) + 41])
    module, turn = (CohereRotaryEmbedding, turn_neighbours) if interleaved else (LlamaRotaryEmbedding, turn_halves)
    cos, sin = module(config(parameters))(query, positions)
    expected = turn(query, key, cos, sin)
    rope = RotaryEmbedding(HEAD, base=BASE, interleaved=interleaved, rule=rule)
    for x, each in zip((query, key), expected, strict=True):
        torch.testing.assert_close(rope(x, positions=positions), each)
        torch.testing.assert_close(rope(x, positions=positions[1])[1], each[1])
        torch.testing.assert_close(rope(x, offset=41)[1], each[1])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_lengths_are_kept_and_products_depend_on_the_distance(name: str, interleaved: bool) -> None:
    rule, _ = RULES[name]
    rope = RotaryEmbedding(HEAD, interleaved=interleaved, rule=rule)
    x = torch.randn(2, 3, 5, HEAD, dtype=torch.float64)
    turned = rope(x, offset=13)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1) * rope.rule.amplitude)
    torch.testing.assert_close(turned @ rope(x, offset=2).mT, rope(x, offset=111) @ rope(x, offset=100).mT)
    assert not torch.allclose(turned @ rope(x, offset=2).mT, rope(x, offset=12) @ rope(x, offset=2).mT)
    torch.testing.assert_close(rope(x[..., :1, :]), x[..., :1, :] * rope.rule.amplitude)  # position 0 does not turn


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_partial_rotation_leaves_the_rest(interleaved: bool) -> None:
    x = torch.randn(2, 3, 5, HEAD)
    turned = RotaryEmbedding(6, interleaved=interleaved)(x, offset=3)
    assert torch.equal(turned[..., 6:], x[..., 6:])
    torch.testing.assert_close(turned[..., :6], RotaryEmbedding(6, interleaved=interleaved)(x[..., :6], offset=3))
    assert turned.is_contiguous()


def test_angles_far_out_are_as_exact_as_float32_positions_allow() -> None:
    far = 131_000
    x = torch.randn(1, 1, 5, HEAD)
    exact = RotaryEmbedding(HEAD)(x.double(), offset=far)
    # The angle is off by its own rounding and by position × that of the frequency.
    allowed = 2 * (far + 5) * torch.finfo(torch.float32).eps * x.abs().max() * math.sqrt(2)
    assert (RotaryEmbedding(HEAD)(x, offset=far).double() - exact).abs().max() < allowed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casting_a_model_to_sixteen_bits_leaves_the_frequencies(dtype: torch.dtype) -> None:
    rope = RotaryEmbedding(HEAD)
    cast = copy.deepcopy(rope).to(dtype)
    assert cast.frequencies.dtype == torch.float32
    assert torch.equal(cast.frequencies, rope.frequencies)
    x = torch.randn(2, 3, 5, HEAD).to(dtype)
    turned = cast(x, offset=1000)
    assert turned.dtype == dtype
    assert torch.equal(turned, rope(x.float(), offset=1000).to(dtype))
    assert not rope.state_dict()


def test_a_module_made_without_memory_finds_its_frequencies() -> None:
    rope = RotaryEmbedding(HEAD, device="meta")
    assert rope.frequencies.is_meta
    assert torch.equal(rope.to_empty(device="cpu").frequencies, RotaryEmbedding(HEAD).frequencies)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(interleaved: bool) -> None:
    rope = RotaryEmbedding(4, interleaved=interleaved, rule=YarnRope(3.0, 5))
    assert torch.autograd.gradcheck(lambda x: rope(x, offset=3), torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RotaryEmbedding(5), "width: got 5; expected an even number from 2 on"),
        (lambda: RotaryEmbedding(4, base=1.0), "base: got 1.0; expected a number above 1"),
        (lambda: RotaryEmbedding(2, rule=NTKRope(2.0)), "width: got 2; expected more than 2"),
        (lambda: LinearRope(0.5), "factor: got 0.5; expected a number from 1 on"),
        (lambda: YarnRope(2.0, 0), "original_length: got 0; expected the length of training"),
        (lambda: Llama3Rope(2.0, 9, 4.0, 4.0), "high_freq_factor: got 4.0; expected more than low_freq_factor = 4.0"),
        (
            lambda: RotaryEmbedding(4)(torch.zeros(2, 3, 2)),
            r"x: got shape \(2, 3, 2\); expected \[..., heads, tokens, d\] with d at",
        ),
        (
            lambda: RotaryEmbedding(4)(torch.zeros(2, 3, 5, 4), positions=torch.zeros(2, 3)),
            r"positions: got shape \(2, 3\); expected \[5\], or \[batch, 5\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_positions_of_a_batch_reach_every_head() -> None:
    rope, x = RotaryEmbedding(HEAD), torch.randn(2, 3, 5, HEAD)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 5, 0, 2, 9]])
    turned = rope(x, positions=positions)

    def at(batch: int, place: int) -> Tensor:
        return rope(x[batch, :, place : place + 1], offset=int(positions[batch, place]))[:, 0]

    for batch in range(2):
        for place in range(5):
            torch.testing.assert_close(turned[batch, :, place], at(batch, place))
