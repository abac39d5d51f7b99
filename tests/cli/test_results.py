"""Where results go and what old findings do, through the command."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from attemper.checker import RULES
from attemper.cli import main

Capture = pytest.CaptureFixture[str]
EXAMPLE = "attemper.examples:unscaled"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


class TestBaseline:
    def test_written_found_and_outgrown(self, capsys: Capture) -> None:
        code, out, _ = run(capsys, "check", EXAMPLE, "--ignore", "ATT3", "--write-baseline", "old.json")
        assert code == 0
        assert "0 errors, 0 warnings, 0 info; 4 old (in the baseline)" in out
        assert len(json.loads(Path("old.json").read_text())["findings"]) == 4
        code, out, _ = run(capsys, "check", EXAMPLE, "--baseline", "old.json", "--fail-on", "warning")
        assert code == 1
        assert "0 errors, 3 warnings, 0 info; 4 old" in out
        assert "ATT101" not in out
        code, out, _ = run(capsys, "check", EXAMPLE, "--baseline", "old.json", "--show-suppressed")
        assert code == 0
        assert "in the baseline\n  ATT101 error blocks.0.attention: q·k is multiplied by 1;" in out
        code, out, _ = run(capsys, "check", "attemper.examples:scaled", "--baseline", "old.json")
        assert code == 0
        assert "4 findings of the baseline are no longer there; write it again" in out
        for others in (["--select", "ATT4"], ["--per-layer-ignore", "*:ATT101"], ["--weights-only"]):
            assert "no longer there" not in run(capsys, "check", EXAMPLE, "--baseline", "old.json", *others)[1]

    def test_programs_see_what_is_old(self, capsys: Capture) -> None:
        run(capsys, "check", EXAMPLE, "--ignore", "ATT3", "--write-baseline", "old.json")
        code, out, _ = run(capsys, "check", EXAMPLE, "--baseline", "old.json", "--output-format", "sarif")
        states = [(each["ruleId"], each["baselineState"]) for each in json.loads(out)["runs"][0]["results"]]
        assert (code, states) == (0, [("ATT301", "new")] * 3 + [("ATT101", "unchanged")] * 4)
        data = json.loads(run(capsys, "check", EXAMPLE, "--baseline", "old.json", "--output-format", "json")[1])
        assert (data["counts"]["error"], len(data["suppressed"])) == (0, 4)

    def test_it_may_stand_in_the_configuration(self, capsys: Capture) -> None:
        Path("attemper.toml").write_text("baseline = 'old.json'\n")
        run(capsys, "check", EXAMPLE, "--write-baseline", "old.json", "--isolated")
        assert run(capsys, "check", EXAMPLE, "--fail-on", "info")[0] == 0

    def test_nothing_seen_writes_none(self, capsys: Capture) -> None:
        Path("bare.py").write_text(
            "import torch\nclass Plain(torch.nn.Linear):\n"
            "    def example_inputs(self):\n        return {'input': torch.ones(2, 3)}\ndef make():\n    return Plain(3, 5)\n"
        )
        assert run(capsys, "check", "bare:make", "--write-baseline", "old.json")[0] == 3
        assert not Path("old.json").exists()

    def test_one_that_is_not_there(self, capsys: Capture) -> None:
        code, out, err = run(capsys, "check", EXAMPLE, "--baseline", "absent.json")
        assert (code, out) == (2, "")
        assert "baseline absent.json could not be read: No such file or directory; --write-baseline makes one" in err


class TestOutput:
    def test_files_beside_stdout(self, capsys: Capture) -> None:
        names = ("r.json", "r.sarif", "r.xml", "r.txt")
        code, out, _ = run(capsys, "check", EXAMPLE, *(word for name in names for word in ("--output", name)))
        assert code == 1
        assert json.loads(Path("r.json").read_text())["counts"]["error"] == 4
        assert json.loads(Path("r.sarif").read_text())["version"] == "2.1.0"
        assert ET.parse("r.xml").getroot().attrib["failures"] == "1"
        assert Path("r.txt").read_text("utf-8") == out
        assert sorted(path.name for path in Path().iterdir()) == sorted(names)

    @pytest.mark.parametrize(
        ("file", "words"),
        [
            ("report.html.gz", "--output: got 'report.html.gz'; expected a file that ends in .json, .sarif, .xml, .txt"),
            ("nowhere/r.json", "--output: got nowhere/r.json; expected a file in a folder that exists; create"),
        ],
    )
    def test_what_cannot_be_written_is_said_before_the_model_runs(
        self, capsys: Capture, monkeypatch: pytest.MonkeyPatch, file: str, words: str
    ) -> None:
        monkeypatch.setattr("attemper.cli.check.check", lambda *_given, **_options: pytest.fail("it ran"))
        code, out, err = run(capsys, "check", EXAMPLE, "--output", file)
        assert (code, out) == (2, "")
        assert words in err

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--output", "r.json", "--write-baseline", "r.json"), "--write-baseline: got r.json; expected another file"),
            (("--output", "r.json", "--output", "./r.json"), "--output: got r.json; expected another file than --output r.json"),
            (("--output", "r.json", "--output", "link.json"), "--output: got link.json; expected another file"),
            (("--write-baseline", "r.json", "--html", "r.json"), "--html: got r.json; expected another file"),
            (("--html", "-"), "--html: got '-', which many commands read as stdout"),
            (("--write-baseline", "-"), "--write-baseline: got '-'"),
        ],
    )
    def test_two_results_of_one_file_are_refused_before_the_model_runs(
        self, capsys: Capture, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: str
    ) -> None:
        monkeypatch.setattr("attemper.cli.check.check", lambda *_given, **_options: pytest.fail("it ran"))
        Path("link.json").symlink_to("r.json")
        code, out, err = run(capsys, "check", EXAMPLE, *options)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1
        assert not Path("r.json").exists()

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
    @pytest.mark.parametrize("option", ["--html", "--write-baseline"])
    def test_a_file_that_is_full_is_named(self, capsys: Capture, option: str) -> None:
        code, out, err = run(capsys, "check", EXAMPLE, option, "/dev/full")
        assert (code, out) == (2, "")
        assert "/dev/full" in err
        assert err.count("\n") == 1

    def test_a_model_below_here_is_a_place_for_annotations(self, capsys: Capture, llama_folder: Path, tmp_path: Path) -> None:
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "a model").symlink_to(llama_folder)
        flags = ("--threshold", "saturated-share=0", "--threshold", "large-logit=0", "--output-format")
        log = json.loads(run(capsys, "check", "models/a model", *flags, "sarif")[1])
        places = {each["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for each in log["runs"][0]["results"]}
        assert places == {"models/a%20model/config.json"}
        assert "file=models/a model/config.json,title=ATT202" in run(capsys, "check", "models/a model", *flags, "github")[1]

    def test_github(self, capsys: Capture) -> None:
        code, out, _ = run(capsys, "check", EXAMPLE, "--output-format", "github")
        assert code == 1
        assert out.startswith("::error title=ATT101 scale-missing::blocks.[0-3].attention: q·k is multiplied by 1;")


class TestExplain:
    def test_every_number_is_explained(self, capsys: Capture) -> None:
        code, out, _ = run(capsys, "check", EXAMPLE, "--explain")
        assert code == 1
        words = " ".join(out.split())
        for column in ("layer", "heads", "max logit", "centred", "entropy", "saturated", "gain", "fp16 room", "scale"):
            assert f" {column}: " in words.partition("the columns")[2]
        assert "ATT301 measured: The share of saturated rows of the worst head" in words
        assert re.search(r"In blocks.3.attention: 0\.886\d*, held against 0\.5 ", words)
        assert "large-logit = 100 (logit; ATT202): The logit above which a head is reported." in words
        assert out.rstrip().splitlines()[-2].startswith("4 attention calls, 8 heads")

    def test_every_number_of_the_weights_too(self, capsys: Capture) -> None:
        code, out, _ = run(capsys, "check", "attemper.examples.faults:logit_bound", "--weights-only", "--explain")
        assert code == 0
        titles = ("the columns", "the closing line", "the findings", "the thresholds")
        columns, closing, *_ = (" ".join(out.partition(f"\n{title}\n")[2].split()) for title in titles)
        for column in ("layer", "heads", "logit bound", "‖W_q‖", "‖W_k‖", "‖W_v‖", "behind"):
            assert f"{column}: " in columns.partition("the closing line")[0]
        assert "largest bound on a logit: the largest logit bound of any of them" in closing

    def test_only_of_the_text(self, capsys: Capture) -> None:
        line = run(capsys, "check", EXAMPLE, "--explain", "--output-format", "json")[2]
        assert "--explain: got output-format json; expected --output-format text beside it" in line

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
    def test_every_rule_has_an_example_that_shows_it(self, capsys: Capture, rule: object) -> None:
        options = rule.options.split()  # pyrefly: ignore
        code, out, err = run(capsys, "check", rule.example, *options, "--select", rule.code, "--fail-on", "info")  # pyrefly: ignore
        assert (code, err) == (1, "")
        assert re.search(rf"^{rule.code} (error|warning|info) {rule.name} \(1 place\)$", out, re.MULTILINE)  # pyrefly: ignore
        said = run(capsys, "rule", rule.code)[1]  # pyrefly: ignore
        for part in ("Why: ", "Measured: ", "Example: attemper check ", "What to do: ", "When to ignore: "):
            assert part in said or (part == "Measured: " and rule.code == "ATT203")  # pyrefly: ignore


def test_what_is_in_force(capsys: Capture) -> None:
    Path("pyproject.toml").write_text("[tool.attemper]\nmax-tokens = 61\n")
    code, out, err = run(capsys, "check", "--show-config", "--fail-on", "info")
    assert (code, err) == (0, "")
    assert f"max-tokens = 61  # {Path.cwd() / 'pyproject.toml'}" in out
    assert 'fail-on = "info"  # command line' in out


def test_severities_change_the_exit_code(capsys: Capture) -> None:
    Path("attemper.toml").write_text("ignore = 'ATT1'\n[severities]\nATT301 = 'error'\n")
    assert run(capsys, "check", EXAMPLE)[0] == 1
    assert run(capsys, "check", EXAMPLE, "--isolated", "--ignore", "ATT1")[0] == 0
    assert run(capsys, "check", EXAMPLE, "--per-layer-ignore", "blocks.*:ATT3")[0] == 0
