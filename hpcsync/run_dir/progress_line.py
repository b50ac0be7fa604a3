"""Progress of a run: a bar on a terminal, or lines at intervals in a file."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hpcsync.config.job import Stop
from hpcsync.report.wording import hours
from hpcsync.system.rank_environment import TERMINAL, under_launcher

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

TERMINAL_EVERY_S = 0.25
FILE_EVERY_S = 2.0
RECENT_S = 30.0  # wall-clock window for the rate and the time left


def console() -> Console:
    """Return the console of rank 0.

    A rank's output passes through its launcher, so the rank cannot detect a terminal: `hpcsync run` announces one in
    the environment; without that the output is taken for a file.
    """
    from rich.console import Console

    if not under_launcher():
        return Console(highlight=False)
    columns = os.environ.get(TERMINAL)
    return Console(force_terminal=columns is not None, width=int(columns) if columns else 80, highlight=False)


def say(doing: str) -> None:
    """Print what is being done before there is progress to show; called on rank 0 only."""
    print(doing, flush=True)


class Standing(Protocol):
    """Counts of a run, its latest training loss, and the accuracy at its last evaluation."""

    version: int
    samples: int
    last_loss: float
    last_accuracy: float


class _Moment(NamedTuple):
    """Progress at one moment: `clock_s` is wall-clock time, `now_s` the run's own time."""

    clock_s: float
    now_s: float
    samples: int
    share: float


class Progress:
    """Progress display: a bar and a line that change on a terminal, or a new line every two seconds in a file.

    Parameters
    ----------
    console : Console
        Console to print to.
    stop : Stop, optional
        The job's stopping rule. Without limits in it, neither the share done nor the time left are known.
    clock : callable
        Wall-clock time in seconds, which differs from the run's own time in a simulation.
    """

    def __init__(self, console: Console, stop: Stop | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.live import Live

        self._console = console
        self._stop = stop or Stop()
        self._clock = clock
        changes = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, auto_refresh=False, transient=True) if changes else None
        self._every_s = TERMINAL_EVERY_S if self._live else FILE_EVERY_S
        self._next_s = clock() + self._every_s
        self._recent: deque[_Moment] = deque()

    def show(self, now_s: float, run: Standing) -> None:
        """Show the progress, unless it was shown a short time ago.

        Parameters
        ----------
        now_s : float
            The run's own time, in seconds.
        run : Standing
            Counts of the run, its latest training loss, and the accuracy at its last evaluation.
        """
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
            done = [f"{run.samples:>9,} samples"] if math.isnan(share) else []
            line = [f"{now_s:7.1f} s", *done, *self._speed(), *_quality(run)]
            self._console.print("  ".join(line), soft_wrap=True)

    def close(self) -> None:
        """Restore the terminal. Repeated calls have no effect."""
        if self._live:
            self._live.stop()

    def _note(self, moment: _Moment) -> None:
        self._recent.append(moment)
        while len(self._recent) > 2 and self._recent[1].clock_s <= moment.clock_s - RECENT_S:
            self._recent.popleft()

    def _bar(self, standing: str) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        share = self._recent[-1].share
        row = Table.grid(padding=(0, 2))
        bar = ProgressBar(1.0, share, width=30) if math.isfinite(share) else Text("")
        row.add_row(bar, "  ".join(self._speed()))
        return Group(row, Text(standing))

    def _speed(self) -> list[str]:
        """Return share done, samples per second of the run's own time, and time left, as far as they are known."""
        first, last = self._recent[0], self._recent[-1]
        parts = [] if math.isnan(last.share) else [f"{100 * last.share:.0f} %"]
        if last.now_s > first.now_s and last.samples > first.samples:
            parts.append(f"{(last.samples - first.samples) / (last.now_s - first.now_s):,.0f} samples/s")
        if last.share > first.share:
            left_s = (last.clock_s - first.clock_s) * (1 - last.share) / (last.share - first.share)
            parts.append(f"{hours(left_s)} left")
        return parts


def _standing(now_s: float, run: Standing) -> str:
    counts = [f"{now_s:7.1f} s", f"{run.samples:>9,} samples", f"{run.version:>7,} updates"]
    return "  ".join([*counts, *_quality(run)])


def _quality(run: Standing) -> list[str]:
    """Return the latest training loss and the accuracy at the last evaluation, as far as they are known."""
    last = (("loss", run.last_loss, ".4g"), ("accuracy", run.last_accuracy, ".4f"))
    return [f"{name} {value:{digits}}" for name, value, digits in last if not math.isnan(value)]
