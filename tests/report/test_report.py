"""The report as a record, as JSON and as text."""

import io
import json
import math

import pytest
import torch
from rich.console import Console

from attemper.errors import ArgumentError
from attemper.report import LayerRow, Report, ScaleRange, Severity
from attemper.report.explanations import explained
from attemper.report.layout import table
from attemper.report.terminal import print_report
from attemper.stats import HeadStats, RowStats
from tests.reports import HOSTILE, finding, report, stats


class TestExitCode:
    @pytest.mark.parametrize(
        ("worst", "fail_on", "code"),
        [
            (None, "info", 0),
            (Severity.INFO, "info", 1),
            (Severity.INFO, "warning", 0),
            (Severity.WARNING, "warning", 1),
            (Severity.WARNING, "error", 0),
            (Severity.ERROR, "error", 1),
            (Severity.ERROR, "info", 1),
            (Severity.ERROR, "never", 0),
        ],
    )
    def test_it_depends_on_the_worst_finding(self, worst: Severity | None, fail_on: str, code: int) -> None:
        findings = () if worst is None else (finding(severity=worst), finding(severity=Severity.INFO))
        assert report(*findings).exit_code(fail_on) == code

    def test_errors_are_what_fails_if_nothing_is_said(self) -> None:
        assert report(finding()).exit_code() == 0
        assert report(finding(severity=Severity.ERROR)).exit_code() == 1

    def test_nothing_to_check(self) -> None:
        assert report(layers=0).exit_code() == 3
        assert report(layers=0).exit_code("never") == 3

    def test_another_word(self) -> None:
        with pytest.raises(ArgumentError, match="'fatal'; expected one of error, warning, info, never"):
            report().exit_code("fatal")


class TestTotals:
    def test_they_are_those_of_all_rows_together(self) -> None:
        parts = [stats(i, factor=1.0 + i) for i in range(3)]
        merged = parts[0].merge(parts[1]).merge(parts[2])
        rows = tuple(LayerRow(f"{i}", 0, "sdpa", each, None) for i, each in enumerate(parts))
        totals = report(rows=rows).totals
        assert totals.max_logit == float(merged.max.max())
        assert totals.rows == int(merged.rows.sum()) == 3 * 2 * 3 * 7
        assert totals.mean_gain == pytest.approx(float(merged.mean_gain.mean()))
        assert totals.mean_normalized_entropy == pytest.approx(float(merged.mean_normalized_entropy.mean()))
        assert totals.saturated_share == pytest.approx(float(merged.saturated_share.mean()))
        assert totals.headroom_float16 == pytest.approx(65504 / totals.product_absmax)

    def test_heads_without_rows_have_no_weight(self) -> None:
        empty = HeadStats.from_rows(RowStats.from_logits(torch.zeros(1, 3, 2, 5), torch.zeros(1, 3, 2, 5, dtype=torch.bool)))
        row = LayerRow("empty", 0, "sdpa", empty, None)
        assert report(rows=(*report().rows, row)).totals.mean_gain == report().totals.mean_gain
        assert math.isnan(report(rows=(row,)).totals.mean_gain)
        assert "empty" in str(report(rows=(row,)))


class TestJson:
    def whole(self) -> Report:
        return report(
            finding(),
            finding("ATT203", Severity.ERROR, measured=None, threshold=None, heads=(), call=None, module=""),
            finding("ATT201", measured=math.inf, threshold=65504.0, module=HOSTILE),
            unseen=((HOSTILE, "no reason"),),
            notes=("a note",),
        )

    def test_round_trip(self) -> None:
        text = json.dumps(self.whole().to_dict(), allow_nan=False)
        again = Report.from_dict(json.loads(text))
        assert json.dumps(again.to_dict(), allow_nan=False) == text
        assert again.findings == self.whole().findings
        assert again.unseen == self.whole().unseen
        assert torch.equal(again.rows[1].stats.max, self.whole().rows[1].stats.max)
        assert again.rows[1].own_order == "eager"
        assert again.rows[1].orders[0] == self.whole().rows[1].orders[0]
        assert again.rows[1].orders[1].weight_error == (0.1235, 0.0, 1e-9)  # four digits of what is measured

    def test_what_stands_in_it(self) -> None:
        data = self.whole().to_dict()
        assert data["schema"] == 2
        assert data["counts"] == {"error": 1, "warning": 2, "info": 0}
        assert data["findings"][2]["measured"] == "inf"
        assert data["findings"][1]["measured"] is None
        layer = data["layers"][1]
        assert layer["module"] == "layers.1.attention"
        assert layer["summary"]["max"] == self.whole().rows[1].stats.max.tolist()
        assert all(len(values) == 3 for values in layer["summary"].values())

    @pytest.mark.parametrize("data", [{}, {"schema": 1}, [], {"schema": 2}, {"schema": 2, "layers": [{}]}])
    def test_what_it_is_not(self, data: object) -> None:
        with pytest.raises(ArgumentError, match="data: got"):
            Report.from_dict(data)  # pyrefly: ignore


