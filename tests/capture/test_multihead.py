"""torch's own attention modules: outputs keep every bit, fused paths stay fused, and records give the module's output again."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.capture import AttentionCall, Written, capture
from tests.capture.watching import recompute, same

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage", "ignore:.*enable_nested_tensor is True")

WIDTH, HEADS, BATCH, QUERIES, KEYS = 12, 4, 3, 7, 5  # an even number of heads: an odd one never takes the fused path


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, list[AttentionCall]]:
    """Run without and with capture, from the same random state; insist on equal outputs, random states and gradients' mode."""
    calls: list[AttentionCall] = []
    torch.manual_seed(5)
    plain = model(*args, **kwargs)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    with capture(model, calls.append) as seen:
        output = model(*args, **kwargs)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(plain, output)
    assert seen.unseen() == ()
    return output, calls


def module_output(module: nn.MultiheadAttention, call: AttentionCall) -> Tensor:
    """The module's output from the record, [batch, queries, width]."""
    return module.out_proj(recompute(call).transpose(1, 2).flatten(2))


def masks(kind: str) -> dict[str, Tensor | None]:
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[1, -2:] = True
    hidden = torch.rand(QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) < 0.3
    hidden[:, 0] = False
    added = torch.randn(BATCH * HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(2))
    cases: dict[str, dict[str, Tensor | None]] = {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "hidden": {"attn_mask": hidden},
        "both": {"attn_mask": hidden, "key_padding_mask": padding},
        "a head each": {"attn_mask": added},
        "float both": {"attn_mask": added, "key_padding_mask": torch.zeros(BATCH, KEYS).masked_fill(padding, -torch.inf)},
    }
    return cases[kind]


