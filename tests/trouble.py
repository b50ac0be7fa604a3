"""Kill and signal runs at random moments, from the first millisecond on, and examine what is left of each.

    python tests/trouble.py --trials 100 --seed 1

A trial starts a run under one of the paradigms, waits for a random step of it and a random time, and sends a signal to
`hpcsync`, to the MPI launcher, to a rank or to two; or the disk of its folder is too small. Afterwards every process
must soon be gone, or those that restart or continue must end in order; no temporary folder and no segment of shared
memory may be left, the trace must be settled and pass its audit, and the run must resume, finish and pass its audit
again. Where a paradigm is deterministic, its final weights are those of a simulation. Needs root, for a /dev/shm of its
own. The same seed makes the same choices, not the same run.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from hpcsync.audit.trace_audit import audit
from hpcsync.config.errors import JobError
from hpcsync.run_dir import checkpoint, lock
from hpcsync.system import launcher
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
stop = {{{stop}}}
evaluation = {{every_samples = {evaluation}}}
checkpoint = {{seconds = 0.4}}
paradigm = {paradigm}
cluster.servers = {servers}
cluster.workers = {workers}
cluster.on_death = "{on_death}"
cluster.compute = {{model = "lognormal", seconds = 0.01, jitter = 0.3}}
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
    "gossip push-sum": 'mode = "push-sum"',
    "gossip permutation": 'mode = "permutation"',
    "stanza": 'cut = "7"',
}
WITHOUT_SERVERS = ("allreduce", "local-sgd", "ad-psgd", "gossip", "gossip push-sum", "gossip permutation", "stanza")
IN_STEP = ("bsp", "allreduce", "local-sgd", "gossip permutation", "stanza")  # their weights do not depend on times
NEED_ALL = ("allreduce", "local-sgd", "gossip permutation", "stanza")  # they cannot continue without a worker
STEPS = ("", "starting", "loading libraries", "loading model", "setting up", "training", " samples/s")  # what it says
SAVING, ENDING = "checkpoints/*.unfinished", "weights*"  # what is in its folder
SIGNALS = {  # launchers and hpcsync pass signals on; a single rank notes others
    "hpcsync": (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP),
    "launcher": (signal.SIGTERM, signal.SIGINT, signal.SIGKILL),
    "rank": (signal.SIGKILL, signal.SIGABRT, signal.SIGSTOP),
    "two ranks": (signal.SIGKILL,),
}
STOPPED_S = 2.0  # of a rank, which then continues
UPDATES = 200  # of a run that ends by itself
SMALL_DISK, ENLARGED = "mount -t tmpfs -o size=400k tmpfs out", "mount -o remount,size=64m"


class Trial(NamedTuple):
    """What happens in a trial. `ends`: the run ends by itself; `disk`: that of its folder is small."""

    paradigm: str
    target: str
    signum: signal.Signals
    step: str
    delay_s: float
    rank: int
    servers: int
    workers: int
    on_death: str
    evaluates: bool
    ends: bool
    disk: bool

    @staticmethod
    def drawn(dice: random.Random, *, continues: bool = False) -> Trial:
        """Return a random trial; `continues`: this MPI's ranks can continue after a death."""
        target, step = dice.choice(list(SIGNALS)), dice.choice((*STEPS, SAVING, ENDING))
        signum, paradigm = dice.choice(SIGNALS[target]), dice.choice(list(PARADIGMS))
        delay_s = 0.0 if step in (SAVING, ENDING) else dice.uniform(0, LATEST_S)
        servers, workers = 0 if paradigm in WITHOUT_SERVERS else dice.choice((1, 1, 2)), dice.choice((2, 2, 3))
        rank, evaluates, disk = dice.randrange(servers + workers), dice.random() < 0.5, dice.random() < 0.1
        ends = step == ENDING or dice.random() < 0.3
        reactions = ("end", "end", "restart", *["continue"] * (continues and paradigm not in NEED_ALL))
        reaction = dice.choice(reactions)
        ends |= reaction != "end"
        return Trial(paradigm, target, signum, step, delay_s, rank, servers, workers, reaction, evaluates, ends, disk)

    @property
    def is_exact(self) -> bool:
        """True if the final weights are those of a simulation."""
        return self.ends and self.paradigm in IN_STEP and self.on_death != "continue"

    def __str__(self) -> str:
        return (
            f"{self.paradigm:18} {self.servers}+{self.workers} {self.on_death:8} {self.signum.name:7} to "
            f"{self.target:9} {self.rank} {self.delay_s:.1f} s after {self.step!r:26}{' (small disk)' * self.disk}"
        )


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


def job(trial: Trial) -> str:
    options = PARADIGMS[trial.paradigm]
    return JOB.format(
        paradigm="{" + f'name = "{trial.paradigm.split()[0]}"' + f", {options}" * bool(options) + "}",
        servers=trial.servers,
        workers=trial.workers,
        on_death=trial.on_death,
        workload="digits" if trial.paradigm == "stanza" else "linear",
        batch=4,
        evaluation=40 if trial.evaluates else 0,
        stop=f"updates = {UPDATES}" if trial.ends else "seconds = 600",
    )


def reached(program: Program, step: str, out: Path) -> bool:
    """Return True if the run has come to this step, or has ended."""
    at_step = any(out.glob(step)) if step in (SAVING, ENDING) else step in program.out
    return at_step or program.process.poll() is not None


