import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AlbertConfig, AlbertModel, LlamaConfig, LlamaForCausalLM

import attemper
from attemper.errors import ArgumentError, UnsupportedError
from attemper.monitor import Alarm, LayerRecord, StepRecord, Watch
from attemper.monitor.measuring import Measured, Taken, measure
from attemper.stats import HeadStats, RowStats, histograms

LAYERS, HEADS, TOKENS, BATCH = 3, 4, 13, 5
ATTENTION = [f"model.layers.{layer}.self_attn" for layer in range(LAYERS)]


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=44,
        intermediate_size=31,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=10,
        **options,
    )
    return LlamaForCausalLM(config)


def drawn(step: int, batch: int = BATCH, tokens: int = TOKENS) -> Tensor:
    return torch.randint(97, (batch, tokens), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, ids: Tensor) -> Tensor:
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss


def logged(record: StepRecord | None) -> StepRecord:
    assert record is not None
    return record


def same(a: StepRecord | None, b: StepRecord | None) -> None:
    """Bit for bit, but for the order of sums."""
    one, other = logged(a), logged(b)
    assert [layer.name for layer in one.layers] == [layer.name for layer in other.layers]
    assert one.layers
    for x, y in zip(one.layers, other.layers, strict=True):
        assert torch.equal(x.stats.counts, y.stats.counts)
        assert torch.equal(x.stats.extremes, y.stats.extremes)
        assert torch.equal(x.scaled_max, y.scaled_max)
        torch.testing.assert_close(x.stats.sums, y.stats.sums, rtol=1e-6, atol=1e-8)
        assert all(torch.equal(x.stats.histograms[name], y.stats.histograms[name]) for name in x.stats.histograms)


@pytest.mark.parametrize("padded", [False, True])
def test_calls_reduced_together_and_alone_give_one_record(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two passes of different lengths, so that not all calls are alike; with the extension and without."""
    records = []
    for most_rows, compiled in ((1, True), (2**17, True), (1, False), (2**17, False)):
        monkeypatch.setattr("attemper.monitor.watching.MOST_ROWS", most_rows)
        if not compiled:
            monkeypatch.setattr("attemper.kernels.row_reduction.reduced", lambda rows: None)
        model = llama()
        with attemper.watch(model) as watching:
            watching.maxima()
            for tokens in (TOKENS, 7):
                ids = drawn(tokens, tokens=tokens)
                mask = torch.ones_like(ids)
                mask[:, :3] = 0 if padded else 1
                model(input_ids=ids, attention_mask=mask, use_cache=False)
            assert watching.maxima().keys() == set(ATTENTION)
            records.append(watching.step())
    for other in records[1:]:
        same(records[0], other)
    assert {layer.stats.rows.unique().item() for layer in logged(records[0]).layers} == {BATCH * (TOKENS + 7 - 6 * padded)}


class Keeping(nn.Module):
    """Keeps the record of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 18)
        self.rows: RowStats | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        output, self.rows = attemper.attention(q, k, v, return_stats=True)
        return output


@pytest.mark.parametrize("batch", [1, 2])
def test_a_model_may_write_into_its_record_before_the_step_ends(batch: int) -> None:
    model, x = Keeping(), torch.randn(batch, 5, 6)
    records = []
    for writes in (False, True):
        with attemper.watch(model, mode="use") as watching:
            model(x)
            assert model.rows is not None
            with torch.no_grad():
                for each in (model.rows.lse, model.rows.entropy, model.rows.rest) if writes else ():
                    each.fill_(9.0)
            records.append(watching.step())
    same(*records)


