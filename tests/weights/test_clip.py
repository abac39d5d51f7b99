"""QK-clip, on every layout: on each layer's own inputs no head is over the threshold, and what was under it keeps its bits."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from attemper.capture import AttentionCall, capture
from attemper.errors import ArgumentError, UnsupportedError
from attemper.weights import Heads, Projections, find_projections, qk_clip_
from tests.capture.architectures import build
from tests.capture.watching import tensors
from tests.weights.test_fold import codegen

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

FAMILIES = ("gpt2", "gpt_neox", "phi3", "falcon", "gpt_bigcode", "modernbert", "codegen")  # fused
FAMILIES += ("llama", "bert", "opt", "whisper", "siglip", "gemma2", "gpt_oss")  # separate; softcap; sinks; torch's own module
FAMILIES += ("qwen3", "qwen3_next", "gemma3", "gemma3n", "persimmon", "olmo2", "cohere", "deepseek_v2", "deepseek_v3")


class Run(NamedTuple):
    """One run of an attention module on inputs recorded before."""

    call: AttentionCall
    largest: Tensor  # |scale·product|, [heads]


def made(name: str, **config: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    if name == "codegen":
        model, inputs = codegen()
        model.float()
    else:
        model, inputs = build(name, gain=4.0, **config)
    torch.manual_seed(13)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.ndim < 2 and "sink" not in weight_name:
                weight.add_(torch.randn_like(weight), alpha=0.5)
    return model, inputs


def recorded(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """What each attention module was given."""
    given: dict[str, Any] = {}
    hooks = []
    for name in find_projections(model):

        def keep(_module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            given.setdefault(name, (args, kwargs))

        hooks.append(model.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True))
    cached = {"use_cache": False} if hasattr(model, "generate") else {}
    with torch.no_grad():
        model(**inputs, **cached)
    for hook in hooks:
        hook.remove()
    return given


def run(module: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Run:
    calls: list[AttentionCall] = []
    with torch.no_grad(), capture(module, calls.append):
        module(*given[0], **given[1])
    (call,) = calls
    stats = call.row_stats()
    seen = stats.count > 0
    high, low = (each.where(seen, torch.zeros(())).abs() for each in (stats.product_max, stats.product_min))
    return Run(call, torch.maximum(high, low).amax((0, 2)) * call.scale)


def loss(model: nn.Module, inputs: dict[str, Tensor]) -> float:
    """The language model's loss; of a model that has none, the mean square of what it returns."""
    with torch.no_grad():
        output = tensors(model(**inputs))[0]
    targets = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if targets is None or output.shape[-1] != 61:
        return float(output.square().mean())
    return float(nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), targets[:, 1:].flatten()))


def between(found: dict[str, Projections], before: dict[str, Run], on: str) -> tuple[float, bool]:
    """A threshold with about half of what is clipped together over it, and none near; and whether anything is under it."""
    tops: list[float] = []
    for module, one in before.items():
        query, key = found[module].query.count, found[module].key
        units = query if on != "both" or key is None else min(query, key.count)
        tops += one.largest.view(units, -1).amax(1).tolist()
    tops.sort()
    middle = len(tops) // 2
    return ((tops[middle - 1] + tops[middle]) / 2, True) if middle else (0.6 * tops[0], False)


