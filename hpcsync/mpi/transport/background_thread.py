"""A thread that makes calls one after the other while its owner computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue


class Background:
    """A daemon: should its owner fail, a call that waits for other ranks does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: Queue[Callable[[], None] | None] = Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Make this call after those before it. After one that raised, none is made."""
        self._calls.put(call)

    def wait(self) -> None:
        """Until all calls are made; raise what one of them raised."""
        self._calls.join()
        self.check()

    def check(self) -> None:
        """Raise what a call has raised so far."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Make what was submitted, then end."""
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
