"""Each preset's answer on results that were made up, so that what it should say is known."""

import math
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from attemper.errors import ArgumentError, LoadError
from attemper.lab.config import RunConfig
from attemper.lab.config_file import override
from attemper.lab.presets import NAMES, preset
from attemper.lab.presets.additive_vs_dot import Cost
from attemper.lab.presets.bounded import HeadEntropy
from attemper.lab.presets.changing import check_settings
from attemper.lab.presets.entropy_bound import Row
from attemper.lab.presets.fp16_overflow import Rounding
from attemper.lab.presets.rebuilding import Likeness
from attemper.lab.store.results import RunResult
from attemper.report.sweep_text import sweep_text
from attemper.report.sweeps import Answer, SweepView
from tests.lab_runs import made_up

NAN = math.nan
Losses = Callable[[RunConfig], float]


def noise(config: RunConfig) -> float:
    """Of an arm, −a, 0, a over the seeds: arms that differ in nothing else have the same mean, whatever the draw."""
    arm = config.model_copy(update={"seed": 0})
    return (config.seed % 3 - 1) * random.Random(arm.model_dump_json()).uniform(0.0001, 0.001)


def same(config: RunConfig) -> float:
    """No arm differs from another, but for the seeds."""
    return 2.5 + 0.01 * (config.seed % 3) + noise(config)


def after(config: RunConfig, loss: float, gap: bool) -> dict[float, float]:
    """Excess grows as ln κ and reaches 0.1 at κ = 8, with QK-norm at 32; with a plain scale a long text costs 0.5 more."""
    if config.after.logit_factors:
        breaks = 32.0 if gap and config.model.qk_norm else 8.0
        at = breaks * math.exp(10 * noise(config))
        return {factor: loss + 0.1 * max(0.0, math.log(factor) / math.log(at)) for factor in config.after.logit_factors}
    more = 0.5 if gap and config.model.rule == "inverse_sqrt" else 0.0
    return {at: loss + noise(config) + (more if at > config.task.length else 0.0) for at in config.after.lengths}


def results(name: str, losses: Losses, gap: bool = False) -> list[RunResult]:
    return [made_up(config, loss := losses(config), after=after(config, loss, gap)) for config in preset(name).runs("quick")]


def rows(name: str, found: list[RunResult], gap: bool = False) -> list[Any]:
    done = [run for run in found if run.status == "done"]
    if name == "entropy-bound":
        sharp = [1.0 if gap and run.config.model.rule == "none" else 2.0 for run in done]
        return [Row(run.id, 0, 0, 7, 1, 1, 1, 1, h + noise(run.config), 0.5, 0.1, 0) for run, h in zip(done, sharp, strict=True)]
    if name == "head-widths":
        return [HeadEntropy(run.id, when, 0, head, 8, 0.75) for run in done for when in ("before", "after") for head in range(4)]
    if name == "additive-vs-dot":
        large = [Cost("dot, written out", 128, 8, 9.0, 4.5), Cost("additive, written out", 128, 8, NAN, NAN)]
        return [Cost("dot, written out", 64, 8, 2.0, 1.5), Cost("additive, written out", 64, 8, 14.0, 96.0), *large]
    if name == "fp16-overflow":
        return [
            Rounding("naive", 1.0, 9.0, 0.0, 1e-3),
            Rounding("naive", 2.0, 36.0, 0.5, 1e-3),
            Rounding("naive", 4.0, 144.0, 1.0, NAN),
            Rounding("softcap", 2.0, 36.0, 0.0, 1e-3),
        ]
    if name == "examples":
        return [Likeness("scaled", 2017, 43, 0), Likeness("unscaled", 2017, 43, 0)]
    return []


def answered(name: str, losses: Losses, gap: bool = False) -> Answer:
    found = results(name, losses, gap)
    said = preset(name).answer(found, rows(name, found, gap))
    whole(said)
    return said


