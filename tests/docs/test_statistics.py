"""The pages of statistics: one for each there is, with what it really comes to."""

import inspect
import math
import re
from collections.abc import Callable

import pytest
from torch import Tensor

from attemper import HeadStats, RowStats
from attemper.checker.codes import BY_CODE
from attemper.monitor.records import BY_NAME
from attemper.stats import FIELDS
from docs.pages.measured_statistics import extremes, value_of
from docs.pages.statistic_texts import STATISTICS, Statistic
from docs.pages.statistics import statistic_pages

N, C, SCALE, LARGE = 512, 1.0, 0.125, 200.0
# The words of the tables, as arithmetic: n logits that are all c, and one logit far above n − 1 others, which are 0 here.
UNIFORM = {
    "n": N,
    "0": 0.0,
    "1": 1.0,
    "c": C,
    "c + ln n": C + math.log(N),
    "ln n": math.log(N),
    "1/n": 1 / N,
    "1/n²": 1 / N**2,
    "1 − 1/n": 1 - 1 / N,
    "√(n − 1)/n": math.sqrt(N - 1) / N,
    "c/s": C / SCALE,
    "65504 s/c in float16": 65504 * SCALE / C,
    "log₂ of headroom": math.log2(65504 * SCALE / C),
    "false": 0.0,
}
ONE_HOT = {
    "n": N,
    "0": 0.0,
    "1": 1.0,
    "true": 1.0,
    "that logit": LARGE,
    "as large as that logit": LARGE,
    "of the other keys": 0.0,
    "the place of that key": 0.0,
    "that logit / n, where the others are 0": LARGE / N,
    "that logit² (n − 1) / n², where the others are 0": LARGE**2 * (N - 1) / N**2,
    "that logit (n − 1)/n, where the others are 0": LARGE * (N - 1) / N,
    "that logit / s": LARGE / SCALE,
    "65504 s / that logit in float16": 65504 * SCALE / LARGE,
    "log₂ of headroom": math.log2(65504 * SCALE / LARGE),
}


def returns_a_tensor(thing: Callable[..., object]) -> bool:
    return inspect.signature(thing).return_annotation is Tensor


def test_every_field_and_every_derived_figure_has_a_page_and_nothing_else_has() -> None:
    derived = {name for name, thing in vars(RowStats).items() if inspect.isfunction(thing) and returns_a_tensor(thing)}
    derived = {name for name in derived if not name.startswith("_")}
    assert "gain" in derived
    assert [each.name for each in STATISTICS if each.name not in derived] == [*FIELDS[:6], "lse", "entropy", *FIELDS[6:]]
    assert {each.name for each in STATISTICS} >= derived
    assert len({each.name for each in STATISTICS}) == len(STATISTICS)


def test_every_figure_of_a_head_and_of_a_watched_run_is_on_one_page() -> None:
    of_heads = {name for name, thing in vars(HeadStats).items() if isinstance(thing, property)} - {"heads"} | {"headroom"}
    assert sorted(name for each in STATISTICS for name in each.heads) == sorted(of_heads)
    assert sorted(name for each in STATISTICS for name in each.figures) == sorted(BY_NAME)


def test_the_codes_named_exist() -> None:
    assert {code for each in STATISTICS for code in each.codes} <= set(BY_CODE)


@pytest.mark.parametrize("statistic", STATISTICS, ids=lambda each: each.name)
def test_what_a_page_says_of_the_extremes_is_so(statistic: Statistic) -> None:
    rows = {name: float(value_of(of, statistic).flatten()[0]) for name, of in extremes(N).items()}
    assert rows["uniform"] == pytest.approx(UNIFORM[statistic.uniform], rel=1e-4, abs=1e-6)
    assert rows["one_hot"] == pytest.approx(ONE_HOT[statistic.one_hot], rel=1e-4, abs=1e-6)


def test_pages_show_examples_that_ran_and_pictures_of_what_was_measured() -> None:
    pages = statistic_pages()
    assert set(pages) == {"index", *(each.name for each in STATISTICS)}
    for each in STATISTICS:
        page = pages[each.name]
        assert re.search(r"^It prints:\n\n```text\n.+\n```", page, re.MULTILINE), each.name
        assert ("<svg" in page) == bool(each.picture), each.name
        assert f"]({each.name}.md)" in pages["index"]
    assert re.search(r"^\| 1 \| 3\.\d+ \| 5\.7\d+ \| 7\.8\d+ \|$", pages["entropy"], re.MULTILINE)  # near ln n − 1/2
