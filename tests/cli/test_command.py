"""The command: exit codes, what goes where, hostile arguments."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attemper
from attemper.checker import RULES
from attemper.cli import main
from attemper.report import Report
from tests import checkpoints
from tests.running import hear_ctrl_c

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def could_not_run(capsys: Capture, *arguments: str) -> str:
    """The one line on stderr of a command that exits 2 and prints no result."""
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("attemper: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


class TestCheck:
    def test_a_sound_folder_is_clean(self, capsys: Capture, llama_folder: Path) -> None:
        code, out, err = run(capsys, "check", str(llama_folder))
        assert (code, err) == (0, "")
        assert f"model: {llama_folder}" in out
        assert "the built-in passage, its own tokenizer, 61 tokens, cut from" in out
        assert "layer = model.layers.*.self_attn" in out
        assert "3 attention calls, 15 heads" in out
        assert "0 errors, 0 warnings, 1 info" in out  # random weights are uniform

    def test_without_a_model_the_unscaled_example(self, capsys: Capture) -> None:
        code, out, _ = run(capsys, "check")
        assert code == 1
        assert "model: attemper.examples:unscaled" in out
        assert "ATT101 error scale-missing (4 places)" in out
        assert "blocks.[0-3].attention: q·k is multiplied by 1" in out

    def test_the_scaled_example_is_clean(self, capsys: Capture) -> None:
        code, out, _ = run(capsys, "check", "attemper.examples:scaled", "--fail-on", "warning")
        assert code == 0
        assert "0 errors, 0 warnings" in out

    def test_python_gives_what_the_command_prints(self, capsys: Capture, bert_folder: Path) -> None:
        _, out, _ = run(capsys, "check", str(bert_folder), "--ignore", "ATT303")  # a report by itself has no names of rules
        assert out == f"{attemper.check(str(bert_folder), ignore='ATT303')}\n"

    @pytest.mark.parametrize(
        ("options", "code"),
        [
            ((), 1),
            (("--ignore", "ATT1"), 0),
            (("--ignore", "ATT1", "--fail-on", "warning"), 1),
            (("--ignore", "ATT1,ATT301", "--fail-on", "info"), 0),
            (("--select", "ATT3"), 0),
            (("--select", "ATT3", "--select", "ATT101"), 1),
            (("--select", "ATT1", "--ignore", "ATT101"), 0),
            (("--select", "ATT101", "--ignore", "ATT1"), 1),
            (("--fail-on", "never"), 0),
        ],
    )
    def test_exit_codes(self, capsys: Capture, options: tuple[str, ...], code: int) -> None:
        assert run(capsys, "check", *options)[0] == code

    def test_nothing_to_check(self, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "no_attention.py").write_text(
            "import torch\n"
            "class Plain(torch.nn.Linear):\n"
            "    def example_inputs(self):\n"
            "        return {'input': torch.randn(2, 3)}\n"
            "def make():\n"
            "    return Plain(3, 5)\n"
        )
        monkeypatch.chdir(tmp_path)
        code, out, _ = run(capsys, "check", "no_attention:make")
        assert code == 3
        assert "Nothing to check" in out

    def test_what_a_factory_prints_does_not_reach_stdout(
        self, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "chatty.py").write_text(
            "from attemper.examples import scaled\ndef make():\n    print('hello')\n    return scaled()\n"
        )
        monkeypatch.chdir(tmp_path)
        code, out, err = run(capsys, "check", "chatty:make", "--output-format", "json")
        assert code == 0
        assert json.loads(out)["model"] == "chatty:make"
        assert err == "hello\n"

    def test_nor_what_its_children_and_its_libraries_write(self, tmp_path: Path) -> None:
        """Past Python's own stdout: a child process, the descriptor, and C's buffer, which waits until the process ends."""
        (tmp_path / "loud.py").write_text(
            "import ctypes, os, sys, attemper.examples\n"
            "def make():\n"
            "    os.system('echo from a child')\n"
            "    os.write(1, b'from the descriptor\\n')\n"
            "    ctypes.CDLL(None).puts(b'from C')\n"
            "    print('from the real stdout', file=sys.__stdout__)\n"
            "    return attemper.examples.scaled()\n"
            "def fail():\n"
            "    os.system('echo from a child')\n"
            "    raise ValueError\n"
        )
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # C's stdout too
        for factory, code in (("make", 0), ("fail", 2)):
            command = [sys.executable, "-m", "attemper", "check", f"loud:{factory}", "--output-format", "json"]
            done = subprocess.run(command, cwd=tmp_path, env=buffered, capture_output=True, text=True, check=False)
            assert done.returncode == code
            assert "from a child" in done.stderr
            assert json.loads(done.stdout)["schema"] if factory == "make" else done.stdout == ""
            assert all(words in done.stderr for words in ("descriptor", "from C", "real stdout") if factory == "make")

    def test_the_descriptor_is_given_back(self, capfd: Capture) -> None:
        assert main(["check", "builtins:list"]) == 2
        os.write(1, b"mine again")
        assert capfd.readouterr().out == "mine again"

    def test_the_current_directory_is_importable_and_no_longer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        before = list(sys.path)
        with pytest.raises(attemper.errors.LoadError, match="'nowhere_here:make' could not be imported"):
            attemper.check("nowhere_here:make")
        assert sys.path == before

    def test_json(self, capsys: Capture, llama_folder: Path) -> None:
        code, out, err = run(capsys, "check", str(llama_folder), "--output-format", "json")
        assert (code, err, out.count("\n")) == (0, "", 1)
        data = json.loads(out, parse_constant=lambda word: pytest.fail(f"not JSON: {word}"))
        assert data["schema"] == 2
        assert [layer["module"] for layer in data["layers"]] == [f"model.layers.{i}.self_attn" for i in range(3)]
        assert Report.from_dict(data).to_dict() == data

    def test_float16(self, capsys: Capture, llama_folder: Path) -> None:
        code, out, _ = run(capsys, "check", str(llama_folder), "--dtype", "float16")
        assert code == 0
        assert "computed in: float16" in out
        assert "the checkpoint is float32; computed in float16" in out


class TestInputs:
    def test_a_text(self, capsys: Capture, llama_folder: Path, tmp_path: Path) -> None:
        (tmp_path / "short.txt").write_text("The ferry to the outer islands leaves in the dark.")
        code, out, _ = run(capsys, "check", str(llama_folder), "--inputs", str(tmp_path / "short.txt"))
        assert code == 0
        assert "inputs: short.txt, its own tokenizer, 11 tokens\n" in out
        assert "3 attention calls, 15 heads, 165 rows" in out

    def test_named_tensors(self, capsys: Capture, llama_folder: Path, tmp_path: Path) -> None:
        checkpoints.tensors(tmp_path / "ids.safetensors", input_ids=torch.arange(4, 17).unsqueeze(0))
        _, out, _ = run(capsys, "check", str(llama_folder), "--inputs", str(tmp_path / "ids.safetensors"))
        assert "inputs: the tensors of ids.safetensors" in out
        assert "195 rows" in out

    def test_a_function(self, capsys: Capture, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "given.py").write_text(
            "import torch\ndef ids():\n    return {'input_ids': torch.arange(4, 11).unsqueeze(0)}\n"
            "def text():\n    return 'words'\n"
        )
        monkeypatch.chdir(tmp_path)
        _, out, _ = run(capsys, "check", str(llama_folder), "--inputs", "given:ids")
        assert "inputs: given:ids (given: input_ids [1, 7])" in out
        assert "returned text" in could_not_run(capsys, "check", str(llama_folder), "--inputs", "given:text")

    def test_max_tokens(self, capsys: Capture, llama_folder: Path) -> None:
        _, out, _ = run(capsys, "check", str(llama_folder), "--max-tokens", "13")
        assert "13 tokens, cut from" in out

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("absent.txt", None, "does not exist; expected a text file"),
            ("empty.txt", b" \n", "is empty"),
            ("binary.txt", b"\xff\xfe\x00", "is not UTF-8 text"),
            ("cut.safetensors", b"\x08\0\0", "is truncated"),
        ],
    )
    def test_what_cannot_be_read(
        self, capsys: Capture, bert_folder: Path, tmp_path: Path, name: str, content: bytes | None, words: str
    ) -> None:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert words in could_not_run(capsys, "check", str(bert_folder), "--inputs", str(tmp_path / name))

    def test_a_name_that_the_model_does_not_take(self, capsys: Capture, tmp_path: Path) -> None:
        file = checkpoints.tensors(tmp_path / "wrong.safetensors", pixels=torch.zeros(3))
        line = could_not_run(capsys, "check", "attemper.examples:scaled", "--inputs", str(file))
        assert "attemper.examples:scaled takes no 'pixels'; it takes " in line

    def test_a_text_needs_a_tokenizer(self, capsys: Capture, tmp_path: Path) -> None:
        (tmp_path / "short.txt").write_text("The ferry.")
        line = could_not_run(capsys, "check", "attemper.examples:scaled", "--inputs", str(tmp_path / "short.txt"))
        assert "short.txt is text, and attemper.examples:scaled brings no tokenizer" in line

    def test_a_folder_is_no_input(self, capsys: Capture, bert_folder: Path) -> None:
        assert "is not a file" in could_not_run(capsys, "check", str(bert_folder), "--inputs", str(bert_folder))

    def test_a_model_that_cannot_run_on_them(self, capsys: Capture, bert_folder: Path, tmp_path: Path) -> None:
        checkpoints.tensors(tmp_path / "ids.safetensors", input_ids=torch.tensor([[5, 999]]))
        line = could_not_run(capsys, "check", str(bert_folder), "--inputs", str(tmp_path / "ids.safetensors"))
        assert "could not be run on the tensors of ids.safetensors: IndexError" in line


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("./nowhere",), "./nowhere: no such folder"),
            (("a/b/c",), "a/b/c: no such folder"),
            (("org/never-heard-of-it",), "not to be had from the Hugging Face Hub"),
            (("no_such_module:make",), "'no_such_module:make' could not be imported: ModuleNotFoundError"),
            (("attemper.examples:nothing",), "could not be imported: AttributeError"),
            (("attemper:__version__",), "is str; expected a function"),
            (("builtins:list",), "returned list; expected a torch.nn.Module"),
            (("torch.nn:Linear",), "failed when called without arguments: TypeError"),
            (("torch.nn:Identity",), "no example_inputs()"),
            (("sys:exit",), "failed when called without arguments: SystemExit"),
            (("~nobody-of-that-name/model",), "~nobody-of-that-name/model: no such folder"),
            (("--inputs", "~nobody-of-that-name/text"), "~nobody-of-that-name/text does not exist"),
            (("--select", "ATT9"), "select: got 'ATT9'; expected a code or the beginning of one: ATT101, "),
            (("--ignore", "E501"), "ignore: got 'E501'"),
            (("--max-tokens", "1"), "--max-tokens: got 1"),
        ],
    )
    def test_one_clear_line(self, capsys: Capture, arguments: tuple[str, ...], words: str) -> None:
        assert words in could_not_run(capsys, "check", *arguments)

    @pytest.mark.parametrize(
        "arguments", [("check", "--dtype", "int4"), ("check", "--fail-on", "sometimes"), ("check", "--what"), ("nonsense",)]
    )
    def test_usage(self, capsys: Capture, arguments: tuple[str, ...]) -> None:
        line = could_not_run(capsys, *arguments)
        assert arguments[-1] in line
        assert line.endswith(f"; see attemper{' check' if arguments[0] == 'check' else ''} --help\n")

    def test_folders(self, capsys: Capture, tmp_path: Path) -> None:
        could_not_run(capsys, "check", str(tmp_path))
        could_not_run(capsys, "check", str(checkpoints.config_only(tmp_path)))
        (tmp_path / "pytorch_model.bin").write_bytes(b"x")
        assert "--allow-pickle" in could_not_run(capsys, "check", str(tmp_path))
        could_not_run(capsys, "check", str(tmp_path), "--allow-pickle")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))
        assert "'../x.safetensors'" in could_not_run(capsys, "check", str(tmp_path))

    def test_names_cannot_steer_the_terminal(self, capsys: Capture, tmp_path: Path) -> None:
        folder = checkpoints.config_only(tmp_path)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "\x1b[2J\u202e[red].safetensors"}}))
        line = could_not_run(capsys, "check", str(folder))
        assert "\x1b" not in line
        assert "\u202e" not in line
        assert "[red]" in line


class TestOtherCommands:
    def test_rule(self, capsys: Capture) -> None:
        code, out, _ = run(capsys, "rule", "att301")
        assert code == 0
        assert out.startswith("ATT301 saturated-head (warning)\n")
        assert "What to do:" in out

    def test_all_rules(self, capsys: Capture) -> None:
        _, out, _ = run(capsys, "rule")
        assert all(rule.code in out for rule in RULES)
        assert all(line.startswith(("ATT", " " * 17)) for line in out.splitlines())

    def test_a_rule_over_time(self, capsys: Capture) -> None:
        code, out, _ = run(capsys, "rule", "ATT504")
        assert code == 0
        assert out.startswith("ATT504 logits-growing (warning)\n")
        assert "Found by: attemper.watch" in out
        assert "Threshold growth-floor = 50" in out
        assert "ATT508" in run(capsys, "rule")[1]

    def test_help_is_not_cut(self, capsys: Capture) -> None:
        assert "..." not in run(capsys, "--help")[1].partition("Commands:")[2]

    def test_an_unknown_rule_lists_those_there_are(self, capsys: Capture) -> None:
        line = could_not_run(capsys, "rule", "ATT999")
        assert all(rule.code in line for rule in RULES)

    def test_info(self, capsys: Capture) -> None:
        code, out, _ = run(capsys, "info")
        assert code == 0
        for words in (
            f"attemper {attemper.__version__}",
            f"torch {torch.__version__}",
            "kernel blocked: here",
            "extra hf: transformers",
        ):
            assert words in out

    def test_version(self, capsys: Capture) -> None:
        assert run(capsys, "--version") == (0, f"attemper {attemper.__version__}\n", "")

    def test_without_arguments_it_shows_its_help(self, capsys: Capture) -> None:
        _, out, err = run(capsys)
        assert "check" in out + err

    @pytest.mark.parametrize("package", ["typer", "rich"])
    def test_a_missing_package_is_named(self, capsys: Capture, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
        import importlib.util

        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
        line = could_not_run(capsys, "check")
        assert f"{package} is needed to run the command; install it with: pip install 'attemper[cli]'" in line

    def test_a_missing_library_for_checkpoints_is_named(
        self, capsys: Capture, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        assert "pip install 'attemper[hf]'" in could_not_run(capsys, "check", str(llama_folder))


class TestStreams:
    def test_a_reader_that_has_gone(self) -> None:
        command = [sys.executable, "-m", "attemper", "check", "attemper.examples:unscaled"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        process.stderr.close()
        assert process.wait() == 1  # the answer stands

    def test_a_reader_that_has_gone_is_no_finding(self) -> None:
        command = [sys.executable, "-m", "attemper", "rule"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        process.stderr.close()
        assert process.wait() == 0

    @pytest.mark.parametrize(("closing", "lines"), [(">&-", 1), ("2>&- >&-", 0), ("2>&-", 0), (">/dev/full", 1)])
    @pytest.mark.parametrize("command", ["check", "rule"])
    def test_a_stream_that_cannot_be_written(self, command: str, closing: str, lines: int) -> None:
        if "/dev/full" in closing and not Path("/dev/full").exists():
            pytest.skip("no /dev/full here")
        done = subprocess.run(
            ["sh", "-c", f'"{sys.executable}" -m attemper {command} {closing}'], capture_output=True, text=True, check=False
        )
        assert done.returncode == (2 if ">&-" in closing.split() or "full" in closing else command == "check")
        assert done.stderr.count("\n") == lines
        assert "Traceback" not in done.stderr

    def test_a_fault_of_our_own_is_not_a_finding(self, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_given: object, **_options: object) -> None:
            raise ZeroDivisionError("nobody expected this")

        monkeypatch.setattr("attemper.cli.check.check", broken)
        code, out, err = run(capsys, "check")
        assert (code, out) == (2, "")
        assert "ZeroDivisionError: nobody expected this" in err
        assert err.splitlines()[-1].startswith("attemper: this is a fault in attemper itself")

    def test_a_terminal_that_knows_latin_1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
        assert main(["check", "attemper.examples:scaled"]) == 0
        sys.stdout.flush()
        assert b"max \x3f mean" in raw.getvalue()

    def test_a_terminal_gets_colour_and_a_pipe_does_not(self, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert "\x1b" not in run(capsys, "check")[1]
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        _, out, err = run(capsys, "check")
        assert "\x1b[1;31mATT101 error" in out
        assert err == ""
        monkeypatch.setenv("NO_COLOR", "1")
        assert "\x1b[1;31m" not in run(capsys, "check")[1]

    def test_interrupted(self, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_given: object, **_options: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("attemper.cli.check.check", interrupt)
        assert run(capsys, "check") == (130, "", "attemper: interrupted\n")

    @pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to one process")
    @pytest.mark.parametrize("ending", ["SIGINT", "SIGTERM"])
    def test_a_signal_ends_it_in_one_line(self, tmp_path: Path, ending: str) -> None:
        (tmp_path / "slow.py").write_text(
            f"import os, pathlib, signal, time\ndef wait():\n    os.kill(os.getpid(), signal.{ending})\n    time.sleep(60)\n"
        )
        # SIGTERM is made to be as Ctrl-C where something could be left half done.
        command = {"SIGINT": ["check"], "SIGTERM": ["fix", "attemper.examples:unscaled"]}[ending]
        command += ["--inputs", "slow:wait"]
        words = [sys.executable, "-m", "attemper", *command]
        done = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, preexec_fn=hear_ctrl_c
        )
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "attemper: interrupted\n")
