"""Modules that call F.scaled_dot_product_attention, in use: redirected while they run and nowhere else, with SDPA's meanings."""

import copy
import pickle
import threading
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.capture import AttentionCall, capture
from attemper.capture.using import Kept, Replaced, Use
from attemper.ops import LISTENERS, Listener

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

HOW = "calls of scaled_dot_product_attention, redirected while it runs"
NEAR = {"rtol": 1e-5, "atol": 1e-6}


class Attention(nn.Module):
    """Self-attention by SDPA under one of its names."""

    def __init__(self, function: Any = F.scaled_dot_product_attention, heads: int = 2, **options: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)
        self.function, self.heads, self.options = function, heads, options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.view(*x.shape[:-1], self.heads, -1).transpose(-3, -2) for each in self.qkv(x).chunk(3, -1))
        return x + self.function(q, k, v, **self.options).transpose(-3, -2).flatten(-2)


class Counter:
    """Counts calls of attemper.attention."""

    def __enter__(self) -> Self:
        self.calls = 0
        self.listener = Listener(self._count)
        LISTENERS.append(self.listener)
        return self

    def _count(self, problem: Any, rows: Any) -> None:
        self.calls += 1

    def __exit__(self, *error: object) -> None:
        LISTENERS.remove(self.listener)


def module_of_sdpa(*args: Any, **kwargs: Any) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)


@pytest.mark.parametrize(
    "function", [F.scaled_dot_product_attention, sdpa, module_of_sdpa, torch.ops.aten.scaled_dot_product_attention]
)
def test_it_is_redirected_by_whatever_name(function: Any) -> None:
    model, x = nn.Sequential(Attention(function), nn.Linear(12, 12)), torch.randn(2, 5, 12)
    plain = model(x)
    used = attemper.use(model)
    assert (used.replaced, used.kept) == ((), (Kept("0", "it never ran"),))
    with Counter() as count:
        torch.testing.assert_close(model(x), plain, **NEAR)
    assert count.calls == 1
    assert (used.replaced, used.kept) == ((Replaced("0", HOW),), ())
    used.undo()
    with Counter() as count:
        assert torch.equal(model(x), plain)
    assert count.calls == 0


def mask_of(kind: str) -> dict[str, Any]:
    visible = torch.rand(2, 1, 5, 7) > 0.4
    visible[..., 0] = True
    return {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": visible},
        "float": {"attn_mask": torch.randn(5, 7)},
        "scale": {"scale": 0.3},
        "grouped": {"enable_gqa": True},
    }[kind]


SHAPES = [(2, 4), (4,), (), (2, 3, 4)]
KINDS = ["none", "causal", "bool", "float", "scale", "grouped"]
# The bool mask is [batch, 1, queries, keys], and without heads there are none to group.
MEANINGS = [
    (kind, shape) for kind in KINDS for shape in SHAPES if len(shape) == 2 or (kind != "bool" and (shape or kind != "grouped"))
]


@pytest.mark.parametrize(("kind", "shape"), MEANINGS)
def test_what_a_call_means_is_what_torch_says(kind: str, shape: tuple[int, ...]) -> None:
    kv = (*shape[:-1], 2) if kind == "grouped" else shape
    query, key, value = torch.randn(*shape, 5, 3), torch.randn(*kv, 7, 3), torch.randn(*kv, 7, 2)
    options = mask_of(kind)

    class Caller(nn.Module):
        def forward(self) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, **options)

    model = Caller()
    plain = model()
    with attemper.use(model) as used, Counter() as count:
        torch.testing.assert_close(model(), plain, **NEAR)
    assert (count.calls, used.kept) == (1, ())


def test_one_key_head_is_broadcast_unasked() -> None:
    class Caller(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, key)

    model, query, key = Caller(), torch.randn(2, 3, 5, 4), torch.randn(2, 1, 7, 4)
    plain = model(query, key)
    with attemper.use(model) as used:
        torch.testing.assert_close(model(query, key), plain, **NEAR)
    assert len(used.replaced) == 1