def whole(answer: Answer) -> None:
    """Whatever it says, a page can show it."""
    for table in answer.tables:
        assert {len(row) for row in table.rows} <= {len(table.header)}, table.title
        assert all(isinstance(cell, str) for row in table.rows for cell in row)
    for chart in answer.charts:
        for series in chart.series:
            assert len({len(series.x), len(series.y), len(series.low or series.x), len(series.high or series.x)}) == 1, (
                chart.title
            )
    for each in answer.maps:
        assert [len(row) for row in each.values] == [len(each.columns)] * len(each.rows)
    assert answer.tables
    assert answer.limits
    texts = [answer.sentence, answer.number, *answer.limits, *(each.note for each in (*answer.tables, *answer.charts))]
    cells = [cell for table in answer.tables for row in table.rows for cell in row]
    assert not [text for text in (*texts, *cells) if re.search(r"\bnan\b", text)]
    assert answer.sentence in " ".join(sweep_text(SweepView("a", "b?", answer, (), "c", 1, 1.0, "d")).split())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("effort", ["quick", "full"])
def test_runs_are_valid_and_each_is_there_once(name: str, effort: Any) -> None:
    made = list(preset(name).runs(effort))
    assert len(set(made)) == len(made) > 1
    assert all(RunConfig.model_validate(config.model_dump(mode="json")) == config for config in made)
    seeds: dict[RunConfig, set[int]] = {}
    for config in made:
        seeds.setdefault(config.model_copy(update={"seed": 0}), set()).add(config.seed)
    assert all(found == set(range(min(found), min(found) + max(3, len(found)))) for found in seeds.values())
    assert preset(name).name == name
    assert preset(name).sources


def test_an_unknown_preset() -> None:
    with pytest.raises(ArgumentError, match=r"'convergense'.*convergence, lr-sensitivity"):
        preset("convergense")


def drifting(config: RunConfig) -> float:
    """The best rate moves by one and a half powers of two a doubling of the width, under 1/√d alone."""
    best = -7.0 if config.model.rule == "mup" else -5.5 - 1.5 * math.log2(config.model.width / 32)
    best += 30 * noise(config.model_copy(update={"optimiser": RunConfig().optimiser}))
    return 2.0 + 0.01 * (math.log2(config.optimiser.learning_rate) - best) ** 2


def worse(differs: Callable[[RunConfig], bool], by: float = 0.5) -> Losses:
    return lambda config: same(config) + (by if differs(config) else 0.0)


