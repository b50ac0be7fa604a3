"""Command compare: a grid is run once, resumed, tuned and refused; finished runs in folders are grouped."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import pytest

from hpcsync.cli import grid, run
from hpcsync.cli.compare import TUNING_SEEDS, Asked, main
from hpcsync.cli.finished_runs import grouped
from hpcsync.config.errors import JobError
from hpcsync.config.job import load
from hpcsync.figures.plotting import of_one_job
from hpcsync.run_dir import lock
from hpcsync.system import launcher
from hpcsync.system.launcher import LaunchError
from hpcsync.trace.reader import load as load_trace
from tests.unit.jobs import refusal
from tests.unit.trace.test_reader import held

JOB = """
name = "small"
seed = 5
workload = {name = "linear"}
optimizer = {name = "sgd", lr = 0.1}
stop = {updates = 60, target_loss = 0.3}
evaluation.every_samples = 64
paradigm = {name = "bsp"}
cluster = {workers = 3, compute = {seconds = [0.1, 0.1, 0.3], jitter = 0.05, model = "lognormal"}}
"""
TWO = ['paradigm=["bsp", {name = "ssp", staleness = 2}]']


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "small.toml"
    path.write_text(JOB)
    return path


class Commands:
    """Replacement of `subprocess.Popen`: carries out `hpcsync simulate` in this process, and records the folders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders: list[str] = []
        self.failing = ""
        monkeypatch.setattr(grid, "subprocess", SimpleNamespace(Popen=self._open, DEVNULL=None))

    def _open(self, command: list[str], **files: Any) -> Commands:
        assert command[1:5] == ["-P", "-m", "hpcsync", "simulate"]
        overrides = [command[i + 1] for i, word in enumerate(command) if word == "--set"]
        folder = command[command.index("--out") + 1]
        self.folders.append(folder)
        self._status = (
            1
            if self.failing and self.failing in folder
            else run.simulate(Path(command[5]), overrides, Path(folder), None)
        )
        return self

    def wait(self) -> int:
        return self._status


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(monkeypatch)


def asked(**given: Any) -> Asked:
    return Asked(vary=TWO, simulate=True, out=Path("grid"), csv=Path("table.csv"))._replace(**given)


def rows() -> dict[str, dict[str, str]]:
    with open("table.csv", encoding="utf-8") as file:
        return {f"{row['condition']} {row['label']}".strip(): row for row in csv.DictReader(file)}