def test_a_mask_beside_is_causal_is_left_to_torch() -> None:
    model, x = Attention(attn_mask=torch.rand(5, 5) > 0.2, is_causal=True), torch.randn(2, 5, 12)

    def outcome() -> Tensor | str:
        try:
            return model(x)
        except RuntimeError as error:  # so did torch before it took both
            return str(error)

    plain = outcome()
    used = attemper.use(model)
    given = outcome()
    assert torch.equal(given, plain) if isinstance(given, Tensor) and isinstance(plain, Tensor) else given == plain
    assert used.kept == (Kept("", "a call of scaled_dot_product_attention was left to torch: a mask beside is_causal"),)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.nested.nested_tensor([torch.randn(2, 5, 4), torch.randn(2, 3, 4)]), "query is a nested tensor"),
        (lambda: torch.randn(2, 3, 5, 4, dtype=torch.bfloat16).as_subclass(Odd), "query is a Odd"),
    ],
)
def test_what_ours_does_not_take_goes_to_torch(make: Any, reason: str) -> None:
    class Caller(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model, x = Caller(), make()
    with torch.no_grad():
        plain = model(x)
        used = attemper.use(model)
        output = model(x)
    assert used.kept == (Kept("", f"a call of scaled_dot_product_attention was left to torch: {reason}"),)
    assert output.is_nested == plain.is_nested
    assert type(output) is type(plain)


class Odd(Tensor):
    """A tensor that may compute in a way of its own."""


def test_a_row_that_sees_nothing_gives_nought() -> None:
    model = Attention(attn_mask=torch.zeros(5, 5, dtype=torch.bool))
    x = torch.randn(2, 5, 12)
    with attemper.use(model):
        assert torch.equal(model(x), x)


def test_outside_the_model_nothing_is_redirected() -> None:
    model, other, x = Attention(), Attention(), torch.randn(2, 5, 12)
    attemper.use(model)
    with Counter() as count:
        other(x)
        F.scaled_dot_product_attention(x, x, x)
        assert count.calls == 0
        model(x)
        assert count.calls == 1
        F.scaled_dot_product_attention(x, x, x)
    assert count.calls == 1


def test_a_part_called_by_itself_is_redirected() -> None:
    model, x = nn.Sequential(nn.Sequential(Attention()), Attention()), torch.randn(2, 5, 12)
    used = attemper.use(model)
    with Counter() as count:
        model[0][0](x)
    assert count.calls == 1
    assert used.replaced == (Replaced("0.0", HOW),)


class Failing(nn.Module):
    """Attends, and fails inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention(function=self._fail)

    def _fail(self, *args: Any, **kwargs: Any) -> Tensor:
        raise ValueError("no")

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.inner(x)
        except ValueError:
            return F.scaled_dot_product_attention(x, x, x)


def test_exceptions_leave_nothing_behind() -> None:
    model, x = nn.Sequential(Failing(), Attention()), torch.randn(2, 5, 12)
    used = attemper.use(model)
    with Counter() as count:
        model(x)
        assert count.calls == 2
        with pytest.raises(ValueError, match="no"):
            model[0].inner(x)
        assert torch.overrides._get_current_function_mode() is None
        F.scaled_dot_product_attention(x, x, x)
    assert count.calls == 2
    assert {each.module for each in used.replaced} == {"0", "1"}


def test_a_keyboard_interrupt_leaves_nothing_redirected() -> None:
    class Interrupted(nn.Module):
        def forward(self, x: Tensor, interrupt: bool) -> Tensor:
            if interrupt:
                raise KeyboardInterrupt("by hand")
            return F.scaled_dot_product_attention(x, x, x)

    model, x = Interrupted(), torch.randn(2, 5, 12)
    attemper.use(model)
    with pytest.raises(KeyboardInterrupt, match="by hand"):
        model(x, True)
    with Counter() as count:
        F.scaled_dot_product_attention(x, x, x)
        assert count.calls == 0
        model(x, False)
        assert count.calls == 1
    assert torch.overrides._get_current_function_mode() is None


def test_threads_do_not_see_one_another() -> None:
    model, x = Attention(), torch.randn(2, 5, 12)
    attemper.use(model)
    inside, outside = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert outside.wait(10)
            return F.scaled_dot_product_attention(x, x, x)

    waiting = Waiting()
    used = attemper.use(waiting)
    thread = threading.Thread(target=waiting, args=(x,))
    with Counter() as count:
        thread.start()
        assert inside.wait(10)
        F.scaled_dot_product_attention(x, x, x)  # this thread runs no model
        assert count.calls == 0
        outside.set()
        thread.join()
    assert count.calls == 1
    assert len(used.replaced) == 1


class Checkpointed(nn.Module):
    """Runs a module again in the backward pass."""

    def __init__(self, inner: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_module_is_redirected_again(reentrant: bool) -> None:
    gradients = []
    for way in (None, reentrant):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(12, 12), Checkpointed(nn.Sequential(Attention(dropout_p=0.4), nn.Linear(12, 12)), way))
        x = torch.randn(2, 5, 12)
        used = attemper.use(model)
        with Counter() as count:
            model(x).square().sum().backward()
        assert count.calls == (1 if way is None else 2)
        assert used.kept == ()
        gradients.append([weight.grad for weight in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


class OwnCheckpoint(nn.Module):
    """Runs a function of its own, no module, again in the backward pass."""

    def __init__(self, reentrant: bool, dropout_p: float) -> None:
        super().__init__()
        self.reentrant, self.dropout_p = reentrant, dropout_p

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, x, use_reentrant=self.reentrant)

    def attend(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout_p)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_function_has_the_right_gradient(reentrant: bool, dropout_p: float) -> None:
    x = torch.randn(2, 3, 5, 4, requires_grad=True)
    model = OwnCheckpoint(reentrant, dropout_p)
    torch.manual_seed(4)
    (plain,) = torch.autograd.grad(model(x).square().sum(), x) if not reentrant else (_backward(model, x),)
    used = attemper.use(model)
    torch.manual_seed(4)
    torch.testing.assert_close(_backward(model, x), plain, **NEAR)
    if not reentrant or dropout_p:
        assert "torch.utils.checkpoint runs again past every module" in used.kept[0].reason
    else:
        assert len(used.replaced) == 1


def _backward(model: nn.Module, x: Tensor) -> Tensor:
    x.grad = None
    model(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


class Softmax(nn.Module):
    """Attention in its own code."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


class Functional(nn.Module):
    """Calls what torch's module calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.MultiheadAttention(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        w = self.weights
        given = (12, 2, w.in_proj_weight, w.in_proj_bias, None, None, False, 0.0, w.out_proj.weight, w.out_proj.bias)
        return F.multi_head_attention_forward(x, x, x, *given, need_weights=False)[0]


def test_other_ways_to_attend_are_kept_with_the_reason() -> None:
    model = nn.ModuleDict({"own": Softmax(), "functional": Functional()})
    used = attemper.use(model)
    model["own"](torch.randn(2, 3, 5, 5))
    model["functional"](torch.randn(5, 2, 12))
    reasons = {each.module: each.reason for each in used.kept}
    assert reasons["own"].startswith("it computes its attention in its own code: a softmax over logits ran")
    assert reasons["functional"] == "it calls multi_head_attention_forward, which is left to torch"


def test_two_models_in_use_one_inside_the_other() -> None:
    inner, x = Attention(), torch.randn(2, 5, 12)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.other = Attention(), [inner]  # not a part of it

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(self.other[0](x))

    outer = Outer()
    plain = outer(x)
    of_inner, of_outer = attemper.use(inner, impl="blocked"), attemper.use(outer, impl="reference")
    torch.testing.assert_close(outer(x), plain, **NEAR)
    assert of_inner.replaced == (Replaced("", HOW),)
    assert of_outer.replaced == (Replaced("attention", HOW),)


def test_under_a_mode_of_the_users() -> None:
    model, x = Attention(), torch.randn(2, 5, 12)
    attemper.use(model)
    with Counter() as count, torch.device("cpu"):  # a torch function mode too
        model(x)
    assert count.calls == 1


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_is_in_use_too(way: str) -> None:
    model, x = nn.Sequential(Attention()), torch.randn(2, 5, 12)
    used = attemper.use(model)
    other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    of_other = Use.of(other)
    assert of_other is not None
    with Counter() as count:
        other(x)
        assert (count.calls, used.replaced) == (1, ())
        assert of_other.replaced == (Replaced("0", HOW),)
        used.undo()
        other(x)
        assert count.calls == 2
        of_other.undo()
        other(x)
        model(x)
    assert count.calls == 2


def test_a_compiled_model_is_one_graph_with_our_operator_in_it() -> None:
    torch._dynamo.reset()
    model, x = nn.Sequential(Attention(), nn.Sequential(Attention())), torch.randn(2, 5, 12)
    plain = model(x)
    used = attemper.use(model)
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), plain, **NEAR)
    assert [code.count("torch.ops.attemper.forward") for code in graphs] == [2]
    assert "scaled_dot_product_attention" not in graphs[0]
    assert {each.module for each in used.replaced} == {"0", "1.0"}
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_graph_that_breaks_inside_a_module_computes_the_same() -> None:
    torch._dynamo.reset()

    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention()

        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            y = self.inner(x)
            torch._dynamo.graph_break()
            return F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None])[:, 0]

    model, x = Breaking(), torch.randn(2, 5, 12)
    plain = model(x)
    used = attemper.use(model)
    compiled: Any = torch.compile(model, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), plain, **NEAR)
        assert torch.overrides._get_current_function_mode() is None
    assert {each.module for each in used.replaced} == {"", "inner"}
    torch.testing.assert_close(model(x), plain, **NEAR)
    torch._dynamo.reset()


def test_capture_is_told_once() -> None:
    model, x = nn.Sequential(Attention(), Attention()), torch.randn(2, 5, 12)
    attemper.use(model)
    calls: list[AttentionCall] = []
    with capture(model, calls.append) as seen:
        model(x)
    assert [(call.module, call.seam) for call in calls] == [("0", "attemper"), ("1", "attemper")]
    assert seen.unseen() == ()
