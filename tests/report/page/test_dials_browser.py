"""The dials in a browser: the numbers of the oracle, rounding to the bit, keys, labels, what is spoken."""

import base64
import math
from collections.abc import Callable, Generator
from dataclasses import asdict

import pytest
import torch
from playwright.sync_api import Browser, Page, expect

from attemper.report.page.dials import BINS, FIGURES, STEPS, controls_page
from attemper.report.page.dials_words import WORDS
from attemper.report.page.shell import source
from tests.browser import Visit, grave_faults, visit
from tests.report.page.dials_oracle import DTYPES, Settings, bits, expected, normals

pytestmark = pytest.mark.slow

SETTINGS = (
    Settings(),
    Settings(rule="none"),
    Settings(rule="linear", d=128),
    Settings(rule="cosine", tau=10),
    Settings(rule="cosine", tau=100, dtype="float16", rho=0.5),
    Settings(rule="cosine", tau=64, dtype="bfloat16", d=1, n=3),
    Settings(d=48, n=32, rho=0.5),  # a factor that float32 rounds
    Settings(d=1, n=2),
    Settings(d=1, n=2, dtype="bfloat16", rule="none", rho=1.0),
    Settings(d=2, n=1024, dtype="float16"),
    Settings(d=1024, n=1024),
    Settings(d=1024, n=1024, rule="none", dtype="float16", softmax="plain"),
    Settings(d=1024, n=6, rho=1.0, rule="linear"),
    Settings(rho=1.0),
    Settings(rho=1.0, rule="none", dtype="bfloat16"),
    Settings(sigma=64, dtype="float16"),
    Settings(sigma=64, dtype="float16", rho=1.0),
    Settings(sigma=64, dtype="bfloat16", rule="none", softmax="plain"),
    Settings(sigma=32, n=48, d=96, dtype="float16", rho=0.75),
    Settings(sigma=4, dtype="float16", softmax="plain"),
    Settings(sigma=0.25, dtype="float16", softmax="plain", n=8),
    Settings(sigma=2, dtype="float16", softmax="plain", n=1024),  # a sum that overflows where no term does
    Settings(sigma=16, softmax="plain", rho=0.3),
    Settings(sigma=2, dtype="bfloat16", d=12, n=24, rho=0.99),
)
SET = """(settings) => {
  for (const [name, value] of Object.entries(settings)) document.getElementById(`dials-${name}`).value = value;
  document.getElementById("dials-d").dispatchEvent(new Event("input", { bubbles: true }));
}"""
READ = """() => ({
  figures: Object.fromEntries(
    [...document.querySelectorAll("#dials [id^='dials-figure-']")].map((each) => [each.id.slice(13), each.dataset.value])),
  counts: [...document.querySelectorAll("#dials-histogram rect")].map((each) => Number(each.dataset.value)),
  weights: [...document.querySelectorAll("#dials-weights rect")].map((each) => Number(each.dataset.value)),
  texts: Object.fromEntries(
    [...document.querySelectorAll("#dials dd[id], #dials .axis [id]")].map((each) => [each.id.slice(6), each.textContent])),
})"""


