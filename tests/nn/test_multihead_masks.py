"""Which weights take part: empty rows, masks beside one another, the causal rule, extra keys, dropout."""

from typing import Any

import pytest
import torch
from torch import nn

from attemper.nn import MultiheadAttention
from tests.nn.multihead_cases import BATCH, EMBED, TOKENS, finish, heads_of, spread


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("source", ["padding", "mask"])
def test_rows_without_a_key_give_heads_of_0(source: str, training: bool, need_weights: bool) -> None:
    theirs = spread(nn.MultiheadAttention(EMBED, 2, batch_first=True)).train(training)
    ours = MultiheadAttention.from_torch(theirs)
    x = torch.randn(BATCH, TOKENS, EMBED)
    if source == "padding":
        arguments: dict[str, Any] = {"key_padding_mask": torch.tensor([[False] * TOKENS, [True] * TOKENS])}
        empty = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
        empty[1] = True
    else:
        arguments = {"attn_mask": torch.arange(TOKENS).unsqueeze(-1).expand(TOKENS, TOKENS) == 3}
        empty = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
        empty[:, 3] = True
    with torch.no_grad():
        output, weights = ours(x, x, x, need_weights=need_weights, **arguments)
        torch_output, torch_weights = theirs(x, x, x, need_weights=need_weights, **arguments)
    assert torch.equal(output[empty], ours.out_proj.bias.expand_as(output[empty]))
    torch.testing.assert_close(output[~empty], torch_output[~empty])
    # The difference: torch's own answer depends on the path.
    if need_weights or not training:
        assert torch_output[empty].isnan().all()
    else:
        torch.testing.assert_close(torch_output[empty], output[empty])
    if weights is not None:
        assert not weights[empty].any()
        assert torch_weights[empty].isnan().all()


def test_empty_rows_send_back_gradients_of_0() -> None:
    module = spread(MultiheadAttention(EMBED, 2, batch_first=True))
    x = torch.randn(BATCH, TOKENS, EMBED, requires_grad=True)
    hidden = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    for need_weights in (True, False):
        output, _ = module(x, x, x, hidden, need_weights)
        gradients = torch.autograd.grad(output.sum(), [x, *module.parameters()], materialize_grads=True)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
        assert not gradients[0].any()


def test_a_bool_mask_beside_a_float_one_hides_as_in_torch() -> None:
    theirs = spread(nn.MultiheadAttention(EMBED, 3))
    ours = MultiheadAttention.from_torch(theirs)
    x, added, padding = torch.randn(TOKENS, BATCH, EMBED), torch.randn(TOKENS, TOKENS), torch.arange(TOKENS).expand(BATCH, -1) > 4
    with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask is deprecated"):
        expected = theirs(x, x, x, padding, attn_mask=added)
    torch.testing.assert_close(ours(x, x, x, padding, attn_mask=added), expected)


def test_a_float_mask_gets_gradients() -> None:
    theirs = spread(nn.MultiheadAttention(EMBED, 3, dtype=torch.float64))
    ours = MultiheadAttention.from_torch(theirs)
    x, mask = (torch.randn(*shape, dtype=torch.float64) for shape in ((TOKENS, BATCH, EMBED), (TOKENS, TOKENS)))
    mask.requires_grad_()
    expected, *found = (
        torch.autograd.grad(module(x, x, x, attn_mask=mask, need_weights=need)[0].square().sum(), mask)[0]
        for module, need in ((theirs, True), (ours, True), (ours, False))
    )
    for each in found:
        torch.testing.assert_close(each, expected)


