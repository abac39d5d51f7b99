import math
import random

import pytest

from attemper.lab.comparing import holm, paired, spread

NAN = math.nan


def test_spread_is_mean_and_standard_deviation() -> None:
    found = spread([1.0, 2.0, 6.0])
    assert (found.mean, found.count) == (3.0, 3)
    assert found.sd == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert str(found) == "3.000 ± 2.646"
    assert math.isnan(spread([5.0]).sd)
    assert str(spread([5.0])) == "5.000"


def test_what_diverged_is_left_out_of_means_and_counted() -> None:
    assert spread([NAN, 1.0, math.inf, 3.0]).count == 2
    found = paired([NAN, 2.0, 3.0, 5.0], [1.0, 1.0, NAN, 3.0])
    assert (found.count, found.lost, found.mean) == (2, 2, 1.5)


def test_a_paired_t_test_against_its_definition() -> None:
    # Of three differences 1, 2, 3: t = 2 / (1 / √3), and p with two degrees of freedom is 1 − t / √(t² + 2).
    found = paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    t = 2 * math.sqrt(3)
    assert found.mean == 2.0
    assert found.p == pytest.approx(1 - t / math.sqrt(t * t + 2), rel=1e-12)
    half = 4.302652729911275 / math.sqrt(3)  # Student's t at 97.5 %, two degrees of freedom
    assert (found.low, found.high) == (pytest.approx(2 - half, rel=1e-9), pytest.approx(2 + half, rel=1e-9))
    assert not found.clear
    mirrored = paired([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert (mirrored.mean, mirrored.p) == (-2.0, found.p)


def test_few_pairs_get_no_test() -> None:
    one = paired([2.0], [1.0])
    assert (one.mean, one.count) == (1.0, 1)
    assert math.isnan(one.p)
    assert not one.clear
    assert str(one) == "+1.000 (1 pairs, no test)"
    none = paired([NAN], [1.0])
    assert math.isnan(none.mean)
    assert none.lost == 1
    assert str(none) == "unknown (0 pairs, no test)"


def test_what_is_not_known_is_said_so() -> None:
    assert str(spread([NAN])) == "unknown"
    assert spread([0.5]).told("+.1f") == "+0.5"
    assert spread([0.5, 1.5]).told("+.1f") == "+1.0 ± 0.7"


def test_equal_differences() -> None:
    assert paired([1.0, 2.0], [1.0, 2.0]).p == 1.0
    assert paired([2.0, 3.0], [1.0, 2.0]).p == 0.0


def test_without_a_difference_the_test_is_clear_one_time_in_twenty() -> None:
    draw = random.Random(0)
    clear = sum(paired([draw.gauss(0, 1) for _ in range(5)], [draw.gauss(0, 1) for _ in range(5)]).clear for _ in range(2000))
    assert 60 < clear < 140  # 100 ± 4 standard deviations


def test_holm_raises_each_by_how_many_are_left() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    raised = holm([NAN, 0.02, 0.01])
    assert math.isnan(raised[0])
    assert raised[1:] == [0.02, 0.02]
    assert holm([]) == []
