"""`attemper check --html`: the page is written, and what would stop it is said before the model runs."""

from pathlib import Path

import pytest

import attemper.cli.check as command
from attemper.cli import main
from attemper.report.page import requirements


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "check", lambda *_, **__: pytest.fail("the model ran"))


def test_the_page_is_written_beside_the_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = main(["check", "attemper.examples:unscaled", "--html", str(tmp_path / "report.html")])
    out, err = capsys.readouterr()
    assert (code, err) == (1, "")
    assert "ATT101 error scale-missing" in out
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "scale-missing" in page
    assert "attemper.examples:unscaled" in page
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.usefixtures("no_run")
def test_a_place_that_cannot_be_written_is_refused_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for given, words in ((tmp_path, "got a folder"), (tmp_path / "no" / "page.html", "a folder that exists")):
        assert main(["check", "attemper.examples:scaled", "--html", str(given)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("attemper: --html: ")
        assert words in err


@pytest.mark.usefixtures("no_run")
def test_a_missing_package_is_named_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "_PACKAGES", {"nowhere_at_all": "altair"})
    assert main(["check", "attemper.examples:scaled", "--html", str(tmp_path / "page.html")]) == 2
    assert "altair is needed to make a report page; install it with: pip install 'attemper[html]'" in capsys.readouterr().err