@pytest.fixture(scope="module")
def shown(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Generator[Visit]:
    """One page for all settings, so that what it keeps from one to the next is tested too."""
    file = tmp_path_factory.mktemp("dials") / "dials.html"
    file.write_text(controls_page("en"), "utf-8")
    opened = visit(browser, file)
    yield opened
    opened.assert_quiet()
    opened.page.context.close()


@pytest.fixture
def opened(show: Callable[..., Visit]):
    """A function that opens a page of its own."""

    def open_page(language: str = "en", **options) -> Visit:
        return show(controls_page(language), **options)

    return open_page


@pytest.fixture(scope="module")
def numbers(browser: Browser) -> Generator[Page]:
    """An empty page in which the functions of dials_numbers.js are at hand as `numbers`."""
    page = browser.new_page()
    page.evaluate(f"() => {{ {source('dials_numbers.js')}; window.numbers = {{ DTYPES, bits, normals, kept }}; }}")
    yield page
    page.close()


def place(name: str, value: object) -> str:
    return str(STEPS[name].index(value) if name in STEPS else value)


def turn(shown: Visit, at: Settings) -> None:
    """Set every dial and wait until the page shows what belongs to it."""
    shown.page.evaluate(SET, {name: place(name, value) for name, value in asdict(at).items()})
    wait_for(shown, **asdict(at))


def wait_for(shown: Visit, **wanted: object) -> None:
    shown.page.wait_for_function(
        """(wanted) => { const shown = JSON.parse(document.getElementById("dials").dataset.shown);
        return Object.entries(wanted).every(([name, value]) => shown[name] === value); }""",
        arg=wanted,
    )


def number(text: str) -> float | None:
    return None if text == "null" else float(text.replace("Infinity", "inf"))


def written(text: str) -> float | None:
    if text == "< 0.1%":
        return 0.0004
    text = text.replace("−", "-").replace("∞", "inf")
    if text.endswith("%"):
        return float(text[:-1]) / 100
    return None if text == "—" else float(text)


@pytest.mark.parametrize("at", SETTINGS, ids=str)
def test_the_numbers_are_those_of_the_oracle(shown: Visit, at: Settings) -> None:
    turn(shown, at)
    read = shown.page.evaluate(READ)
    figures = {name: number(text) for name, text in read["figures"].items()}
    wanted = expected(at)
    assert set(figures) == set(wanted.figures) == {figure.key for figure in FIGURES}
    # The products agree to the bit: a sum in another order lies within d·2^-53, and none comes so close to where the number
    # format rounds the other way. From equal logits each weight follows within n + 4 roundings, and from the weights each
    # figure within n + 4 more, in a few terms of size below 16 (dp is below 7, ln n below 7).
    slack = 64 * (at.n + 4) * 2.0**-53
    for name, value in wanted.figures.items():
        if value is None:
            assert figures[name] is None, name
        elif name in ("product_absmax", "product_overflow", "exp_overflow", "lost_rows"):
            assert figures[name] == pytest.approx(value, abs=2.0**-53, rel=0), name
        elif name == "jacobian_norm" and wanted.jacobian_norms.numel():
            # A root of what cancels near one-hot rows: an error e under it is one of e / norm, and at worst of √e.
            worst = (slack / wanted.jacobian_norms).clamp(max=math.sqrt(slack)).mean().item()
            assert figures[name] == pytest.approx(value, abs=worst, rel=0), name
        else:
            assert figures[name] == pytest.approx(value, abs=slack, rel=slack), name
    texts = read["texts"]
    for name, value in ({f"figure-{key}": each for key, each in wanted.figures.items()} | wanted.ends()).items():
        # Three digits, or a tenth of a percent.
        assert written(texts[name]) == (
            None if value is None else pytest.approx(value, rel=0.006, abs=0.0006 if texts[name].endswith("%") else 1e-9)
        ), name
    assert read["counts"] == wanted.counts
    # A weight may round the other way, to the next number of its format.
    info = torch.finfo(DTYPES[at.dtype])
    first = wanted.weights[:BINS]
    assert read["weights"] == pytest.approx(first, rel=info.eps, abs=info.smallest_normal * info.eps)


def encoded(values: torch.Tensor) -> str:
    return base64.b64encode(values.numpy().tobytes()).decode()


def awkward() -> torch.Tensor:
    """float64: every float32 whose lower half is at, beside or between what 16-bit formats tell apart, and finer numbers."""
    lower = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001)
    patterns = (torch.arange(65536).unsqueeze(-1) * 65536 + torch.tensor(lower)).flatten()
    singles = patterns.to(torch.int32).view(torch.float32).double()
    halves = torch.arange(-8193, 8194).double() * 2.0**-26  # each half of a quantum of the subnormal float16 numbers
    edges = torch.tensor([65504.0, 65519.999, 65520.0, 65520.001, 65536.0, 3.3895e38, 3.3961775e38, 3.4e38, 3.5e38, 1e-45, 1e-46])
    edges = torch.cat([edges.double(), torch.tensor([0.0, 5e-324, 1.7e308, math.inf], dtype=torch.float64)])
    beside = torch.cat([halves, edges, -edges])
    finer = torch.cat([beside * (1 + side * 2.0**-power) for side in (-1, 1) for power in (23, 24, 26, 52)])
    return torch.cat([singles, beside, finer])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_agrees_to_the_bit(numbers: Page, dtype: str) -> None:
    values = awkward()
    code = """([dtype, text]) => {
      const values = new Float64Array(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
      const found = new Uint8Array(Float64Array.from(values, (each) => window.numbers.DTYPES[dtype].round(each)).buffer);
      let out = "";
      for (let at = 0; at < found.length; at += 8192) out += String.fromCharCode(...found.subarray(at, at + 8192));
      return btoa(out);
    }"""
    found = torch.frombuffer(bytearray(base64.b64decode(numbers.evaluate(code, [dtype, encoded(values)]))), dtype=torch.float64)
    wanted = values.float().to(DTYPES[dtype]).double()
    assert torch.equal(found.isnan(), wanted.isnan())
    known = ~wanted.isnan()
    wrong = found[known].view(torch.int64) != wanted[known].view(torch.int64)
    assert not wrong.any(), (values[known][wrong][:5].tolist(), found[known][wrong][:5].tolist())


