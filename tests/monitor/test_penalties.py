"""Penalties of whole models: their value and gradient, however the model is trained, against a float64 eager definition."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.capture.using import Use
from attemper.errors import ArgumentError, UnsupportedError
from attemper.monitor import watch
from attemper.monitor.penalties import Penalties
from attemper.ops import LISTENERS
from tests.attention_cases import Budget
from tests.capture.architectures import build


class Attention(nn.Module):
    """Causal attention, 3 heads of width 7; in its plain form with every weight written down, and its penalty beside."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(21, 63), nn.Linear(21, 21)
        self.plain = False
        self.penalty = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).unflatten(-1, (3, 3, 7)).permute(2, 0, 3, 1, 4)
        if not self.plain:
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        logits = (q @ k.mT / 7**0.5).masked_fill(hidden, -torch.inf)
        weights, lse = logits.softmax(-1), logits.logsumexp(-1)
        entropy = -(weights * (logits - lse.unsqueeze(-1)).masked_fill(hidden, 0.0)).sum(-1)
        lse, entropy = lse[..., 1:], entropy[..., 1:] / torch.arange(2, x.shape[1] + 1).log()  # the first row has one key
        self.penalty = 1e-2 * lse.square().mean() + 0.5 * (0.9 - entropy).clamp(min=0.0).square().mean()
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, reentrant: bool | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.reentrant, self.dropout = reentrant, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            run: Callable[[Tensor], Tensor] = lambda y, layer=layer: y + self.dropout(layer(y))  # noqa: E731
            x = run(x) if self.reentrant is None or not self.training else checkpoint(run, x, use_reentrant=self.reentrant)
        return x


FACTORS: dict[str, Any] = {"z_loss": 1e-2, "entropy_floor": (0.9, 0.5)}


