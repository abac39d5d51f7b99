"""Figures, their scales and colours, and the data that the page's script reads."""

import base64
import itertools
import json
import math
import zlib

import pytest
import torch

from attemper.report.page.charts import RAMPS, heat_map, histogram
from attemper.report.page.figures import FIGURES, HISTOGRAMS, Scale, mapped, scale_of
from attemper.report.page.heads import layer_data, map_data
from tests.report.page import pages


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([2.0, 3.0, math.nan], Scale("linear", 2.0, 3.0)),
        ([2.0, 61.0, math.inf], Scale("log", 2.0, 61.0)),
        ([-2.0, 61.0], Scale("linear", -2.0, 61.0)),
        ([-2.0, 101.0, -math.inf], Scale("symlog", -2.0, 101.0)),
        ([0.0, 1e5], Scale("symlog", 0.0, 1e5)),
        ([5.0, 5.0], Scale("linear", 4.5, 5.5)),
        ([-5.0], Scale("linear", -5.5, -4.5)),
        ([0.0], Scale("linear", 0.0, 1.0)),
        ([], Scale("linear", 0.0, 1.0)),
        ([math.nan, math.inf], Scale("linear", 0.0, 1.0)),
    ],
)
def test_a_scale_is_logarithmic_where_values_span_decades(values: list[float], scale: Scale) -> None:
    assert scale_of(values) == scale


def test_shares_have_one_scale_and_counts_are_mapped_where_they_are_not_zero() -> None:
    sound = mapped([row.stats for row in pages.report().rows])
    assert {scale for figure, scale in sound if figure.share} == {Scale("linear", 0.0, 1.0)}
    assert not [figure.key for figure, _ in sound if figure.form == "count"]
    broken = mapped([row.stats for row in pages.broken().rows])
    assert [figure.key for figure, _ in broken if figure.form == "count"] == ["empty_rows", "nonfinite_rows"]


@pytest.mark.parametrize("theme", RAMPS)
def test_a_ramp_reads_without_telling_hues_apart(theme: str) -> None:
    def lightness(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]) ** (1 / 3)

    steps = [lightness(colour) for colour in RAMPS[theme]]
    falls = [(before - after) * (1 if theme == "light" else -1) for before, after in itertools.pairwise(steps)]
    assert min(falls) > 0.07


def test_a_layer_unpacks_to_its_record() -> None:
    for row in (*pages.report().rows, *pages.broken().rows):
        data = json.loads(zlib.decompress(base64.b64decode(layer_data(row))))
        for (name, _), heads in zip(HISTOGRAMS, data["runs"], strict=True):
            counts = torch.zeros_like(row.stats.histograms[name])
            for head, (first, *run) in enumerate(heads):
                counts[head, first : first + len(run)] = torch.tensor(run, dtype=torch.int64)
                assert not run or (run[0] and run[-1])
            assert torch.equal(counts, row.stats.histograms[name])
        for figure in FIGURES:
            for said, value in zip(data["values"][figure.key], figure.read(row.stats).tolist(), strict=True):
                if math.isnan(value):
                    assert said is None
                elif math.isinf(value):
                    assert said == str(value)
                else:
                    assert said == pytest.approx(value, rel=1e-4, abs=0.00051)


def test_charts_are_plain_vega_without_code() -> None:
    data = map_data(pages.report().rows, list("abcde"), list("abcde"))
    assert json.dumps(data, allow_nan=False)
    for chart in (heat_map(), *(histogram(kind) for kind in ("share", "linear", "log"))):
        assert {"marks", "scales", "signals"} <= set(chart)
        assert "http" not in json.dumps(chart)