def test_the_random_numbers_are_the_same(numbers: Page) -> None:
    places = [0, 1, 2, 3, 1023, 1024, 65537, 1024 * 1024 - 1, 2**21 - 1, 2**31 - 1]
    for seed in range(3):
        found = numbers.evaluate("([seed, places]) => places.map((each) => window.numbers.bits(seed, each))", [seed, places])
        assert found == bits(seed, torch.tensor(places)).tolist()
    rows = numbers.evaluate("() => [0, 1, 2].map((each) => [...window.numbers.kept.keys.row(each, 1024)])")
    # A logarithm, a root, a cosine and an angle of up to 2π, each off by a unit in the last place or so.
    assert torch.allclose(torch.tensor(rows, dtype=torch.float64), normals(0, 3, 1024), rtol=2.0**-50, atol=2.0**-48)


def test_a_slider_moves_by_keys_and_all_else_follows(opened) -> None:
    shown = opened()
    before = shown.page.evaluate(READ)
    slider = shown.page.get_by_label("Width d", exact=True)
    slider.focus()
    shown.page.keyboard.press("End")
    wait_for(shown, d=1024)
    assert shown.text("#dials-d-value") == slider.get_attribute("aria-valuetext") == "1024"
    after = shown.page.evaluate(READ)
    changed = {name for name in before["figures"] if before["figures"][name] != after["figures"][name]}
    assert changed >= {"logit_std", "product_absmax", "normalized_entropy", "peak", "gain", "jacobian_norm", "gradient_rms"}
    assert before["counts"] != after["counts"]
    assert before["weights"] != after["weights"]
    shown.page.keyboard.press("ArrowLeft")
    wait_for(shown, d=768)
    shown.page.get_by_label("Correlation ρ").focus()
    shown.page.keyboard.press("ArrowRight")
    wait_for(shown, rho=0.01)
    shown.page.get_by_label("Scale").select_option("none")
    wait_for(shown, rule="none")
    entropy = shown.text("#dials-figure-normalized_entropy")
    expect(shown.page.locator("#dials-spoken[aria-live=polite]")).to_contain_text(f"Normalized entropy {entropy}, ")


