"""A page is written whole or not at all, and what cannot be written is known beforehand."""

import os
from pathlib import Path

import pytest

from attemper.errors import ArgumentError
from attemper.report.page.writing import refuse_target, write_whole


def test_a_new_file_and_an_old_one(tmp_path: Path) -> None:
    for text in ("größer", "✓"):
        write_whole(tmp_path / "page.html", text)
        assert (tmp_path / "page.html").read_text("utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_who_reads_the_old_page_goes_on_reading_it(tmp_path: Path) -> None:
    write_whole(tmp_path / "page.html", "old")
    with (tmp_path / "page.html").open() as reader:
        write_whole(tmp_path / "page.html", "new")
        assert reader.read() == "old"


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "old.html").write_text("old")
    (tmp_path / "link.html").symlink_to("old.html")
    write_whole(str(tmp_path / "link.html"), "new")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "old.html").read_text() == "new"


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("old")
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        write_whole(tmp_path / "page.html", "half of it \ud800")
    assert (tmp_path / "page.html").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"html: got a folder, {tmp_path}"):
        refuse_target(tmp_path)
    with pytest.raises(ArgumentError, match="nowhere first"):
        refuse_target(tmp_path / "nowhere" / "page.html")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match="pipe, which is no regular file"):
        refuse_target(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match=r"/proc/page\.html \("):
        refuse_target("/proc/page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_what_may_be_written_is_left_alone(tmp_path: Path) -> None:
    assert refuse_target(tmp_path / "page.html") == tmp_path.resolve() / "page.html"
    assert not list(tmp_path.iterdir())
