"""QKClip in training loops: what is over the threshold comes under it, at the same inputs, in the model's own forward pass."""

import contextlib
import copy
import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.capture import Unseen, capture
from attemper.errors import ArgumentError, UnsupportedError
from attemper.monitor import Watch, watch
from attemper.monitor.clipping import QKClip
from attemper.weights import ClipReport, find_projections
from tests.capture.architectures import build
from tests.monitor.measuring import measured, scaled_maxima
from tests.monitor.small import Decoder, drawn, loss_of

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")


class Given:
    """Maxima said by the test, once, after QKClip has begun."""

    def __init__(self, maxima: dict[str, Any]) -> None:
        self.given, self.asked = maxima, 0

    def maxima(self) -> dict[str, Tensor]:
        self.asked += 1
        if self.asked == 1:
            return {}
        given, self.given = self.given, {}
        return {name: torch.as_tensor(each, dtype=torch.float64) for name, each in given.items()}


class Stepped(NamedTuple):
    """Largest logits of one step's tokens at the new weights."""

    before: float
    after: float  # the clip; of the first layer, since a clipped one changes the inputs of the next


def trained(threshold: float | None, steps: int = 12) -> list[Stepped]:
    """A run whose learning rate is far too high, each batch of which is seen twice."""
    torch.manual_seed(3)
    model = Decoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    found = []
    with contextlib.nullcontext() if threshold is None else QKClip(model, threshold) as clip:
        for step in range(2 * steps):
            tokens = drawn(step // 2)
            optimizer.zero_grad()
            loss_of(model, tokens).backward()
            if step % 2 == 0:
                optimizer.step()
                if clip is not None:
                    clip.step()  # of the weights before
            else:  # at the weights that the last step made
                before = measured(model, {"input_ids": tokens})
                if clip is not None and threshold is not None:
                    report = clip.step()
                    assert isinstance(report, ClipReport)
                    over = sum(int((each > threshold).sum()) for each in before.values())
                    assert clip.clipped == over == sum(len(one.heads) for one in report.clips)
                after = measured(model, {"input_ids": tokens})["blocks.0.self_attn"]
                found.append(Stepped(max(float(each.max()) for each in before.values()), float(after.max())))
    assert Watch.of(model) is None
    return found


def test_a_run_that_would_diverge_stays_under_the_threshold() -> None:
    held, free = trained(5.0), trained(None)
    assert max(step.before for step in held) > 5.0
    assert max(step.after for step in held) <= 5.0 * (1 + 1e-5)
    assert max(step.before for step in held) < 8.0  # what one step of the optimiser adds
    assert max(step.before for step in free) > 10.0


def test_its_own_watch_goes_with_it_and_another_one_stays() -> None:
    model = Decoder(layers=1)
    with QKClip(model) as clip:
        assert isinstance(Watch.of(model), Watch)
        assert repr(clip) == "QKClip(threshold=100, layers=1, unclipped=0)"
        assert clip.step() is None
    assert Watch.of(model) is None
    clip.remove()
    with watch(model, every=3) as watching:
        with QKClip(torch.compile(model, backend="eager"), 0.001) as clip:
            for _ in range(2):  # the maxima of steps that are not logged too
                loss_of(model, drawn(0)).backward()
                clip.step()
                assert clip.clipped == 3
                clip.threshold /= 2
                watching.step(**clip.scalars())
        assert Watch.of(model) is watching
        assert watching.last is not None
        assert watching.last.scalars["clipped_heads"] == 3.0


FAMILIES = ("gpt2", "llama", "deepseek_v3", "qwen3", "siglip", "gemma2", "albert", "gpt_oss", "whisper")


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    model, inputs = build(name, gain=4.0)
    first = measured(model, inputs)
    assert set(first) <= set(find_projections(model))
    tops = torch.cat([each[each > -math.inf] for each in first.values()]).sort().values
    threshold = float(tops[len(tops) // 2 - 1 : len(tops) // 2 + 1].mean())
    with QKClip(model, threshold) as clip:
        assert clip.unclipped == {}
        for _ in range(40):  # layers behind a clipped one see other inputs: they settle one after the other
            model(**inputs)
            report = clip.step()
            assert report is not None
            if not report.clips:
                break
    assert max(float(each.max()) for each in measured(model, inputs).values()) <= threshold * (1 + 1e-5)
    assert sum(int(counts.sum()) for counts in clip.total.values()) > 0


def test_a_shared_module_is_clipped_once_by_the_largest_of_its_calls() -> None:
    model, inputs = build("albert", gain=4.0)
    calls: list[Tensor] = []
    with torch.no_grad(), capture(model, lambda call: calls.append(scaled_maxima(call))):
        model(**inputs)
    assert len(calls) > 1
    largest = torch.stack(calls).amax(0)
    with QKClip(model, float(largest.max()) / 2) as clip:
        model(**inputs)
        report = clip.step()
    assert report is not None
    assert max(one.maximum for one in report.clips) == pytest.approx(float(largest.max()), rel=1e-6)
    (total,) = clip.total.values()
    assert total.tolist() == (largest > largest.max() / 2).long().tolist()


@pytest.mark.parametrize("mode", ["observe", "use"])
def test_learned_factors_and_softcaps(mode: Any) -> None:
    """What is held is |scale·q·k|: with a learned factor of each head, and before the softcap."""
    torch.manual_seed(9)
    factors = nn.Parameter(torch.tensor([0.5, -3.0, 8.0]))
    model = attemper.nn.MultiheadAttention(33, 3, scale=factors, softcap=2.0, batch_first=True)
    x = torch.randn(2, 13, 33)
    with torch.no_grad():
        model(x, x, x, need_weights=False)
        q, k = (part.unflatten(-1, (3, 11)).transpose(1, 2) for part in F.linear(x, model.in_proj_weight).chunk(3, -1)[:2])
        largest = (factors[:, None, None] * (q @ k.mT)).abs().amax((0, 2, 3))
    threshold = float(largest.sort().values[:2].mean())
    with watch(model, mode=mode), QKClip(model, threshold) as clip:
        model(x, x, x, need_weights=False)
        report = clip.step()
    assert report is not None
    expected = [(threshold / each) for each in largest.tolist() if each > threshold]
    assert [each.factor for each in report.clips] == pytest.approx(expected, rel=1e-5)
    assert max(largest.tolist()) > 2.0


class Tied(nn.Module):
    """Two attention modules that hold one W_q, and two plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.apart = (nn.MultiheadAttention(22, 2) for _ in range(3))
        self.other.in_proj_weight, self.other.in_proj_bias = self.one.in_proj_weight, self.one.in_proj_bias


def test_modules_that_share_weights_are_clipped_together() -> None:
    torch.manual_seed(7)
    model = Tied()
    weight, apart = model.one.in_proj_weight.detach().clone(), model.apart.in_proj_weight.detach().clone()
    clip = QKClip(model, 100.0, watch=Given({"one": [50.0, 200.0], "other": [20.0, 400.0], "apart": [3.0, 99.0]}))
    report = clip.step()
    assert report is not None
    assert [(each.module, each.heads, each.factor) for each in report.clips] == [("one", (1,), 0.25), ("other", (1,), 0.25)]
    torch.testing.assert_close(model.one.in_proj_weight[11:22], weight[11:22] * 0.5)
    assert torch.equal(model.one.in_proj_weight[:11], weight[:11])
    assert torch.equal(model.one.in_proj_weight[44:], weight[44:])
    assert torch.equal(model.apart.in_proj_weight, apart)


def test_what_cannot_be_clipped_is_named_and_told_once() -> None:
    model = nn.ModuleDict({"good": nn.MultiheadAttention(22, 2), "bad": nn.MultiheadAttention(22, 2)})
    model["embedding"] = nn.Embedding(22, 22)
    model["bad"].out_proj.weight = model["embedding"].weight  # of no matter
    torch.nn.utils.parametrize.register_parametrization(model["bad"], "in_proj_weight", nn.Identity())
    watch = Given({"good": [1.0, 2.0], "bad": [101.0, 2.0], "elsewhere": [7.0]})
    clip = QKClip(model, 100.0, watch=watch)
    assert list(clip.unclipped) == ["bad"]
    assert "computed from other parameters" in clip.unclipped["bad"]
    with pytest.warns(UserWarning, match=r"QKClip: bad: a logit of 101 is over 100, unclipped: .*bad.in_proj_weight") as told:
        clip.step()
    assert len(told) == 1
    assert told[0].filename == __file__
    assert "q and k are made is not known" in clip.unclipped["elsewhere"]
    watch.given = {"bad": [102.0, 2.0]}
    assert clip.step() is None  # no second warning, which would be an error
    with pytest.raises(ArgumentError, match=r"model: got Linear without any that can be clipped \(none\)"):
        QKClip(nn.Linear(3, 3), watch=watch)
    with pytest.raises(ArgumentError, match=r"threshold: got 0; expected a finite number above 0"):
        QKClip(model, 0, watch=watch)
    with pytest.raises(ArgumentError, match=r"on: got 'key'"):
        QKClip(model, on="key", watch=watch)  # pyrefly: ignore
    with pytest.raises(ArgumentError, match=r"layouts: got 'nowhere'"):
        QKClip(model, watch=watch, layouts={"nowhere": find_projections(model, only={"good"})["good"]})
    watch.given = {"good": [200.0]}
    with pytest.raises(ArgumentError, match=r"watch.maxima\(\)\['good'\]: got \[1\]; expected \[2\], its heads"):
        clip.step()


def test_projections_with_adapters_are_named_and_keep_their_weights() -> None:
    model, inputs = build("llama", gain=4.0)
    first, second = (layer.self_attn for layer in model.model.layers)
    adapter = nn.Linear(first.q_proj.in_features, 3, bias=False)
    first.q_proj.add_module("adapter", adapter)
    kept, changed = first.q_proj.weight.detach().clone(), second.q_proj.weight.detach().clone()
    with QKClip(model, 1e-3) as clip:
        assert list(clip.unclipped) == ["model.layers.0.self_attn"]
        model(**inputs)
        with pytest.warns(UserWarning, match=r"unclipped: model.layers.0.*\(adapter.weight\)"):
            clip.step()
    assert torch.equal(first.q_proj.weight, kept)
    assert not torch.equal(second.q_proj.weight, changed)


def test_a_run_in_which_nothing_is_measured_says_so_once() -> None:
    class Blind(Given):
        def unseen(self) -> tuple[Unseen, ...]:
            return (Unseen("one", "it hides"),)

    model = nn.ModuleDict({"one": nn.MultiheadAttention(22, 2)})
    clip = QKClip(model, watch=Blind({}))
    with pytest.warns(UserWarning, match=r"QKClip: no logits were measured, so nothing is clipped \(one: it hides\)") as told:
        assert clip.step() is None
    assert told[0].filename == __file__
    assert clip.step() is None


def test_a_second_one_on_a_watch_is_refused_until_the_first_is_removed() -> None:
    model, tokens = steep()
    with QKClip(model, 10.0) as first:
        loss_of(model, tokens).backward()
        with pytest.raises(UnsupportedError, match=r"model: a QKClip asks this watch already, .*; remove\(\) it first"):
            QKClip(model, 5.0)
        first.step()
        assert first.clipped > 0  # by what was measured before
    with pytest.raises(UnsupportedError, match="QKClip: it was removed, and clips no more"):
        first.step()
    with watch(model) as watching:
        clip = QKClip(model, 5.0, watch=watching)
        clip.remove()
        clip = QKClip(model, 5.0)
        del clip  # one that nobody holds asks no more
        with QKClip(model, 5.0) as clip:
            assert clip.step() is None


def test_a_watch_that_was_removed_is_said() -> None:
    model, tokens = steep()
    watching = watch(model)
    clip = QKClip(model, 10.0)
    loss_of(model, tokens).backward()
    watching.remove()
    with pytest.raises(UnsupportedError, match="watch: it was removed, and measures nothing more"):
        clip.step()
    clip.remove()
    with pytest.raises(UnsupportedError, match="watch: it was removed, and measures nothing more"):
        QKClip(model, watch=watching)


@pytest.mark.parametrize("bad", ["x", None, math.nan, math.inf, 0, -1.0])
def test_a_threshold_that_is_set_later_is_checked(bad: Any) -> None:
    clip = QKClip(nn.MultiheadAttention(22, 2), 7.0, watch=Given({}))
    with pytest.raises(ArgumentError, match=rf"threshold: got {bad!r}; expected a finite number above 0"):
        clip.threshold = bad
    assert clip.threshold == 7.0


def test_weights_that_are_flattened_are_refused() -> None:
    class FullyShardedDataParallel(nn.Module):
        pass

    model = nn.ModuleDict({"one": nn.MultiheadAttention(22, 2), "other": FullyShardedDataParallel()})
    with pytest.raises(UnsupportedError, match=r"FullyShardedDataParallel flattens weights, .*; use fully_shard"):
        QKClip(model, watch=Given({}))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_maxima_that_are_not_finite_leave_the_weights_alone(bad: float) -> None:
    torch.manual_seed(7)
    model = nn.ModuleDict({"one": nn.MultiheadAttention(22, 2), "other": nn.MultiheadAttention(22, 2)})
    watch = Given({"one": [bad, 500.0], "other": [200.0, -math.inf]})
    before = copy.deepcopy(model.state_dict())
    clip = QKClip(model, 100.0, watch=watch)
    with pytest.warns(UserWarning, match=r"QKClip: one: its logits are NaN or infinite"):
        report = clip.step()
    assert report is not None
    assert [(each.module, each.heads) for each in report.clips] == [("other", (0,))]
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items() if name.startswith("one"))
    assert clip.scalars() == {"clipped_heads": 1.0, "min_factor": 0.5, "skipped_layers": 1.0}
    watch.given = {"one": [bad, 500.0]}
    assert clip.step().clips == ()  # pyrefly: ignore
    assert clip.nonfinite == {"one": 2, "other": 0}
    assert clip.scalars() == {"clipped_heads": 0.0, "min_factor": 1.0, "skipped_layers": 1.0}


def test_maxima_are_used_once() -> None:
    model = nn.ModuleDict({"one": nn.MultiheadAttention(22, 2)})
    clip = QKClip(model, 100.0, watch=Given({"one": [200.0, -math.inf]}))
    assert clip.step() is not None
    weight = model["one"].in_proj_weight.detach().clone()
    assert clip.step() is None
    assert torch.equal(model["one"].in_proj_weight, weight)
    assert clip.clipped == 0
    assert clip.total["one"].tolist() == [1, 0]


def test_counts_are_saved_and_go_on() -> None:
    model = nn.ModuleDict({"one": nn.MultiheadAttention(22, 2)})
    clip = QKClip(model, 100.0, watch=Given({"one": [200.0, 400.0]}))
    clip.step()
    state = torch.load(_saved(clip.state_dict()), weights_only=True)
    again = QKClip(model, 100.0, watch=Given({"one": [125.0, 3.0]}))
    again.load_state_dict(state)
    again.step()
    assert again.total["one"].tolist() == [2, 1]
    assert again.smallest == 0.25
    assert again.min_factor == 0.8
    assert clip.total["one"].tolist() == [1, 1]
    other = QKClip(nn.ModuleDict({"one": nn.MultiheadAttention(21, 3)}), watch=Given({}))
    with pytest.raises(ArgumentError, match=r"state: got \[2\] for 'one'; expected counts of \[3\] there"):
        other.load_state_dict(state)


COUNTS = {"one": torch.tensor([1, 0])}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ([], "state: got a list; expected the dict that QKClip.state_dict gave: total, smallest, nonfinite"),
        (None, "state: got a NoneType"),
        ({}, "state: got nothing for 'total', 'smallest', 'nonfinite'"),
        ({"total": COUNTS, "nonfinite": {"one": 0}}, "state: got nothing for 'smallest'"),
        ({"total": [1], "smallest": 1.0, "nonfinite": {"one": 0}}, r"state\['total'\]: got \[1\]; expected Tensor of each layer"),
        ({"total": {"one": [1, 0]}, "smallest": 1.0, "nonfinite": {"one": 0}}, r"state\['total'\]: got \[1, 0\]"),
        ({"total": COUNTS, "smallest": "1", "nonfinite": {"one": 0}}, r"state\['smallest'\]: got '1'; expected a number"),
        ({"total": COUNTS, "smallest": 1.0, "nonfinite": {"one": "0"}}, r"state\['nonfinite'\]: got '0'; expected int of each"),
        ({"total": COUNTS, "smallest": 1.0, "nonfinite": ["one"]}, r"state\['nonfinite'\]: got \['one'\]"),
    ],
)
def test_counts_of_something_else_are_refused(state: Any, words: str) -> None:
    clip = QKClip(nn.ModuleDict({"one": nn.MultiheadAttention(22, 2)}), watch=Given({}))
    before = clip.state_dict()
    with pytest.raises(ArgumentError, match=words):
        clip.load_state_dict(state)
    assert repr(clip.state_dict()) == repr(before)


def _saved(state: dict[str, Any]) -> Any:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def steep() -> tuple[Decoder, Tensor]:
    torch.manual_seed(5)
    model = Decoder(layers=1)
    with torch.no_grad():
        model.blocks[0].self_attn.in_proj_weight.mul_(9.0)  # pyrefly: ignore
    return model, drawn(0)


def test_the_optimiser_keeps_its_state_and_a_step_that_the_scaler_skipped_changes_nothing() -> None:
    model, tokens = steep()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)  # at which gradients overflow: the step is skipped
    with QKClip(model, 10.0) as clip:
        weights = copy.deepcopy(model.state_dict())
        scaler.scale(loss_of(model, tokens) * 1e6).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
        clip.step()
        assert clip.clipped > 0
        assert float(measured(model, {"input_ids": tokens})["blocks.0.self_attn"].max()) <= 10.0 * (1 + 1e-5)
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict()["state"])
        clip.threshold = 5.0
        clip.step()
    assert clip.clipped > 0
    for key, each in optimizer.state_dict()["state"].items():
        assert all(torch.equal(tensor, state[key][name]) for name, tensor in each.items())


def test_float32_copies_that_the_optimiser_steps_are_clipped_in_place_of_the_16_bit_weights() -> None:
    masters, tokens = steep()
    model = copy.deepcopy(masters).bfloat16()
    with watch(model) as watching:
        clip = QKClip(masters, 10.0, watch=watching)
        model(tokens)
        clip.step()
    assert clip.clipped > 0
    with torch.no_grad():
        for low, high in zip(model.parameters(), masters.parameters(), strict=True):
            low.copy_(high)
    largest = float(measured(model, {"input_ids": tokens})["blocks.0.self_attn"].max())
    # q and k are rounded to bfloat16 as well as the weights: 2⁻⁸ each, of sums of absolute values.
    assert largest <= 10.0 * (1 + 4 * 2**-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_stay_within_their_rounding(dtype: torch.dtype) -> None:
    """Clipped again and again at the same inputs, the bound that docs/clip.md states holds, and the clip comes to rest."""
    torch.manual_seed(21)
    model = nn.MultiheadAttention(66, 6, batch_first=True, dtype=dtype)
    x = torch.randn(2, 31, 66, dtype=dtype)
    with torch.no_grad():
        model.in_proj_weight.mul_(6.0)
    threshold, unit = 10.0, torch.finfo(dtype).eps / 2
    with QKClip(model, threshold) as clip:
        for _ in range(3):
            model(x, x, x, need_weights=False)
            clip.step()
        weights, bias = model.in_proj_weight.detach().double(), model.in_proj_bias.detach().double()
        sizes = F.linear(x.double().abs(), weights.abs(), bias.abs())
        q, k = (part.unflatten(-1, (6, 11)).transpose(1, 2) for part in sizes.chunk(3, -1)[:2])
        # W_q, W_k, q and k are rounded after the clip, and q and k were before it; the float32 sums are of no weight here.
        slack = 6 * unit * float((q @ k.mT).max()) / math.sqrt(11)
        model(x, x, x, need_weights=False)
        largest = max(float(each.max()) for each in watch_maxima(model).values())
    assert threshold * 0.9 < largest <= threshold + slack


def watch_maxima(model: nn.Module) -> dict[str, Tensor]:
    found = Watch.of(model)
    assert found is not None
    return found.maxima()


def test_a_compiled_model_sees_the_new_weights_and_compiles_nothing_anew() -> None:
    torch.manual_seed(5)
    model, seen = Decoder(layers=1), 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal seen
        seen += 1
        return graph

    compiled, tokens = torch.compile(model, backend=backend), drawn(0)
    with torch.no_grad():
        first = compiled(tokens)
        graphs = seen
        QKClip(model, 1.0, watch=Given({"blocks.0.self_attn": [9.0, 25.0, 3.0]})).step()
        second = compiled(tokens)
        assert not torch.allclose(first, second)
        torch.testing.assert_close(second, model(tokens))
    assert seen == graphs


def test_a_compiled_model_is_clipped_by_what_its_own_watch_measures() -> None:
    model, tokens = steep()
    compiled = torch.compile(model, backend="eager")
    with QKClip(compiled, 10.0) as clip:
        loss_of(compiled, tokens).backward()
        report = clip.step()
    assert report is not None
    assert report.clips
    assert float(measured(model, {"input_ids": tokens})["blocks.0.self_attn"].max()) <= 10.0 * (1 + 1e-5)
