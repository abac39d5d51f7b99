"""Under torch.compile: one graph, the numbers of eager mode forward and backward, and no graph anew for every length."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from attemper import attention
from attemper.errors import ArgumentError, UnsupportedError
from attemper.ops import LISTENERS, Listener, row_stats

HEADS, KV_HEADS = 6, 2

# Of its own making, on import.
inductor_warns = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()


def tensors(queries: int = 7, keys: int = 11, **kinds: str) -> dict[str, Tensor]:
    """Leaves that require gradients; kinds: attn_mask, scale and sinks, each by the name of its form."""
    made = {
        "query": torch.randn(2, HEADS, queries, 5),
        "key": torch.randn(2, KV_HEADS, keys, 5),
        "value": torch.randn(2, KV_HEADS, keys, 13),
    }
    forms = {
        "bool": lambda: torch.rand(2, 1, queries, keys) > 0.3,
        "float": lambda: torch.randn(HEADS, queries, keys),
        "head": lambda: torch.rand(HEADS),
        "query": lambda: torch.rand(2, HEADS, queries),
        "scalar": lambda: torch.rand(()),
    }
    made |= {name: forms[form]() for name, form in kinds.items()}
    return {name: x.requires_grad_() if x.is_floating_point() else x for name, x in made.items()}


def results(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    output, rows = found
    return [output, rows.lse, rows.entropy, rows.rest, rows.peak()]


def agree(
    function: Callable[..., Any], given: dict[str, Tensor], *, exactly: bool = True, grad: bool = True, **options: Any
) -> None:
    """Compiled into one graph, the function gives what it gives in eager mode; then the gradients, one by one."""
    compiled = torch.compile(function, fullgraph=True, **options)
    every = []
    for run in (function, compiled):
        torch.manual_seed(5)
        found = results(run(**given))
        roots, leaves = [x for x in found if x.requires_grad], [x for x in given.values() if x.requires_grad]
        assert bool(roots) == grad
        upstream = [torch.linspace(-1, 1, x.numel()).reshape(x.shape).to(x.dtype) for x in roots]
        every.append([*found, *(torch.autograd.grad(roots, leaves, upstream, allow_unused=True) if roots else ())])
    for ours, eager in itertools.zip_longest(*every):
        torch.testing.assert_close(ours, eager, **({"rtol": 0.0, "atol": 0.0} if exactly else {}), equal_nan=True)


CASES: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("plain", {}, {}),
    ("causal, window, offset", {"is_causal": True, "window": (4, None), "offset": 3}, {}),
    ("number, softcap", {"scale": 0.3, "softcap": 2.0}, {}),
    ("dropout", {"dropout_p": 0.3}, {}),
    ("bool mask, scale per query", {"is_causal": True, "offset": 4}, {"attn_mask": "bool", "scale": "query"}),
    (
        "everything",
        {"softcap": 3.0, "window": (None, 6), "dropout_p": 0.2},
        dict.fromkeys(("scale", "sinks"), "head") | {"attn_mask": "float"},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("return_stats", [True, False], ids=["statistics", "output alone"])
@pytest.mark.parametrize(("options", "kinds"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_one_graph_gives_what_eager_mode_gives(
    options: dict[str, Any], kinds: dict[str, str], return_stats: bool, dynamic: bool
) -> None:
    def run(**given: Tensor) -> Any:
        return attention(**given, **options, enable_gqa=True, return_stats=return_stats)

    agree(run, tensors(**kinds), backend="aot_eager", dynamic=dynamic)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_the_other_kernels_too(impl: str) -> None:
    def run(**given: Tensor) -> Any:
        return attention(**given, dropout_p=0.2, softcap=3.0, enable_gqa=True, return_stats=True, impl=impl)

    agree(run, tensors(attn_mask="float", scale="head", sinks="head"), backend="aot_eager", dynamic=True)


def test_without_gradients() -> None:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return attention(query, key, value, enable_gqa=True, return_stats=True)

    with torch.no_grad():
        agree(run, tensors(), backend="aot_eager", dynamic=True, grad=False)


@pytest.mark.parametrize("row_stride", [1, 3])
def test_the_statistics_alone(row_stride: int) -> None:
    def run(query: Tensor, key: Tensor, **given: Tensor) -> Tensor:
        return row_stats(query, key, is_causal=True, offset=4, softcap=2.0, row_stride=row_stride, **given).rest

    given = tensors(attn_mask="float", scale="query", sinks="head")
    del given["value"]
    agree(run, given, backend="aot_eager", dynamic=True, grad=False)


def test_under_autocast() -> None:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(query, key, value, enable_gqa=True, return_stats=True)

    agree(run, tensors(), backend="aot_eager", dynamic=True)


@pytest.mark.slow
@inductor_warns
def test_inductor() -> None:
    def run(**given: Tensor) -> Any:
        output, rows = attention(**given, is_causal=True, offset=4, enable_gqa=True, return_stats=True)
        return 2.0 * output.sin(), rows

    agree(run, tensors(attn_mask="float", scale="head", sinks="head"), backend="inductor", dynamic=True, exactly=False)


@pytest.mark.slow
@inductor_warns
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_with_projections(dynamic: bool) -> None:
    """Views of one projection, their heads beside one another in each row, as models make them; and back into such rows."""
    joined, out = torch.randn(24, 72), torch.randn(24, 24)

    def run(x: Tensor, y: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (3, 8)).transpose(1, 2) for part in (x @ joined).split(24, -1))
        return y + attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2) @ out

    for rows in (9, 14):
        given = {name: torch.randn(2, rows, 24).requires_grad_() for name in "xy"}
        agree(run, given, backend="inductor", dynamic=dynamic, exactly=False)


class TestDropout:
    """The seed is drawn by every run of the graph, not once by its maker."""

    @pytest.mark.slow
    @inductor_warns
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_every_call_drops_anew_and_a_seed_repeats_it(self, backend: str) -> None:
        query, key, value = (torch.randn(1, 2, 7, 5) for _ in range(3))

        @torch.compile(fullgraph=True, backend=backend)
        def run(query: Tensor) -> tuple[Tensor, Tensor]:
            return attention(query, key, value, dropout_p=0.5), attention(query, key, value, dropout_p=0.5)

        torch.manual_seed(3)
        first, second = run(query), run(query)
        torch.manual_seed(3)
        again = run(query)
        assert all(map(torch.equal, first, again))
        assert len({tuple(x.flatten().tolist()) for x in (*first, *second)}) == 4

    def test_the_backward_pass_drops_what_the_forward_pass_dropped(self) -> None:
        identity, zeros = torch.eye(11)[None, None], torch.zeros(1, 1, 11, 5)
        value = identity.clone().requires_grad_()
        compiled = torch.compile(lambda value: attention(zeros, zeros, value, dropout_p=0.5), fullgraph=True, backend="aot_eager")
        weights = compiled(value)
        (gradient,) = torch.autograd.grad(weights, value, identity)
        # The output is weights·1 and the gradient weightsᵀ·1: the diagonal of both is the same weights.
        torch.testing.assert_close(gradient, weights.detach().mT)


class TestRecompilation:
    """A new length is no new graph."""

    @pytest.mark.parametrize("grad", [False, True], ids=["forward", "with gradients"])
    def test_one_graph_for_all_lengths_and_offsets(self, grad: bool) -> None:
        counter = CompileCounterWithBackend("aot_eager")

        @torch.compile(fullgraph=True, dynamic=True, backend=counter)
        def run(offset: int, **given: Tensor) -> Tensor:
            options: dict[str, Any] = {"window": (offset + 99, None), "dropout_p": 0.1, "enable_gqa": True, "return_stats": True}
            output, rows = attention(**given, is_causal=True, offset=offset, **options)
            return output.sum() + rows.entropy.sum()

        for queries, keys in ((7, 11), (8, 12), (30, 41), (41, 30)):
            given = tensors(queries, keys, attn_mask="bool", scale="query")
            loss = run(keys - queries, **{name: x if grad else x.detach() for name, x in given.items()})
            if grad:
                loss.backward()
        assert counter.frame_count == 1

    def test_decoding_settles_on_one_graph_by_itself(self) -> None:
        counter = CompileCounterWithBackend("aot_eager")
        run = torch.compile(lambda q, k, v: attention(q, k, v, enable_gqa=True), fullgraph=True, backend=counter)
        for keys in range(11, 19):
            given = tensors(1, keys)
            run(given["query"].detach(), given["key"].detach(), given["value"].detach())
        assert counter.frame_count == 2  # for the first length, and for any


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"softcap": -1.0}, ArgumentError, r"softcap: got -1\.0; expected a finite number above 0"),
        ({"attn_mask": torch.ones(5, 3)}, ArgumentError, r"attn_mask: got shape \(5, 3\)"),
        ({"impl": "triton"}, UnsupportedError, "impl: 'triton' does not take a tensor on cpu"),
    ],
    ids=["softcap", "mask", "impl"],
)
def test_a_bad_argument_is_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    query = torch.randn(1, 2, 7, 5)

    def run(query: Tensor) -> Tensor:
        return attention(query, query, query, **options)

    with pytest.raises(error, match=message):
        torch.compile(run, backend="aot_eager")(query)
    torch._dynamo.reset()
    # In one graph it is torch that raises, and quotes what was raised.
    name, quoted = error.__name__, repr(message.partition(":")[0])[1:-1]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"raised exception {name}\(.{quoted}"):
        torch.compile(run, backend="aot_eager", fullgraph=True)(query)


def test_a_second_derivative_is_refused() -> None:
    query = torch.randn(1, 2, 7, 5, requires_grad=True)
    loss = torch.compile(lambda query: attention(query, query, query).sin().sum(), backend="aot_eager")(query)
    (gradient,) = torch.autograd.grad(loss, query, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()


def test_nobody_is_told_of_a_call_that_is_only_traced() -> None:
    told: list[Any] = []
    LISTENERS.append(Listener(lambda *call: told.append(call)))
    try:
        query = torch.randn(1, 2, 7, 5)
        torch.compile(lambda query: attention(query, query, query), fullgraph=True, backend="aot_eager")(query)
        assert not told
        attention(query, query, query)
        assert len(told) == 1
    finally:
        LISTENERS.pop()


class TestTransforms:
    """torch.func inside a compiled function."""

    def test_vmap_is_part_of_the_graph(self) -> None:
        query, key = torch.randn(3, 2, 7, 5), torch.randn(2, 11, 5)

        def run(query: Tensor) -> Tensor:
            return torch.func.vmap(lambda query: attention(query, key, key))(query)

        torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(query), run(query))

    def test_a_derivative_is_left_to_eager_mode_or_refused(self) -> None:
        query, key = torch.randn(2, 7, 5), torch.randn(2, 11, 5)

        def run(query: Tensor) -> Tensor:
            return torch.func.grad(lambda query: attention(query, key, key).sin().sum())(query)

        torch.testing.assert_close(torch.compile(run, backend="aot_eager")(query), run(query))
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compile does not see through torch\.func\.grad of it"):
            torch.compile(run, fullgraph=True, backend="aot_eager")(query)


def test_an_exported_program_holds_the_operator() -> None:
    class Module(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return attention(query, key, key, is_causal=True)

    query, key = torch.randn(1, 2, 7, 5), torch.randn(1, 2, 11, 5)
    keys = torch.export.Dim("keys", min=2)
    program = torch.export.export(Module(), (query, key), dynamic_shapes=({}, {2: keys}))
    assert any(node.target is torch.ops.attemper.forward.default for node in program.graph.nodes)
    longer = torch.randn(1, 2, 23, 5)
    torch.testing.assert_close(program.module()(query, longer), Module()(query, longer))
