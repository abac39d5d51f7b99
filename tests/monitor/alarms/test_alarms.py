"""Alarms: each fires on what it is about, once, and on nothing else."""

import io
import json
import math
import re
from collections.abc import Iterable

import pytest
import torch

from attemper.checker.codes import BY_CODE
from attemper.checker.rules import TRAINING
from attemper.errors import ArgumentError
from attemper.monitor import Alarm, LayerRecord
from attemper.monitor.alarms import Alarms, AlarmThresholds
from attemper.monitor.alarms.growth import COARSE, POINTS, trend
from attemper.monitor.alarms.looking import CODES
from attemper.monitor.alarms.thresholds import ALARM_THRESHOLDS
from tests.monitor.series import layer, record, stats


def run(layers: Iterable[LayerRecord], alarms: Alarms | None = None, start: int = 0, every: int = 1) -> list[Alarm]:
    """What is told of a run with one layer, one record after the other."""
    alarms = alarms or Alarms()
    return [found for number, each in enumerate(layers) for found in alarms.look(record(start + number * every, each))]


def told(found: Iterable[Alarm]) -> list[tuple[str, int]]:
    return [(each.code, each.step) for each in found]


def maxima(values: Iterable[float], **options: object) -> list[LayerRecord]:
    return [layer((value,), **options) for value in values]  # pyrefly: ignore


class TestLargeLogits:
    def test_each_size_is_told_once(self) -> None:
        found = run(maxima([20, 49, 60, 101, 99, 400, 1001, 990, 1200, 9999, 10001, 20000]))
        assert told(found) == [("ATT501", 3), ("ATT502", 6), ("ATT503", 10)]
        assert [each.severity for each in found] == ["warning", "error", "error"]
        assert [each.threshold for each in found] == [100, 1e3, 1e4]
        first = found[0]
        assert (first.layer, first.call, first.head, first.figure, first.value) == (
            "layers.0.attention", 0, 0, "max_scaled_product", 101,
        )  # fmt: skip
        assert first.message.startswith(
            "layers.0.attention: head 0 has a largest |scale·q·k| of 101, above 100 (at most 50 until step 1). "
        )
        assert first.message.endswith("More: attemper rule ATT501")

    def test_the_highest_speaks_for_those_below(self) -> None:
        assert told(run(maxima([3, 2e4, 2e4]))) == [("ATT503", 1)]

    def test_it_is_told_again_when_it_had_receded_clearly(self) -> None:
        assert told(run(maxima([120, 60, 120, 51, 120, 49, 120]))) == [("ATT501", 0), ("ATT501", 6)]

    def test_it_is_told_again_at_ten_times_as_much(self) -> None:
        found = run(maxima([1.1e4, 5e4, 1.0e5, 1.2e5, 9e5, 1.3e6]))
        assert told(found) == [("ATT503", 0), ("ATT503", 3), ("ATT503", 5)]

    def test_an_infinity_is_told_once(self) -> None:
        assert told(run(maxima([3, math.inf, math.inf, math.inf]))) == [("ATT503", 1)]

    def test_a_layer_speaks_once_for_its_heads(self) -> None:
        found = run([layer((3.0, 3.0, 3.0, 3.0)), layer((150.0, 3.0, 170.0, 160.0)), layer((150.0, 130.0, 170.0, 160.0))])
        assert told(found) == [("ATT501", 1)]
        assert found[0].head == 2
        assert "head 2 (and 2 more) has" in found[0].message
        apart = [layer((200.0, 3.0)), layer((40.0, 120.0)), layer((40.0, 40.0)), layer((3.0, 120.0))]
        assert [(each.step, each.head) for each in run(apart)] == [(0, 0), (3, 1)]

    def test_layers_and_calls_are_told_apart(self) -> None:
        alarms = Alarms()
        at = record(5, layer((200.0,)), layer((200.0,), call=2), layer((2000.0,), name="layers.1.attention"))
        found = alarms.look(at)
        assert [(each.code, each.layer, each.call) for each in found] == [
            ("ATT502", "layers.1.attention", 0), ("ATT501", "layers.0.attention", 0), ("ATT501", "layers.0.attention", 2),
        ]  # fmt: skip
        assert found[2].message.startswith("layers.0.attention#2: ")
        assert "(and never below half of that)" in found[0].message
        assert not alarms.look(record(6, *at.layers))

    def test_no_rows_are_no_logit(self) -> None:
        assert not run(maxima([-math.inf, math.nan, -math.inf]))
        assert told(run(maxima([200, -math.inf, math.nan, 200]))) == [("ATT501", 0)]

    def test_a_head_held_at_the_threshold_speaks_once(self) -> None:
        generator = torch.Generator().manual_seed(3)
        held = (100 * torch.rand(400, generator=generator) * 0.2 + 95).tolist()  # QK-clip at 100: some are above by the next step
        assert told(run(maxima(held)))[1:] == []


