"""The models: what each dial does to the logits, seen by `attemper.watch`, and that each task is learned."""

import math
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.errors import ArgumentError
from attemper.lab import config
from attemper.lab.arithmetic import computing
from attemper.lab.models import attention_layers, build, logits_times
from attemper.lab.optimisers import Optimisers, is_hidden_matrix, share_of_rate
from attemper.lab.presets import NAMES, additive_vs_dot, preset
from attemper.lab.tasks import IGNORED, load_task
from attemper.lab.tasks.digits import Digits
from attemper.lab.tasks.recall import Recall
from attemper.lab.tasks.reversal import Reversal
from attemper.lab.tasks.task import Task
from attemper.lab.tasks.text import Text
from attemper.ops.listening import LISTENERS, Listener
from attemper.scales import LogitShape
from tests.lab_runs import made_up

SMALL = config.Model(layers=1, heads=2, head_dim=6, width=20)
EXAMPLE = config.Model(layers=1, heads=2, head_dim=10, width=20, attention="example")


def task_of(name: str, length: int = 11) -> Task:
    return load_task(config.Task.model_validate({"name": name, "length": length, "symbols": 13}))


def model_of(task: Task, **dials: Any) -> nn.Module:
    names = {Text: "text", Digits: "digits", Recall: "recall", Reversal: "reversal"}
    fields = {"task": {"name": names[type(task)]}, "model": SMALL.model_dump() | dials}
    return build(config.RunConfig.model_validate(fields), task)


def loss_of(model: nn.Module, task: Task, size: int = 7, seed: int = 1) -> Tensor:
    batch = task.batch(size, torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(**batch.inputs).float().flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)


@pytest.mark.parametrize("name", ["text", "digits", "recall", "reversal"])
@pytest.mark.parametrize("position", ["rotary", "learned", "none"])
def test_each_task_has_a_model_that_is_seeded(name: str, position: str) -> None:
    task = task_of(name)
    losses = []
    for _ in range(2):
        torch.manual_seed(5)
        losses.append(loss_of(model_of(task, position=position), task).item())
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(math.log(task.classes), abs=1.5)


def logits_seen(model: nn.Module, task: Task, arithmetic: Any = "fp32", mode: Any = "use") -> Any:
    with attemper.watch(model, mode=mode) as watching, computing(arithmetic):
        loss_of(model, task).backward()
        record = watching.step()
    assert record is not None
    return record.layers


FACTORS = {
    "none": 1.0,
    "inverse_sqrt": 6**-0.5,
    "inverse": 1 / 6,
    "mup": 32**0.5 / 6,
    "learned": 6**-0.5,
    "log_length": 6**-0.5,
    "log_length_learned": 6**-0.5,
}


@pytest.mark.parametrize("rule", FACTORS)
def test_the_rule_is_the_factor_on_the_products(rule: str) -> None:
    task = task_of("digits")  # 16 keys, all in view: the rules of length are 1/√d there
    model = model_of(task, rule=rule)
    (layer,) = attention_layers(model).values()
    heard: list[Any] = []
    listener = Listener(lambda problem, rows: heard.append(problem))
    LISTENERS.append(listener)
    try:
        loss_of(model, task)
    finally:
        LISTENERS.remove(listener)
    scale = torch.as_tensor(heard[0].scale).float()
    torch.testing.assert_close(scale, torch.full_like(scale, FACTORS[rule]))
    learned = layer.scale.parameters() if isinstance(layer.scale, nn.Module) else ()
    assert sum(p.numel() for p in learned if p.requires_grad) == (2 if "learned" in rule else 0)


def test_cosine_bounds_the_logits_by_its_temperature() -> None:
    task = task_of("digits")
    (layer,) = logits_seen(model_of(task, rule="cosine"), task)
    assert 1.0 < layer.scaled_max.max() <= 10.0 + 1e-5


@pytest.mark.parametrize(("init", "variance"), [("unit", 1.0), ("torch", 1 / 3), ("mup", 1.0)])
def test_what_an_initialisation_gives_q_and_k(init: str, variance: float) -> None:
    task = task_of("text")
    model = model_of(task, init=init, width=96, head_dim=48)
    (layer,) = attention_layers(model).values()
    x = F.rms_norm(torch.randn(1009, 96), (96,))
    for projection in (layer.q_proj, layer.k_proj):
        assert projection(x).var().item() == pytest.approx(variance, rel=0.1)
    if init == "mup":
        assert loss_of(model, task).item() == pytest.approx(math.log(256), abs=1e-5)


@pytest.mark.parametrize("own", [True, False])
def test_heads_of_unequal_width_have_own_or_shared_scales(own: bool) -> None:
    model = model_of(task_of("text"), head_dim=(4, 12), own_scales=own)
    heard: list[float] = []
    listener = Listener(lambda problem, rows: heard.append(problem.scale))
    LISTENERS.append(listener)
    try:
        model(torch.randint(256, (3, 7)))
    finally:
        LISTENERS.remove(listener)
    assert heard == pytest.approx([4**-0.5, 12**-0.5] if own else [8**-0.5] * 2)


