"""The dials without a browser: words in both languages, what a page gets, and that the oracle measures what attemper does."""

import pytest
import torch

import attemper
from attemper.errors import ArgumentError
from attemper.report.page.dials import BINS, FIGURES, START, STEPS, controls_page, dials_part
from attemper.report.page.dials_words import WORDS
from attemper.report.page.shell import source
from tests.report.page.dials_oracle import KEYS, QUERIES, Settings, entries, expected, normals


def shape(words: object) -> object:
    """The keys, and the names that a text leaves to be filled in."""
    if isinstance(words, dict):
        return {key: shape(value) for key, value in words.items()}
    if isinstance(words, tuple):
        return [shape(each) for each in words]
    assert isinstance(words, str)
    assert words.strip()
    return sorted(part.partition("}")[0] for part in words.split("{")[1:])


def test_both_languages_have_the_same_words() -> None:
    assert shape(WORDS["en"]) == shape(WORDS["zh"])
    assert list(WORDS["en"]["figures"]) == [figure.key for figure in FIGURES]
    assert set(WORDS["en"]["dials"]) == set(START)


def test_the_dials_reach_as_far_as_they_should() -> None:
    for name, low in (("d", 1), ("n", 2)):
        assert (STEPS[name][0], STEPS[name][-1]) == (low, 1024)
        assert list(STEPS[name]) == sorted(set(STEPS[name]))
    assert f"const BINS = {BINS};" in source("dials_numbers.js")


@pytest.mark.parametrize("language", WORDS)
def test_a_page_in_each_language(language: str) -> None:
    page = controls_page(language)
    assert f'<html lang="{language}">' in page
    assert "default-src &#39;none&#39;" in page
    for text, _ in WORDS[language]["figures"].values():
        assert f"<dt>{text}</dt>" in page
    assert len(page.encode()) < 60_000


def test_a_language_that_is_not_there() -> None:
    with pytest.raises(ArgumentError, match="lang: got 'de'; expected one of 'en', 'zh'"):
        controls_page("de")


def test_words_are_no_markup() -> None:
    words = {**WORDS["en"], "title": "<img src=x onerror=alert(1)>"}
    assert "<img" not in dials_part(words).html


def test_the_random_numbers_are_normal_and_independent() -> None:
    keys, queries = normals(KEYS, 1024, 1024), normals(QUERIES, 512, 1024)
    error = 5 / 1024  # five standard errors of a mean of 1024² numbers
    assert abs(keys.mean().item()) < error
    assert abs(keys.square().mean().item() - 1) < error * 2**0.5
    assert abs(keys.pow(4).mean().item() - 3) < error * 96**0.5  # Var x⁴ = 105 − 9
    for one, two in ((keys[:, 1:], keys[:, :-1]), (keys[1:], keys[:-1]), (keys[:512], queries)):
        assert abs((one * two).mean().item()) < error * (keys.numel() / one.numel()) ** 0.5
    assert torch.equal(normals(KEYS, 3, 5), keys[:3, :5])


@pytest.mark.parametrize(
    "at",
    [Settings(), Settings(d=1, n=2), Settings(d=1024, n=48, rho=0.5), Settings(rule="none"), Settings(rule="cosine", tau=32)],
    ids=str,
)
def test_the_figures_are_those_that_attemper_gives(at: Settings) -> None:
    query, key = (each.unsqueeze(0) for each in entries(at))
    _, rows = attemper.attention(query, key, key, scale=at.factor, return_stats=True)
    found = expected(at).figures
    # Here products and logits are not rounded to float32: each logit differs by at most two roundings and that of the factor.
    slack = 3 * 2.0**-24 * float((rows.product_absmax().max() * at.factor).clamp(min=1))
    for name, values in (
        ("normalized_entropy", rows.normalized_entropy()),
        ("peak", rows.peak()),
        ("gain", rows.gain()),
        ("jacobian_norm", rows.jacobian_norm()),
    ):
        # d ln p is at most twice the error of a logit, and none of these moves faster than 4 with ln p (H / ln n: ln p / ln 2).
        assert found[name] == pytest.approx(values.mean().item(), abs=8 * slack, rel=0), name
    assert found["logit_std"] == pytest.approx(rows.var.mean().sqrt().item(), abs=2 * slack, rel=0)
    assert found["product_absmax"] == pytest.approx(rows.product_absmax().max().item(), rel=2.0**-24)


def test_what_is_known_of_scaling_shows() -> None:
    spread = {rule: expected(Settings(d=256, rule=rule)).figures["logit_std"] for rule in ("none", "sqrt", "linear")}
    assert spread == pytest.approx({"none": 16.0, "sqrt": 1.0, "linear": 1 / 16}, rel=0.1)
    wild = expected(Settings(sigma=64, rho=1.0, dtype="float16")).figures
    assert wild["lost_rows"] == 1.0
    assert wild["gain"] is None
    assert expected(Settings(sigma=64, rho=1.0, dtype="bfloat16")).figures["lost_rows"] == 0.0
    raised = expected(Settings(sigma=4, dtype="float16", softmax="plain")).figures
    assert raised["product_overflow"] == 0.0
    assert raised["lost_rows"] > 0.9
    # In one row of these no e^z overflows, but their sum does, and leaves weights of 0.
    assert expected(Settings(sigma=2, n=1024, dtype="float16", softmax="plain")).figures["lost_rows"] == 1.0