@pytest.mark.parametrize("extras", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_extra_keys_stay_visible_under_the_causal_rule(extras: dict[str, bool]) -> None:
    theirs = spread(nn.MultiheadAttention(EMBED, 3, **extras))
    ours = MultiheadAttention.from_torch(theirs)
    x = torch.randn(TOKENS, BATCH, EMBED)
    later = torch.ones(TOKENS, TOKENS).triu(1).bool()
    expected = theirs(x, x, x, attn_mask=later, is_causal=True)[0]
    for need_weights in (True, False):
        torch.testing.assert_close(ours(x, x, x, attn_mask=later, is_causal=True, need_weights=need_weights)[0], expected)
        torch.testing.assert_close(ours(x, x, x, is_causal=True, need_weights=need_weights)[0], expected)
        torch.testing.assert_close(ours(x, x, x, attn_mask=later, need_weights=need_weights)[0], expected)
    # The difference: with the hint and without weights torch drops the mask, and its causal rule hides the extra keys.
    hinted = theirs(x, x, x, attn_mask=later, is_causal=True, need_weights=False)[0]
    assert (hinted - expected).abs().max() > 0.01


def test_the_causal_rule_needs_no_mask_and_joins_any() -> None:
    module = spread(MultiheadAttention(EMBED, 3, batch_first=True))
    x, padding = torch.randn(BATCH, TOKENS, EMBED), torch.arange(TOKENS).expand(BATCH, -1) > 4
    later = torch.ones(TOKENS, TOKENS).triu(1).bool()
    for need_weights in (True, False):
        expected = module(x, x, x, padding, need_weights, later)[0]
        torch.testing.assert_close(module(x, x, x, padding, need_weights, is_causal=True)[0], expected)
    # One query at a time, with its place.
    whole = module(x, x, x, is_causal=True)[0]
    for place in range(TOKENS):
        step = module(x[:, place : place + 1], x, x, need_weights=False, is_causal=True, offset=place)[0]
        torch.testing.assert_close(step[:, 0], whole[:, place])


def test_what_torch_does_with_is_causal_depends_on_the_path_and_ours_does_not() -> None:
    theirs = spread(nn.MultiheadAttention(EMBED, 3))
    ours = MultiheadAttention.from_torch(theirs)
    x, mask = torch.randn(TOKENS, BATCH, EMBED), torch.arange(TOKENS * TOKENS).reshape(TOKENS, TOKENS) % 5 == 3
    with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
        theirs(x, x, x, is_causal=True, need_weights=False)
    # A wrong hint: the mask alone, or the causal rule alone.
    later = torch.ones(TOKENS, TOKENS).triu(1).bool()
    torch.testing.assert_close(theirs(x, x, x, attn_mask=mask, is_causal=True)[0], theirs(x, x, x, attn_mask=mask)[0])
    dropped = theirs(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    torch.testing.assert_close(dropped, theirs(x, x, x, attn_mask=later)[0])
    for need_weights in (True, False):
        both = ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)[0]
        torch.testing.assert_close(both, theirs(x, x, x, attn_mask=mask | later)[0])


def test_the_most_negative_number_hides() -> None:
    theirs = spread(nn.MultiheadAttention(EMBED, 3))
    ours = MultiheadAttention.from_torch(theirs)
    x, mask = torch.randn(TOKENS, BATCH, EMBED), torch.zeros(TOKENS, TOKENS)
    mask[:, 2] = mask[3] = torch.finfo(torch.float32).min
    (expected, uniform), (output, weights) = (module(x, x, x, attn_mask=mask) for module in (theirs, ours))
    others = torch.arange(TOKENS) != 3
    torch.testing.assert_close(output[others], expected[others])
    torch.testing.assert_close(uniform[:, 3], torch.full((BATCH, TOKENS), 1 / TOKENS))  # the difference
    assert not weights[:, 3].any()


def test_dropout_drops_the_same_weights_with_and_without_returning_them() -> None:
    module = spread(MultiheadAttention(EMBED, 3, dropout=0.4, batch_first=True))
    x = torch.randn(BATCH, TOKENS, EMBED)
    torch.manual_seed(11)
    output, weights = module(x, x, x, average_attn_weights=False)
    torch.manual_seed(11)
    torch.testing.assert_close(module(x, x, x, need_weights=False)[0], output)
    # As in torch, what is returned is what met the values.
    assert 0.2 < (weights == 0.0).float().mean() < 0.6
    torch.testing.assert_close(finish(module, weights @ heads_of(module, x)[2]), output)
    assert not torch.equal(module(x, x, x)[0], output)
    module.eval()
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    torch.testing.assert_close(module(x, x, x)[1].sum(-1), torch.ones(BATCH, TOKENS))
