"""Kill and signal runs at random moments, from the first millisecond on, and examine what is left of each.

    python tests/trouble.py --trials 100 --seed 1

A trial starts a run under one of the paradigms, waits for a random step of its start and a random time, and sends
SIGTERM, SIGINT or SIGKILL to `hpcsync`, to the MPI launcher, or to a rank. Afterwards every process must soon be
gone, no temporary folder and no segment of shared memory may be left, the trace must be settled and pass its audit, and
the run must resume, finish and pass its audit again. Needs root, for a /dev/shm of its own. The same seed makes the
same choices, not the same run.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from hpcsync.audit.trace_audit import audit
from hpcsync.config.errors import JobError
from hpcsync.run_dir import checkpoint, lock
from hpcsync.system.namespaces import Hosts
from hpcsync.system.process_cleanup import PROXY
from hpcsync.trace.reader import TraceError, load
from tests.runs.processes import MARK, Program, hpcsync

GONE_S = 5.0  # on a machine with free cores
LIMIT_S = 120.0  # for a step to come, for a trial to end by itself unless said otherwise, and for a run that resumes
LATEST_S = 1.5  # after a step has begun
MEMORY = Path("/dev/shm")
TOPOLOGY = "hydra_hwloc_xmlfile_*"  # in /tmp, of MPICH's launcher
DAEMON = "prted."  # folder on another host: an Open MPI daemon whose launcher was killed does not always remove it
PYTHON_STARTS = "Fatal Python error: init_import_site"  # Ctrl-C before a line of hpcsync has run
OWN_MEMORY = "HPCSYNC_TROUBLE"

JOB = """
name = "trouble"
seed = 5
workload = {{name = "{workload}", batch_size = {batch}}}
optimizer = {{name = "sgd", lr = 0.01}}
stop = {{seconds = 600}}
evaluation = {{every_samples = 0}}
checkpoint = {{seconds = 0.4}}
paradigm = {paradigm}
cluster = {{workers = {workers}, compute = {{model = "lognormal", seconds = 0.01, jitter = 0.3}}}}
"""
PARADIGMS = {  # by name, some followed by what is special
    "bsp": "",
    "asp": "",
    "ssp": "staleness = 2",
    "dssp": "staleness_min = 1, staleness_max = 5",
    "sync-switch": "plateau = 0.1",
    "k-sync": 'k = 2, cancel = "abort"',
    "k-batch-sync": 'k = "loss"',
    "k-async": 'k = "state"',
    "k-batch-async": 'k = "min"',
    "easgd": "period = 2",
    "ashl": "warmup = 1, profiled = 4, steps_coarse = 3, steps_fine = 2, loss_preset = 0.5",
    "ashl gate": 'commit = "after-gate", staleness = 0, warmup = 1, profiled = 4, loss_preset = 0.5',
    "adsp": "check_period_s = 0.1, interval_min_s = 0.01, commits = 4",
    "adsp loss": 'check_period_s = 0.1, interval_min_s = 0.01, loss = "evaluation"',
    "async-diloco": "",
    "allreduce": "",
    "local-sgd": "steps = 3",
    "ad-psgd": "",
    "gossip": 'mode = "pull"',
    "stanza": 'cut = "7"',
}
STEPS = ("", "starting", "loading libraries", "loading model", "setting up", "training", " samples/s")  # what it says
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
TARGETS = ("hpcsync", "launcher", "rank")


class Trial(NamedTuple):
    """What happens in a trial."""

    paradigm: str
    target: str
    signum: signal.Signals
    step: str
    delay_s: float
    rank: int

    @staticmethod
    def drawn(dice: random.Random) -> Trial:
        """Return a random trial. Launchers and hpcsync pass signals on; a single rank notes them, so it is killed."""
        target = dice.choice(TARGETS)
        signum = signal.SIGKILL if target == "rank" else dice.choice(SIGNALS)
        step = dice.choice(STEPS)
        return Trial(dice.choice(list(PARADIGMS)), target, signum, step, dice.uniform(0, LATEST_S), dice.randrange(2))

    def __str__(self) -> str:
        return f"{self.paradigm:13} {self.signum.name:7} to {self.target:8} {self.delay_s:.1f} s after {self.step!r:19}"


class Found(NamedTuple):
    """What a trial has left."""

    moment: str
    gone_s: float
    status: int
    trace: str
    resumed: bool
    wrong: list[str]


class Place(NamedTuple):
    """Where runs are started: the command line there, the environment, and the folders of shared memory."""

    inside: Callable[[Path, list[str]], list[str]]
    environ: dict[str, str]
    memories: tuple[Path, ...]

    def segments(self) -> set[Path]:
        """Return the segments of shared memory on all hosts."""
        return {segment for memory in self.memories for segment in memory.iterdir()}


def job(paradigm: str) -> str:
    options = PARADIGMS[paradigm]
    return JOB.format(
        paradigm="{" + f'name = "{paradigm.split()[0]}"' + f", {options}" * bool(options) + "}",
        workers=2,
        workload="digits" if paradigm == "stanza" else "linear",
        batch=4,
    )


def hit(program: Program, trial: Trial) -> str:
    """Send the signal, to hpcsync itself while there is no such process; return what the run was doing."""
    moment = next(step for step in reversed(STEPS) if step in program.out) or "before"
    victim = program.process.pid
    if trial.target != "hpcsync":
        victim = _pid_of(program, trial) or victim
    try:
        os.kill(victim, trial.signum)
    except ProcessLookupError:
        moment += ", too late"
    return moment


def _pid_of(program: Program, trial: Trial) -> int | None:
    try:
        if trial.target == "rank":
            return program.rank(trial.rank).pid
        return next(p.pid for p in program.left() if p.ppid() == program.process.pid and _is_launcher(p))
    except (AssertionError, StopIteration, psutil.Error):
        return None


def _is_launcher(process: psutil.Process) -> bool:
    return Path(process.exe()).name in ("mpiexec", "mpirun", "prterun", "mpiexec.hydra")


def wait(condition: Callable[[], bool], limit_s: float) -> float:
    """Return the seconds until the condition holds, at most the limit."""
    begin_s = time.monotonic()
    while not condition() and time.monotonic() < begin_s + limit_s:
        time.sleep(0.02)
    return time.monotonic() - begin_s


def slowness() -> float:
    """Return how many times longer a computation takes than its process computes: 1 on a machine with a free core.

    It tells trials that fail because of other programs from those that fail by themselves.
    """
    begin_s, computed_s = time.monotonic(), time.process_time()
    while time.process_time() < computed_s + 0.2:
        pass
    return (time.monotonic() - begin_s) / 0.2


def proxies() -> set[psutil.Process]:
    """Return the proxies of all of MPICH's launchers."""
    return {process for process in psutil.process_iter(["name"]) if process.info["name"] == PROXY}