@pytest.mark.parametrize("on", ["auto", "query", "both"])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_head_is_over_the_threshold_and_those_under_it_keep_their_bits(name: str, on: str) -> None:
    model, inputs = made(name)
    if on == "both" and name == "gemma3n":
        pytest.skip("its layers share keys: on='both' raises, which is tested below")
    found, given = find_projections(model), recorded(model, inputs)
    before = {module: run(model.get_submodule(module), one) for module, one in given.items()}
    weights = {key: weight.clone() for key, weight in model.state_dict().items()}
    (threshold, spares), was = between(found, before, on), loss(model, inputs)

    report = qk_clip_(model, {module: one.largest for module, one in before.items()}, threshold, on=on)

    after = {module: run(model.get_submodule(module), one) for module, one in given.items()}
    story = f"{name}: loss {was:.4f} -> {loss(model, inputs):.4f}; {report}"
    clipped = {(clip.module, head): clip for clip in report.clips for head in clip.heads}
    assert clipped, story
    edited = {edit.parameter for edit in report.edits}
    assert all(torch.equal(weight, weights[key]) for key, weight in model.state_dict().items() if key not in edited), story
    under = 0
    for module, one in before.items():
        new = after[module]
        assert float(new.largest.max()) <= threshold * (1 + 1e-3), story
        assert torch.equal(new.call.value, one.call.value), story
        group = one.call.query.shape[1] // one.call.key.shape[1]
        for head in range(len(one.largest)):
            same_query = torch.equal(new.call.query[:, head], one.call.query[:, head])
            same_key = torch.equal(new.call.key[:, head // group], one.call.key[:, head // group])
            clip = clipped.get((module, head))
            if clip is None:
                under += 1
                assert float(one.largest[head]) <= threshold, story
                assert same_query, story
                assert same_key, story
                continue
            assert not same_query, story
            assert same_key == (clip.on == "query"), story
            torch.testing.assert_close(new.largest[head], clip.factor * one.largest[head], rtol=2e-5, atol=0)
            assert clip.maximum == float(one.largest[list(clip.heads)].max())
            assert clip.factor == pytest.approx(threshold / clip.maximum, rel=1e-12)
    assert bool(under) == spares, story
    assert torch.isfinite(torch.tensor(loss(model, inputs))), story


@pytest.mark.parametrize(
    ("name", "on", "units"),
    [
        ("llama", "auto", {1}),  # two key heads for four query heads: each query head by its own maximum
        ("llama", "both", {2}),
        ("gpt2", "auto", {1}),
        ("qwen3", "auto", {4}),  # one gain for all heads
        ("olmo2", "both", {2}),
        ("deepseek_v3", "auto", {1}),
    ],
)
def test_what_is_clipped_together(name: str, on: str, units: set[int]) -> None:
    model, _ = made(name)
    maxima = {module: torch.tensor([50.0, 200.0, 120.0, 300.0]) for module in find_projections(model)}
    report = qk_clip_(model, maxima, 100.0, on=on)
    assert {len(clip.heads) for clip in report.clips} == units
    first = [clip for clip in report.clips if clip.module == report.clips[0].module]
    expected = {1: [0.5, 100 / 120, 1 / 3], 2: [0.5, 1 / 3], 4: [1 / 3]}[units.pop()]
    assert [clip.factor for clip in first] == pytest.approx(expected)
    assert {clip.on for clip in first} == {"query" if (name, on) == ("llama", "auto") else "both"}


def test_latent_attention_leaves_the_shared_rotary_key_alone() -> None:
    model, inputs = made("deepseek_v3")
    given = recorded(model, inputs)
    name = "model.layers.0.self_attn"
    module = model.get_submodule(name)
    before = run(module, given[name]).call
    report = qk_clip_(model, {name: torch.tensor([50.0, 400.0, 50.0, 50.0])}, 100.0)
    after = run(module, given[name]).call
    assert {edit.parameter for edit in report.edits} == {f"{name}.q_b_proj.weight", f"{name}.kv_b_proj.weight"}
    assert torch.equal(after.key[..., 6:], before.key[..., 6:])
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(after.key[:, 1, :, :6], before.key[:, 1, :, :6] * 0.5, **close)
    torch.testing.assert_close(after.query[:, 1, :, :6], before.query[:, 1, :, :6] * 0.5, **close)
    torch.testing.assert_close(after.query[:, 1, :, 6:], before.query[:, 1, :, 6:] * 0.25, **close)


def test_nothing_over_the_threshold_changes_nothing() -> None:
    model, _ = made("gpt2")
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    report = qk_clip_(model, {"transformer.h.1.attn": torch.tensor([-3.0, 0.0, 100.0, 7.0])}, 100.0)
    assert (report.clips, report.edits) == ((), ())
    assert str(report) == "nothing to clip: no head is over the threshold"
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())


def test_what_cannot_be_clipped_raises_and_leaves_every_bit() -> None:
    model, _ = made("gpt2")
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    first, second, over = "transformer.h.0.attn", "transformer.h.1.attn", torch.full((4,), 200.0)
    with pytest.raises(ArgumentError, match=r"threshold: got -1\.0; expected a finite number above 0"):
        qk_clip_(model, {first: over}, -1.0)
    with pytest.raises(ArgumentError, match=r"on: got 'key'; expected \"auto\", \"query\" or \"both\""):
        qk_clip_(model, {first: over}, on="key")
    with pytest.raises(
        ArgumentError, match=r"max_logits\['transformer.h.1.attn'\]: got \[3\]; expected a tensor \[heads\] with 4 heads"
    ):
        qk_clip_(model, {first: over, second: torch.ones(3)})
    with pytest.raises(ArgumentError, match=r"max_logits\['transformer.h.1.attn'\]: got \[1.0, inf"):
        qk_clip_(model, {first: over, second: torch.tensor([1.0, torch.inf, 1.0, 1.0])})
    with pytest.raises(ArgumentError, match=r"max_logits\['transformer.h.1.attn'\]: got \[nan"):
        qk_clip_(model, {first: over, second: torch.full((4,), torch.nan)})
    with pytest.raises(
        ArgumentError,
        match=r"max_logits: got 'transformer.h.9.attn'; expected names of attention modules, such as transformer.h.0",
    ):
        qk_clip_(model, {first: over, "transformer.h.9.attn": over})
    with pytest.raises(ArgumentError, match=r"max_logits: got Tensor; expected a dict of module names"):
        qk_clip_(model, over)  # pyrefly: ignore
    with pytest.raises(ArgumentError, match=r"model: got NoneType; expected a torch.nn.Module"):
        qk_clip_(None, {first: over})  # pyrefly: ignore
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())
    shared, _ = made("gemma3n")
    with pytest.raises(UnsupportedError, match=r'layers.0.self_attn: k cannot be scaled alone .* pass on="query"'):
        qk_clip_(shared, {"model.layers.0.self_attn": over}, on="both")


class Own(nn.Module):
    """An attention with a layout of its own: [k; q; v] in one matrix, heads of q interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(7, 3 * 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, q, _ = self.mix(x).chunk(3, -1)
        return q.unflatten(-1, (5, 2)).mT, k.unflatten(-1, (2, 5))


def test_a_layout_that_you_describe() -> None:
    torch.manual_seed(5)
    model = nn.ModuleDict({"attention": Own()})
    x = torch.randn(3, 7)
    names = ("mix.weight", "mix.bias")
    layout = Projections(Heads(names, 10 + torch.arange(10).view(5, 2).T), Heads(names, torch.arange(10).view(2, 5)))
    q, k = model["attention"](x)
    qk_clip_(model, {"attention": torch.tensor([90.0, 400.0])}, layouts={"attention": layout})
    new_q, new_k = model["attention"](x)
    assert torch.equal(new_q[:, 0], q[:, 0])
    assert torch.equal(new_k[:, 0], k[:, 0])
    torch.testing.assert_close(new_q[:, 1], q[:, 1] * 0.5)
    torch.testing.assert_close(new_k[:, 1], k[:, 1] * 0.5)
