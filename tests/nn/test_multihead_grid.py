"""Every combination of torch's own arguments, against torch.nn.MultiheadAttention: outputs, weights, and all gradients.

The oracle is torch's module in float64; the peer is the same in float32, with the tokens in two orders, whose error sets the
budget.
"""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attemper.nn import MultiheadAttention
from tests.attention_cases import Budget

BATCH, HEADS, WIDTH, QUERIES, KEYS, KDIM, VDIM = 3, 2, 5, 7, 11, 13, 17
EMBED = HEADS * WIDTH

LAYOUTS = ("batch first", "sequence first", "unbatched")
SOURCES = ("self", "key is value", "three", "three widths")
MASKS = ("none", "padding", "padding added", "mask", "mask added", "mask of heads", "both", "both added", "causal hint")
EXTRAS = ("", "bias_kv", "zero_attn", "bias_kv zero_attn")
WEIGHTS = ({"need_weights": False}, {}, {"average_attn_weights": False})
INNER = tuple(itertools.product(MASKS, EXTRAS, WEIGHTS))
# Every second combination is a training step, the others evaluate without gradients, where torch takes a fused path if it can;
# the two alternate within every value of every argument.
COMBINATIONS = len(LAYOUTS) * len(SOURCES) * len(INNER)


def test_the_grid_has_the_size_that_it_should() -> None:
    assert COMBINATIONS >= 500


def sources(source: str, layout: str, generator: torch.Generator) -> list[Tensor]:
    def draw(tokens: int, width: int) -> Tensor:
        shape = {"batch first": (BATCH, tokens), "sequence first": (tokens, BATCH), "unbatched": (tokens,)}[layout]
        return torch.randn(*shape, width, generator=generator)

    if source == "self":
        return [draw(QUERIES, EMBED)] * 3
    widths = (KDIM, VDIM) if source == "three widths" else (EMBED, EMBED)
    query, key = draw(QUERIES, EMBED), draw(KEYS, widths[0])
    return [query, key, key if source == "key is value" else draw(KEYS, widths[1])]


def masks(kind: str, layout: str, keys: int, generator: torch.Generator) -> dict[str, Any]:
    """The arguments by which torch hides or adds; no row is left without a key."""
    batch = 1 if layout == "unbatched" else BATCH
    hidden = torch.rand(batch * HEADS, QUERIES, keys, generator=generator) > 0.6
    padding = torch.rand(batch, keys, generator=generator) > 0.6
    hidden[..., 1] = padding[:, 1] = False
    added, padding_added = (torch.randn(each.shape, generator=generator) for each in (hidden, padding))
    padding_added[:, 2] = -torch.inf
    if layout == "unbatched":
        padding, padding_added = padding[0], padding_added[0]
    given: dict[str, dict[str, Any]] = {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "padding added": {"key_padding_mask": padding_added},
        "mask": {"attn_mask": hidden[0]},
        "mask added": {"attn_mask": added[0]},
        "mask of heads": {"attn_mask": hidden},
        "both": {"attn_mask": hidden, "key_padding_mask": padding},
        "both added": {"attn_mask": added[0], "key_padding_mask": padding_added},
        "causal hint": {"attn_mask": torch.ones(QUERIES, keys).triu(1).bool(), "is_causal": True},
    }
    return given[kind]


def in_dtype(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    def cast(thing: Any) -> Any:
        return thing.to(dtype) if isinstance(thing, Tensor) and thing.dtype.is_floating_point else thing

    return {name: cast(thing) for name, thing in arguments.items()}


def results(module: Any, inputs: list[Tensor], arguments: dict[str, Any], *, training: bool) -> dict[str, Tensor]:
    """Output, weights, and in training the gradients of every input and parameter, from uneven upstream gradients."""
    dtype = module.out_proj.weight.dtype
    leaves = {id(x): x.to(dtype, copy=True).requires_grad_(training) for x in inputs}
    given = [leaves[id(x)] for x in inputs]  # the same tensor stays the same tensor
    module.train(training)
    with torch.set_grad_enabled(training):
        output, weights = module(*given, **in_dtype(arguments, dtype))
    found = {"output": output} | ({} if weights is None else {"weights": weights})
    if training:
        wanted = {f"of {place}": leaf for place, leaf in enumerate(leaves.values())} | dict(module.named_parameters())
        upstream = [torch.linspace(-1.0, 1.0, out.numel(), dtype=torch.float64).reshape(out.shape) for out in found.values()]
        gradients = torch.autograd.grad(
            list(found.values()), list(wanted.values()), [each.to(dtype) for each in upstream], materialize_grads=True
        )
        found |= {f"gradient {name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}
    return found


def turned(module: Any, inputs: list[Tensor], arguments: dict[str, Any], *, training: bool, tokens: int) -> dict[str, Tensor]:
    """The same results with every sum over tokens added from the other end; `tokens` is the dimension they lie in."""

    def turn(name: str, thing: Any) -> Any:
        if not isinstance(thing, Tensor):
            return thing
        return thing.flip((-1,) if name == "key_padding_mask" else (-1, -2))

    given = {id(x): x.flip(tokens) for x in inputs}
    found = results(
        module, [given[id(x)] for x in inputs], {name: turn(name, thing) for name, thing in arguments.items()}, training=training
    )
    keys = inputs[1].shape[tokens]
    for name, result in found.items():
        if name == "weights":
            found[name] = torch.cat([result[..., :keys].flip(-1), result[..., keys:]], -1).flip(-2)
        elif name == "output" or name.startswith("gradient of"):
            found[name] = result.flip(tokens)
    return found


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_torchs_module(layout: str, source: str) -> None:
    budget = Budget()
    generator = torch.Generator().manual_seed(7)
    tokens = 0 if layout == "sequence first" else -2
    dims = {"kdim": KDIM, "vdim": VDIM} if source == "three widths" else {}
    for place, (mask, extras, weights) in enumerate(INNER):
        if mask == "causal hint" and extras and weights == {"need_weights": False}:
            continue  # torch then hides the extra keys too, and shows them with need_weights=True: see test_multihead_masks.py
        options: dict[str, Any] = {
            "bias": place % 4 < 2,
            "add_bias_kv": "bias_kv" in extras,
            "add_zero_attn": "zero_attn" in extras,
            "batch_first": layout == "batch first",
            **dims,
        }
        peer = nn.MultiheadAttention(EMBED, HEADS, **options)
        for parameter in peer.parameters():  # torch starts biases at 0, where a lost one would not show
            nn.init.normal_(parameter, std=0.3, generator=generator)
        ours = MultiheadAttention(EMBED, HEADS, **options)
        ours.load_state_dict(peer.state_dict())
        oracle = copy.deepcopy(peer).double()
        inputs = sources(source, layout, generator)
        arguments = masks(mask, layout, inputs[1].shape[tokens], generator) | weights

        training = place % 2 == 0
        exact, theirs, own = (results(module, inputs, arguments, training=training) for module in (oracle, peer, ours))
        assert own.keys() == theirs.keys()
        causal = arguments.get("is_causal", False)
        again = theirs if causal else turned(peer, inputs, arguments, training=training, tokens=tokens)
        for name, actual in own.items():
            said = f"{name} with {mask}, {extras or 'no extras'}, {weights}, training={training}"
            torch.testing.assert_close(actual, theirs[name], rtol=1e-3, atol=1e-4, msg=lambda text, said=said: f"{said}: {text}")
            budget.add(name, actual, exact[name], theirs[name], again[name])
    budget.check()