def made(**options: Any) -> tuple[Model, Tensor]:
    torch.manual_seed(3)
    model = Model(**options)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    return model, torch.randn(2, 13, 21)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def eager(x: Tensor, dtype: torch.dtype, model: Model | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Penalty and gradients of loss and penalty, by the plain definition."""
    model = copy.deepcopy(made()[0] if model is None else model).to(dtype)
    for layer in model.layers:
        layer.plain = True  # pyrefly: ignore
    output = model(x.to(dtype))
    penalty = torch.stack([layer.penalty for layer in model.layers]).sum()  # pyrefly: ignore
    (output.square().mean() + penalty).backward()
    return penalty.detach(), gradients(model)


@pytest.mark.parametrize("reentrant", [None, False])
def test_value_and_gradient(reentrant: bool | None) -> None:
    budget = Budget()
    for seed in range(5):
        model, x = made(reentrant=reentrant)
        x = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        with Penalties(model, **FACTORS) as penalties:
            output = model(x)
            penalty = penalties()
            (output.square().mean() + penalty).backward()
        assert penalty.dtype == torch.float32
        (true, exact), (single, peers) = eager(x, torch.float64), eager(x, torch.float32)
        budget.add("penalty", penalty, true, single)
        found = gradients(model)
        assert set(found) == set(exact)
        for kind in ("mix.weight", "mix.bias", "out.weight", "out.bias"):  # together: k's bias has a gradient of rounding alone
            budget.add(kind, *(torch.stack([each[f"layers.{i}.{kind}"] for i in range(3)]) for each in (found, exact, peers)))
        assert Use.of(model) is None
        assert LISTENERS == []
    budget.check()


def test_checkpointing_changes_no_bit_with_dropout() -> None:
    found = []
    for reentrant in (None, False):
        model, x = made(reentrant=reentrant, dropout=0.3)
        with Penalties(model, **FACTORS) as penalties:
            torch.manual_seed(4)
            (model(x).square().mean() + penalties()).backward()
        found.append(gradients(model))
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


def test_reentrant_checkpointing_is_refused() -> None:
    model, x = made(reentrant=True)
    with Penalties(model, **FACTORS) as penalties:
        with pytest.raises(UnsupportedError, match=r"layers.0: it runs under reentrant activation checkpointing"):
            model(x.requires_grad_())
        model.reentrant = None  # and nothing is left of the failed pass
        model(x)
        assert penalties().requires_grad


def test_accumulation_evaluation_and_what_is_forgotten() -> None:
    model, x = made()
    first, second = x, x.flip(1)
    with Penalties(model, **FACTORS) as penalties:
        apart = []
        for one in (first, second):
            model(one)
            apart.append(penalties())
        model.eval()
        model(first)  # with gradients, in evaluation mode
        model.train()
        with torch.no_grad():
            model(first)
        with pytest.raises(
            UnsupportedError, match=r"no attention was computed by attemper in training mode .* since the last call"
        ):
            penalties()
        model(first)
        model.eval()
        model(second)
        model.train()
        model(second)
        torch.testing.assert_close(penalties(), apart[0] + apart[1])
        model(first)
        penalties.forget()
        model(second)
        assert torch.equal(penalties(), apart[1])
    assert not torch.equal(apart[0], apart[1])


def test_micro_batches_add_up() -> None:
    model, x = made()
    with Penalties(model, **FACTORS) as penalties:
        for _ in range(2):
            (model(x).square().mean() + penalties()).backward()
    twice = gradients(model)
    once = eager(x, torch.float64)[1]
    for name, gradient in twice.items():
        torch.testing.assert_close(gradient, 2 * once[name].float(), rtol=1e-4, atol=1e-5)


def test_some_layers_and_one_penalty_alone() -> None:
    model, x = made()
    with Penalties(model, **FACTORS) as penalties:
        model(x)
        everything = penalties()
    parts = []
    for options in ({"z_loss": 1e-2, "entropy_floor": None}, {"z_loss": None, "entropy_floor": (0.9, 0.5)}):
        for layers in ("layers.0", ["layers.1", "*.2"]):
            with Penalties(model, **options, layers=layers) as penalties:
                model(x)
                parts.append(penalties())
    assert len({float(part.detach()) for part in parts}) == 4
    torch.testing.assert_close(torch.stack(parts).sum(), everything)


def test_padding_is_left_out() -> None:
    model, inputs = build("bert", gain=3.0)  # row 1 has 4 of its 11 tokens padded
    model.train()
    found = []
    for length in (11, 7):
        batch = {name: each[1:2, :length] for name, each in inputs.items()}
        with Penalties(model, **FACTORS) as penalties:
            model(**batch)
            found.append(penalties())
            assert penalties.kept == ()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_of_hugging_face_that_checkpoints(reentrant: bool) -> None:
    found = []
    for checkpointed in (False, True):
        model, inputs = build("llama", gain=3.0)
        model.train()
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        with Penalties(model, **FACTORS) as penalties:
            if checkpointed and reentrant:
                with pytest.raises(UnsupportedError, match=r"model.layers.0.self_attn: it runs under reentrant"):
                    model(**inputs)
                return
            (model(**inputs, use_cache=False).logits.square().mean() + penalties()).backward()
        found.append(gradients(model))
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def test_under_autocast() -> None:
    model, x = made()
    with Penalties(model, **FACTORS) as penalties, torch.autocast("cpu", torch.bfloat16):
        output = model(x)
        penalty = penalties()
        (output.float().square().mean() + penalty).backward()
    assert penalty.dtype == torch.float32
    torch.testing.assert_close(penalty.detach().double(), eager(x, torch.float64)[0], rtol=0.02, atol=0)
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_beside_a_watch_and_in_a_model_in_use() -> None:
    model, x = made()
    with attemper.use(model) as used, watch(model) as watching:
        with Penalties(model, **FACTORS) as penalties:
            model(x).square().mean().backward()
            record = watching.step()
            assert penalties().requires_grad
        assert Use.of(model) is used
    assert record is not None
    assert [each.layer for each in record.layers] == ["layers.0", "layers.1", "layers.2"]


def test_copies_of_the_model_collect_nothing() -> None:
    model, x = made()
    with Penalties(model, **FACTORS) as penalties:
        model(x)
        average = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(average))
        kept = penalties()
        average(x)
        loaded(x)
        with pytest.raises(UnsupportedError, match="since the last call"):
            penalties()
        model(x)
        assert torch.equal(penalties(), kept)


class Failing(nn.Module):
    """A layer at the end that raises what it is told to."""

    fault: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fault is not None:
            raise self.fault
        return x


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])  # of the latter torch tells no hook
def test_a_pass_that_failed_counts_for_nothing(fault: type[BaseException]) -> None:
    inner, x = made()
    failing = Failing()
    model = nn.Sequential(inner, failing)

    def fail() -> None:
        failing.fault = fault("broken off")
        with pytest.raises(fault, match="broken off"):
            model(x)
        failing.fault = None

    with Penalties(model, **FACTORS) as penalties:
        model(x)
        once = penalties()
        fail()
        model(x)
        assert torch.equal(penalties(), once)
        model(x)
        failing.fault = fault("broken off")
        try:
            model(x)
        except fault:  # tried again while it is being handled
            failing.fault = None
            model(x)
        torch.testing.assert_close(penalties(), 2 * once)
        fail()
        with pytest.raises(UnsupportedError, match="since the last call"):
            penalties()
        fail()
        model.eval()
        model(x)
        with pytest.raises(UnsupportedError, match="since the last call"):
            penalties()


def test_removing_after_an_interrupt_leaves_no_hook() -> None:
    hooks = (torch.nn.modules.module._global_forward_pre_hooks, torch.nn.modules.module._global_forward_hooks)
    before = [len(each) for each in hooks]
    model = nn.Sequential(made()[0], Failing())
    model[1].fault = KeyboardInterrupt("broken off")
    with Penalties(model, **FACTORS), pytest.raises(KeyboardInterrupt, match="broken off"):
        model(made()[1])
    assert [len(each) for each in hooks] == before
    assert Use.of(model) is None


class Again(nn.Module):
    """A model that calls itself once."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.depth = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        self.depth = 1 - self.depth
        if self.depth:
            self(x)
        return self.inner(x)


def test_a_model_that_calls_itself_counts_both_calls() -> None:
    inner, x = made()
    model = Again(inner)
    with Penalties(inner, **FACTORS) as penalties:
        inner(x)
        once = penalties()
    with Penalties(model, **FACTORS) as penalties:
        model(x)
        torch.testing.assert_close(penalties(), 2 * once)


class Materialised(nn.Module):
    """Attention that nobody can replace."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.query(x) @ self.key(x).mT, -1) @ x


def test_what_cannot_be_done_is_said() -> None:
    model, x = made()
    other = nn.Sequential(Materialised())
    with Penalties(other) as penalties:
        other(x[..., :5])
        assert [each.module for each in penalties.kept] == ["0"]
        with pytest.raises(UnsupportedError, match=r"since the last call \(0: "):
            penalties()
    with pytest.raises(UnsupportedError, match="model: it is compiled"):
        Penalties(torch.compile(model, backend="eager"))  # pyrefly: ignore
    with pytest.raises(ArgumentError, match=r"model: got int; expected a torch.nn.Module"):
        Penalties(3)  # pyrefly: ignore
    for bad in (-1.0, float("nan"), True, "1"):
        with pytest.raises(ArgumentError, match=rf"z_loss: got {bad!r}; expected a finite factor from 0 on"):
            Penalties(model, z_loss=bad)  # pyrefly: ignore
    with pytest.raises(ArgumentError, match=r"entropy_floor: got 0.1; expected \(floor, factor\)"):
        Penalties(model, entropy_floor=0.1)  # pyrefly: ignore
    with pytest.raises(ArgumentError, match=r"entropy_floor\[0\]: got 2.0; expected a number in \[0, 1\]"):
        Penalties(model, entropy_floor=(2.0, 0.1))
    with pytest.raises(ArgumentError, match=r"entropy_floor\[1\]: got -0.1; expected a finite factor"):
        Penalties(model, entropy_floor=(0.5, -0.1))
    with pytest.raises(ArgumentError, match=r"z_loss: got None, and no entropy_floor either"):
        Penalties(model, z_loss=None, entropy_floor=None)
    with pytest.raises(ArgumentError, match=r"layers: got 'nowhere'"):
        Penalties(model, layers="nowhere")
    with Penalties(model, **FACTORS) as penalties:
        model.layers[1].compile(backend="eager")
        with pytest.raises(UnsupportedError, match="model: it is compiled"):
            model(x)
    assert Use.of(model) is None
