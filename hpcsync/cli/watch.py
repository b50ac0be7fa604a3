"""Command `watch`, and the same view beside the output of `run`."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpcsync.config.errors import JobError
from hpcsync.system import standard_output
from hpcsync.system.atomic_files import below

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from hpcsync.report.live import Status

LOOK_S = 0.5
OLD_S = 2.0  # from this age on, that of a status is shown anew
RUN_LINES = 16  # of the view beside the output of `run`


def watch(folder: Path, *, once: bool, as_json: bool) -> int:
    """Show the status of a run until it ends, or once.

    Parameters
    ----------
    folder
        Folder of a run, or folder of runs, of which the one written last is shown.
    once
        If True, show the present status only.
    as_json
        If True, print each status as a line of JSON.

    Returns
    -------
    int
        0; 1 if the run has failed.

    Raises
    ------
    JobError
        If there is no status.
    """
    from rich.console import Console
    from rich.live import Live

    from hpcsync.run_dir.status_file import StatusError

    console = Console(highlight=False)
    is_live = console.is_terminal and not console.is_dumb_terminal and not (once or as_json)
    live = Live(console=console, auto_refresh=False)
    failed = False
    try:
        with live if is_live else nullcontext():
            for status in _statuses(_newest(folder), once=once):
                failed = status.status == "failed"
                if as_json:
                    print(status.model_dump_json(), flush=True)
                elif is_live:
                    live.update(_view(status, console), refresh=True)
                else:
                    console.print(_view(status, console))
                if standard_output.reader_left():
                    break
    except StatusError as error:
        raise JobError(f"watch: {error}") from None
    except KeyboardInterrupt:
        pass
    return int(failed)


@contextmanager
def viewed(folder: Path) -> Iterator[Callable[[int, bytes], None] | None]:
    """Show the status of the run in this folder below the output of its ranks, if that goes to a terminal.

    Yields
    ------
    callable or None
        Writes bytes of the ranks to file descriptor 1 or 2; None without a terminal.
    """
    if not standard_output.is_terminal():
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    from hpcsync.run_dir.status_file import StatusError, read

    console = Console(highlight=False)
    ended = threading.Event()
    live = Live(console=console, auto_refresh=False, transient=True)
    before: Status | None = None
    with suppress(StatusError):
        before = read(folder)  # of a run that resumes

    def look() -> None:
        shown = before
        while not ended.wait(LOOK_S):
            with suppress(StatusError, OSError):  # the terminal may be closed
                status = read(folder)
                if status != shown and status.status == "running":
                    shown = status
                    live.start()
                    live.update(_view(status, console, RUN_LINES), refresh=True)

    thread = threading.Thread(target=look, name="view", daemon=True)
    thread.start()
    output = _Lines(console)
    try:
        yield output.write
    finally:
        ended.set()
        thread.join()
        with suppress(OSError):
            live.stop()
        output.end()


class _Lines:
    """Output of ranks, printed line by line above the view. After the terminal was closed the ranks continue."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._parts = {1: b"", 2: b""}
        self._lock = threading.Lock()

    def write(self, target: int, data: bytes) -> None:
        *lines, self._parts[target] = (self._parts[target] + data).split(b"\n")
        for line in lines:
            self._print(target, line)

    def end(self) -> None:
        for target, rest in self._parts.items():
            if rest:
                self._print(target, rest)

    def _print(self, target: int, line: bytes) -> None:
        from rich.console import Group
        from rich.text import Text

        text = line.decode(errors="replace")
        with suppress(OSError), self._lock:
            if target == 2 and not sys.stderr.isatty():
                print(text, file=sys.stderr, flush=True)
            else:
                # `soft_wrap` would cut the lines of the view too. Outside of a group a Text loses its settings.
                self._console.print(Group(Text.from_ansi(text, no_wrap=True, overflow="ignore")), crop=False)


def _newest(folder: Path) -> Path:
    """Return the folder of the run in `folder` whose status was written last: `folder` itself if it is one."""
    from hpcsync.run_dir.status_file import STATUS, StatusError

    try:
        if (folder / STATUS).exists():
            return folder
        found = sorted(below(folder, STATUS), key=_written_s)
        if not found:
            none = "no such folder" if not folder.exists() else "must be the folder of a run, or of runs"
            what = "contains no run with a status; simulations write none" if folder.is_dir() else none
            raise StatusError(f"{folder}: {what}")
    except OSError as error:
        raise StatusError(f"{folder}: {error.strerror}") from None
    return found[-1].parent


def _written_s(path: Path) -> float:
    """Return when a file was written; 0 if it has been deleted meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _statuses(folder: Path, *, once: bool) -> Iterator[Status]:
    """Yield the present status, and unless `once` each later one, and again one that grows old, until the run ends."""
    from hpcsync.run_dir.status_file import read

    status = read(folder)
    yield status
    while status.status == "running" and not once:
        time.sleep(LOOK_S)
        before, status = status, read(folder)
        if status != before or time.time() - status.written_s > OLD_S:
            yield status


def _view(status: Status, console: Console, height: int | None = None) -> RenderableType:
    from hpcsync.report.live_view import render

    age_s = max(0.0, time.time() - status.written_s)
    return render(status, age_s, console, min(console.height, height or console.height))
