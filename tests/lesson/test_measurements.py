"""What is measured: another measurement agrees within the uncertainty that is stated, and the figures are what algebra says."""

import dataclasses
import math

import pytest
import torch

from attemper.lesson.figures import Figure, estimated, exact, over_seeds, within_factor, written
from attemper.lesson.making import measure
from attemper.lesson.topics import TOPICS
from tests.lesson.measured import measured


def disagreeing(topic: str, seed: int) -> list[str]:
    ours, fresh = measured(topic).figures(), measured(topic, seed).figures()
    assert ours.keys() == fresh.keys()
    return [name for name, figure in ours.items() if not figure.agrees(fresh[name].value)]


@pytest.mark.parametrize("topic", TOPICS)
def test_a_fresh_measurement_agrees_within_the_stated_uncertainty(topic: str) -> None:
    assert disagreeing(topic, 7) == []


@pytest.mark.parametrize("topic", TOPICS)
def test_figures_are_finite_and_more_certain_than_they_are_large(topic: str) -> None:
    found = measured(topic)
    for name, figure in found.figures().items():
        assert math.isfinite(figure.value), name
        assert figure.margin >= 0, name
        assert figure.factor == 1 or (figure.margin == 0 and figure.factor > 1 and figure.value > 0), name
    assert {field.name for field in dataclasses.fields(found)} - {"points"} == set(found.figures())
    assert all(math.isfinite(point.x) and math.isfinite(point.y) for point in found.points)


def value(topic: str, name: str) -> float:
    return measured(topic).figures()[name].value


def within(topic: str, name: str, expected: float) -> None:
    figure = measured(topic).figures()[name]
    assert abs(figure.value - expected) <= figure.margin + 10**-6 + abs(expected) * 1e-3, (name, figure, expected)


