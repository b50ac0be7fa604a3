"""Commands `run`, `simulate` and `show` in a process that is not a rank.

`run` checks the job file, starts the ranks, and closes the trace if the ranks could not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from hpcsync.cli.watch import viewed
from hpcsync.config import job as jobs
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.config.user_code import import_beside, refuse_missing, user_code
from hpcsync.run_dir import lock
from hpcsync.system import allocation, garbage, gpu_selection, launcher, rank_environment
from hpcsync.system.atomic_files import is_folder
from hpcsync.system.interpreter import python
from hpcsync.system.process_cleanup import Will
from hpcsync.system.signals import TO_BE_RESUMED, Interrupted, Terminated, ending_at_once, interrupt, on_signals

MOST_IN_VAIN = 3  # deaths in a row without a new checkpoint


def run(
    path: Path,
    overrides: Sequence[str],
    ranks: int | None,
    out: Path | None,
    resume: bool = False,
    *,
    oversubscribe: bool = False,
    log: str | None = None,
) -> int:
    """Start the ranks of a job and wait until they end; return the exit status.

    Parameters
    ----------
    path : path
        Job file.
    overrides : sequence of str
        ``KEY=VALUE`` overrides of the job file.
    ranks : int, optional
        Number of ranks, servers included; by default that of the job.
    out : path, optional
        Folder of the run.
    resume : bool
        If True, resume from the newest checkpoint in `out`.
    oversubscribe : bool
        If True, allow more ranks than a small multiple of the cores.
    log : str, optional
        A key of `hpcsync.export.loggers.LOGS`.

    Raises
    ------
    JobError or LaunchError
        Before any rank starts.
    """
    from hpcsync.run_dir import status_file

    with lock.releasing(), ExitStack() as ending:
        attempt = _run(path, overrides, ranks, out, resume, oversubscribe=oversubscribe, log=log)
        if attempt.restarts_in is not None:
            ending.callback(status_file.settle, attempt.restarts_in, "failed")  # unless another start has an end
        in_vain = 0
        while (folder := attempt.restarts_in) is not None:
            in_vain = 0 if attempt.made_checkpoint else in_vain + 1
            if in_vain == MOST_IN_VAIN:
                print(f"hpcsync: died {in_vain} times without a new checkpoint: not restarted", file=sys.stderr)
                break
            try:
                with on_signals(interrupt):  # until the ranks are launched: a large checkpoint takes a while to verify
                    left = allocation.left(attempt.n_ranks)
                    if left.n_ranks < attempt.n_ranks and not attempt.has_checkpoint:
                        what = f"{left.n_ranks} of {attempt.n_ranks} ranks are left, and no checkpoint"
                        print(f"hpcsync: {what}: not restarted", file=sys.stderr)
                        break
                    os.environ.update(left.variables)
                    print(f"hpcsync: restarting {left.n_ranks} of {attempt.n_ranks} ranks", file=sys.stderr)
                    attempt = _run(path, overrides, left.n_ranks, folder, True, oversubscribe=oversubscribe, log=log)
            except Interrupted as error:
                print("hpcsync: interrupted", file=sys.stderr)
                status_file.settle(folder, "interrupted")
                return TO_BE_RESUMED if isinstance(error, Terminated) else 1
        return attempt.status


class _Attempt(NamedTuple):
    """End of one start of the ranks.

    Attributes
    ----------
    status
        Exit status.
    n_ranks
        Number of ranks.
    restarts_in
        Folder of the run if a rank has died and the job asks for a restart; None otherwise.
    has_checkpoint, made_checkpoint
        Whether there is a checkpoint, and one that is newer than that from which it resumed.
    """

    status: int
    n_ranks: int = 0
    restarts_in: Path | None = None
    has_checkpoint: bool = False
    made_checkpoint: bool = False


def _run(
    path: Path,
    overrides: Sequence[str],
    ranks: int | None,
    out: Path | None,
    resume: bool,
    *,
    oversubscribe: bool,
    log: str | None,
) -> _Attempt:
    with ending_at_once():
        from hpcsync.export import loggers
        from hpcsync.run_dir import checkpoint as checkpoints
        from hpcsync.run_dir import layout, status_file

        loggers.check(log)

        if layout.finished_already(out, resume):
            print(f"finished already: {out}")
            return _Attempt(0)
        before = layout.resuming(out, resume)
        job = layout.job_of(path, overrides, ranks, before)
        n_ranks = ranks or job.cluster.ranks
        job.refuse_ranks(n_ranks, resumes=before is not None)
        if before is not None:
            before.refuse_ranks(n_ranks)
        given = out is not None and os.path.exists(out)
        _check(path, job, overrides, puts_aside=resume and before is None and given)
        if not oversubscribe:
            _refuse_crowd(job, ranks)
    missing = layout.missing_above(out)
    if resume and before is None:
        layout.put_aside(out, path)
    folder = layout.choose(job, out, before)
    held = lock.hold(folder)
    assert held is not None, "this process is no rank"
    argv = python("-m", "mpi4py", "-m", "hpcsync", "run", str(path))
    for override in overrides:
        argv += ["--set", override]
    argv += ["--lock", held.owner.token, "-n", str(n_ranks), "--out", str(folder), *(["--resume"] if resume else [])]
    argv += [] if log is None else ["--log", log]
    tolerant = job.cluster.on_death == "continue"
    will = Will(_settling(folder), [str(held.path)], [held.handle])
    trace_before = _inode(folder / layout.TRACE)
    try:
        with viewed(folder) as write:
            ended = launcher.launch(n_ranks, argv, suspends=True, tolerant=tolerant, will=will, write=write)
    finally:
        if before is None and not (folder / layout.TRACE).exists():  # it never began: the same command may start it
            with suppress(OSError):
                (folder / layout.JOB).unlink()
        if not given and folder.exists() and os.listdir(folder) == [lock.NAME]:
            lock.release(folder)
            folder.rmdir()
            with suppress(OSError):  # another run is in it
                for parent in missing:
                    parent.rmdir()
    began = _inode(folder / layout.TRACE) not in (None, trace_before)  # a run that resumes writes another file
    restarts = job.cluster.on_death == "restart" and ended.signum is None
    status, died = _concluded(folder, ended, began=began, may_restart=restarts)
    newest = checkpoints.newest(folder)
    if died and restarts:
        made = checkpoints.number_of(newest) > checkpoints.number_of(None if before is None else before.checkpoint)
        return _Attempt(status, n_ranks, folder, newest is not None, made)
    if status:
        ended_by_signal = ended.signum is not None or ended.status == TO_BE_RESUMED
        status_file.settle(folder, "interrupted" if ended_by_signal else "failed")
    if status and (folder / layout.SUMMARY).exists():
        print(f"hpcsync: the run had finished; hpcsync show {folder} prints its summary", file=sys.stderr)
    elif newest is not None and status not in (0, 2) and ended.status != TO_BE_RESUMED:
        print(f"hpcsync: use --resume to resume from {newest}", file=sys.stderr)
    return _Attempt(status)


def _inode(path: Path) -> int | None:
    """Return which file is at this path, None if there is none; opening it asks the file server."""
    with suppress(OSError), path.open("rb") as file:
        return os.fstat(file.fileno()).st_ino
    return None


def _concluded(folder: Path, ended: launcher.Ended, *, began: bool, may_restart: bool) -> tuple[int, bool]:
    """Settle what the ranks of a run have left; return the exit status, and whether a rank was killed.

    If they have not begun a trace, that of an earlier start stays as it is.
    """
    from hpcsync.run_dir import layout, unfinished

    # Open MPI's launcher ends with status 0 when it has lost a whole node: only the last file of a run proves its end.
    if ended.status == 0 and (folder / layout.SUMMARY).exists():
        return 0, False
    killed = ended.status not in (1, 2, TO_BE_RESUMED)
    if not began:
        if ended.signum is not None or ended.status == TO_BE_RESUMED:
            print("hpcsync: interrupted before training began", file=sys.stderr)
            return ended.resumable_status, False
        return 2 if ended.status == 2 else 1, killed
    if ended.status == TO_BE_RESUMED:
        return ended.resumable_status, False
    status = "failed" if ended.signum is None else "interrupted"
    before = unfinished.close(folder, status, may_restart=may_restart)
    return TO_BE_RESUMED if ended.signum == signal.SIGTERM else 1, killed or before == "running"


def _check(path: Path, job: Job, overrides: Sequence[str], *, puts_aside: bool) -> None:
    """Raise JobError for a job that cannot run on this machine.

    What depends on the model is checked by rank 0 before it changes a file, or here if files of an earlier start are
    to be put aside.
    """
    jobs.refuse_simulated(job)
    launcher.refuse_without_mpi()
    _print_remarks(path, overrides)
    _name_user_code(path, job)
    _refuse_without_gpu(job.cluster.device, job.cluster.window)
    if puts_aside:
        with garbage.loading():
            from hpcsync.core.job_validation import check
        check(job)


def _name_user_code(path: Path, job: Job) -> None:
    """Print which code of the user will be imported, if any. Raises JobError if it is not found."""
    import_beside(path)
    refuse_missing(job)
    if (code := user_code(job)) is not None:
        print(f"importing the workload from {code}", flush=True)


def _print_remarks(path: Path, overrides: Sequence[str]) -> None:
    for line in jobs.remarks(path, overrides):
        print(f"hpcsync: {line}", file=sys.stderr)


def _refuse_crowd(job: Job, ranks: int | None) -> None:
    cluster = job.cluster
    asked = f"cluster.workers = {cluster.workers}, cluster.servers = {cluster.servers}"
    launcher.refuse_crowd(ranks or cluster.ranks, asked if ranks is None else f"-n {ranks}")


def _refuse_without_gpu(device: str, window: str) -> None:
    """Raise JobError if the job needs a GPU that this node lacks and all ranks run here; elsewhere the ranks check."""
    if gpu_selection.needed(device, window) and launcher.on_this_node(os.environ):
        gpu_selection.choose(device, window, gpu_selection.found())


def simulate(
    path: Path, overrides: Sequence[str], out: Path | None, times_from: Path | None, log: str | None = None
) -> int:
    """Run a job in virtual time; return the exit status.

    Raises
    ------
    JobError or LaunchError
        Before any file is written.
    """
    if rank_environment.under_launcher():
        raise launcher.LaunchError("simulate: must be started as one process, without an MPI launcher")
    if times_from is not None:
        overrides = [*overrides, f"cluster.times_from={json.dumps(str(times_from.absolute()), ensure_ascii=False)}"]
    _print_remarks(path, overrides)
    job = jobs.load(path, overrides)
    from hpcsync.export import loggers
    from hpcsync.run_dir.progress_line import console
    from hpcsync.simulator import simulate as run

    loggers.load(log)
    _name_user_code(path, job)
    return run.simulate(job, out, console(), log)


def _settling(folder: Path) -> list[str]:
    """Return a command that settles a run whose parent was killed."""
    code = "import sys, pathlib, hpcsync.run_dir.unfinished as runs; runs.close(pathlib.Path(sys.argv[1]), sys.argv[2])"
    return python("-c", code, str(folder.absolute()), "interrupted")


def show(path: Path, overrides: Sequence[str], *, load: bool) -> None:
    """Print what a job resolves to, or the table with which a run has ended.

    Parameters
    ----------
    path
        Job file, or a trace or the folder of a run.
    overrides
        Of the keys of a job file.
    load
        Import a workload function of the user.

    Raises
    ------
    JobError
        If the job is not valid, a run comes with overrides, or its trace cannot be read.
    """
    if is_folder(path) or path.suffix == ".h5":
        if overrides or load:
            raise JobError(
                f"{'--set' if overrides else '--load'}: must come with a job file: {path} is a run that has been made"
            )
        from hpcsync.run_dir import layout
        from hpcsync.run_dir.progress_line import console
        from hpcsync.trace.reader import trace_path

        layout.print_summary(trace_path(path), console())
        return
    _print_remarks(path, overrides)
    job = jobs.load(path, overrides)
    from hpcsync.cli.show import print_job

    import_beside(path)
    if (code := user_code(job)) is not None and not load:
        print(job.to_toml(), end="")
        print(f"hpcsync: the workload is code in {code}: --load imports it and shows what the job resolves to")
        return
    print_job(job)