def gone(program: Program) -> bool:
    return program.process.poll() is not None and not program.left()


def examined(trial: Trial, folder: Path, place: Place, *, resumes: bool, gone_limit_s: float, limit_s: float) -> Found:
    """Carry out a trial in this folder; one that does not end by itself is ended after `limit_s`."""
    out, temporary = folder / "out", folder / "tmp"
    temporary.mkdir(parents=True)
    (folder / "job.toml").write_text(job(trial.paradigm))
    place.environ["TMPDIR"] = str(temporary)
    memory, topologies, wrong = place.segments(), set(Path("/tmp").glob(TOPOLOGY)), []
    program = Program(place.inside(folder, hpcsync("run", "job.toml", "--out", "out")), folder, place.environ)
    try:
        wait(lambda: trial.step in program.out or program.process.poll() is not None, LIMIT_S)
        time.sleep(trial.delay_s)
        beside = proxies() - set(program.left())
        moment = hit(program, trial)
        gone_s = wait(lambda: gone(program), limit_s)
        # The launcher's daemons on other hosts, which have no mark, end a moment later and remove their folders.
        wait(lambda: not place.segments() - memory, gone_limit_s)
        if gone_s > gone_limit_s:
            wrong.append(f"gone after {gone_s:.1f} s, while a core was {slowness():.1f} times slower than alone")
        if moment.endswith("too late") and program.process.returncode:
            wrong.append("ended by itself")
        if left := program.left():
            wrong.append(f"processes left: {[' '.join(p.cmdline())[:80] for p in left]}")
    finally:
        program.kill()
    status = program.status
    if names := sorted(p.name for p in temporary.iterdir()):
        wrong.append(f"temporary: {names}")
    segments = place.segments() - memory
    if trial.signum == signal.SIGKILL and segments and all(found.name.startswith(DAEMON) for found in segments):
        moment += ", leaving a folder of Open MPI's daemon"
    elif segments:
        wrong.append(f"segments: {sorted(map(str, segments))}")
    # While another launch lives, its files cannot be told from this one's, and `hpcsync run` leaves them.
    names = sorted(str(path) for path in set(Path("/tmp").glob(TOPOLOGY)) - topologies)
    if names and not beside | proxies():
        wrong.append(f"topologies: {names}")
    if out.exists():
        try:
            lock.take(out / lock.NAME, lock.this_process()).release()
        except JobError as error:
            wrong.append(str(error))
    if "Traceback" in program.err and PYTHON_STARTS not in program.err:
        wrong.append("traceback")
    trace, wrong_trace = traced(out)
    wrong += wrong_trace
    resumed = False
    if resumes and not wrong and trace not in ("finished",) and out.exists():
        resumed = True
        wrong += after_resuming(folder, place)
    if wrong:
        (folder / "said").write_text(f"{trial}\n{program.out}\n--\n{program.err}")
    return Found(moment, gone_s, status, trace, resumed, wrong)


