"""Background thread that runs submitted calls in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue


class Background:
    """Daemon thread that runs submitted calls one after the other.

    Notes
    -----
    The thread is a daemon so that, if its owner fails, a call that waits for other ranks does not keep the process
    alive.
    """

    def __init__(self) -> None:
        self._calls: Queue[Callable[[], None] | None] = Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Queue `call` after those submitted before. Once a call has raised, later calls are skipped."""
        self._calls.put(call)

    def wait(self) -> None:
        """Wait until all submitted calls have run; raise the exception of the one that failed, if any."""
        self._calls.join()
        self.check()

    def check(self) -> None:
        """Raise the exception of the call that failed, if any has so far."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Run the calls already submitted, then end the thread."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                if self._error is None:
                    call()
            except BaseException as error:
                self._error = error
            finally:
                self._calls.task_done()
