"""What a run says of itself while it runs, and where: a line on a terminal, lines now and then in a file."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hpcsync.system.launcher import TERMINAL, under_launcher

TERMINAL_EVERY_S = 0.25
FILE_EVERY_S = 2.0


def console() -> Console:
    """The console of rank 0. A rank's output goes through its launcher, so it cannot see for itself what is behind it:
    `hpcsync run` says so in the environment; without that it is taken for a file."""
    if not under_launcher():
        return Console(highlight=False)
    columns = os.environ.get(TERMINAL)
    return Console(force_terminal=columns is not None, width=int(columns) if columns else 80, highlight=False)


class Standing(Protocol):
    """Where a run is."""

    version: int
    samples: int
    last_loss: float
    last_accuracy: float


class Progress:
    """Says how far a run is: in one line that changes on a terminal, else in a new line every two seconds.

    clock: seconds of the people who read it, which need not be those of the run.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._every_s = TERMINAL_EVERY_S if self._live else FILE_EVERY_S
        self._next_s = clock() + self._every_s

    def show(self, now_s: float, run: Standing) -> None:
        """Say it, if the last time is long enough ago. now_s: the run's own time."""
        clock_s = self._clock()
        if clock_s < self._next_s:
            return
        self._next_s = clock_s + self._every_s
        line = f"{now_s:7.1f} s  {run.samples:>9} samples  {run.version:>7} updates"
        for name, value, digits in (
            ("loss", run.last_loss, ".4g"),
            ("accuracy", run.last_accuracy, ".4f"),
        ):
            if not math.isnan(value):
                line += f"  {name} {value:{digits}}"
        if self._live:
            self._live.start()
            self._live.update(Text(line), refresh=True)
        else:
            self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was; harmless when repeated."""
        if self._live:
            self._live.stop()