@pytest.mark.parametrize("kind", ["none", "padding", "hidden", "both", "a head each", "float both"])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 8, "vdim": 9}], ids=str
)
@pytest.mark.parametrize(
    ("training", "need_weights", "average"), [(True, True, True), (False, True, False), (False, False, True)]
)
def test_cross_attention(kind: str, options: dict[str, Any], training: bool, need_weights: bool, average: bool) -> None:
    for batch_first in (True, False):
        module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, dropout=0.25 if training else 0.0, **options)
        module.train(training)
        query, key = torch.randn(BATCH, QUERIES, WIDTH), torch.randn(BATCH, KEYS, options.get("kdim", WIDTH))
        value = torch.randn(BATCH, KEYS, options.get("vdim", WIDTH))
        given = [each if batch_first else each.transpose(0, 1) for each in (query, key, value)]
        settings = {"need_weights": need_weights, "average_attn_weights": average, **masks(kind)}
        (output, _), (call,) = captured(module, *given, **settings)
        assert (call.module, call.call, call.seam, call.is_causal) == ("", 0, "multihead", False)
        assert call.query.shape == (BATCH, HEADS, QUERIES, WIDTH // HEADS)
        assert call.written == (Written(torch.float32, scaled_first=True) if need_weights else None)
        assert call.dropout_p == (0.25 if training else 0.0)
        assert not call.self_attention
        if not training:
            output = output if batch_first else output.transpose(0, 1)
            torch.testing.assert_close(module_output(module, call), output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(("grad", "fused"), [(False, True), (True, False)])
@pytest.mark.parametrize("hint", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_self_attention_fused_or_not(
    need_weights: bool, grad: bool, fused: bool, hint: bool, padded: bool, fused_calls: Any
) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    source = torch.randn(BATCH, KEYS, WIDTH)
    mask = torch.ones(KEYS, KEYS, dtype=torch.bool).triu(1)
    padding = masks("padding")["key_padding_mask"] if padded else None
    with torch.set_grad_enabled(grad):
        (output, _), (call,) = captured(
            module, source, source, source, padding, need_weights=need_weights, attn_mask=mask, is_causal=hint
        )
    assert fused_calls == (["mha", "mha"] if fused else [])
    assert call.self_attention
    assert call.is_causal == (hint and not need_weights and not padded and not fused)
    torch.testing.assert_close(module_output(module, call), output, rtol=1e-5, atol=1e-6)
    real = call.query_mask()
    if padded:
        assert real is not None
        assert padding is not None
        assert torch.equal(real, ~padding)


def test_unbatched_inputs() -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS).eval()
    query, key = torch.randn(QUERIES, WIDTH), torch.randn(KEYS, WIDTH)
    padding = torch.tensor([False, False, True, False, False])
    added = torch.randn(HEADS, QUERIES, KEYS)
    (output, _), (call,) = captured(module, query, key, key, key_padding_mask=padding.float() * -1e9, attn_mask=added)
    assert call.query.shape == (1, HEADS, QUERIES, WIDTH // HEADS)
    torch.testing.assert_close(module_output(module, call)[0], output, rtol=1e-5, atol=1e-6)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fused functions that run: they must run with capture as they do without."""
    ran: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            return function(*args, **kwargs)

        return count

    monkeypatch.setattr(torch, "_native_multi_head_attention", counted("mha", torch._native_multi_head_attention))
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted("layer", torch._transformer_encoder_layer_fwd))
    return ran


def encoder(layers: int = 2, heads: int = HEADS, nested: bool = False, **options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, heads, 17, batch_first=True, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=nested)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_the_fused_encoder_layer(norm_first: bool, padded: bool, nested: bool, fused_calls: list[str]) -> None:
    model = encoder(nested=nested, norm_first=norm_first).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    source = torch.randn(BATCH, KEYS, WIDTH)
    padding = masks("padding")["key_padding_mask"] if padded else None
    with torch.no_grad():
        _, calls = captured(model, source, src_key_padding_mask=padding)
        plain: list[AttentionCall] = []
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with capture(model, plain.append):
                model(source, src_key_padding_mask=padding)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert fused_calls == ["layer"] * 4
    assert [call.module for call in calls] == ["layers.0.self_attn", "layers.1.self_attn"] == [call.module for call in plain]
    for call, slow in zip(calls, plain, strict=True):
        rows, slow_rows = call.row_stats(), slow.row_stats()
        real = torch.ones(BATCH, KEYS, dtype=torch.bool) if padding is None else ~padding
        assert torch.equal(rows.count.transpose(1, 2)[real], slow_rows.count.transpose(1, 2)[real])
        torch.testing.assert_close(rows.lse.transpose(1, 2)[real], slow_rows.lse.transpose(1, 2)[real], rtol=1e-5, atol=1e-5)
        if padding is not None:
            mask = call.query_mask()
            assert mask is not None
            assert torch.equal(mask, real)


@pytest.mark.parametrize(("training", "grad"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("heads", [HEADS, 3])
def test_transformer_with_encoder_and_decoder(training: bool, grad: bool, heads: int) -> None:
    model = nn.Transformer(WIDTH, heads, 2, 2, 17, dropout=0.25, batch_first=True).train(training)
    source, target = torch.randn(BATCH, KEYS, WIDTH), torch.randn(BATCH, QUERIES, WIDTH)
    causal = nn.Transformer.generate_square_subsequent_mask(QUERIES)
    padding = torch.zeros(BATCH, KEYS).masked_fill(masks("padding")["key_padding_mask"], -torch.inf)  # type: ignore[arg-type]
    with torch.set_grad_enabled(grad):
        _, calls = captured(model, source, target, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding)
    names = [f"encoder.layers.{layer}.self_attn" for layer in range(2)]
    names += [f"decoder.layers.{layer}.{kind}" for layer in range(2) for kind in ("self_attn", "multihead_attn")]
    assert [call.module for call in calls] == names
    assert [call.self_attention for call in calls] == [True, True, True, False, True, False]
    decoder = calls[2].row_stats()
    assert torch.equal(decoder.count[0, 0], torch.arange(1, QUERIES + 1))
    assert torch.equal(calls[3].row_stats().count[1, 0], torch.full((QUERIES,), 3))


def test_gradients_are_identical() -> None:
    gradients = []
    for observed in (False, True):
        torch.manual_seed(2)
        model = encoder(dropout=0.25).train()
        source = torch.randn(BATCH, KEYS, WIDTH)
        if observed:
            with capture(model, lambda call: call.row_stats()):
                model(source).square().sum().backward()
        else:
            model(source).square().sum().backward()
        gradients.append([weight.grad for weight in model.parameters()])
    assert same(*gradients)


def test_autocast_records_what_was_multiplied() -> None:
    model = encoder().eval()
    source = torch.randn(BATCH, KEYS, WIDTH)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, calls = captured(model, source)
    assert [call.query.dtype for call in calls] == [torch.bfloat16] * 2


class Direct(nn.Module):
    """Calls the function behind nn.MultiheadAttention itself, as attention pooling layers do."""

    def __init__(self, function: Callable[..., Any] | None) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        function = self.function or F.multi_head_attention_forward
        inner = self.inner
        weights = (inner.in_proj_weight, inner.in_proj_bias, None, None, False, 0.0, inner.out_proj.weight, inner.out_proj.bias)
        return function(x[:1], x, x, WIDTH, HEADS, *weights, training=False, need_weights=False)[0]


@pytest.mark.parametrize("imported", [True, False])
def test_the_function_called_directly(imported: bool) -> None:
    model = Direct(F.multi_head_attention_forward if imported else None)
    calls: list[AttentionCall] = []
    x = torch.randn(KEYS, BATCH, WIDTH)
    plain = model(x)
    with capture(model, calls.append) as seen:
        output = model(x)
    assert torch.equal(plain, output)
    assert seen.calls == 1
    torch.testing.assert_close(module_output(model.inner, calls[0]).transpose(0, 1), output, rtol=1e-5, atol=1e-6)


class Own(nn.TransformerEncoderLayer):
    """A layer with attention of its own inside torch's encoder: the mode must be back while it runs."""

    def _sa_block(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return src + self._sa_block(src)


def test_an_own_layer_inside_the_encoder_is_seen() -> None:
    model = nn.TransformerEncoder(Own(WIDTH, HEADS, 17, batch_first=True), 2, enable_nested_tensor=False).eval()
    calls: list[AttentionCall] = []
    with torch.no_grad():
        plain = model(torch.ones(BATCH, KEYS, WIDTH))
        with capture(model, calls.append):
            assert torch.equal(model(torch.ones(BATCH, KEYS, WIDTH)), plain)
    assert [(call.module, call.seam) for call in calls] == [("layers.0", "sdpa"), ("layers.1", "sdpa")]


def test_every_combination_counts_each_call_once() -> None:
    for training, grad, heads, first in itertools.product((True, False), (True, False), (4, 3), (True, False)):
        model = nn.TransformerEncoderLayer(WIDTH, heads, 17, batch_first=first).train(training)
        with torch.set_grad_enabled(grad):
            _, calls = captured(model, torch.randn(BATCH, KEYS, WIDTH))
        assert [call.module for call in calls] == ["self_attn"]