class TestGrowth:
    def test_doubling_is_told_before_it_gets_there(self) -> None:
        found = run(maxima([2.0 ** (1 + step / 12) for step in range(110)]))
        growth, *rest = found
        assert growth.code == "ATT504"
        assert growth.step == 59  # 2^(1 + 56/12) is the first above 50, and every fourth record is looked at
        assert re.search(
            r"doubles every 12 steps since step 36 or before: as it goes, it passes 1000 near step 108", growth.message
        )
        assert abs(2.0 ** (1 + 108 / 12) / 1000 - 1) < 0.03
        assert told(rest) == [("ATT501", 68), ("ATT504", 99), ("ATT502", 108)]  # and at ten times as much again

    def test_slow_growth_is_seen_in_the_long_window(self) -> None:
        noise = torch.randn(1200, generator=torch.Generator().manual_seed(0)) * 0.1
        found = run(maxima([2.0 ** (step / 120 + float(noise[step])) for step in range(1200)]))
        assert [each.code for each in found] == ["ATT504", "ATT501", "ATT504", "ATT502"]
        assert found[0].step < 700
        assert float(found[0].message.split("doubles every ")[1].split()[0]) == pytest.approx(120, rel=0.15)

    def test_beyond_1e3_it_speaks_of_1e4(self) -> None:
        found = run(maxima([1500 * 2.0 ** (step / 20) for step in range(40)]))
        assert told(found) == [("ATT502", 0), ("ATT504", 35)]
        assert found[1].threshold == 1e4
        assert "it passes 10000 near step 55" in found[1].message

    @pytest.mark.parametrize("spread", [0.05, 0.2, 0.5, 1.0])
    def test_noise_does_not_fire_it(self, spread: float) -> None:
        noise = torch.randn(700, 31, generator=torch.Generator().manual_seed(7)) * spread
        found = run(layer(tuple(row)) for row in (60 * 2.0**noise).tolist())
        assert "ATT504" not in {each.code for each in found}

    def test_noise_that_wanders_does_not_fire_it(self) -> None:
        steps = torch.randn(700, 31, generator=torch.Generator().manual_seed(11))
        value, levels = torch.zeros(31), []
        for step in steps:  # with a memory of ten records
            value = 0.9 * value + 0.1 * step
            levels.append(value)
        found = run(layer(tuple(row)) for row in (60 * 2.0 ** torch.stack(levels)).tolist())
        assert "ATT504" not in {each.code for each in found}

    def test_growth_that_slows_down_does_not_fire_it(self) -> None:
        assert told(run(maxima([0.3 * step for step in range(300)]))) == []  # a straight line
        assert told(run(maxima([95 * (1 - math.exp(-step / 20)) for step in range(300)]))) == []  # after an initialisation

    def test_growth_below_the_floor_does_not_fire_it(self) -> None:
        assert not run(maxima([2.0 ** (step / 12) for step in range(67)]))

    def test_growth_that_takes_longer_than_the_horizon_does_not_fire_it(self) -> None:
        values = [29 * 2.0 ** (step / 20) for step in range(40)]
        assert told(run(maxima(values))) == [("ATT504", 35), ("ATT501", 36)]
        assert told(run(maxima(values), every=100)) == [("ATT501", 3600)]

    def test_a_run_that_goes_back_begins_its_line_anew(self) -> None:
        alarms = Alarms()
        values = [2.0 ** (1 + step / 12) for step in range(40)]
        assert not run(maxima(values), alarms)
        assert not run(maxima(values[20:]), alarms, start=20)
        (state,) = [rule.states for rule in alarms._rules if rule.name == "growth"]
        assert state["layers.0.attention", 0]["steps"] == list(range(40))

    def test_a_line_is_what_least_squares_give(self) -> None:
        generator = torch.Generator().manual_seed(1)
        steps = torch.arange(0, 5 * POINTS, 5, dtype=torch.float64)
        levels = torch.randn(POINTS, 3, dtype=torch.float64, generator=generator) + steps.unsqueeze(-1) * 0.1
        line = trend(steps, levels)
        design = torch.stack([torch.ones_like(steps), steps], 1)
        fitted = torch.linalg.lstsq(design, levels).solution
        rest = levels - design @ fitted
        errors = (rest.square().sum(0) / (POINTS - 2) * torch.linalg.inv(design.mT @ design)[1, 1]).sqrt()
        memory = ((rest[1:] * rest[:-1]).sum(0) / rest.square().sum(0)).clamp(min=0)
        assert (memory > 0).any()
        errors *= ((1 + memory) / (1 - memory)).sqrt()
        torch.testing.assert_close(line.slope, fitted[1])
        torch.testing.assert_close(line.certainty, fitted[1] / errors)
        torch.testing.assert_close(line.now, fitted[0] + steps[-1] * fitted[1])
        torch.testing.assert_close(line.rise, fitted[1] * 5 * (POINTS - 1))

    def test_it_does_not_keep_the_whole_run(self) -> None:
        alarms = Alarms()
        run(maxima([3.0] * (POINTS * COARSE + 50)), alarms)
        (state,) = [rule.states for rule in alarms._rules if rule.name == "growth"]
        assert state["layers.0.attention", 0]["levels"] == [[float(torch.tensor(3.0).double().log2())]] * (POINTS * COARSE)


