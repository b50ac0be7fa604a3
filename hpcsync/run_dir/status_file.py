"""The file `status.json` in the folder of a run: its status, replaced every second or few for `hpcsync watch`.

A thread of rank 0 writes it. The thread that trains only copies what changes, since other threads may not ask the
ranks for their phases; the file is replaced as a whole, so a reader never sees a part of one. It is not flushed to the
disk: it matters only while the run lasts.
"""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from pydantic import ValidationError

from hpcsync.config.job import Job
from hpcsync.report import live
from hpcsync.report.live import Moment, RowTally, Status
from hpcsync.run_dir import layout
from hpcsync.system.atomic_files import replace

STATUS = "status.json"
EVERY_S, SELDOM_S = 1.0, 10.0  # least and largest time between two
LATE_S = 30.0  # after the summary, without a last status: rank 0 was killed in between, or could not write it
SHARE = 0.0008  # of a core, which writing them may take: with the first and the last, 0.001 after a minute


class StatusError(Exception):
    """A folder has no status that can be read; the message is one line."""


class Run(Protocol):
    """What a coordinator knows of its run."""

    version: int
    samples: int
    last_loss: float
    last_accuracy: float
    active: set[int]

    @property
    def done(self) -> Sequence[int]:
        """Iterations that each worker has ended."""

    @property
    def iters(self) -> Sequence[int]:
        """Iterations of each worker by which leads are counted."""


class _Snapshot(NamedTuple):
    """What the training thread copies."""

    status: str
    moment: Moment
    updates: int
    loss: float
    accuracy: float
    done: list[int]
    iters: list[int]
    active: set[int]
    phases: Sequence[int]


class StatusWriter:
    """Writer of the status of one run.

    Parameters
    ----------
    folder
        Folder of the run.
    job
        The job.
    run
        Its coordinator.
    hosts
        Host of each worker.
    phases
        Returns the phase of each worker; called on the thread that calls `offer`.
    clock
        Wall-clock time in seconds.
    cpu_clock
        CPU time of the calling thread in seconds.
    """

    def __init__(
        self,
        folder: Path,
        job: Job,
        run: Run,
        hosts: Sequence[str],
        phases: Callable[[], Sequence[int]],
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.tally = RowTally(job.cluster.workers)
        self._path = folder / STATUS
        if final_status(folder) is not None:  # of a run that this one resumes
            self._path.unlink()
        self._job, self._run, self._hosts, self._phases = job, run, hosts, phases
        self._clock, self._cpu_clock = clock, cpu_clock
        self._every_s = EVERY_S
        self._handed_s = -math.inf
        self._moments: list[Moment] = []
        self._now_s = 0.0
        self._next: _Snapshot | None = None  # to be written
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._write_all, name="status", daemon=True)
        self._thread.start()

    def offer(self, now_s: float) -> None:
        """Copy what is to be written, if it is time for it; `now_s` is the time of the run."""
        self._now_s, clock_s = now_s, self._clock()
        if clock_s >= self._handed_s + self._every_s:
            self._handed_s = clock_s
            self._hand_over(self._snapshot("running", clock_s, now_s))

    def close(self, status: str) -> None:
        """Write the last status and end the thread. A second call does nothing."""
        if self._ended:
            return
        self._hand_over(self._snapshot(status, self._clock(), self._now_s, ended=True), ended=True)
        self._thread.join()

    def _snapshot(self, status: str, clock_s: float, now_s: float, *, ended: bool = False) -> _Snapshot:
        run, stop = self._run, self._job.stop
        share = stop.share(samples=run.samples, updates=run.version, seconds=now_s)
        phases = [0] * len(self._hosts) if ended else self._phases()
        moment = Moment(clock_s, now_s, run.samples, share)
        counts = run.version, run.last_loss, run.last_accuracy
        return _Snapshot(status, moment, *counts, [*run.done], [*run.iters], {*run.active}, phases)

    def _hand_over(self, snapshot: _Snapshot, *, ended: bool = False) -> None:
        with self._changed:
            self._next, self._ended = snapshot, ended
            self._changed.notify()

    def _write_all(self) -> None:
        ended, n_written = False, 0
        while not ended:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None)
                snapshot, ended = self._next, self._ended
                self._next = None
            assert snapshot is not None
            if n_written:
                self._every_s = min(max(EVERY_S, self._cpu_clock() / n_written / SHARE), SELDOM_S)
            with suppress(OSError):  # `hpcsync watch` says that the status is old; the trace says what is wrong
                self._replace(self._status(snapshot).model_dump_json())
            n_written += 1

    def _status(self, snapshot: _Snapshot) -> Status:
        job, moment, tally = self._job, snapshot.moment, self.tally
        self._moments = live.recent(self._moments, moment)
        known = live.known
        return Status(
            name=job.name,
            paradigm=job.paradigm.name,
            n_servers=job.cluster.servers,
            status=snapshot.status,
            written_s=time.time(),
            every_s=self._every_s,
            now_s=moment.now_s,
            updates=snapshot.updates,
            samples=moment.samples,
            samples_per_s=live.samples_per_s(self._moments),
            loss=known(snapshot.loss),
            accuracy=known(snapshot.accuracy),
            target=job.stop.target,
            share=known(moment.share),
            left_s=live.time_left(self._moments),
            lead_bound=known(job.paradigm.lead_bound),
            bound=job.paradigm.bound,
            decisions=tally.decisions,
            stalls=tally.stalls,
            not_finite=tally.not_finite,
            workers=live.columns(tally, self._hosts, snapshot.phases, snapshot.done, snapshot.iters, snapshot.active),
        )

    def _replace(self, text: str) -> None:
        replace(self._path, text)


def read(folder: Path) -> Status:
    """Return the status of the run in this folder.

    Raises
    ------
    StatusError
        If there is none, or it cannot be read.
    """
    path = folder / STATUS
    try:
        status = Status.model_validate_json(_content(path))
        return _with(status, "finished") if status.status == "running" and _is_late(folder / layout.SUMMARY) else status
    except FileNotFoundError:
        raise StatusError(f"{path}: no such file: the run has not begun, or wrote none") from None
    except OSError as error:
        raise StatusError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        what = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise StatusError(f"{path}: not a status: {what}") from None


def final_status(folder: Path) -> str | None:
    """Return the status with which rank 0 has ended the run in this folder; None if it has not."""
    with suppress(StatusError):
        return status if (status := read(folder).status) != "running" else None
    return None


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        if error.errno != errno.ESTALE:  # NFS: another host has replaced the file since it was opened
            raise
        return path.read_bytes()


def settle(folder: Path, status: str) -> None:
    """Set the final status of a run whose ranks were killed before they could; "finished" if they had finished."""
    with suppress(StatusError, OSError):
        last = read(folder)
        if last.status == "running":
            final = "finished" if (folder / layout.SUMMARY).exists() else status
            replace(folder / STATUS, _with(last, final).model_dump_json())


def _is_late(summary: Path) -> bool:
    with suppress(FileNotFoundError):
        return time.time() - summary.stat().st_mtime > LATE_S
    return False


def _with(last: Status, status: str) -> Status:
    return last.model_copy(update={"status": status})
