"""A file is there whole or not at all."""

import os
from pathlib import Path

import pytest

from attemper.errors import LoadError
from attemper.report.files import check_writable, write_whole


def test_a_new_one_and_a_replaced_one(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    write_whole(file, "first ä")
    assert file.read_text("utf-8") == "first ä"
    assert file.stat().st_mode & 0o777 == 0o666 & ~os.umask(os.umask(0o22))
    file.chmod(0o640)
    write_whole(file, "second")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("second", 0o640)
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]


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


@pytest.mark.parametrize(("name", "words"), [("nowhere/x.json", "nowhere does not exist"), (".", "it is a folder")])
def test_what_cannot_be_written_is_known_before(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(LoadError, match=words):
        check_writable(tmp_path / name, "--output")