class TestCollapse:
    def test_entropy_that_falls(self) -> None:
        (first, second) = run(maxima([3] * 30, sharpness=1.0)[:10] + maxima([3] * 8, sharpness=9.0))
        assert told([first, second]) == [("ATT505", 12), ("ATT506", 12)]  # at the third such record
        assert (first.head, first.figure, first.threshold) == (None, "normalized_entropy", 0.05)
        assert 0 < first.value < 0.01
        assert re.search(r"is 0\.00\d+ on average, below 0\.05, and was 0\.9\d+ at step 0", first.message)
        assert "1 of 1 heads have a mean gain below 0.02" in second.message

    def test_what_was_low_from_the_beginning_has_not_fallen(self) -> None:
        assert not run(maxima([3] * 30, sharpness=9.0))

    def test_one_sharp_head_is_no_collapse(self) -> None:
        soft, sharp = (1.0,) * 5, (1.0, 12.0, 1.0, 1.0, 1.0)
        assert not run([layer((3.0,) * 5, sharpness=each) for each in [soft] * 5 + [sharp] * 10])

    def test_one_odd_batch_is_no_collapse(self) -> None:
        assert not run(maxima([3] * 5) + (maxima([3] * 2, sharpness=9.0) + maxima([3])) * 5)

    def test_it_is_told_again_after_it_recovered_for_ten_records(self) -> None:
        soft, sharp = maxima([3] * 10), maxima([3] * 5, sharpness=9.0)
        assert told(run(soft + sharp + soft + sharp)) == [("ATT505", 12), ("ATT506", 12), ("ATT505", 27), ("ATT506", 27)]
        assert told(run(soft + sharp + soft[:9] + sharp)) == [("ATT505", 12), ("ATT506", 12)]

    @pytest.mark.parametrize(("code", "sharpness"), [("ATT505", 5.8), ("ATT506", 6.3)])
    def test_it_is_not_told_again_before_it_recovered(self, code: str, sharpness: float) -> None:
        soft, sharp = maxima([3] * 5), maxima([3] * 5, sharpness=9.0)
        between = maxima([3] * 15, sharpness=sharpness)  # above its threshold, and below twice that
        assert [each.step for each in run(soft + sharp + between + sharp) if each.code == code] == [7]

    def test_no_rows_say_nothing(self) -> None:
        empty = torch.zeros(1, 2, 7, 11, dtype=torch.bool)
        from attemper.stats import HeadStats, RowStats

        nothing = HeadStats.from_rows(RowStats.from_logits(torch.zeros(1, 2, 7, 11), empty))
        assert not run([LayerRecord("a", 0, nothing, torch.full((2,), -math.inf, dtype=torch.float64))] * 20)


