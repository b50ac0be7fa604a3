"""What a run says of itself while it runs: a line now and then."""

from __future__ import annotations

import math

from rich.console import Console

from hpcsync.coordinator import Coordinator

EVERY_S = 2.0


class Progress:
    """Says how far a run is, at most every two seconds."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._next_s = EVERY_S

    def show(self, now_s: float, coordinator: Coordinator) -> None:
        if now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        line = f"{now_s:7.1f} s  {coordinator.samples:>9} samples  {coordinator.version:>7} updates"
        line += f"  loss {coordinator.last_loss:.4f}"
        if not math.isnan(coordinator.last_accuracy):
            line += f"  accuracy {coordinator.last_accuracy:.4f}"
        self._console.print(line)
