"""Files are written completely or not at all; what is no file is left what it is."""

import errno
import os
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcsync.system.atomic_files import NotWritten, is_folder, try_to_write, whole


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
        reader.join(100)
        assert read == ["table"]
    assert stat.S_ISFIFO(pipe.stat().st_mode) and link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_system_that_cannot_flush_folders_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(is_refused: Callable[[int], bool], number: int) -> None:
        def fsync(handle: int) -> None:
            if is_refused(os.fstat(handle).st_mode):
                raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    file = tmp_path / "file"
    refuse(stat.S_ISDIR, errno.EINVAL)
    with whole(file) as path:
        path.write_text("text")
    assert file.read_text() == "text"
    for is_refused, number in ((stat.S_ISREG, errno.EINVAL), (stat.S_ISDIR, errno.EIO)):
        refuse(is_refused, number)
        with pytest.raises(NotWritten), whole(file) as path:
            path.write_text("other")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotWritten, match=f"^{tmp_path}: Is a directory$"), whole(tmp_path) as path:
        path.write_text("")


def refusal(file: Path) -> str:
    with pytest.raises(NotWritten) as refused:
        try_to_write(file)
    return str(refused.value)


def test_whether_a_file_can_be_written_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_text("old")
    os.mkfifo(pipe)
    for allowed in (file, pipe, tmp_path / "new", tmp_path / "missing" / "folder" / "new"):
        try_to_write(allowed)
    assert refusal(tmp_path) == f"{tmp_path}: Is a directory"
    assert refusal(file / "new") == f"{file / 'new'}: Not a directory"
    assert refusal(file / "missing" / "new").endswith("new: Not a directory")

    def refused(**where: object) -> None:
        raise PermissionError(13, "Permission denied", str(where["dir"]))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)  # as in a folder of someone else, for who is not root
    assert refusal(tmp_path / "new") == f"{tmp_path / 'new'}: Permission denied"
    assert refusal(file) == f"{file}: Permission denied"
    assert (file.read_text(), {path.name for path in tmp_path.iterdir()}) == ("old", {"file", "pipe"})


def test_what_the_system_refuses_to_look_for_is_no_folder(tmp_path: Path) -> None:
    """A name that is too long is refused to root too."""
    (tmp_path / "file").touch()
    assert is_folder(tmp_path)
    assert not any(is_folder(tmp_path / name) for name in ("file", "absent", "x" * 300))