def hit(program: Program, trial: Trial) -> str:
    """Send the signal, to hpcsync itself while there is no such process; return what the run was doing."""
    moment = next(step for step in reversed(STEPS) if step in program.out) or "before"
    pids = {"hpcsync": [], "launcher": _launcher(program)}.get(trial.target)
    if pids is None:
        ranks = [trial.rank, (trial.rank + 1) % (trial.servers + trial.workers)]
        pids = [pid for rank in ranks[: len(trial.target.split())] for pid in _rank(program, rank)]
    for pid in pids or [program.process.pid]:
        try:
            os.kill(pid, trial.signum)
            if trial.signum == signal.SIGSTOP:
                time.sleep(STOPPED_S)
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            moment += ", too late"
    return moment


def _launcher(program: Program) -> list[int]:
    with suppress(psutil.Error):
        return [p.pid for p in program.left() if p.ppid() == program.process.pid and _is_launcher(p)]
    return []


def _rank(program: Program, rank: int) -> list[int]:
    with suppress(AssertionError, psutil.Error):
        return [program.rank(rank).pid]
    return []


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


def tolerates() -> bool:
    """Return True if ranks of this MPI can continue when another one dies."""
    try:
        launcher.command(1, ["true"], tolerant=True)
    except launcher.LaunchError:
        return False
    return True


def proxies() -> set[psutil.Process]:
    """Return the proxies of all of MPICH's launchers."""
    return {process for process in psutil.process_iter(["name"]) if process.info["name"] == PROXY}


def gone(program: Program) -> bool:
    return program.process.poll() is not None and not program.left()


def examined(trial: Trial, folder: Path, place: Place, *, resumes: bool, gone_limit_s: float, limit_s: float) -> Found:
    """Carry out a trial in this folder; one that does not end by itself is ended after `limit_s`."""
    out, temporary = folder / "out", folder / "tmp"
    temporary.mkdir(parents=True)
    (folder / "job.toml").write_text(job(trial))
    if trial.disk:
        out.mkdir()
        subprocess.run(SMALL_DISK.split(), cwd=folder, check=True)
    place.environ["TMPDIR"] = str(temporary)
    memory, topologies, wrong = place.segments(), set(Path("/tmp").glob(TOPOLOGY)), []
    program = Program(place.inside(folder, hpcsync("run", "job.toml", "--out", "out")), folder, place.environ)
    try:
        wait(lambda: reached(program, trial.step, out), LIMIT_S)
        time.sleep(trial.delay_s)
        beside = proxies() - set(program.left())
        moment = hit(program, trial)
        if trial.signum == signal.SIGSTOP and not trial.ends:
            program.process.send_signal(signal.SIGTERM)
        gone_s = wait(lambda: gone(program), limit_s)
        # The launcher's daemons on other hosts, which have no mark, end a moment later and remove their folders.
        wait(lambda: not place.segments() - memory, gone_limit_s)
        if gone_s > (limit_s if trial.ends else gone_limit_s):
            wrong.append(f"gone after {gone_s:.1f} s, while a core was {slowness():.1f} times slower than alone")
        if moment.endswith("too late") and program.process.returncode and not trial.disk:
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
    if status == 0 and not (out / "summary.json").exists():
        wrong.append("no summary")
    resumed = resumes and not wrong and out.exists() and not (out / "summary.json").exists()
    if trial.disk and resumed:
        subprocess.run([*ENLARGED.split(), str(out)], check=True)
    if resumed:
        wrong += after_resuming(folder, place, ends=trial.ends)
    if trial.is_exact and not wrong and (out / "summary.json").exists():
        wrong += unlike_simulation(folder, place)
    if trial.disk:
        subprocess.run(["umount", str(out)], check=True)
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


def unlike_simulation(folder: Path, place: Place) -> list[str]:
    """Simulate the job of a run that has finished; return how their weights differ."""
    line = hpcsync("simulate", "job.toml", "--out", "simulated", "--set", 'cluster.on_death="end"')
    subprocess.run(line, cwd=folder, env=place.environ, capture_output=True, check=True)
    files = [(folder / name / "weights.safetensors").read_bytes() for name in ("out", "simulated")]
    return [] if files[0] == files[1] else ["weights: not those of the simulation"]


def after_resuming(folder: Path, place: Place, *, ends: bool) -> list[str]:
    """Resume and finish a run; return what is wrong."""
    out, now_s = folder / "out", 0.0
    if (newest := checkpoint.newest(out)) is not None:
        trace = load(out)
        now_s = max(
            (float(rows["now_s"].max()) for t in ("pushes", "exchanges") if len(rows := trace.tables[t])), default=0
        )
    line = hpcsync("run", "job.toml", "--out", "out", "--resume")
    line += [] if ends else ["--set", f"stop.seconds={now_s + 0.5:.2f}"]
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
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # likewise nohup
    dice, begin_s = random.Random(given.seed), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="trouble-", dir="/var/tmp"))
    counts: collections.Counter[str] = collections.Counter()
    longest_s, bad = 0.0, 0
    with ExitStack() as stack:
        place = Place(lambda cwd, line: line, dict(os.environ), (MEMORY,))
        if given.hosts:
            hosts = stack.enter_context(Hosts(given.hosts, rate="1gbit"))
            numbers = range(1, given.hosts + 1)
            mpiexec = hosts.mpiexec(numbers)
            if "--host" in mpiexec:  # Open MPI hands on only the variables that are named
                mpiexec += ["-x", MARK, "-x", "TMPDIR"]
            environ = {**os.environ, **hosts.environ(), "MPIEXEC": shlex.join(mpiexec)}
            memories = (Path(f"/proc/{hosts.pid(f'n{number}')}/root{MEMORY}") for number in numbers)
            place = Place(lambda cwd, line: hosts.inside("head", cwd, line), environ, (MEMORY, *memories))
        for number in range(given.trials):
            trial = Trial.drawn(dice, continues=tolerates() and not given.hosts)
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