class TestNonfinite:
    def test_a_nan_is_told_once_and_after_ten_clean_records_again(self) -> None:
        def at(bad: bool) -> LayerRecord:
            return layer((3.0, 3.0, 3.0), nonfinite=(1, 2) if bad else ())

        found = run([at(step in (2, 3, 5, 14, 25)) for step in range(30)])
        assert told(found) == [("ATT507", 2), ("ATT507", 25)]
        assert (found[0].severity, found[0].head, found[0].value) == ("error", 1, 1.0)
        assert "head 1 (and 1 more) has NaN or infinite logits in 1 of 7 rows" in found[0].message


class TestNorms:
    def test_growth_against_the_first_record(self) -> None:
        norms = [(2.0 + step, 3.0 + step, 1.0) for step in range(30)]
        found = run([layer((3.0,), norms=each) for each in norms])
        step = next(step for step, (q, k, _) in enumerate(norms) if (q * k / 6) ** 0.5 > 4)
        assert told(found) == [("ATT508", step)]
        assert "times what it was at step 0" in found[0].message

    def test_norms_that_grow_together_are_no_matter(self) -> None:
        assert not run([layer((3.0,), norms=(2.0 * step, 3.0 * step, 5.0 * step)) for step in range(1, 100)])


@pytest.mark.parametrize("odd", [-math.inf, math.inf, math.nan], ids=["no rows", "overflow", "NaN"])
@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside another head"])
def test_one_odd_record_does_not_hide_growth(odd: float, other: bool) -> None:
    def run_with(values: Iterable[float]) -> list[tuple[str, int]]:
        layers = [layer((value, 20.0)[: 1 + other], name="a") for value in values]
        return [step for code, step in told(run(layers)) if code == "ATT504"]

    values = [20.0] * 40 + [20.0 * 2 ** (step / 24) for step in range(160)]
    (expected,) = run_with(values)
    (found,) = run_with([*values[:5], odd, *values[5:]])
    # A nought beside another head is remembered, and waited for until it leaves the window.
    assert expected + 1 <= found <= expected + COARSE


def test_a_layer_without_rows_recedes_from_nothing() -> None:
    growing = [2.0 ** (1 + step / 12) for step in range(110)]
    first = told(run(maxima(growing)))
    at = next(step for code, step in first if code == "ATT504") + 1
    assert [each for each in told(run(maxima([*growing[:at], -math.inf, *growing[at:]]))) if each[0] == "ATT504"] == [
        ("ATT504", step + (step >= at)) for code, step in first if code == "ATT504"
    ]


def test_a_layer_without_heads() -> None:
    assert not run([LayerRecord("a", 0, stats(()), torch.zeros(0, dtype=torch.float64))] * 3)


def test_a_restart_does_not_tell_anything_twice() -> None:
    values = [2.0 ** (1 + step / 12) for step in range(110)]
    layers = [
        layer((value, 2 * value), norms=(1 + value, 1.0, 1.0), sharpness=(step > 80) * 9.0) for step, value in enumerate(values)
    ]
    whole = run(layers)
    assert {each.code for each in whole} >= {"ATT501", "ATT502", "ATT504", "ATT505", "ATT506", "ATT508"}
    for cut in (30, 50, 70, 83, 100):
        first, second = Alarms(), Alarms()
        before = run(layers[:cut], first)
        kept = io.BytesIO()
        torch.save(first.state_dict(), kept)
        kept.seek(0)
        second.load_state_dict(torch.load(kept, weights_only=True))
        assert before + run(layers[cut:], second, start=cut) == whole
        assert run(layers[cut:], Alarms(), start=cut) != whole[len(before) :]


def test_what_is_kept_does_not_change_with_the_run() -> None:
    alarms = Alarms()
    run(maxima([3.0]), alarms)
    kept = alarms.state_dict()
    run(maxima([300.0]), alarms, start=1)
    assert not any(kept["large-logits"][0]["state"]["fired"])


@pytest.mark.parametrize(("given", "words"), [(None, "NoneType"), ({"a": []}, "'a'"), ({}, "")])
def test_a_state_of_something_else_is_refused(given: object, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"state: got {words}; expected what Alarms.state_dict gave"):
        Alarms().load_state_dict(given)  # pyrefly: ignore


def test_a_state_with_a_fault_is_refused() -> None:
    state = Alarms().state_dict() | {"growth": [{"layer": "a"}]}
    with pytest.raises(ArgumentError, match=r"a dictionary with a fault under 'growth' \(KeyError\('call'\)\)"):
        Alarms().load_state_dict(state)


