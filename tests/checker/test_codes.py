"""Codes, and which of them are wanted."""

import operator
import re

import pytest

import attemper
from attemper.checker.codes import BY_CODE, RULES, is_selected, prefixes, rule
from attemper.checker.rules import TRAINING
from attemper.errors import ArgumentError


def test_every_rule_says_everything_and_none_says_it_twice() -> None:
    assert len(BY_CODE) == len(RULES) + len(TRAINING) == len({each.name for each in BY_CODE.values()})
    assert list(BY_CODE) == sorted(BY_CODE)
    for each in BY_CODE.values():
        assert re.fullmatch(r"ATT[1-5]\d\d", each.code)
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", each.name)
        for text in (each.summary, each.why, each.remedy):
            assert text.endswith(".")
        assert each.source


def test_names_in_a_rules_words_exist() -> None:
    words = " ".join(text for each in BY_CODE.values() for text in (each.why, each.measured, each.remedy, each.ignore_when))
    names = set(re.findall(r"\battemper\.([\w.]*\w)", words, re.IGNORECASE))
    assert {"QKClip", "weights.spectral_reparam"} <= names
    for name in names:
        operator.attrgetter(name)(attemper)
    assert "Attemper" not in words


@pytest.mark.parametrize("given", ["ATT301", "att301", " Att301 "])
def test_a_code_is_found_however_it_is_written(given: str) -> None:
    assert rule(given).name == "saturated-head"


@pytest.mark.parametrize("given", ["ATT999", "ATT3", "", "saturated-head"])
def test_what_is_no_code_lists_the_codes(given: str) -> None:
    with pytest.raises(ArgumentError, match=f"code: got {given!r}; expected one of ATT101, .*ATT406"):
        rule(given)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, ()),
        ("", ()),
        ("att1", ("ATT1",)),
        ("ATT1, ATT301,", ("ATT1", "ATT301")),
        (["A", "ATT40,ATT2"], ("A", "ATT40", "ATT2")),
    ],
)
def test_prefixes(given: str | list[str] | None, wanted: tuple[str, ...]) -> None:
    assert prefixes("select", given) == wanted


@pytest.mark.parametrize("given", ["ATT9", "E501", "ATT1011", "ATT1,B"])
def test_a_prefix_that_fits_nothing(given: str) -> None:
    with pytest.raises(ArgumentError, match=f"ignore: got {given.rpartition(',')[2]!r}; expected a code or the beginning of one"):
        prefixes("ignore", given)


@pytest.mark.parametrize("given", ["ATT5", "att501", "ATT1,ATT50"])
def test_alarms_are_no_findings_of_check(given: str) -> None:
    last = given.upper().rpartition(",")[2]
    with pytest.raises(
        ArgumentError, match=f"select: got '{last}'; .*ATT406. ATT5xx are alarms over a training run: attemper.watch"
    ):
        prefixes("select", given)
    assert prefixes("select", "ATT") == ("ATT",)


@pytest.mark.parametrize(
    ("select", "ignore", "kept"),
    [
        ((), (), True),
        ((), ("ATT2",), True),
        ((), ("ATT3",), False),
        (("ATT3",), (), True),
        (("ATT2",), (), False),
        (("ATT301",), ("ATT3",), True),
        (("ATT3",), ("ATT301",), False),
        (("ATT3",), ("ATT3",), False),
        (("ATT2", "ATT301"), ("ATT",), True),
        ((), ("ATT301", "ATT2"), False),
    ],
)
def test_the_longest_prefix_decides(select: tuple[str, ...], ignore: tuple[str, ...], kept: bool) -> None:
    assert is_selected("ATT301", select, ignore) is kept