def test_calls_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without rows neither, of a batch of none."""
    together: list[int] = []

    def counted(calls: Sequence[Taken]) -> list[Measured]:
        together.append(len(calls))
        return measure(calls)

    monkeypatch.setattr("attemper.monitor.watching.MOST_ROWS", 4)
    monkeypatch.setattr("attemper.monitor.watching.measure", counted)
    model = Keeping()
    with attemper.watch(model) as watching:
        for _ in range(10):
            model(torch.randn(0, 5, 6))
        assert together == [4, 4]
        assert {layer.stats.rows.sum().item() for layer in logged(watching.step()).layers} == {0}
    assert together == [4, 4, 2]


def test_the_record_is_that_of_the_logits() -> None:
    """Against attention written down by hand from the model's own projections."""
    model, ids = llama(), drawn(0)
    kept: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, output: kept.setdefault(name, []).append(output.detach())

    for layer in range(LAYERS):
        for part in ("q_proj", "k_proj"):
            model.get_submodule(f"model.layers.{layer}.self_attn.{part}").register_forward_hook(keep(part))
    with attemper.watch(model) as watching:
        train(model, ids)
        record = logged(watching.step())
    position = torch.arange(TOKENS)[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1, TOKENS, 44), position)
    for layer, found in enumerate(record.layers):
        q = kept["q_proj"][layer].unflatten(-1, (HEADS, 10)).transpose(1, 2).double()
        k = kept["k_proj"][layer].unflatten(-1, (2, 10)).transpose(1, 2).repeat_interleave(2, 1).double()
        q, k = (x * cos.double() + torch.cat([-x[..., 5:], x[..., :5]], -1) * sin.double() for x in (q, k))
        products = q @ k.mT
        visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        rows = attemper.RowStats.from_logits(products * 10**-0.5, visible, products)
        wanted = HeadStats.from_rows(rows)
        assert torch.equal(found.stats.counts, wanted.counts)
        torch.testing.assert_close(found.stats.extremes, wanted.extremes, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.stats.sums, wanted.sums, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(
            found.scaled_max, (products * 10**-0.5).masked_fill(~visible, 0).abs().amax((0, 2, 3)), rtol=1e-5, atol=0
        )


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_observed_a_run_is_what_it_would_be(implementation: str) -> None:
    model = llama(attn_implementation=implementation, attention_dropout=0.1).train()
    other = copy.deepcopy(model)
    with attemper.watch(model, rows=3):
        torch.manual_seed(2)
        loss = train(model, drawn(0))
        state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(loss, train(other, drawn(0)))
    assert torch.equal(state, torch.get_rng_state())
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("mode", ["observe", "use"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_counts_a_row_once(mode: Any, reentrant: bool) -> None:
    model = llama(attn_implementation="sdpa").train()
    with attemper.watch(model, mode=mode) as watching:
        train(model, drawn(0))
        plain = watching.step()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        train(model, drawn(0))
        same(plain, watching.step())
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    assert int(logged(plain).layers[0].stats.rows[0]) == BATCH * TOKENS


def test_a_function_that_is_checkpointed_counts_once_too() -> None:
    attention = nn.MultiheadAttention(12, 3, batch_first=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor, reentrant: bool) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inside, x, use_reentrant=reentrant)

        def inside(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    with attemper.watch(Model()) as watching:
        for reentrant in (False, True):
            x = torch.randn(2, 7, 12, requires_grad=True)
            Watch.of(watching._model)
            watching._model(x, reentrant).sum().backward()
            (layer,) = logged(watching.step()).layers
            assert layer.stats.rows.tolist() == [14, 14, 14]


def test_micro_batches_of_a_step_add_up() -> None:
    model = llama().train()
    with attemper.watch(model) as watching:
        for part in drawn(0, batch=6).chunk(3):
            train(model, part)
        accumulated = watching.step()
        train(model, drawn(0, batch=6))
        same(accumulated, watching.step())


def test_evaluation_in_between_does_not_count() -> None:
    model = llama().train()
    with attemper.watch(model) as watching:
        train(model, drawn(0))
        alone = watching.step()
        train(model, drawn(0))
        model.eval()
        with torch.no_grad():
            model(input_ids=drawn(1))
        model.train()
        same(alone, watching.step())
        # Fine-tuning with dropout off: evaluation mode, and gradients.
        model.eval()
        train(model, drawn(0))
        same(alone, watching.step())


def test_only_every_so_many_steps_is_measured() -> None:
    model = llama().train()
    with attemper.watch(model, every=3) as watching:
        records = []
        for step in range(7):
            train(model, drawn(step))
            records.append(watching.step())
    assert [record is None for record in records] == [False, True, True, False, True, True, False]
    assert [logged(records[step]).step for step in (0, 3, 6)] == [0, 3, 6]
    assert int(logged(records[3]).layers[0].stats.rows[0]) == BATCH * TOKENS


def test_a_stride_of_rows_is_looked_at() -> None:
    model = llama().train()
    with attemper.watch(model, rows=5) as watching:
        train(model, drawn(0))
        record = logged(watching.step())
    assert record.layers[0].stats.rows.tolist() == [BATCH * 3] * HEADS  # rows 0, 5, 10


def test_padding_is_left_out() -> None:
    model, ids = llama().train(), drawn(0)
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[3, :7] = 0
    with attemper.watch(model) as watching:
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        assert logged(watching.step()).layers[0].stats.rows.tolist() == [BATCH * TOKENS - 11] * HEADS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["observe", "use"])
def test_under_autocast_the_logits_are_those_of_the_rounded_operands(mode: Any, dtype: torch.dtype) -> None:
    model = llama(attn_implementation="sdpa").train()
    for layer in range(LAYERS):
        model.get_parameter(f"model.layers.{layer}.self_attn.q_proj.weight").data.mul_(9)
    with attemper.watch(model, mode=mode) as watching:
        train(model, drawn(0))
        whole = logged(watching.step())
        with torch.autocast("cpu", dtype):
            train(model, drawn(0))
        rounded = logged(watching.step())
    for x, y in zip(whole.layers, rounded.layers, strict=True):
        assert torch.equal(x.stats.counts[0], y.stats.counts[0])
        assert not torch.equal(x.stats.max, y.stats.max)
        torch.testing.assert_close(x.stats.max, y.stats.max, rtol=0.05, atol=0.05)


def test_lengths_may_change_within_a_step() -> None:
    model = llama().train()
    with attemper.watch(model) as watching:
        for tokens in (5, 13, 2, 1):
            train(model, drawn(0, batch=2, tokens=tokens))
        assert logged(watching.step()).layers[0].stats.rows.tolist() == [42] * HEADS


def test_a_shared_module_has_a_record_for_each_of_its_calls() -> None:
    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=97, embedding_size=8, hidden_size=20, num_attention_heads=2, intermediate_size=11, num_hidden_layers=3
    )
    model = AlbertModel(config).train()
    with attemper.watch(model) as watching:
        for _ in range(2):
            model(input_ids=drawn(0)).last_hidden_state.sum().backward()
        record, maxima = logged(watching.step()), watching.maxima()
    names = [layer.name for layer in record.layers]
    shared = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    assert names == [shared, f"{shared}#1", f"{shared}#2"]
    assert [layer.stats.rows.tolist() for layer in record.layers] == [[2 * BATCH * TOKENS] * 2] * 3
    assert maxima[shared].tolist() == [-float("inf")] * 2  # asked for the first time: nothing was measured for it


class Unequal(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.heads = attemper.nn.MultiheadAttention(11, len(widths), head_dims=widths, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("mode", ["observe", "use"])
@pytest.mark.parametrize("widths", [(16, 16, 32), (3, 5, 3, 5, 7)])
def test_heads_of_other_widths_have_a_record_a_width_however_many_they_are(widths: tuple[int, ...], mode: Any) -> None:
    model, x = Unequal(widths).train(), torch.randn(2, 5, 11, requires_grad=True)
    with attemper.watch(model, mode=mode) as watching:
        watching.maxima()
        for _ in range(2):
            model(x).sum().backward()
        record, maxima = logged(watching.step()), watching.maxima()
        assert not watching.unseen()
    names = [(f"heads#{call}" if call else "heads", widths.count(width)) for call, width in enumerate(dict.fromkeys(widths))]
    assert [(part.name, part.stats.heads) for part in record.layers] == names
    assert all(part.stats.rows.tolist() == [20] * part.stats.heads for part in record.layers)
    q, k = (F.linear(x, weight).split(widths, -1) for weight in model.heads.in_proj_weight.split(sum(widths))[:2])
    places = [head for width in dict.fromkeys(widths) for head in range(len(widths)) if widths[head] == width]
    largest = [(q[head] @ k[head].mT).abs().max().item() / widths[head] ** 0.5 for head in places]
    assert torch.cat([part.scaled_max for part in record.layers]).tolist() == pytest.approx(largest, rel=1e-5)
    assert maxima["heads"].tolist() == pytest.approx(largest, rel=1e-5)


class WithoutAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_model_without_attention_is_told_of_once() -> None:
    model = WithoutAttention().train()
    with attemper.watch(model) as watching:
        model(torch.randn(2, 3)).sum().backward()
        with pytest.warns(UserWarning, match="no attention was measured in WithoutAttention: no forward pass"):
            record = watching.step()
        assert logged(record).layers == ()
        assert watching.step() is not None


class SortingAttention(nn.Module):
    """Attention in code that no seam can describe: something happens between q·k and the softmax."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax((x @ x.mT).sort(-1).values, -1) @ x


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.own = nn.MultiheadAttention(12, 3, batch_first=True), SortingAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.attention(x, x, x, need_weights=False)[0])


def test_what_is_not_seen_is_named() -> None:
    model = Mixed().train()
    with attemper.watch(model) as watching:
        model(torch.randn(2, 7, 12)).sum().backward()
        record = logged(watching.step())
        (unseen,) = watching.unseen()
    assert [layer.layer for layer in record.layers] == ["attention"]
    assert unseen.module == "own"
    assert "softmax" in unseen.reason


def test_layers_are_chosen_by_pattern() -> None:
    model = llama().train()
    with attemper.watch(model, layers=["*.1.self_attn", "model.layers.2.*"]) as watching:
        train(model, drawn(0))
        assert [layer.layer for layer in logged(watching.step()).layers] == ATTENTION[1:]


def test_maxima_are_those_since_the_last_time() -> None:
    model = llama().train()
    with attemper.watch(model, every=100) as watching:
        assert watching.maxima() == {}
        train(model, drawn(0))
        first = watching.step()
        train(model, drawn(1))
        maxima = watching.maxima()
        assert list(maxima) == ATTENTION
        train(model, drawn(1))
        again = watching.maxima()
    assert first is not None
    for layer, record in zip(ATTENTION, first.layers, strict=True):
        assert torch.equal(maxima[layer], torch.maximum(record.scaled_max, again[layer]))


class Waits(TorchDispatchMode):
    """Refuses what waits for the device: a number read off it, a result whose size depends on values."""

    WORDS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "is_nonzero", "_to_cpu")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        masked = func is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if masked or any(word in name for word in self.WORDS):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["observe", "use"])
def test_nothing_waits_for_the_device_in_the_forward_pass(mode: Any) -> None:
    model = llama(attn_implementation="sdpa").train()
    mask = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    mask[0, :3] = 0
    with attemper.watch(model, mode=mode) as watching:
        train(model, drawn(0))  # the first pass says what is not seen
        watching.step()
        hidden = model.model.embed_tokens(drawn(0))
        with Waits():
            for layer in model.model.layers:  # transformers' own mask functions read a mask; the layers do not
                assert layer is not None
            output = model.model.layers[0].self_attn
            cos, sin = model.model.rotary_emb(hidden, torch.arange(TOKENS)[None])
            causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() & mask[:, None, None].bool()
            watching._seeing._enter(model, ())
            output(hidden, position_embeddings=(cos, sin), attention_mask=causal)
            watching._seeing._leave(model, (), None)
        (layer,) = logged(watching.step()).layers
    assert layer.stats.rows.tolist() == [BATCH * TOKENS - 3] * HEADS


def test_alarms_reach_the_record_and_the_caller() -> None:
    model, told = llama().train(), []
    model.get_parameter("model.layers.1.self_attn.q_proj.weight").data.mul_(20_000)
    with attemper.watch(model, on_alarm=told.append) as watching:
        train(model, drawn(0))
        record, table = logged(watching.step()), watching.table()
        train(model, drawn(0))
        watching.step()
    assert [(alarm.layer, alarm.code) for alarm in record.alarms] == [(ATTENTION[1], record.alarms[0].code)]
    assert told == list(record.alarms)
    assert f"{record.alarms[0].code} error: {ATTENTION[1]}" in table


def test_a_step_may_end_in_inference_mode() -> None:
    """Where every rule begins to remember; what it remembers is changed later, outside."""
    model = Keeping()
    with attemper.watch(model, alarms={"alarming-logit": 1e-6}) as watching:
        for place in range(4):
            model(torch.randn(2, 5, 6)).sum().backward()
            with torch.inference_mode(place == 0):
                record = watching.step()
            assert [alarm.code for alarm in record.alarms] == ["ATT501"] * (place == 0)  # pyrefly: ignore


def test_what_on_alarm_raises_ends_the_run() -> None:
    model = llama().train()
    model.get_parameter("model.layers.1.self_attn.q_proj.weight").data.mul_(20_000)

    def stop(alarm: Alarm) -> None:
        raise KeyboardInterrupt(alarm.code)

    with attemper.watch(model, on_alarm=stop) as watching:
        train(model, drawn(0))
        with pytest.raises(KeyboardInterrupt, match="ATT50"):
            watching.step()


def test_trackers_get_every_record_and_are_closed() -> None:
    events: list[str] = []

    class Tracker:
        def begin(self, run: Any) -> None:
            events.append(f"begin {run.model} {run.mode} {run.every} {run.rows} {run.world}")

        def log(self, record: StepRecord) -> None:
            events.append(f"log {record.step} {record.scalars}")

        def close(self) -> None:
            events.append("close")

    model = llama().train()
    with attemper.watch(model, trackers=[Tracker()], rows=2) as watching:
        for step in (7, 8):
            train(model, drawn(step))
            watching.step(step, loss=0.5)
    watching.remove()
    assert events == ["begin LlamaForCausalLM observe 1 2 1", "log 7 {'loss': 0.5}", "log 8 {'loss': 0.5}", "close"]


def test_the_frame_has_a_row_for_each_head() -> None:
    model = llama().train()
    with attemper.watch(model, history=2) as watching:
        for step in range(3):
            train(model, drawn(step))
            watching.step()
        frame = watching.frame()
    assert len(frame) == 2 * LAYERS * HEADS
    assert frame["step"].unique().tolist() == [1, 2]
    last = logged(watching.last).layers[2]
    row = frame[(frame.step == 2) & (frame.layer == ATTENTION[2]) & (frame["head"] == 3)]
    assert row.max_logit.item() == float(last.stats.max[3])
    assert last.norms is not None
    weight = model.get_parameter(f"{ATTENTION[2]}.q_proj.weight").detach()
    assert row.query_norm.item() == pytest.approx(float(weight.norm()), rel=1e-6)


def test_a_run_goes_on_where_its_state_was_kept() -> None:
    model = llama().train()
    model.get_parameter("model.layers.1.self_attn.q_proj.weight").data.mul_(20_000)
    with attemper.watch(model, every=2) as watching:
        train(model, drawn(0))
        assert logged(watching.step()).alarms
        state = watching.state_dict()
    with attemper.watch(model, every=2) as watching:
        watching.load_state_dict(state)
        assert watching.step() is None
        train(model, drawn(0))
        record = logged(watching.step())
    assert record.step == 2
    assert not record.alarms


def test_arguments_that_do_not_fit_are_refused() -> None:
    model = llama()
    for arguments, message in [
        ({"every": 0}, "every: got 0"),
        ({"every": True}, "every: got True"),
        ({"rows": 1.5}, r"rows: got 1\.5"),
        ({"mode": "watch"}, "mode: got 'watch'"),
        ({"mode": "use", "rows": 2}, "rows: got 2"),
        (
            {"layers": "*.attn"},
            r"layers: got '\*\.attn'; expected patterns of names of modules, such as 'model.layers.0.self_attn'",
        ),
        ({"on_alarm": 3}, "on_alarm: got 3"),
        ({"alarms": {"alarming": 3}}, "alarming"),
        ({"trackers": "nowhere"}, "trackers: got 'nowhere'"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            attemper.watch(model, **arguments)
    with pytest.raises(ArgumentError, match="model: got str"):
        attemper.watch("model")  # pyrefly: ignore[bad-argument-type]
    assert Watch.of(model) is None
    with attemper.watch(model), pytest.raises(UnsupportedError, match="it is watched already"):
        attemper.watch(model)


def test_a_learned_scale_is_in_the_scaled_maximum() -> None:
    """[heads], negative in one head, and beside a softcap, which comes after it."""
    torch.manual_seed(0)
    scale = torch.tensor([0.5, -2.0, 0.1])
    model = attemper.nn.MultiheadAttention(21, 3, batch_first=True, scale=scale, softcap=0.3).train()
    x = torch.randn(2, 11, 21)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = model

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    with attemper.watch(Model()) as watching:
        watching._model(x).sum().backward()
        (layer,) = logged(watching.step()).layers
    q, k, _ = F.linear(x, model.in_proj_weight, model.in_proj_bias).unflatten(-1, (9, 7)).transpose(1, 2).chunk(3, 1)
    products = (q @ k.mT).abs().amax((0, 2, 3)).double()
    torch.testing.assert_close(layer.scaled_max, (products * scale.abs().double()).detach(), rtol=1e-5, atol=0)
    assert float(layer.stats.max.max()) < 0.3
    assert isinstance(layer, LayerRecord)


def test_the_default_device_has_no_say() -> None:
    """`torch.set_default_device` is where a script makes its tensors, not where records lie."""
    model = nn.MultiheadAttention(16, 4)
    inputs = [factor * torch.ones(6, 2, 16) for factor in range(1, 41)]

    def run() -> tuple[dict[str, Any], Any]:
        histograms._logit_cells.cache_clear()
        histograms._share_cells.cache_clear()
        with attemper.watch(model, alarms={"growth-floor": 1e-6}) as watching:
            for each in inputs:
                model(each, each, each, need_weights=False)
                record = logged(watching.step())
            restored = HeadStats.from_dict(record.layers[0].stats.to_dict())
            return restored.to_dict(), (record.layers[0].norms, watching.state_dict()["alarms"])

    expected = run()
    with torch.device("meta"):
        assert run() == expected
