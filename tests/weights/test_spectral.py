"""σReparam: the spectral norm is γ, gradients are those of the formula, it trains, saves, and can be taken off again."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attemper.errors import ArgumentError, UnsupportedError
from attemper.scales import Constant
from attemper.weights import SigmaReparam, fold_scale, spectral_reparam
from tests.capture.architectures import build
from tests.capture.watching import tensors

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def norm(weight: Tensor) -> float:
    return float(torch.linalg.matrix_norm(weight.detach().double(), 2))


@pytest.mark.parametrize("shape", [(13, 7), (7, 13), (1, 5), (5, 1)])
@pytest.mark.parametrize("gain", [None, 1.0, 3.5])
def test_the_spectral_norm_is_gamma(shape: tuple[int, int], gain: float | None) -> None:
    torch.manual_seed(3)
    layer = nn.Linear(shape[1], shape[0]).double().eval()
    before = layer.weight.detach().clone()
    done = spectral_reparam(layer, gain=gain)
    assert done.weights == ("weight",)
    expected = norm(before) if gain is None else gain
    assert norm(layer.weight) == pytest.approx(expected, rel=1e-8)
    assert float(layer.parametrizations.weight[0].gain) == pytest.approx(expected, rel=1e-8)
    torch.testing.assert_close(layer.weight, before * (expected / norm(before)), rtol=1e-8, atol=1e-12)


def test_gradients_are_those_of_the_formula() -> None:
    torch.manual_seed(3)
    weight = torch.randn(13, 7, dtype=torch.float64, requires_grad=True)
    towards = torch.randn(13, 7, dtype=torch.float64)
    reparametrise = SigmaReparam(weight, 2.5).eval()
    one, of_gain = torch.autograd.grad((reparametrise(weight) * towards).sum(), [weight, reparametrise.gain])
    gamma = torch.tensor(2.5, dtype=torch.float64, requires_grad=True)
    wanted = weight * (gamma / torch.linalg.matrix_norm(weight, 2))
    other, of_gamma = torch.autograd.grad((wanted * towards).sum(), [weight, gamma])
    # u and v are right to about √1e-9, which the gradient inherits.
    torch.testing.assert_close(one, other, rtol=0, atol=1e-3 * float(other.abs().max()))
    torch.testing.assert_close(of_gain, of_gamma, rtol=1e-7, atol=0)
    assert abs(float((one * weight).sum())) < 1e-9  # the length of W has no effect


@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v3", "siglip", "bert"])
def test_a_model_keeps_its_function_there_and_back(name: str) -> None:
    model, inputs = build(name, gain=3.0)
    keys = set(model.state_dict())
    with torch.no_grad():
        before = tensors(model(**inputs))
        done = spectral_reparam(model)
        during = tensors(model(**inputs))
        computed = {name: _value(model, name).clone() for name in done.weights}
        model.train()
        done.remove()
        after = tensors(model.eval()(**inputs))
    assert all(torch.equal(model.get_parameter(name), weight) for name, weight in computed.items())
    assert set(model.state_dict()) == keys
    assert done.weights
    for one, two, three in zip(before, during, after, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(three, two, rtol=1e-5, atol=1e-5)  # torch's own module then takes another path


def test_which_weights() -> None:
    model, _ = build("llama")
    assert spectral_reparam(model).weights == tuple(
        f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qk"
    )
    model, _ = build("gpt2")  # its lm_head is the embedding
    names = spectral_reparam(model, which="all").weights
    assert {name.split(".")[-2] for name in names} == {"c_attn", "c_proj", "c_fc"}
    assert len(names) == 8
    assert spectral_reparam(build("siglip")[0]).weights[-1] == "head.attention.in_proj_weight"
    assert len(spectral_reparam(build("llama")[0].model.layers[0].self_attn).weights) == 2


def test_it_trains_and_gamma_stays_the_norm() -> None:
    model, inputs = build("llama", gain=2.0)
    model.train()
    done = spectral_reparam(model, gain=1.0)
    gains = [parameter for name, parameter in model.named_parameters() if name.endswith("0.gain")]
    assert len(gains) == len(done.weights) == 4
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        # Two forward passes before a backward pass reads what the first one kept.
        losses += [model(**inputs, labels=inputs["input_ids"]).loss for _ in range(2)]
        (losses[-1] + losses[-2]).backward()
        optimiser.step()
    assert losses[-1] < 0.8 * losses[0]
    assert all(gain.grad is not None and float(gain.grad.abs()) > 0 and float(gain) != 1.0 for gain in gains)
    for name, gain in zip(done.weights, gains, strict=True):
        assert norm(_value(model, name)) == pytest.approx(float(gain), rel=0.01)


def _value(model: nn.Module, name: str) -> Tensor:
    path, _, tensor = name.rpartition(".")
    return getattr(model.get_submodule(path).eval(), tensor)


def test_a_state_dict_goes_round() -> None:
    model, inputs = build("bert")
    spectral_reparam(model, gain=1.7)
    other, _ = build("bert", seed=11)
    spectral_reparam(other)
    state = model.state_dict()
    assert "encoder.layer.0.attention.self.query.parametrizations.weight.0.gain" in state
    other.load_state_dict(state)
    with torch.no_grad():
        for one, two in zip(tensors(model(**inputs)), tensors(other(**inputs)), strict=True):
            assert torch.equal(one, two)
    name = "encoder.layer.0.attention.self.query.weight"
    assert torch.equal(_value(copy.deepcopy(model), name), _value(model, name))


def test_sixteen_bits_are_computed_in_thirty_two() -> None:
    torch.manual_seed(3)
    layer = nn.Linear(13, 7, dtype=torch.bfloat16).eval()
    before = layer.weight.detach().clone()
    spectral_reparam(layer)
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight, before)  # γ/σ is 1 up to what bfloat16 cannot see
    layer(torch.ones(2, 13, dtype=torch.bfloat16)).sum().backward()


def test_random_numbers_stay_where_they_were() -> None:
    torch.manual_seed(3)
    layer = nn.Linear(13, 7)
    state = torch.get_rng_state()
    spectral_reparam(layer)
    layer(torch.zeros(2, 13))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_be_reparametrised() -> None:
    with pytest.raises(ArgumentError, match=r"which: got 'q'; expected \"qk\" or \"all\""):
        spectral_reparam(nn.Linear(3, 5), which="q")
    with pytest.raises(ArgumentError, match=r"gain: got 0\.0; expected a finite number above 0"):
        spectral_reparam(nn.Linear(3, 5), gain=0.0)
    with pytest.raises(ArgumentError, match=r"model: got ReLU without"):
        spectral_reparam(nn.ReLU())
    zero = nn.Linear(3, 5)
    nn.init.zeros_(zero.weight)
    with pytest.raises(ArgumentError, match=r"weight: got a matrix with spectral norm 0\.0"):
        spectral_reparam(zero)
    model, _ = build("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.k_proj.weight = first.k_proj.weight
    with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn\.k_proj\.weight is held by several modules"):
        spectral_reparam(model)
    assert not any(parametrize.is_parametrized(module) for module in model.modules())
    model, _ = build("llama")
    spectral_reparam(model)
    with pytest.raises(ArgumentError, match=r"q_proj\.weight, which is computed from other parameters already"):
        spectral_reparam(model)
    with pytest.raises(ArgumentError, match=r"q_proj\.weight, which is computed from other parameters; expected a plain weight"):
        fold_scale(model, Constant(1.0), Constant(2.0))
