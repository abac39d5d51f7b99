"""A file is there whole or not at all."""

import os
from pathlib import Path

import pytest

from attemper.errors import ArgumentError
from attemper.files import check_writable, write_whole


def test_a_new_one_and_a_replaced_one(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    write_whole(file, "first ä")
    assert file.read_text("utf-8") == "first ä"
    assert file.stat().st_mode & 0o777 == 0o666 & ~os.umask(os.umask(0o22))
    file.chmod(0o640)
    write_whole(file, "second")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("second", 0o640)
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]


def test_the_longest_name_that_a_file_can_have(tmp_path: Path) -> None:
    file = tmp_path / (81 * "度" + ".json")  # 248 bytes of at most 255
    check_writable(file, "--output")
    write_whole(file, "whole")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [(file.name, "whole")]


def test_a_file_that_others_may_not_read_is_never_one_that_they_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen = tmp_path / "report.json", []
    file.touch(0o600)
    flush = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (seen.append(os.fstat(handle).st_mode & 0o777), flush(handle)))
    write_whole(file, "mine")
    assert seen == [0o600]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_failure_leaves_the_old_one_and_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.json"
    write_whole(file, "old")

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_who_reads_the_old_file_goes_on_reading_it(tmp_path: Path) -> None:
    write_whole(tmp_path / "page.html", "old")
    with (tmp_path / "page.html").open() as reader:
        write_whole(str(tmp_path / "page.html"), "new")
        assert reader.read() == "old"


def test_text_that_cannot_be_encoded_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("old")
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        write_whole(tmp_path / "page.html", "half of it \ud800")
    assert (tmp_path / "page.html").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"--output: got a folder, {tmp_path}"):
        check_writable(tmp_path, "--output")
    with pytest.raises(ArgumentError, match="nowhere first"):
        check_writable(tmp_path / "nowhere" / "page.html", "--output")
    with pytest.raises(ArgumentError, match=r"/proc/page\.html \("):
        check_writable("/proc/page.html", "--output")
    assert not list(tmp_path.iterdir())


def test_what_may_be_written_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_writable(tmp_path / "page.html", "--output")
    check_writable(tmp_path / "pipe", "--output")
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_a_pipe_is_written_to_by_the_name_of_its_descriptor() -> None:
    reading, writing = os.pipe()
    name = f"/proc/self/fd/{writing}"  # as /dev/stdout is one; where it leads, pipe:[…], is no file
    check_writable(name, "--output")
    write_whole(name, "page")
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        assert stream.read() == b"page"
