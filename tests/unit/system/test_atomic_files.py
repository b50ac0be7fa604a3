"""Files are written completely or not at all; what is no file is left what it is."""

import os
import stat
import threading
from pathlib import Path

import pytest

from hpcsync.system.atomic_files import NotWritten, whole


def test_a_file_is_replaced_once_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), whole(file) as path:
        path.write_text("half")
        raise ZeroDivisionError
    assert file.read_text() == "old"
    with whole(file) as path:
        path.write_text("new")
        assert file.read_text() == "old"
    assert (file.read_text(), [path.name for path in tmp_path.iterdir()]) == ("new", ["file"])


def test_a_pipe_is_written_and_stays_one(tmp_path: Path) -> None:
    """As /dev/stdout may be, which root could otherwise replace for everybody."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for name in (pipe, link):
        read: list[str] = []
        reader = threading.Thread(target=lambda read=read: read.append(pipe.read_text()), daemon=True)
        reader.start()
        with whole(name) as path:
            path.write_text("table")
        reader.join(10)
        assert read == ["table"]
    assert stat.S_ISFIFO(pipe.stat().st_mode) and link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotWritten, match=f"^{tmp_path}: Is a directory$"), whole(tmp_path) as path:
        path.write_text("")