EXPECTED = {
    "why-sqrt-d": {
        "product_variance_16": 16, "product_variance_256": 256, "uniform_variance_64": 64, "scaled_variance_256": 1,
        "aligned_product_256": 128, "aligned_logit_256": 8,
    },
    "why-not-d": {
        "std_inverse_128": 128**-0.5, "entropy_inverse_128": 1 - 1 / (256 * math.log(512)), "own_logit_sqrt_512": 512**0.5,
        "own_logit_inverse_16": 1,
    },
    "sixteen-bit": {"fp16_max": 65504, "exp_limit": 11.0899, "scaled_limit_128": 5789.7, "bf16_spacing_300": 2},
    "qk-norm": {
        "cosine_rms": 1, "cosine_layer": 1 - 1 / 128, "std_plain_8": 64, "std_normed_8": 1, "std_normed_unscaled": 8,
        "aligned_logit": 8,
    },
    "learned-temperature": {"found_sharpest": 4},
    "rope-yarn": {
        "yarn_ratio_16": (0.1 * math.log(16) + 1) ** 2, "yarn_rule_40": (0.1 * math.log(40) + 1) ** 2,
        "yarn_rule_v2": (0.0707 * math.log(40) + 1) ** 2, "length_ratio": 1,
    },
    "many-heads": {"shared_8": 0.5, "shared_128": 2, "own_8": 1, "module_factor_times_root": 1, "module_has_scale": 0},
    "width-one": {"kurtosis_1": 9, "kurtosis_64": 3 + 6 / 64, "variance_1": 1, "factor": 1},
    "initialisation": {
        "packed_variance": 1 / 2, "linear_variance": 1 / 3, "xavier_variance": 1, "he_variance": 2, "t5_query": 1 / 64,
        "t5_logit": 1, "he_logit": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("topic", EXPECTED)
def test_figures_are_what_the_derivation_gives(topic: str) -> None:
    for name, expected in EXPECTED[topic].items():
        within(topic, name, expected)


def test_what_the_words_say_of_sizes() -> None:
    # Sentences of the texts that compare figures, and would be wrong if these did not hold.
    assert value("softmax-jacobian", "rms_4") > value("softmax-jacobian", "rms_1") > 0
    assert value("softmax-jacobian", "rms_4") > value("softmax-jacobian", "rms_16") > value("softmax-jacobian", "rms_64") > 0.03
    assert value("softmax-jacobian", "median_row_64") < 1e-3 * value("softmax-jacobian", "median_row_4")
    assert value("softmax-jacobian", "query_gradient_unscaled") > value("softmax-jacobian", "query_gradient_scaled")
    assert value("additive-or-dot", "largest_256") < value("additive-or-dot", "bound_256")
    assert value("additive-or-dot", "time_ratio") > 1
    assert value("additive-or-dot", "entropy_sharper") < 0.7 * value("additive-or-dot", "entropy_additive")
    assert value("sixteen-bit", "eager_finite") == 0
    assert value("sixteen-bit", "fused_finite") == value("sixteen-bit", "safe_softmax_finite") == 1
    assert value("sixteen-bit", "eager_error_16") > 5 * value("sixteen-bit", "fused_error_16")
    assert value("width-one", "beyond_four_64") > 1.5 * value("width-one", "beyond_four_normal")
    assert value("learned-temperature", "error_shared") > 20 * value("learned-temperature", "error_per_head")
    assert value("during-training", "largest_after") > 4 * value("during-training", "largest_before")
    assert value("during-training", "largest_clipped") < 1.2 * value("during-training", "threshold")
    assert value("during-training", "error_clipped") < 0.05 * value("during-training", "error_before")
    assert value("during-training", "error_after") < value("during-training", "error_clipped")
    assert value("during-training", "offset_max") > 250
    assert value("during-training", "offset_entropy") > 0.85


def test_figures_from_seeds() -> None:
    samples = over_seeds(lambda seed: {"x": torch.rand(()).item() + seed}, 3, 4)
    assert [math.floor(each) for each in samples["x"]] == [3000, 3001, 3002, 3003]
    figure = estimated([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert (figure.value, figure.margin) == (3.5, pytest.approx(9.71 * (3.5 / 6) ** 0.5))
    assert estimated([1.0] * 8, floor=0.5).margin == 0.5


@pytest.mark.parametrize("number", [6, 8, 12, 16])
def test_one_measurement_in_a_thousand_lies_outside_of_the_uncertainty(number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    ours, other = torch.randn(2, 200_000, number, generator=generator, dtype=torch.float64)
    # The margin of a sample is a multiple of its standard error, the same for all.
    multiple = estimated(ours[0].tolist()).margin / (ours[0].std().item() / number**0.5)
    outside = (ours.mean(-1) - other.mean(-1)).abs() > multiple * ours.std(-1) / number**0.5
    assert outside.double().mean().item() == pytest.approx(1e-3, abs=5 * (1e-3 / 200_000) ** 0.5)


def test_which_numbers_a_figure_agrees_with() -> None:
    assert [exact(2).agrees(other) for other in (2.0, 2.0000001)] == [True, False]
    assert [Figure(2.0, 0.5).agrees(other) for other in (1.5, 2.5, 2.51, math.nan)] == [True, True, False, False]
    factor = within_factor(2.0, 4)
    assert [factor.agrees(other) for other in (0.5, 8.0, 0.49, 8.1, 0.0, math.nan)] == [True, True, False, False, False, False]


@pytest.mark.parametrize("topic", ["rope-yarn", "additive-or-dot"])
def test_measuring_leaves_torch_as_it_was(topic: str) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    measure(topic)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (Figure(0.5, 0.02, ".2f"), "0.50 ± 0.02"),
        (exact(65504, ".0f"), "65504"),
        (within_factor(8e-7, 30, ".0e"), "8·10⁻⁷ ×÷ 30"),
        (Figure(-1.25, 0.5, ".1f"), "−1.2 ± 0.5"),
        (Figure(0.82, 0.0349, ".2f"), "0.82 ± 0.04"),
        (Figure(0.82, 0.07, ".2f"), "0.82 ± 0.07"),
        (Figure(300.0, 12.0, ".0f"), "300 ± 20"),
        (Figure(1.0, 0.01, ".0%"), "100% ± 1%"),
        (Figure(6.5e-3, 3.1e-4, ".1e"), "6.5·10⁻³ ± 4·10⁻⁴"),
    ],
)
def test_how_a_figure_is_written(figure: Figure, text: str) -> None:
    assert figure.with_margin() == text
    assert written(175.0, ".1g") == "2·10²"