UNFIT = (
    None,
    "x",
    [],
    {},
    [None],
    [[1.0]],
    [0.0] * 500,
    (1, 2),
    10**400,
    1j,
    torch.zeros(3),
    torch.ones(2, requires_grad=True) * 2,
)


def test_what_a_state_must_not_hold_is_refused_as_it_is_loaded() -> None:
    """Or a later look would fail on it, and end the run."""
    alarms = Alarms()
    run([layer((200.0, 3.0), norms=(1.0, 1.0, 1.0), nonfinite=(0,))] * 40, alarms)
    refused = 0
    for rule, (entry,) in alarms.state_dict().items():
        for name, value in entry["state"].items():
            for unfit in (value[:-1] if isinstance(value, list) else ..., *UNFIT):
                state = alarms.state_dict() | {rule: [entry | {"state": entry["state"] | {name: unfit}}]}
                with pytest.raises(ArgumentError, match=f"a dictionary with a fault under '{rule}'"):
                    Alarms().load_state_dict(state)
                refused += 1
            without = {other: each for other, each in entry["state"].items() if other != name}
            with pytest.raises(ArgumentError, match="no state of this rule"):
                Alarms().load_state_dict(alarms.state_dict() | {rule: [entry | {"state": without}]})
    assert refused > 250


def test_what_is_refused_changes_nothing() -> None:
    alarms = Alarms()
    run(maxima([200.0]), alarms)
    before = alarms.state_dict()
    with pytest.raises(ArgumentError, match="a dictionary with a fault under 'norm-growth'"):
        alarms.load_state_dict(Alarms().state_dict() | {"norm-growth": [1]})
    assert alarms.state_dict() == before


def test_json_keeps_a_state() -> None:
    alarms = Alarms()
    run(maxima([3.0, 200.0]), alarms)
    again = Alarms()
    again.load_state_dict(json.loads(json.dumps(alarms.state_dict())))
    assert again.state_dict() == alarms.state_dict()


def test_a_layer_with_another_number_of_heads_begins_anew() -> None:
    alarms = Alarms()
    assert not run([layer((20.0, 3.0))] * 40, alarms)
    assert told(run([layer((200.0, 3.0, 3.0), nonfinite=(2,))], alarms, start=40)) == [("ATT507", 40), ("ATT501", 40)]
    (state,) = [rule.states for rule in alarms._rules if rule.name == "growth"]
    assert state["layers.0.attention", 0]["levels"] == [torch.tensor([200.0, 3.0, 3.0]).double().log2().tolist()]


def test_thresholds_can_be_set() -> None:
    values = [3.0, 30.0, 60.0]
    assert told(run(maxima(values), Alarms({"alarming-logit": 50}))) == [("ATT501", 2)]
    assert told(run(maxima(values), Alarms(AlarmThresholds(alarming_logit=20.0)))) == [("ATT501", 1)]
    with pytest.raises(ArgumentError, match="thresholds: got 'alarm-logit'; expected one of alarming-logit, hurting-logit"):
        Alarms({"alarm-logit": 3.0})
    with pytest.raises(ArgumentError, match=r"thresholds.collapsed-gain: got 2.0; expected a number from 0 to 1"):
        Alarms({"collapsed_gain": 2.0})
    with pytest.raises(ArgumentError, match="thresholds: got 2000, 1000, 10000; expected alarming-logit < hurting-logit"):
        Alarms({"alarming-logit": 2000.0})


def test_every_alarm_has_a_rule_and_every_message_is_a_line() -> None:
    assert tuple(rule.code for rule in TRAINING) == CODES
    layers = [layer((2.0 ** (1 + step / 12),), norms=(1.0 + step, 1.0, 1.0), sharpness=(step > 80) * 9.0) for step in range(170)]
    found = run([*layers, layer((3.0,), nonfinite=(0,))])
    assert {each.code for each in found} == set(CODES)
    for each in found:
        assert each.severity == BY_CODE[each.code].severity
        assert "\n" not in each.message
        assert each.message.endswith(f". More: attemper rule {each.code}")


@pytest.mark.parametrize("threshold", ALARM_THRESHOLDS, ids=lambda each: each.name)
def test_each_threshold_says_what_it_is(threshold: object) -> None:
    meaning = threshold.meaning  # pyrefly: ignore
    assert meaning.words.endswith(".")
    assert meaning.unit
    assert meaning.source
    assert set(meaning.codes) <= set(CODES)
