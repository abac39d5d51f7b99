"""What is said of narrow dtypes: a warning where the model's own code does it, a description where other code would."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attemper
from attemper.report import Finding

HEADS, TOKENS, WIDTH = 3, 29, 8
OFFSET = 400.0  # common to every row; bfloat16 has steps of 2 there


class Attends(nn.Module):
    """Attention over what it is given, in one of the ways in which code computes it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.ones(()))  # says which dtype the model is in

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = WIDTH**-0.5
        if self.way == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, scale=scale)
        if self.way == "float32":
            return ((q.float() @ k.float().mT) * scale).softmax(-1).to(v.dtype) @ v
        if self.way == "query":
            return ((q * scale) @ k.mT).softmax(-1) @ v
        if self.way == "baddbmm":
            flat = [each.flatten(0, 1) for each in (q, k, v)]
            logits = torch.baddbmm(q.new_zeros(()), flat[0], flat[1].mT, beta=0.0, alpha=scale)
            return (logits.softmax(-1) @ flat[2]).unflatten(0, q.shape[:2])
        return ((q @ k.mT) * scale).softmax(-1) @ v


def inputs(dtype: torch.dtype, offset: float = OFFSET, spread: float = 1.5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, HEADS, TOKENS, WIDTH, generator=generator) * spread for _ in "qkv")
    q[..., 0], k[..., 0] = offset**0.5, (offset * WIDTH) ** 0.5
    return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}


def findings(way: str, dtype: torch.dtype, code: str, **options: float) -> list[Finding]:
    report = attemper.check(Attends(way).to(dtype), inputs(dtype, **options), select=code)
    assert not report.unseen
    assert len(report.rows) == 1
    return list(report.findings)


class TestLogitsThatRoundAway:
    @pytest.mark.parametrize(
        ("way", "dtype", "severity", "own"),
        [
            ("plain", torch.bfloat16, "warning", "eager"),
            ("query", torch.bfloat16, "warning", "scale-first"),
            ("baddbmm", torch.bfloat16, "warning", "scale-first"),
            ("float32", torch.bfloat16, "info", "fused"),
            ("sdpa", torch.bfloat16, "info", "fused"),
            ("plain", torch.float32, "info", "eager"),
            ("plain", torch.float16, "info", "eager"),
        ],
    )
    def test_by_order_and_dtype(self, way: str, dtype: torch.dtype, severity: str, own: str) -> None:
        (finding,) = findings(way, dtype, "ATT205")
        assert finding.severity == severity
        assert f"({own} in {str(dtype).removeprefix('torch.')})" in finding.cost
        assert finding.measured is not None
        assert finding.measured > finding.threshold == 0.1
        assert "in bfloat16" in finding.message
        assert "fused 0.00" in finding.message

    def test_silent_without_the_offset(self) -> None:
        assert not findings("plain", torch.bfloat16, "ATT205", offset=0.0)

    def test_it_happens(self) -> None:
        # The model's own output in bfloat16 is off by as much as the finding says, and that of a fused kernel is not.
        given = inputs(torch.bfloat16)
        exact = Attends("plain").double()(**{name: each.double() for name, each in given.items()})
        off = {way: float((Attends(way)(**given).double() - exact).norm() / exact.norm()) for way in ("plain", "sdpa")}
        report = attemper.check(Attends("plain").bfloat16(), given)
        run = {each.order: max(each.output_error) for each in report.rows[0].orders if each.dtype == "bfloat16"}
        assert report.rows[0].own_order == "eager"
        assert off["plain"] / 2 < run["eager"] < off["plain"] * 2
        assert run["fused"] < 0.01 > off["sdpa"]
        assert off["plain"] > 0.1


class TestFloat8:
    def test_numbers_beyond_it(self) -> None:
        (finding,) = findings("sdpa", torch.float32, "ATT206", spread=0.1, offset=250000.0)
        assert finding.severity == "info"
        assert "pass the largest float8_e4m3fn number" in finding.message
        assert finding.heads == (0, 1, 2)

    def test_too_few_bits(self) -> None:
        (finding,) = findings("sdpa", torch.float32, "ATT206", spread=8.0, offset=0.0)
        assert "pass the largest" not in finding.message
        assert finding.measured is not None
        assert finding.measured > 0.25

    def test_silent_where_it_does_well(self) -> None:
        assert not findings("sdpa", torch.float32, "ATT206", spread=1.0, offset=0.0)


def test_a_call_without_keys_has_no_orders() -> None:
    given = inputs(torch.float32)
    given["k"], given["v"] = given["k"][:, :, :0], given["v"][:, :, :0]
    report = attemper.check(Attends("sdpa"), given)
    assert [(row.own_order, row.orders) for row in report.rows] == [("", ())]
