"""What a run says of itself while it runs, and where: a bar on a terminal, lines now and then in a file."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcsync.config.job import Stop
from hpcsync.system.launcher import TERMINAL, under_launcher

TERMINAL_EVERY_S = 0.25
FILE_EVERY_S = 2.0
RECENT_S = 30.0  # rate and time left are those of so many seconds of the people who read them


def console() -> Console:
    """The console of rank 0. A rank's output goes through its launcher, so it cannot see for itself what is behind it:
    `hpcsync run` says so in the environment; without that it is taken for a file."""
    if not under_launcher():
        return Console(highlight=False)
    columns = os.environ.get(TERMINAL)
    return Console(force_terminal=columns is not None, width=int(columns) if columns else 80, highlight=False)


def say(doing: str) -> None:
    """Say what is being done, before there is progress to show; on rank 0 alone."""
    print(doing, flush=True)


class Standing(Protocol):
    """Where a run is."""

    version: int
    samples: int
    last_loss: float
    last_accuracy: float


class _Moment(NamedTuple):
    """clock_s: of the people; now_s: of the run."""

    clock_s: float
    now_s: float
    samples: int
    share: float


class Progress:
    """Says how far a run is: a bar and a line that change on a terminal, else a new line every two seconds.

    Parameters
    ----------
    console : Console
        Where to say it.
    stop : Stop, optional
        The job's rule for the end of the run. Without limits in it no share is known, and no time left.
    clock : callable
        Seconds of the people who read it, which need not be those of the run.
    """

    def __init__(self, console: Console, stop: Stop | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._stop = stop or Stop()
        self._clock = clock
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._every_s = TERMINAL_EVERY_S if self._live else FILE_EVERY_S
        self._next_s = clock() + self._every_s
        self._recent: deque[_Moment] = deque()

    def show(self, now_s: float, run: Standing) -> None:
        """Say it, if the last time is long enough ago. now_s: the run's own time."""
        clock_s = self._clock()
        if self._recent and clock_s < self._next_s:
            return
        share = self._stop.share(samples=run.samples, updates=run.version, seconds=now_s)
        self._note(_Moment(clock_s, now_s, run.samples, share))
        if clock_s < self._next_s:
            return
        self._next_s = clock_s + self._every_s
        if self._live:
            self._live.start()
            self._live.update(self._bar(_standing(now_s, run)), refresh=True)
        else:
            self._console.print("  ".join([_standing(now_s, run), *self._speed()]), soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was; harmless when repeated."""
        if self._live:
            self._live.stop()

    def _note(self, moment: _Moment) -> None:
        self._recent.append(moment)
        while len(self._recent) > 2 and self._recent[1].clock_s <= moment.clock_s - RECENT_S:
            self._recent.popleft()

    def _bar(self, standing: str) -> RenderableType:
        share = self._recent[-1].share
        row = Table.grid(padding=(0, 2))
        bar = ProgressBar(1.0, share, width=30) if math.isfinite(share) else Text("")
        row.add_row(bar, "  ".join(self._speed()))
        return Group(row, Text(standing))

    def _speed(self) -> list[str]:
        """Share done, samples in a second of the run, and time left, as far as they are known."""
        first, last = self._recent[0], self._recent[-1]
        said = [] if math.isnan(last.share) else [f"{100 * last.share:.0f} %"]
        if last.now_s > first.now_s and last.samples > first.samples:
            said.append(f"{(last.samples - first.samples) / (last.now_s - first.now_s):,.0f} samples/s")
        if last.share > first.share:
            left_s = (last.clock_s - first.clock_s) * (1 - last.share) / (last.share - first.share)
            said.append(f"{_hours(left_s)} left")
        return said


def _standing(now_s: float, run: Standing) -> str:
    line = f"{now_s:7.1f} s  {run.samples:>9} samples  {run.version:>7} updates"
    for name, value, digits in (("loss", run.last_loss, ".4g"), ("accuracy", run.last_accuracy, ".4f")):
        if not math.isnan(value):
            line += f"  {name} {value:{digits}}"
    return line


def _hours(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{s:02}"