def test_every_dial_has_its_label_and_says_its_value(opened) -> None:
    shown = opened()
    for name, (label, hint) in WORDS["en"]["dials"].items():
        dial = shown.page.get_by_label(label, exact=True)
        assert dial.get_attribute("id") == f"dials-{name}"
        assert shown.text(f"#{dial.get_attribute('aria-describedby')}") == hint
        if dial.get_attribute("type") == "range":
            assert dial.get_attribute("aria-valuetext") == shown.text(f"#dials-{name}-value")


def test_the_temperature_belongs_to_the_cosine(opened) -> None:
    shown = opened()
    expect(shown.page.locator("#dials-tau")).to_be_disabled()
    shown.page.select_option("#dials-rule", "cosine")
    expect(shown.page.locator("#dials-tau")).to_be_enabled()
    expect(shown.page.locator("#dials-sigma")).to_be_disabled()
    wait_for(shown, rule="cosine")
    before = shown.text("#dials-figure-logit_std")
    shown.page.locator("#dials-tau").focus()
    shown.page.keyboard.press("End")
    wait_for(shown, tau=100)
    assert shown.text("#dials-figure-logit_std") != before


def test_a_share_of_something_is_not_written_as_nothing(opened) -> None:
    shown = opened()
    turn(shown, Settings(n=1024, rho=0.9, dtype="float16", softmax="plain"))
    assert shown.text("#dials-figure-exp_overflow") == "< 0.1%"
    assert shown.text("#dials-figure-product_overflow") == "0.0%"


def test_lost_rows_are_told(opened) -> None:
    shown = opened()
    turn(shown, Settings(sigma=64, rho=1.0, dtype="float16"))
    assert shown.text("#dials-weights-note") == WORDS["en"]["lost"]
    assert shown.text("#dials-figure-gain") == "—"
    assert shown.text("#dials-figure-lost_rows") == "100.0%"
    assert shown.text("#dials-figure-product_absmax") == "∞"
    turn(shown, Settings(sigma=4, dtype="float16"))
    assert shown.text("#dials-histogram-note") == WORDS["en"]["limit"].format(limit="11.09")
    assert shown.page.locator("#dials-histogram line").count() == 1


def test_the_numbers_are_not_made_within_the_event(opened) -> None:
    shown = opened()
    shown.page.evaluate(SET, {"d": place("d", 1024), "n": place("n", 1024)})
    wait_for(shown, d=1024, n=1024)
    moved = """async () => {
      const dials = document.getElementById("dials");
      let painted = 0;
      new MutationObserver(() => { painted += 1; }).observe(dials, { attributeFilter: ["data-shown"] });
      const spent = [];
      for (const at of [1, 2, 3, 4, 5]) {
        document.getElementById("dials-rho").value = at / 10;
        const begun = performance.now();
        document.getElementById("dials-rho").dispatchEvent(new Event("input", { bubbles: true }));
        spent.push(performance.now() - begun);
      }
      while (JSON.parse(dials.dataset.shown).rho !== 0.5) await new Promise((done) => setTimeout(done, 20));
      return [Math.min(...spent), painted];
    }"""
    fastest, painted = shown.page.evaluate(moved)
    assert fastest < 50
    assert painted == 1  # five moves in a row, of which only the last is measured


@pytest.mark.parametrize("language", WORDS)
@pytest.mark.parametrize("width", [320, 420, 800, 1400])
def test_no_width_is_too_narrow(opened, language: str, width: int) -> None:
    shown = opened(language, width=width)
    turn(shown, Settings(d=1024, n=1024, rule="none", dtype="float16", softmax="plain"))
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width


def test_light_and_dark_have_their_own_colours(opened) -> None:
    colours = [
        opened(theme=theme).page.evaluate("getComputedStyle(document.querySelector('#dials-histogram rect')).fill")
        for theme in ("light", "dark")
    ]
    assert colours[0] != colours[1]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("language", WORDS)
def test_axe_finds_nothing_serious(opened, theme: str, language: str) -> None:
    shown = opened(language, theme=theme)
    assert not grave_faults(shown)