@pytest.mark.parametrize("dials", [{}, {"softcap": 2.0}, {"rule": "cosine"}, {"rule": "log_length_learned"}])
def test_logits_times_multiplies_and_leaves_no_trace(dials: dict[str, Any]) -> None:
    task = task_of("reversal")
    model = model_of(task, **dials)
    with torch.no_grad():
        plain = loss_of(model, task).item()
        with logits_times(model, 30.0):
            assert abs(loss_of(model, task).item() - plain) > 1e-3
        with logits_times(model, 1.0):
            assert loss_of(model, task).item() == plain
        assert loss_of(model, task).item() == plain


@pytest.mark.parametrize("arithmetic", ["bf16", "fp16", "fp16_safe", "fp16_naive", "bf16_naive"])
@pytest.mark.parametrize("rule", ["inverse_sqrt", "learned", "log_length_learned"])
def test_every_arithmetic_is_near_that_of_32_bits_and_is_watched(arithmetic: str, rule: str) -> None:
    task = task_of("text")
    model = model_of(task, rule=rule)
    exact = loss_of(model, task).item()
    for mode in ("use", "observe"):
        assert len(logits_seen(model, task, arithmetic, mode)) == 1
    with computing(arithmetic):  # type: ignore[arg-type]
        found = loss_of(model, task).item()
    assert found != exact
    assert found == pytest.approx(exact, rel=0.03 if arithmetic.startswith("bf16") else 3e-3)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": {"attention": "additive"}}, "'additive' for the task 'text'"),
        ({"model": {"head_dim": (4, 4, 4)}}, "got 3 widths"),
        ({"model": {"head_dim": (4, 6)}, "optimiser": {"qk_clip": 3}}, r"3 beside model\.head_dim = \[4, 6\]"),
        ({"model": {"qk_norm": True}, "optimiser": {"qk_clip": 3}}, r"3 beside model\.qk_norm; expected none: it clips weights"),
        ({"model": {"rule": "cosine"}, "optimiser": {"qk_clip": 3}}, "3 beside the rule cosine; expected none"),
        ({"model": {"head_dim": (1, 8)}}, r"model\.head_dim: got 1; expected at least 2"),
        (
            {"task": {"name": "reversal"}, "model": {"attention": "additive"}, "precision": {"arithmetic": "fp16"}},
            "'fp16' for additive",
        ),
        (
            {"task": {"name": "reversal"}, "model": {"attention": "additive"}, "after": {"logit_factors": [2.0]}},
            "after.logit_factors",
        ),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], said: str) -> None:
    run = config.RunConfig.model_validate(fields)
    with pytest.raises(ArgumentError, match=said):
        build(run, load_task(run.task))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"task": {"name": "digits"}}, r"task\.name: got 'digits' for .*one of text, recall"),
        ({"precision": {"arithmetic": "bf16"}}, r"precision\.arithmetic: got 'bf16'"),
        ({"model": {"rule": "learned"}}, r"model\.rule: got 'learned'"),
        ({"model": {"width": 21}}, r"model\.width: got 21 for .*a multiple of 2·model\.heads = 4"),
        ({"model": {"width": 22}}, r"model\.width: got 22"),
        ({"model": {"head_dim": 8}}, r"model\.head_dim: got 8 for .*10, which is"),
        ({"model": {"head_dim": (10, 10)}}, r"model\.head_dim: got \(10, 10\)"),
        ({"model": {"qk_norm": True}}, r"model\.qk_norm: got True"),
        ({"model": {"softcap": 5.0}}, r"model\.softcap: got 5\.0"),
        ({"model": {"position": "learned"}}, r"model\.position: got 'learned'"),
        ({"after": {"logit_factors": [2.0]}}, r"after\.logit_factors: got \(2\.0,\) .*or model\.attention 'dot'"),
    ],
)
def test_what_the_attention_of_the_examples_does_not_have_is_refused(fields: dict[str, Any], said: str) -> None:
    fields = fields | {"model": EXAMPLE.model_dump() | fields.get("model", {})}
    run = config.RunConfig.model_validate(fields)
    with pytest.raises(ArgumentError, match=said):
        build(run, load_task(run.task))


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("inverse_sqrt", 10**-0.5), ("inverse", 0.1), ("mup", 32**0.5 / 10)])
def test_the_attention_of_the_examples_has_the_factor_of_the_rule(rule: str, factor: float) -> None:
    model = model_of(task_of("recall"), **EXAMPLE.model_dump() | {"rule": rule})
    (layer,) = attention_layers(model).values()
    assert layer.scale == pytest.approx(factor)
    seen = logits_seen(model, task_of("recall"), mode="observe")
    assert [(record.layer, record.scaled_max.shape) for record in seen] == [("blocks.0.attention", (2,))]


def test_learned_positions_have_an_end() -> None:
    with pytest.raises(ArgumentError, match=r"length: got 12 tokens; expected at most 11"):
        model_of(task_of("text"), position="learned")(torch.zeros(1, 12, dtype=torch.int64))


