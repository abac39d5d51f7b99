"""What is said of runs that no preset asked for."""

import math

from attemper.lab.viewing import plain_answer
from tests.lab_runs import MODEL, made_up, tiny

NAN = math.nan


def said(losses: dict[str, list[float]]) -> tuple[str, str]:
    runs = [
        made_up(tiny(seed, model=MODEL.model_copy(update={"rule": rule})), loss)
        for rule, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    answer = plain_answer(runs)
    assert len(answer.tables[0].rows) == len(losses)
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