KNOWN: dict[str, tuple[Losses, str, str]] = {
    "convergence": (worse(lambda c: c.model.rule == "none"), "no scale is behind 1/√d", "+0.500 nats"),
    "lr-sensitivity": (
        worse(lambda c: c.model.rule == "none" and c.optimiser.learning_rate > 0.05, 0.7),
        "No scale is more sensitive than",
        "+0.200 nats",
    ),
    "logit-threshold": (same, "bears a larger κ than", "κ = 8.0"),
    "entropy-bound": (same, "Entropy without a scale is lower than with 1/√d", "0.1 ≤ 2.00 nats"),
    "width-transfer": (drifting, "under 1/d is smaller than under 1/√d", "-3.00 powers of two"),
    "additive-vs-dot": (
        worse(lambda c: c.model.rule == "none"),
        "additive attention is ahead of the dot product without a scale",
        "-0.500 nats",
    ),
    "fp16-overflow": (
        lambda c: NAN if (c.precision.arithmetic, c.model.rule) == ("fp16_naive", "none") else same(c),
        "breaks at a largest logit of 36",
        "3 of 3 diverge",
    ),
    "clip-vs-scale": (worse(lambda c: c.model.rule == "none"), "is behind 1/√d without any clipping", "+0.500 nats"),
    "head-widths": (worse(lambda c: not c.model.own_scales), "is behind a scale for each", "+0.500 nats"),
    "examples": (worse(lambda c: c.model.rule == "none"), "without the factor is behind the one with", "+0.500 nats"),
    "length": (same, "fixed factor in ln n that change is smaller than with 1/√d", "-0.500 nats"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_gap_that_is_there_is_told_with_its_number(name: str) -> None:
    losses, said, number = KNOWN[name]
    answer = answered(name, losses, gap=True)
    assert said in answer.sentence
    numeral = re.compile(r"[+-]?\d+(\.\d+)?")
    assert numeral.sub("#", answer.number) == numeral.sub("#", number)
    found, wanted = ([float(each[0]) for each in numeral.finditer(text)] for text in (answer.number, number))
    assert found == pytest.approx(wanted, abs=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_no_gap_is_claimed_where_there_is_none(name: str) -> None:
    answer = answered(name, same)
    assert "is not told apart from" in answer.sentence
    assert not any(claim in answer.sentence for claim in ("is behind", "is ahead of", "is more sensitive", "bears a"))


@pytest.mark.parametrize("name", NAMES)
def test_trainings_that_diverged_are_told_and_how_they_count(name: str) -> None:
    gone = preset(name).runs("quick")[0]
    answer = answered(name, lambda config: NAN if config == gone else same(config))
    counted = "counted with the loss before the first step" if name == "lr-sensitivity" else "in no mean and no test"
    assert f"Diverged, and thus {counted}: " in answer.sentence
    assert "1 of 3" in answer.sentence
    with_all_gone = answered(name, lambda _: NAN)
    assert "cannot be compared with" in with_all_gone.sentence
    assert "is not told apart from" not in with_all_gone.sentence
    assert "No κ up to" not in with_all_gone.sentence


@pytest.mark.parametrize("name", NAMES)
def test_missing_seeds_are_told(name: str) -> None:
    found = results(name, same)[1:]
    answer = preset(name).answer(found, rows(name, found))
    whole(answer)
    assert "Of 3 seeds " in answer.sentence
    assert "tests take the seeds that both sides have" in answer.sentence


@pytest.mark.parametrize("name", NAMES)
def test_of_one_seed_no_test_is_made(name: str) -> None:
    found = results(name, KNOWN[name][0], gap=True)
    found = [run for run in found if run.config.seed == found[0].config.seed]
    answer = preset(name).answer(found, rows(name, found, gap=True))
    whole(answer)
    assert "no test" in answer.sentence
    assert "is not told apart from" in answer.sentence


OTHERS: dict[str, list[Any]] = {
    "task.name": ["digits", "recall"],
    "task.path": ["own.txt"],
    "task.length": [48],
    "model.layers": [1],
    "model.heads": [1],
    "model.head_dim": [40, [8, 24]],
    "model.width": [48],
    "model.attention": ["additive", "dot"],
    "model.rule": ["none", "inverse_sqrt", "learned"],
    "model.own_scales": [True],
    "model.mup_base": [7],
    "model.qk_norm": [True, False],
    "model.softcap": [10.0],
    "model.position": ["rotary"],
    "model.init": ["torch"],
    "precision.arithmetic": ["fp32", "bf16"],
    "precision.loss_scale": [8.0],
    "optimiser.name": ["sgd"],
    "optimiser.learning_rate": [0.01],
    "optimiser.gradient_clip": [1.0],
    "optimiser.qk_clip": [5.0],
    "after.logit_factors": [[2.0]],
    "after.lengths": [[40]],
    "steps": [5],
    "seed": [3],
}


@pytest.mark.parametrize("name", NAMES)
def test_what_may_be_set_leaves_an_answer_and_what_may_not_is_refused_beforehand(name: str) -> None:
    asked, refused = preset(name), {}
    runs = [config for config in asked.runs("quick") if config.seed < 2]
    for field, values in OTHERS.items():
        if (name, field) == ("length", "after.logit_factors"):  # `after` makes up one of the two
            continue
        for value in values:
            try:
                check_settings(asked, "quick", {field: value})
            except ArgumentError as error:
                refused[field] = str(error)
                continue
            configs = override(runs, {field: value})
            assert len(configs) == len(runs) or field in ("model.head_dim", "seed")
            found = [made_up(config, loss := same(config), after=after(config, loss, False)) for config in configs]
            answer = asked.answer(found, rows(name, found))
            whole(answer)
    assert set(refused) == REFUSED[name] | {"task.name"}
    said = "{} for the preset {}; expected a field on which its answer does not rest"
    assert all(said.format(field, name) in message for field, message in refused.items())


REFUSED = {
    "convergence": {"model.head_dim", "model.rule", "model.qk_norm", "model.init"},
    "lr-sensitivity": {"model.rule", "model.qk_norm", "optimiser.learning_rate"},
    "logit-threshold": {"precision.arithmetic", "model.qk_norm", "model.softcap", "after.logit_factors"},
    "entropy-bound": {"model.rule", "model.position", "model.qk_norm", "model.softcap"},
    "width-transfer": {
        "model.rule", "model.width", "model.head_dim", "model.init", "model.mup_base",
        "optimiser.learning_rate", "optimiser.name",
    },
    "additive-vs-dot": {"model.attention", "model.rule", "model.head_dim"},
    "fp16-overflow": {
        "precision.arithmetic", "precision.loss_scale", "model.rule", "model.qk_norm", "model.softcap", "model.head_dim",
    },
    "clip-vs-scale": {"model.rule", "optimiser.gradient_clip", "optimiser.qk_clip"},
    "head-widths": {"model.rule", "model.head_dim", "model.own_scales", "model.position", "model.qk_norm", "model.softcap"},
    "length": {"model.rule", "task.length", "after.lengths", "model.position"},
    "examples": {"model.rule"},  # and all that its models would not have, by its product's own check
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in NAMES if rows(name, results(name, same))])
def test_what_could_not_be_measured_is_never_a_number(name: str) -> None:
    found = results(name, same)
    always = {"size", "logit", "broken"}  # of a Rounding
    unknown = [
        row._replace(**{key: NAN for key, value in row._asdict().items() if isinstance(value, float) and key not in always})
        for row in rows(name, found)
    ]
    whole(preset(name).answer(found, unknown))
    whole(preset(name).answer(found, []))


def test_the_step_of_the_largest_logit_is_told() -> None:
    found = results("logit-threshold", same)
    limits = preset("logit-threshold").answer(found, ()).limits
    said = f"The largest logit is that of the batch after 2 of {found[0].config.steps} steps, the last that was logged."
    assert said in limits
    gone = results("logit-threshold", lambda _: NAN)
    assert not any(limit.startswith("The largest logit") for limit in preset("logit-threshold").answer(gone, ()).limits)


def test_models_that_bear_every_factor_are_told() -> None:
    found = results("logit-threshold", same, gap=True)
    assert "No κ up to" not in preset("logit-threshold").answer(found, ()).sentence
    held = [
        made_up(run.config, run.loss, after=dict.fromkeys(run.config.after.logit_factors, run.loss))
        if run.config.model.qk_norm and run.config.seed < 2
        else run
        for run in found
    ]
    sentence = preset("logit-threshold").answer(held, ()).sentence
    assert "No κ up to 4096 breaks, and thus in no mean and no test of κ is: float32, QK-norm 2 of 3." in sentence


def test_what_additive_attention_costs_is_told_where_both_were_measured() -> None:
    found = results("additive-vs-dot", same)
    told = [preset("additive-vs-dot").answer(found, measured).sentence for measured in (rows("additive-vs-dot", found), [])]
    assert "at n = 64 and d = 8 it takes 7 times the time of the dot product, and 96 MiB against 2." in told[0]
    assert "it takes" not in told[1]
    alone = [row for row in rows("additive-vs-dot", found) if row.n == 128]
    assert "was not measured beside the dot product" in preset("additive-vs-dot").answer(found, alone).sentence


@pytest.mark.parametrize("value", [math.inf, -math.inf, NAN])
def test_the_largest_logit_of_a_step_that_overflowed_is_none(value: float) -> None:
    found = results("fp16-overflow", same)
    for run in found:
        run.curves.figures["max_scaled_product"][-1, 0, 0] = value
    found[0].curves.figures["max_scaled_product"][:] = value
    table = preset("fp16-overflow").answer(found, ()).tables[1]
    assert {row[-1] for row in table.rows} == {"0.5"}
    for run in found:
        run.curves.figures["max_scaled_product"][:] = value
    assert {row[-1] for row in preset("fp16-overflow").answer(found, ()).tables[1].rows} == {""}


def test_the_entropy_at_the_start_is_that_of_all_seeds() -> None:
    found = results("clip-vs-scale", same)
    for run in found:
        run.curves.figures["normalized_entropy"][0] = 0.25 * (1 + run.config.seed)
    assert (
        "mean over the seeds: none 0.50; none, gradients clipped at 1 0.50;"
        in preset("clip-vs-scale").answer(found, ()).tables[0].note
    )


def test_a_coarser_softmax_is_told_apart_from_one_that_overflows() -> None:
    losses = worse(lambda config: config.precision.arithmetic == "fp16_safe", 0.25)
    answer = answered("fp16-overflow", losses)
    assert "in 16 bits too, 3 of 3 end, and the loss is above that of one in float32: +0.25" in answer.sentence


def test_a_run_of_no_arm_is_refused() -> None:
    stray = made_up(
        preset("length").runs("quick")[0].model_copy(update={"model": RunConfig().model.model_copy(update={"rule": "mup"})}), 2.0
    )
    with pytest.raises(LoadError, match=r"model\.rule = 'mup': expected that of one of 1/√d, ln n, fixed"):
        preset("length").answer([stray], [])


SEVERAL = {
    "lr-sensitivity": 3,
    "logit-threshold": 2,
    "width-transfer": 3,
    "additive-vs-dot": 5,  # four of the table, and one that the sentence makes beside them
    "fp16-overflow": 26,
    "clip-vs-scale": 6,
    "head-widths": 2,
    "length": 2,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_sentence_of_several_comparisons_has_the_corrected_p_of_the_table(name: str) -> None:
    answer = answered(name, KNOWN[name][0] if name == "width-transfer" else same)
    said = re.findall(r"Holm's p of (\d+) tests = ([^,]+),", answer.sentence)
    if name not in SEVERAL:
        assert len(re.findall(r"paired t, p = ", answer.sentence)) == 1
        return
    assert {int(count) for count, _ in said} == {SEVERAL[name]}
    assert "paired t, p = " not in answer.sentence
    tables = [table for table in answer.tables if "p, Holm" in table.header]
    shown = {row[table.header.index("p, Holm")] for table in tables for row in table.rows}
    beside = {"additive-vs-dot": 1, "fp16-overflow": 2, "clip-vs-scale": 1}.get(name, 0)
    assert not tables or sum(p in shown for _, p in said) >= len(said) - beside


def test_what_is_told_apart_alone_is_not_told_apart_as_one_of_many() -> None:
    spoilt = {("none", 0): 0.6, ("none", 1): 0.7, ("none", 2): 1.1}  # p = 0.036 alone

    def losses(config: RunConfig) -> float:
        high = config.optimiser.learning_rate > 0.05 and not config.model.qk_norm
        return same(config) + (spoilt.get((config.model.rule, config.seed), 0.0) if high else 0.0)

    answer = answered("lr-sensitivity", losses)
    assert "No scale is not told apart from it: the difference is +0.22" in answer.sentence
    assert "Holm's p of 3 tests = 0.1" in answer.sentence


@pytest.mark.parametrize("name", ["convergence", "additive-vs-dot", "fp16-overflow"])
def test_heads_of_several_widths_are_refused(name: str) -> None:
    config = preset(name).runs("quick")[0]
    stray = made_up(config.model_copy(update={"model": config.model.model_copy(update={"head_dim": (8, 24), "heads": 2})}), 2.0)
    with pytest.raises(LoadError, match=r"model\.head_dim = \[8, 24\]: expected heads of one width"):
        preset(name).answer([stray], [])