def test_additive_attention_is_in_place_of_the_look_at_the_encoder() -> None:
    task = task_of("reversal")
    model = model_of(task, attention="additive", layers=2)
    assert [name for name in attention_layers(model) if "cross" in name] == []
    assert len(attention_layers(model)) == 4
    loss_of(model, task).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_an_optimiser_learns_and_goes_on_from_its_state(name: str) -> None:
    task = task_of("text")
    run = config.RunConfig(model=SMALL, steps=40, optimiser=config.Optimiser.model_validate({"name": name, "warmup": 3}))
    model = model_of(task)
    copy = model_of(task)
    optimisers = Optimisers(model, run)
    losses = [train(model, optimisers, task, step) for step in range(30)]
    assert losses[-1] < losses[0]
    copy.load_state_dict(model.state_dict())
    again = Optimisers(copy, run)
    again.load(deepcopy(optimisers.state()))  # torch takes the tensors over as they are
    assert train(model, optimisers, task, 30) == train(copy, again, task, 30)
    assert train(model, optimisers, task, 31) == train(copy, again, task, 31)


def train(model: nn.Module, optimisers: Optimisers, task: Task, step: int) -> float:
    optimisers.set_rate(step)
    optimisers.zero_grad()
    loss = loss_of(model, task, 16, step)
    loss.backward()
    for optimiser in optimisers.all:
        optimiser.step()
    return loss.item()


def test_mup_slows_the_matrices_between_hidden_states_by_the_width() -> None:
    run = config.RunConfig(model=config.Model(init="mup", width=256), optimiser=config.Optimiser(learning_rate=0.5, warmup=0))
    model = model_of(task_of("text"), width=256)
    optimisers = Optimisers(model, run)
    optimisers.set_rate(0)
    rates = {id(p): group["lr"] for group in optimisers.all[0].param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert rates[id(parameter)] == (0.125 if is_hidden_matrix(name, parameter) or name == "head.weight" else 0.5)


def test_the_arms_of_additive_attention_differ_in_the_look_at_the_encoder_alone() -> None:
    scales = {}
    for arm in additive_vs_dot.ARMS:
        run = arm.over(config.RunConfig(task=config.Task(name="reversal", length=9), model=config.Model(layers=1, heads=1)))
        layers = attention_layers(build(run, load_task(run.task)))
        shape = LogitShape(run.model.head_dim, 1, 9, 9, 0)
        scales[arm.name] = {name: layer.scale.factor(shape) for name, layer in layers.items()}
    usual = pytest.approx(32**-0.5)
    within = {"encoder.0.attention": usual, "decoder.0.attention": usual}
    assert scales[additive_vs_dot.ADDITIVE] == within
    assert scales[additive_vs_dot.SCALED] == within | {"decoder.0.cross": usual}
    assert scales[additive_vs_dot.BARE] == within | {"decoder.0.cross": 1.0}
    limits = additive_vs_dot.answer([made_up(arm.over(config.RunConfig()), 1.0) for arm in additive_vs_dot.ARMS]).limits
    assert any(limit.endswith("has the examples of one with the dot product, but other first weights.") for limit in limits)


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_gives_models_of_the_same_layers_the_same_weights(name: str) -> None:
    drawn: dict[Any, list[Tensor]] = {}
    for run in preset(name).runs("quick"):
        if run.seed in (0, 2017) and run.model.width <= 64 and run.model.head_dim != 512:
            torch.manual_seed(run.seed)
            weights = {key: value for key, value in build(run, load_task(run.task)).named_parameters() if value.ndim == 2}
            shapes = tuple((key, value.shape) for key, value in weights.items())
            found = drawn.setdefault((shapes, run.model.init), list(weights.values()))
            assert all(map(torch.equal, found, weights.values()))


def test_under_mup_what_a_step_adds_to_the_outputs_does_not_grow_with_the_width() -> None:
    moves = {}
    for width in (64, 256):
        dials = {"layers": 1, "width": width, "head_dim": width // 2, "rule": "mup", "init": "mup"}
        run = config.RunConfig(model=config.Model.model_validate(dials), optimiser=config.Optimiser(warmup=0))
        task = Recall(8, 16)
        torch.manual_seed(0)
        model = build(run, task)
        optimisers, batch = Optimisers(model, run), task.batch(8, torch.Generator().manual_seed(0))
        before = model(**batch.inputs)
        F.cross_entropy(before.flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORED).backward()
        optimisers.set_rate(0)
        for optimiser in optimisers.all:
            optimiser.step()
        moves[width] = (model(**batch.inputs) - before).square().mean().sqrt().item()
    assert moves[256] / moves[64] == pytest.approx(1.0, rel=0.25)


def test_the_rate_rises_then_falls_to_a_twentieth() -> None:
    run = config.RunConfig(steps=101, optimiser=config.Optimiser(warmup=10))
    shares = [share_of_rate(step, run) for step in range(102)]
    assert shares[:11] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0])
    assert shares[101] == pytest.approx(0.05)
    assert all(one > other for one, other in pairwise(shares[10:]))