class TestText:
    def test_the_table(self) -> None:
        lines = str(report()).splitlines()
        assert "layer = layers.*.attention" in lines
        row = next(line for line in lines if line.startswith("1 "))
        expected = report().rows[1].stats
        assert f"{float(expected.max.max()):.5g}" in row
        assert row.split()[1] == "3"
        assert row.endswith("0.125")

    def test_findings_of_one_code_stand_together_and_errors_first(self) -> None:
        text = str(
            report(
                finding(),
                finding("ATT302", Severity.INFO),
                finding("ATT402", Severity.ERROR),
                finding(module="layers.2.attention"),
            )
        )
        places = [text.index(words) for words in ("ATT402 error (1 place)", "ATT301 warning (2 places)", "ATT302 info (1 place)")]
        assert places == sorted(places)
        assert "layers.[1-2].attention: heads 1 and 2: something was measured." in text
        assert text.count("remedy: a remedy") == 3

    def test_the_worst_come_first_and_many_are_folded(self) -> None:
        findings = [finding(module=f"m{i}", message=f"number {i}.", measured=0.5 + i / 100) for i in range(20)]
        text = str(report(*findings))
        assert "ATT301 warning (20 places)" in text
        assert text.index("m19: number 19.") < text.index("m18: number 18.")
        assert "m13:" not in text
        assert "and 14 more" in text

    def test_what_was_not_seen_and_notes(self) -> None:
        text = str(report(unseen=(("a", "it never ran"), ("b", "it never ran")), notes=("a note",)))
        assert "not seen\n  a, b: it never ran" in text
        assert "notes\n  a note" in text

    def test_nothing_to_check(self) -> None:
        assert str(report(layers=0)).endswith("Nothing to check: no attention call was seen.")

    def test_a_module_that_is_called_again(self) -> None:
        rows = tuple(LayerRow("shared.attention", call, "sdpa", stats(call), None) for call in range(2))
        assert "layer = shared.attention" in str(report(rows=rows))
        assert "call 1 " in str(report(rows=rows))

    def test_a_narrow_terminal_cuts_no_figure(self) -> None:
        console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=40)
        whole = report()
        print_report(whole, console, {})
        text = console.file.getvalue()
        _, rows = table(whole)
        for cells in rows:
            assert any(line.split()[-len(cells) + 1 :] == cells[1:] for line in text.splitlines())

    def test_figures_that_there_are_none_of(self) -> None:
        one_key = HeadStats.from_rows(RowStats.from_logits(torch.ones(1, 3, 1, 1)))
        assert "mean normalized entropy —, mean gain 0.0000, saturated —." in " ".join(
            str(report(rows=(LayerRow("one", 0, "sdpa", one_key, None),))).split()
        )

    @pytest.mark.parametrize("on_terminal", [False, True])
    def test_names_cannot_steer_the_terminal(self, on_terminal: bool) -> None:
        rows = (LayerRow(HOSTILE, 0, "sdpa", stats(0), 0.125),)
        whole = report(
            finding(module=HOSTILE, message=HOSTILE, cost=HOSTILE, remedy=HOSTILE, source=HOSTILE),
            rows=rows,
            model=HOSTILE,
            inputs=HOSTILE,
            unseen=((HOSTILE, HOSTILE),),
            notes=(HOSTILE,),
        )
        text = str(whole)
        if on_terminal:
            console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=300)
            print_report(whole, console, {"ATT301": "a-name"})
            text = console.file.getvalue()
            assert "a-name" in text
        assert not {c for c in text if c < " " and c != "\n"} - ({"\x1b"} if on_terminal else set())
        assert "\x1b]" not in text
        assert "\x1b[2J" not in text
        assert not set(text) & set("\u202e\u200b\x9b\x07")
        assert text.count("[bold red]") >= 9
        assert "\\x1b[2J" in text


def test_a_scale_that_varies_is_shown_kept_and_explained() -> None:
    by_head, by_position = ScaleRange((0.25, 0.5)), ScaleRange((0.125, 1.5), by_position=True)
    rows = (LayerRow("one", 0, "sdpa", stats(0), None, by_head), LayerRow("two", 1, "sdpa", stats(1), None, by_position))
    before = report(rows=rows)
    text = str(before)
    assert "0.25…0.5" in text
    assert "0.125…1.5" in text
    data = json.loads(json.dumps(before.to_dict()))
    assert data["layers"][1]["scales"] == {"values": [0.125, 1.5], "by_position": True}
    assert [row.scales for row in Report.from_dict(data).rows] == [by_head, by_position]
    (lines,) = (lines for title, lines in explained(before, ()) if title == "the scales that vary")
    assert lines == ["one: by head, 0: 0.25, 1: 0.5", "two call 1: by position, from 0.125 to 1.5"]
    assert (by_head.single, by_position.single, ScaleRange((0.5,)).single) == (None, None, 0.5)