def traced(out: Path) -> tuple[str, list[str]]:
    """Return the status of a trace, and what is wrong with it."""
    if not (out / "trace.h5").exists():
        return "none", []
    try:
        trace = load(out)
    except TraceError as error:
        return "unreadable", [str(error)]
    wrong = ["trace running"] if trace.status == "running" else []
    return trace.status, wrong + [f"audit: {found.name}" for found in audit(trace) if not found.passed]


def after_resuming(folder: Path, place: Place) -> list[str]:
    """Resume and finish a run; return what is wrong."""
    out, now_s = folder / "out", 0.0
    if (newest := checkpoint.newest(out)) is not None:
        trace = load(out)
        now_s = max(
            (float(rows["now_s"].max()) for t in ("pushes", "exchanges") if len(rows := trace.tables[t])), default=0
        )
    line = hpcsync("run", "job.toml", "--out", "out", "--resume", "--set", f"stop.seconds={now_s + 0.5:.2f}")
    program = Program(place.inside(folder, line), folder, place.environ)
    try:
        wait(lambda: gone(program), LIMIT_S)
        left = program.left()
    finally:
        program.kill()
    if left or program.status:
        (folder / "resuming").write_text(f"{program.out}\n--\n{program.err}")
        return [f"resume from {newest}: status {program.status}"]
    status, wrong = traced(out)
    return wrong if status == "finished" else [f"resumed trace {status}", *wrong]


def main() -> int:
    """Carry out the trials; return 1 if one of them left what it must not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=0, help="ranks on so many network namespaces, at 1 Gbit/s")
    parser.add_argument("--no-resume", action="store_true", help="do not resume what can be resumed")
    parser.add_argument("--gone", type=float, default=GONE_S, help="seconds in which every process must be gone")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a trial to end by itself")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no trial after this time")
    given = parser.parse_args()
    if OWN_MEMORY not in os.environ and os.geteuid() == 0:
        mount = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        os.environ[OWN_MEMORY] = "1"
        os.execvp("unshare", ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, *sys.argv])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs, and theirs, ignore it
    dice, begin_s = random.Random(given.seed), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="trouble-", dir="/var/tmp"))
    counts: collections.Counter[str] = collections.Counter()
    longest_s, bad = 0.0, 0
    with ExitStack() as stack:
        place = Place(lambda cwd, line: line, dict(os.environ), (MEMORY,))
        if given.hosts:
            hosts = stack.enter_context(Hosts(given.hosts, rate="1gbit"))
            numbers = range(1, given.hosts + 1)
            launcher = hosts.mpiexec(numbers)
            if "--host" in launcher:  # Open MPI hands on only the variables that are named
                launcher += ["-x", MARK, "-x", "TMPDIR"]
            environ = {**os.environ, **hosts.environ(), "MPIEXEC": shlex.join(launcher)}
            memories = (Path(f"/proc/{hosts.pid(f'n{number}')}/root{MEMORY}") for number in numbers)
            place = Place(lambda cwd, line: hosts.inside("head", cwd, line), environ, (MEMORY, *memories))
        for number in range(given.trials):
            trial = Trial.drawn(dice)
            if time.monotonic() - begin_s > given.seconds:
                break
            here = folder / str(number)
            resumes = not given.no_resume
            found = examined(trial, here, place, resumes=resumes, gone_limit_s=given.gone, limit_s=given.limit)
            longest_s, bad = max(longest_s, found.gone_s), bad + bool(found.wrong)
            counts.update(["trials", f"during {found.moment}", f"trace {found.trace}", *["resumed"] * found.resumed])
            counts.update(f"wrong: {wrong.split(':')[0].split(' after')[0]}" for wrong in found.wrong)
            kind = "WRONG " + "; ".join(found.wrong) if found.wrong else "ok"
            print(
                f"{number:4} {trial} ({found.moment}): gone {found.gone_s:4.1f} s, status {found.status}, "
                f"trace {found.trace}{', resumed' * found.resumed}: {kind}",
                flush=True,
            )
            if not found.wrong:
                shutil.rmtree(here)
    print(f"seed {given.seed}, longest {longest_s:.1f} s, {bad} wrong; {dict(sorted(counts.items()))}")
    if bad:
        print(f"what is left: {folder}")
    else:
        shutil.rmtree(folder)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