def test_a_grid_is_run_once_and_continued(job: Path, commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([job], asked()) == 0
    assert commands.folders == [f"grid/{name}/seed-{i}" for name in ("bsp", "ssp-staleness=2") for i in (5, 6, 7)]
    found = rows()
    assert set(found) == {"bsp", "ssp staleness=2"}
    assert all((row["runs"], row["arrived"]) == ("3", "3") for row in found.values())
    assert float(found["ssp staleness=2"]["time_s"]) < float(found["bsp"]["time_s"])
    assert "6 runs of 2 variants in grid; 0 finished already" in capsys.readouterr().err
    assert main([job], asked(vary=['paradigm=["bsp"]'], seeds=1)) == 0
    assert "1 run of 1 variant in grid; 1 finished already" in capsys.readouterr().err

    del commands.folders[:]
    assert main([job], asked(seeds=4, report=Path("all.html"))) == 0
    assert "<dt>runs</dt><dd>8</dd>" in Path("all.html").read_text()
    assert commands.folders == ["grid/bsp/seed-8", "grid/ssp-staleness=2/seed-8"]
    assert rows()["bsp"]["runs"] == "4"
    again = rows()
    assert main([Path("grid")], Asked(csv=Path("table.csv"))) == 0
    assert len(commands.folders) == 2
    assert {tuple(row.values())[2:] for row in rows().values()} == {tuple(row.values())[2:] for row in again.values()}


def test_a_run_that_another_command_has_finished_meanwhile_stays_as_it_is(job: Path, commands: Commands) -> None:
    finished, other = grid.plan(job, [], grid.combinations("--vary", TWO), range(1), Path("grid"))
    assert grid._execute(job, finished, [], simulated=True) == 0
    trace = finished.folder / "trace.h5"
    content = trace.read_bytes()
    assert grid._execute(job, finished, [], simulated=True) == 0
    assert (len(commands.folders), trace.read_bytes() == content) == (1, True)
    assert grid._execute(job, other, [], simulated=True) == 0  # the control
    assert len(commands.folders) == 2


def test_a_folder_in_which_another_comparison_runs_is_refused(job: Path, commands: Commands) -> None:
    Path("grid").mkdir()
    others = lock.take(Path("grid") / lock.NAME, lock.this_process())
    with pytest.raises(JobError, match=r"^out .*grid: must be a folder that no other process uses: process "):
        main([job], asked())
    assert not commands.folders
    others.release()
    assert main([job], asked()) == 0 and not (Path("grid") / lock.NAME).exists()
    others = lock.take(Path("grid") / lock.NAME, lock.this_process())
    assert main([job], asked()) == 0, "nothing is left to run, so nothing is written into the folder"
    others.release()


def test_a_run_that_another_command_simulates_now_ends_no_other(
    job: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = grid.plan(job, [], grid.combinations("--vary", TWO), range(1), Path("grid"))
    folder = runs[0].folder
    folder.mkdir(parents=True)
    others = lock.take(folder / lock.NAME, lock.this_process())
    assert [(run, status) for run, status in grid.carry_out(job, runs, simulated=True, at_once=1)] == [
        (runs[0], 2),
        (runs[1], 0),
    ]
    assert "must be a folder that no other process uses" in folder.with_name(f"{folder.name}.log").read_text()
    others.release()
    assert grid._execute(job, runs[0], [], simulated=True) == 0 and len(commands.folders) == 2

    monkeypatch.setattr(grid, "finished", lambda run: False)  # it ends between the two looks
    assert grid._execute(job, runs[0], [], simulated=True) == 0 and len(commands.folders) == 2
    assert not (folder / lock.NAME).exists()


def test_values_that_no_key_takes_are_refused_in_one_line() -> None:
    """TOML has dates and nan, which JSON lacks."""
    axes = ["a=[2020-01-01, 2020-01-01T10:00:00, 10:00:00, nan, inf, -inf, 1.5]"]
    (values,) = [[text for (text,) in grid.combinations("--vary", axes)]]
    assert values == [f"a={v}" for v in axes[0][3:-1].split(", ")]
    assert [grid.variant([text]).condition for text in values[3:]] == ["a=nan", "a=inf", "a=-inf", "a=1.5"]


def test_runs_that_fail_are_said_and_run_again(
    job: Path, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.failing = "seed-6"
    assert main([job], asked()) == 1
    assert "bsp, seed 6: failed with status 1, see grid/bsp/seed-6.log" in capsys.readouterr().err
    assert {row["runs"] for row in rows().values()} == {"2"}
    commands.failing = ""
    del commands.folders[:]
    assert main([job], asked()) == 0
    assert len(commands.folders) == 2
    commands.failing = "other"
    assert main([job], asked(out=Path("other"))) == 1
    assert "no run has finished" in capsys.readouterr().err


def test_every_variant_is_tuned_with_the_same_settings(
    job: Path, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = asked(tune=["optimizer.lr=[0.1, 1e-6, 0.05]"], tune_seeds=2)
    assert main([job], rates) == 0
    tuning = [folder for folder in commands.folders if folder.startswith("grid-tuning/")]
    assert len(tuning) == 2 * 3 * 2
    assert {folder.rpartition("-")[2] for folder in tuning} == {str(5 + TUNING_SEEDS), str(6 + TUNING_SEEDS)}
    assert set(rows()) == {"bsp lr=0.1", "ssp staleness=2 lr=0.1"}, "a rate of 1e-6 does not arrive, 0.05 arrives later"
    said = capsys.readouterr().err
    assert "bsp: lr=0.1 is the best of 3 settings" in said
    assert "hpcsync: bsp: optimizer.lr = 0.1 is the smallest or largest value of --tune" in said


def test_a_job_of_an_earlier_run_that_cannot_be_read_is_named(job: Path, commands: Commands) -> None:
    assert main([job], asked(seeds=1)) == 0
    Path("grid/bsp/seed-5/job.toml").write_text("seed = -1")
    with pytest.raises(JobError, match="^grid/bsp/seed-5/job.toml: "):
        main([job], asked(seeds=1))


def test_the_other_jobs_folder_is_refused(job: Path, commands: Commands) -> None:
    assert main([job], asked(seeds=1)) == 0
    with pytest.raises(JobError, match="grid/bsp/seed-5 holds a run of another job; give another folder"):
        main([job], asked(seeds=1, overrides=["workload.batch_size=16"]))


def test_runs_on_ranks_and_simulations_do_not_share_a_folder(job: Path, commands: Commands) -> None:
    """Their times differ, and an unfinished run would be put aside or resumed by the other command."""
    assert main([job], asked(seeds=1)) == 0
    with pytest.raises(JobError, match="grid/bsp/seed-5 holds a simulation; give another folder"):
        main([job], asked(seeds=1, simulate=False))
    with h5py.File("grid/ssp-staleness=2/seed-5/trace.h5", "r+") as trace:
        trace.attrs["engine"] = "mpi"
    with pytest.raises(JobError, match="grid/ssp-staleness=2/seed-5 holds a run on MPI ranks; give another folder"):
        main([job], asked(seeds=1))
    Path("grid/bsp/seed-5/trace.h5").write_bytes(b"")  # as if the run had been killed: its engine is unknown
    assert grid._engine(Path("grid/bsp/seed-5")) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"out": Path("small.toml")}, "out small.toml/bsp: Not a directory"),
        ({"vary": []}, 'compare: --vary is missing; must be KEY=[VALUE, ...], such as paradigm=["bsp", "asp"]'),
        ({"vary": ["paradigm=bsp"]}, "--vary paradigm=bsp: must be KEY=[VALUE, ...]"),
        ({"vary": ["paradigm=[]"]}, "--vary paradigm=[]: must be KEY=[VALUE, ...]"),
        ({"vary": ['paradigm=["bps"]']}, 'paradigm.name = "bps": must be one of'),
        ({"vary": [*TWO, "seed=[1, 2]"]}, "--vary seed: must not be given, since --seeds gives it"),
        (
            {"tune": ["optimizer.lr=[0.1]"], "vary": ["optimizer.lr=[0.1, 0.2]"]},
            "--tune optimizer.lr: must not be given",
        ),
        (
            {"vary": ["optimizer.lr=[0.1, 0.1]"]},
            "--vary optimizer.lr=[0.1, 0.1]: must be different values; 0.1 is given",
        ),
        (
            {"tune": ["optimizer.lr=[1, 2, 1]"]},
            "--tune optimizer.lr=[1, 2, 1]: must be different values; 1 is given twice",
        ),
        ({"vary": ['paradigm=["bsp", {name = "bsp"}]']}, "--vary: bsp and bsp must differ"),
        (
            {"vary": ['paradigm=["asp", {name = "asp", compensation = "none"}]']},
            "--vary: asp and asp compensation=none must differ: they are the same job",
        ),
        ({"tune": ["cluster.workers=[2, 3]"]}, "--tune cluster.workers: must be a key of optimizer, paradigm"),
        ({"vary": [*TWO, *TWO]}, "paradigm must be given once"),
        ({"csv": Path("small.toml/table.csv")}, "small.toml/table.csv: Not a directory"),
        ({"latex": Path.cwd()}, f"{Path.cwd()}: Is a directory"),
        ({"report": Path("small.toml/report.html")}, "small.toml/report.html: Not a directory"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    job: Path, commands: Commands, given: dict[str, Any], message: str
) -> None:
    assert message in refusal(main, [job], asked(**given))
    assert commands.folders == []
    assert not Path("grid").exists()


def test_without_mpi_the_first_line_says_so_once(
    job: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise LaunchError("mpi4py: not installed")

    monkeypatch.setattr(launcher, "refuse_without_mpi", refuse)
    with pytest.raises(LaunchError, match="^mpi4py: not installed$"):
        main([job], asked(simulate=False))
    assert commands.folders == []
    assert not Path("grid").exists()
    assert main([job], asked(simulate=True)) == 0


def test_finished_runs_take_no_options_of_a_grid(job: Path) -> None:
    with pytest.raises(JobError, match="compare: --vary, --simulate, --out: must be left out for finished runs"):
        main([Path("runs")], asked())
    with pytest.raises(JobError, match="must be the only argument"):
        main([job, Path("runs")], asked())
    with pytest.raises(JobError, match="empty: must be a trace, or a folder with the traces of runs"):
        Path("empty").mkdir()
        main([Path("empty")], Asked())


def test_a_run_under_way_is_left_out(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (5, 6):
        run.simulate(job, [f"seed={seed}"], Path(f"runs/{seed}"), None)
    with held(Path("runs/5/trace.h5")) as rank:
        (runs,) = grouped([Path("runs")]).values()
        rank.stdin.close()
    assert [*runs] == [6]
    assert capsys.readouterr().err == "hpcsync: 1 run has not finished and is left out: runs/5/trace.h5\n"
    assert [*next(iter(grouped([Path("runs")]).values()))] == [5, 6], "control: it has ended"


def test_a_prediction_makes_no_other_variant(job: Path) -> None:
    predicted = job.with_name("predicted.toml")
    predicted.write_text(job.read_text() + "\n[predicted]\nseconds = 1.0\n")
    run.simulate(job, ["seed=1"], Path("runs/0"), None)
    run.simulate(predicted, ["seed=2"], Path("runs/1"), None)
    (runs,) = grouped([Path("runs")]).values()
    assert runs[1].job.predicted is None and runs[2].job.predicted is not None
    assert len(of_one_job([load_trace(each.trace) for each in runs.values()])) == 1


def test_runs_are_of_one_variant_if_only_seed_and_name_differ(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Labels are the keys that differ; options of a paradigm are compared within the paradigm only."""
    for i, overrides in enumerate(
        [
            ["paradigm={name='ssp', staleness=1}"],
            ["paradigm={name='ssp', staleness=1}", "seed=9", "name='other'"],
            ["paradigm={name='ssp', staleness=3}"],
            ["paradigm='asp'"],
            ["paradigm='asp'", "optimizer.lr=0.2"],
            ["paradigm='asp'", "cluster.workers=2", "cluster.compute.seconds=0.1"],
        ]
    ):
        run.simulate(job, overrides, Path(f"runs/{i}"), None)
    found = grouped([Path("runs")])
    assert {variant: sorted(runs) for variant, runs in found.items()} == {
        ("workers=3 seconds=[0.1,0.1,0.3]", "ssp lr=0.1 staleness=1"): [5, 9],
        ("workers=3 seconds=[0.1,0.1,0.3]", "ssp lr=0.1 staleness=3"): [5],
        ("workers=3 seconds=[0.1,0.1,0.3]", "asp lr=0.1"): [5],
        ("workers=3 seconds=[0.1,0.1,0.3]", "asp lr=0.2"): [5],
        ("workers=2 seconds=0.1", "asp lr=0.1"): [5],
    }
    (runs,) = grouped([Path("runs/0"), Path("runs/0/trace.h5")]).values()
    assert len(runs) == 1 and not capsys.readouterr().err, "one run, named twice"


def test_the_link_of_servers_is_no_condition_of_runs_without(job: Path) -> None:
    network = "cluster.network.server_bandwidth_gbit"
    for i, overrides in enumerate([["paradigm='asp'", f"{network}=40"], ["paradigm='allreduce'"]]):
        run.simulate(job, ["cluster.network.bandwidth_gbit=10", *overrides], Path(f"runs/{i}"), None)
    assert [*grouped([Path("runs")])] == [("", "asp"), ("", "allreduce")]
    run.simulate(job, ["cluster.network.bandwidth_gbit=10", "paradigm='asp'", f"{network}=20"], Path("runs/2"), None)
    assert len({variant.condition for variant in grouped([Path("runs")])}) == 3, "control: with servers it is one"


def test_times_that_were_drawn_for_each_seed_make_no_other_condition(job: Path) -> None:
    for seed, file in ((5, "times-5.csv"), (6, "times-6.csv"), (7, "times-7.csv"), (7, "other-5.csv")):
        lines = [f"{worker},{i},0.1" for worker in range(3) for i in range(2)]
        Path(file).write_text("\n".join(["worker,iteration,seconds", *lines, ""]))
        times = f'cluster.compute={{model = "table", table = "{Path(file).absolute()}"}}'
        run.simulate(job, [times, f"seed={seed}"], Path(f"runs/{seed}-{file}"), None)
    found = grouped([Path("runs")])
    assert sorted(sorted(runs) for runs in found.values()) == [[5, 6, 7], [7]], "the last is the control"
    every = [load_trace(each.trace) for runs in found.values() for each in runs.values()]
    assert sorted(map(len, of_one_job(every))) == [1, 3]


def test_of_two_runs_of_one_job_the_newest_counts(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, created in (("a", "2026-01-03"), ("b", "2026-01-02"), ("c", "2026-01-03"), ("d", "2026-01-01")):
        run.simulate(job, [f"seed={5 + (name == 'd')}"], Path(f"runs/{name}"), None)
        with h5py.File(f"runs/{name}/trace.h5", "r+") as file:
            file.attrs["created"] = created
    os.utime("runs/c/trace.h5", (1, 1))  # of equal ones the file counts
    capsys.readouterr()
    (runs,) = grouped([Path("runs")]).values()
    assert {seed: str(run.trace) for seed, run in runs.items()} == {5: "runs/a/trace.h5", 6: "runs/d/trace.h5"}
    assert capsys.readouterr().err == (
        "hpcsync: 2 runs have the job and seed of a newer one and are left out: runs/b/trace.h5, older than "
        "runs/a/trace.h5\n"
    )
    os.utime("runs/c/trace.h5", (2**33, 2**33))
    assert main([Path("runs/a"), Path("runs/c")], Asked()) == 0
    said = capsys.readouterr()
    assert "hpcsync: 1 run has the job and seed of a newer one and is left out: runs/a/trace.h5, older than" in said.err
    assert "no probabilities: 1 common seed, at least 3 are needed" in said.out


def as_a_user(job: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start two simulations at a time, as a user starts them."""
    command = [sys.executable, "-m", "hpcsync", "compare", str(job), "--vary", TWO[0], "--simulate", *arguments]
    environ = {**os.environ, "COLUMNS": "80"}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_of_a_grid(job: Path) -> None:
    process = as_a_user(job, "--seeds", "1", "--jobs", "2")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "ssp staleness=2" in out
    assert Path("runs/small-compare/bsp/seed-5.log").read_text().strip()


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 1), (signal.SIGKILL, -9)])
def test_a_signal_ends_all_processes_of_a_grid(job: Path, signum: int, status: int) -> None:
    endless = ["--set", "stop.updates=100000000", "--set", "stop.target_loss=1e-30", "--out", "endless"]
    process = as_a_user(job, *endless)
    deadline_s = time.monotonic() + 200
    while not Path("endless/bsp/seed-5/trace.h5").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    children += [
        pid for task in Path(f"/proc/{process.pid}/task").iterdir() for pid in (task / "children").read_text().split()
    ]
    assert children
    process.send_signal(signum)
    assert process.wait(200) == status
    while (left := [pid for pid in children if is_running(pid)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)  # after SIGKILL the kernel tells them
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert not left
    assert ("interrupted; the same command resumes" in process.stderr.read()) == (signum == signal.SIGTERM)


def is_running(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_run_whose_process_is_just_being_started_is_ended_too(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = grid.plan(job, [], grid.combinations("--vary", TWO), range(1), Path("grid"))
    ending = threading.Event()

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        is_late = "ssp" in str(command)
        if is_late:
            ending.wait()
            time.sleep(0.5)
        return subprocess.Popen(["sleep", "60" if is_late else "0"], **options)

    monkeypatch.setattr(grid, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))
    ended = grid.carry_out(job, runs, simulated=True, at_once=2)
    assert next(ended) == (runs[0], 0)
    ending.set()
    begin_s = time.monotonic()
    ended.close()
    assert time.monotonic() - begin_s < 30


def test_variants_of_overrides() -> None:
    """Keys of the cluster and the task are conditions: variants under different ones are not compared."""
    found = grid.variant(["paradigm='bsp'", "cluster.compute.seconds=[0.1, 0.2]"])
    assert found == ("seconds=[0.1,0.2]", "bsp")
    assert str(found) == "bsp seconds=[0.1,0.2]"
    assert grid.variant(["compression={name='top-k', ratio=0.1}"]) == ("", "top-k ratio=0.1")
    assert grid.variant(["workload.batch_size=8", "workload.name='digits'"]) == ("digits", "batch_size=8")
    assert grid.variant([]) == ("", "job")


def test_only_variants_under_the_same_condition_are_compared(
    job: Path, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters = "cluster.compute.seconds=[0.1, [0.1, 0.1, 0.5]]"
    assert main([job], asked(vary=[*TWO, clusters], seeds=1, latex=Path("table.tex"))) == 0
    found = rows()
    assert set(found) == {
        "seconds=0.1 bsp",
        "seconds=[0.1,0.1,0.5] bsp",
        "seconds=0.1 ssp staleness=2",
        "seconds=[0.1,0.1,0.5] ssp staleness=2",
    }
    assert sum(row["behind_s"] == "" for row in found.values()) == 2, "each condition has its fastest"
    assert capsys.readouterr().out.count("fastest") == 2 + 2  # in each table, and twice in the line about the columns


def test_values_at_an_end() -> None:
    axes = ["optimizer.lr=[0.1, 0.3, 0.2]", "paradigm=['bsp', 'asp', 'ssp']", "cluster.workers=[2, 4]"]
    assert grid.at_an_end(["optimizer.lr=0.3", "paradigm='bsp'", "cluster.workers=2"], axes) == ["optimizer.lr = 0.3"]
    assert grid.at_an_end(["optimizer.lr=0.2"], axes) == []


def test_a_plan_is_of_valid_jobs(job: Path) -> None:
    runs = grid.plan(job, [], grid.combinations("--vary", TWO), range(2), Path("out"))
    assert [(each.variant.label, each.seed, each.job.paradigm.name) for each in runs] == [
        ("bsp", 5, "bsp"),
        ("bsp", 6, "bsp"),
        ("ssp staleness=2", 5, "ssp"),
        ("ssp staleness=2", 6, "ssp"),
    ]
    assert all(each.job == load(job, each.overrides) for each in runs)
