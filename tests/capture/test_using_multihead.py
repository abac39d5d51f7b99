"""nn.MultiheadAttention in use, alone and inside torch's transformer modules."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import attemper
from attemper.capture import AttentionCall, capture
from attemper.capture.using import Kept, Replaced, Use

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

HOW = "as attemper.nn.MultiheadAttention, on the same parameters"
NEAR = {"rtol": 1e-5, "atol": 1e-6}


def encoder(layers: int = 2, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(12, 2, 17, batch_first=True, **{"dropout": 0.0} | options)
    return nn.TransformerEncoder(layer, layers).eval()


def padded(batch: int = 3, tokens: int = 7) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, tokens, 12)
    hidden = torch.zeros(batch, tokens, dtype=torch.bool)
    hidden[1, 5:] = True
    return x, hidden


@pytest.mark.parametrize("gradients", [False, True])
def test_an_encoder_gives_what_it_gave(gradients: bool) -> None:
    model, (x, hidden) = encoder(), padded()
    with torch.set_grad_enabled(gradients):  # without them torch takes its fused path, on nested tensors
        plain = model(x, src_key_padding_mask=hidden)
        with attemper.use(model) as used:
            output = model(x, src_key_padding_mask=hidden)
        again = model(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(output[~hidden], plain[~hidden], **NEAR)
    assert torch.equal(plain, again)
    assert used.replaced == tuple(Replaced(f"layers.{layer}.self_attn", HOW) for layer in (0, 1))
    assert used.kept == ()


def test_an_encoder_decoder_with_masks_in_training() -> None:
    torch.manual_seed(5)
    model = nn.Transformer(12, 2, 2, 2, 17, dropout=0.0, batch_first=True)
    source, target = torch.randn(3, 7, 12), torch.randn(3, 5, 12)
    _, hidden = padded()
    masks = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(5), "tgt_is_causal": True}
    masks |= {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
    results = []
    for using in (False, True):
        if using:
            used = attemper.use(model)
        output = model(source, target, **masks)
        results.append((output, torch.autograd.grad(output.square().sum(), list(model.parameters()))))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert len(used.replaced) == 6
    assert used.kept == ()


def test_the_module_stays_the_same_object_and_is_undone_exactly() -> None:
    model = encoder(1)
    module = model.layers[0].self_attn
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = dict(module.__dict__)
    parameters, keys, state = list(model.parameters()), list(model.state_dict()), torch.get_rng_state()
    used = attemper.use(model)
    assert torch.equal(state, torch.get_rng_state())
    assert model.layers[0].self_attn is module
    assert isinstance(module, attemper.nn.MultiheadAttention)
    assert isinstance(module, nn.MultiheadAttention)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == keys
    weight = module.in_proj_weight.clone()
    model(torch.randn(2, 3, 12)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(weight, module.in_proj_weight)
    assert model.use_nested_tensor is False
    used.undo()
    assert model.use_nested_tensor is True
    assert type(module) is nn.MultiheadAttention
    assert module.__dict__ == before


def test_a_class_derived_meanwhile_is_undone_too() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model = encoder(1)
    module, (x, _) = model.layers[0].self_attn, padded()
    used = attemper.use(model)
    parametrize.register_parametrization(module, "in_proj_weight", Double())
    output = model(x)
    used.undo()
    assert isinstance(module, nn.MultiheadAttention)
    assert not isinstance(module, attemper.nn.MultiheadAttention)
    assert type(module).__name__ == "ParametrizedMultiheadAttention"
    torch.testing.assert_close(model.train()(x), output, **NEAR)
    parametrize.remove_parametrizations(module, "in_proj_weight")
    assert type(module) is nn.MultiheadAttention


def test_hooks_of_the_module_stay() -> None:
    model, (x, _) = encoder(1), padded()
    seen: list[str] = []
    handle = model.layers[0].self_attn.register_forward_hook(lambda module, args, output: seen.append("before"))
    with attemper.use(model):
        model.layers[0].self_attn.register_forward_pre_hook(lambda module, args: seen.append("meanwhile"))
        model(x)
        assert seen == ["meanwhile", "before"]
        handle.remove()
        model(x)
    model(x)
    assert seen == ["meanwhile", "before", "meanwhile", "meanwhile"]


def test_a_module_in_two_places_is_converted_once_and_the_model_itself_may_be_one() -> None:
    one = nn.MultiheadAttention(12, 3, batch_first=True).eval()
    x = torch.randn(2, 5, 12)
    plain = one(x, x, x)
    pair = nn.ModuleList([one, one])
    with attemper.use(pair) as used:
        assert used.replaced == (Replaced("0", HOW),)
        torch.testing.assert_close(pair[1](x, x, x), plain, **NEAR)
    with attemper.use(one) as used:
        assert used.replaced == (Replaced("", HOW),)
        torch.testing.assert_close(one(x, x, x), plain, **NEAR)
    assert type(one) is nn.MultiheadAttention


@pytest.mark.parametrize("options", [{"kdim": 5, "vdim": 7}, {"add_bias_kv": True, "add_zero_attn": True}, {"bias": False}])
def test_every_form_of_it(options: dict[str, Any]) -> None:
    torch.manual_seed(2)
    module = nn.MultiheadAttention(12, 3, batch_first=True, **options)
    query, key, value = torch.randn(2, 3, 12), torch.randn(2, 5, module.kdim), torch.randn(2, 5, module.vdim)
    for need_weights in (True, False):
        plain = module(query, key, value, need_weights=need_weights)
        with attemper.use(module, impl="reference"):
            torch.testing.assert_close(module(query, key, value, need_weights=need_weights), plain, **NEAR)


class Subclass(nn.MultiheadAttention):
    """Nothing but another name; it could be anything."""


def _instead(module: nn.MultiheadAttention) -> None:
    module.forward = lambda *args, **kwargs: args  # pyrefly: ignore


KEPT = {
    "it is a tests.capture.test_using_multihead.Subclass, whose code may differ": Subclass,
    "its in_proj_weight is no parameter": lambda *args: prune.l1_unstructured(
        nn.MultiheadAttention(*args), "in_proj_weight", 0.5
    ),
    "ParametrizedMultiheadAttention, whose code may differ": lambda *args: parametrizations.weight_norm(
        nn.MultiheadAttention(*args), "in_proj_weight"
    ),
}


@pytest.mark.parametrize("reason", KEPT)
def test_what_may_be_another_module_is_kept(reason: str) -> None:
    model = nn.ModuleDict({"attn": KEPT[reason](12, 3)})
    x = torch.randn(5, 2, 12)
    plain = model["attn"](x, x, x)[0]
    used = attemper.use(model)
    assert used.replaced == ()
    assert [each.module for each in used.kept] == ["attn"]
    assert reason in used.kept[0].reason
    assert torch.equal(model["attn"](x, x, x)[0], plain)


def test_a_module_whose_parts_were_changed_is_kept() -> None:
    hooked, patched, replaced = (nn.MultiheadAttention(12, 3) for _ in range(3))
    hooked.out_proj.register_forward_hook(lambda module, args, output: output + 1)
    _instead(patched)
    replaced.out_proj = nn.Sequential(replaced.out_proj)
    used = attemper.use(nn.ModuleList([hooked, patched, replaced]))
    assert used.kept == (
        Kept("0", "hooks sit on its out_proj, which torch's module never calls"),
        Kept("1", "somebody has replaced its forward method"),
        Kept("2", "its out_proj is a Sequential, of which torch's module reads the weight alone"),
    )


def test_a_parametrized_out_proj_is_the_same_computation() -> None:
    module = nn.MultiheadAttention(12, 3)
    parametrizations.weight_norm(module.out_proj)
    x = torch.randn(5, 2, 12)
    plain = module(x, x, x)
    with attemper.use(module) as used:
        torch.testing.assert_close(module(x, x, x), plain, **NEAR)
        assert len(used.replaced) == 1


def test_nested_tensors_go_to_torch_and_are_noted() -> None:
    model = encoder(1)
    nested = torch.nested.nested_tensor([torch.randn(3, 12), torch.randn(5, 12)])
    with torch.no_grad():
        plain = model.layers[0].self_attn(nested, nested, nested, need_weights=False)[0]
        used = attemper.use(model)
        output = model.layers[0].self_attn(nested, nested, nested, need_weights=False)[0]
    assert torch.equal(plain.to_padded_tensor(0.0), output.to_padded_tensor(0.0))
    assert used.kept == (Kept("layers.0.self_attn", "it was given nested tensors, which only torch's own module takes"),)
    assert model.layers[0].self_attn._qkv_same_embed_dim is False


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_is_in_use_too(way: str) -> None:
    model, (x, _) = encoder(1), padded()
    plain = model(x)
    used = attemper.use(model)
    other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    of_other = Use.of(other)
    assert of_other is not None
    assert torch.equal(model(x), other(x))
    used.undo()
    assert isinstance(other.layers[0].self_attn, attemper.nn.MultiheadAttention)
    of_other.undo()
    assert type(other.layers[0].self_attn) is nn.MultiheadAttention
    torch.testing.assert_close(other(x), plain)


def test_a_compiled_encoder_is_one_graph() -> None:
    torch._dynamo.reset()
    model, (x, hidden) = encoder(1), padded()
    attemper.use(model)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, src_key_padding_mask=hidden), model(x, src_key_padding_mask=hidden))
    torch._dynamo.reset()


def test_capture_is_told_once() -> None:
    model, (x, hidden) = encoder(2), padded()
    attemper.use(model)
    calls: list[AttentionCall] = []
    with capture(model, calls.append) as seen:
        model(x, src_key_padding_mask=hidden)
    assert [(call.module, call.seam) for call in calls] == [(f"layers.{layer}.self_attn", "attemper") for layer in (0, 1)]
    assert seen.unseen() == ()


def test_a_row_that_sees_nothing_gives_the_bias() -> None:
    module = nn.MultiheadAttention(12, 3, batch_first=True)
    nn.init.normal_(module.out_proj.bias)
    x, hidden = torch.randn(1, 4, 12), torch.ones(1, 4, dtype=torch.bool)
    with attemper.use(module):
        output = module(x, x, x, key_padding_mask=hidden)[0]
    torch.testing.assert_close(output, module.out_proj.bias.expand(1, 4, 12))
