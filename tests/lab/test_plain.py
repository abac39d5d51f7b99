"""What is said of runs that no preset asked for."""

import math

import pytest

from attemper.lab.config import After
from attemper.lab.plain import DRAWN, plain_answer
from attemper.report.sweep_text import sweep_text
from attemper.report.sweeps import Answer, SweepView
from tests.lab_runs import MODEL, Task, made_up, tiny

NAN = math.nan


def answered(losses: dict[str, list[float]]) -> Answer:
    runs = [
        made_up(tiny(seed, model=MODEL.model_copy(update={"rule": rule})), loss)
        for rule, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    answer = plain_answer(runs)
    assert len(answer.tables[0].rows) == len(losses)
    assert not [cell for table in answer.tables for row in table.rows for cell in row if cell == "nan"]
    return answer


def said(losses: dict[str, list[float]]) -> tuple[str, str]:
    answer = answered(losses)
    return answer.sentence, answer.number


def test_the_lowest_loss_is_one_of_runs_that_did_not_diverge() -> None:
    sentence, number = said({"none": [NAN, NAN], "inverse": [3.0, 4.0], "inverse_sqrt": [2.0, NAN]})
    assert sentence.startswith("The lowest mean held-out loss is 2.000 nats a scored position, of model.rule = inverse_sqrt.")
    assert "3 of 6 runs diverged, and are in no mean." in sentence
    assert number == "2.000 nats"


def test_where_every_run_diverged_no_loss_is_told() -> None:
    assert said({"none": [NAN], "inverse": [NAN]}) == ("Every run diverged: there is no loss to tell.", "none")


def test_of_one_arm_nothing_is_varied() -> None:
    sentence, _ = said({"none": [3.0, 4.0]})
    assert "is 3.500 ± 0.707 nats a scored position, of its only arm. No test" in sentence


def test_a_page_has_curves_with_bands_of_what_was_varied() -> None:
    loss, entropy = answered({"none": [NAN, NAN], "inverse": [3.0, 4.0], "inverse_sqrt": [2.0, 2.5]}).charts
    assert [series.name for series in loss.series] == ["rule = inverse_sqrt", "rule = inverse"]  # no curve where all diverged
    assert loss.series[1].y == (3.5, 3.5)
    assert loss.series[1].high[0] - loss.series[1].low[0] == pytest.approx(2 * 0.5**0.5)
    assert "rule = none" in [series.name for series in entropy.series]


def test_a_path_cannot_write_to_the_terminal() -> None:
    runs = [made_up(tiny(task=Task(length=13, path=path)), 2.0) for path in ("a", "b\x1b[31m")]
    text = sweep_text(SweepView("a", "b?", plain_answer(runs), (), "c", 2, 1.0, "d"))
    assert "\x1b" not in text
    assert r"b\x1b[31m" in text


def test_of_many_arms_the_best_are_drawn() -> None:
    runs = [made_up(tiny(steps=steps), 100.0 / steps) for steps in range(2, 4 + DRAWN)]
    answer = plain_answer(runs)
    loss = answer.charts[0]
    assert [series.name for series in loss.series] == [f"steps = {steps}" for steps in range(3 + DRAWN, 3, -1)]
    assert f"Of {len(runs)} arms the {DRAWN} of the lowest loss." in loss.note
    assert not answer.maps


def test_two_fields_make_a_map() -> None:
    runs = [
        made_up(tiny(seed, steps=steps, batch=batch), steps * batch + seed)
        for steps in (2, 4)
        for batch in (1, 3, 5)
        for seed in (0, 1)
    ]
    (drawn,) = plain_answer(runs[:-2]).maps
    assert (drawn.rows, drawn.columns) == (("2", "4"), ("1", "3", "5"))
    assert drawn.values[0] == (2.5, 6.5, 10.5)
    assert drawn.values[1][:2] == (4.5, 12.5)
    assert math.isnan(drawn.values[1][2])


@pytest.mark.parametrize("fields", [{"lengths": (4, 8)}, {"logit_factors": (4.0, 8.0)}])
def test_what_was_measured_after_the_training_is_told(fields: dict[str, object]) -> None:
    after = After.model_validate(fields)
    answer = plain_answer([made_up(tiny(seed, after=after), 2.0, after={4: 3.0 + seed, 8: 5.0}) for seed in (0, 1)])
    assert answer.tables[1].rows == (("3.500 ± 0.707", "5.000 ± 0.000"),)
    assert answer.charts[2].series[0].y == (3.5, 5.0)
