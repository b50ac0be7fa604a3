"""Batch scripts: their text, and the commands they run in a bash without Slurm."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcsync.cli import app
from hpcsync.cli.slurm import BatchRequest, script
from hpcsync.config.errors import JobError
from hpcsync.system import launcher, rank_environment
from tests.unit.jobs import refusal

JOB = """
name = "small"
seed = 1
workload = {name = "linear"}
optimizer = {name = "sgd", lr = 0.1}
stop = {updates = 5}
paradigm = {name = "bsp"}
"""
TWO_BY_TWO = BatchRequest(nodes=[2], ntasks_per_node=[2], mpi="pmix")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "the job.toml"
    path.write_text(JOB)
    return path


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def execute(text: str, folder: Path, **environ: str) -> tuple[int, list[list[str]]]:
    """Run the script; return its status and its calls of srun and scontrol. srun ends with the status STATUS."""
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    for name in ("srun", "scontrol"):
        stand_in = folder / name
        stand_in.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            f"print(json.dumps([{name!r}, os.environ.get('OMP_NUM_THREADS'), *sys.argv[1:]]), "
            f"file=open({str(calls)!r}, 'a'))\nsys.exit(int(os.environ.get('STATUS', 0)))\n"
        )
        stand_in.chmod(0o755)
    given = {"SLURM_JOB_NAME": "small", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "3", **environ}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(["bash", "-c", text], env={"PATH": path, **given}, check=False)
    return ended.returncode, [json.loads(line) for line in calls.read_text().splitlines()]


def test_one_kind_of_node(job: Path, tmp_path: Path) -> None:
    asked = TWO_BY_TWO._replace(cpus_per_task=[3], gpus_per_node=[2], partition=["gpu"], mem=["4G"], account="abc")
    text = script(job, ["seed=2"], asked._replace(time="1-0"), "hpcsync slurm ...")
    assert text.startswith("#!/bin/bash\n# hpcsync slurm ...\n#SBATCH ")
    assert directives(text) == [
        "--job-name=small",
        "--output=%x-%j.out",
        "--open-mode=append",
        "--time=1-0",
        "--account=abc",
        "--partition=gpu",
        "--nodes=2",
        "--ntasks-per-node=2",
        "--cpus-per-task=3",
        "--gpus-per-node=2",
        "--mem=4G",
    ]
    status, calls = execute(text, tmp_path)
    options = ["--mpi=pmix", "--kill-on-bad-exit=1", "--export=ALL", "--cpus-per-task=3"]
    run = ["python", "-m", "mpi4py", "-m", "hpcsync", "run", str(job), "--set", "seed=2", "-n", "4"]
    assert (status, calls) == (0, [["srun", "3", *options, *run, "--out", "runs/small-7", "--resume"]])
    assert execute(text, tmp_path, STATUS="3")[0] == 3


def test_only_requested_options_are_written(job: Path) -> None:
    text = script(job, [], TWO_BY_TWO, "")
    assert [line for line in directives(text) if "None" in line] == []
    assert len(directives(text)) == 6


def test_two_kinds_of_nodes_are_one_job_and_one_srun(job: Path, tmp_path: Path) -> None:
    asked = BatchRequest([1, 2], [2, 1], [1, 4], partition=["old", "new"], mpi="pmi2", time="10")
    text = script(job, [], asked, "")
    first, second = " ".join(directives(text)).split(" hetjob ")
    assert first.endswith("--time=10 --partition=old --nodes=1 --ntasks-per-node=2 --cpus-per-task=1")
    assert second == "--partition=new --nodes=2 --ntasks-per-node=1 --cpus-per-task=4"
    groups = {"NTASKS_HET_GROUP_0": 2, "NTASKS_HET_GROUP_1": 2, "CPUS_PER_TASK_HET_GROUP_0": 1}
    groups["CPUS_PER_TASK_HET_GROUP_1"] = 4
    _, calls = execute(text, tmp_path, **{f"SLURM_{name}": str(value) for name, value in groups.items()})
    (call,) = calls
    components = " ".join(call[2:]).split(" : ")
    run = f"python -m mpi4py -m hpcsync run {job} -n 4 --out runs/small-7 --resume"
    for i, (component, threads) in enumerate(zip(components, (1, 4), strict=True)):
        group = f"--het-group={i} --cpus-per-task={threads} --export=ALL,OMP_NUM_THREADS={threads} {run}"
        assert component.removeprefix("--mpi=pmi2 --kill-on-bad-exit=1 ") == group


def test_an_option_given_once_holds_for_all_kinds(job: Path) -> None:
    text = script(job, [], BatchRequest([1], [1], [2], partition=["old", "new"], mpi="pmix"), "")
    assert text.count("#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=1\n#SBATCH --cpus-per-task=2") == 2


def test_an_array_runs_every_combination_once(job: Path, tmp_path: Path) -> None:
    array = ['paradigm=[{name = "bsp"}, {name = "dssp", staleness_min = 1, staleness_max = 3}]', "seed=[1, 2, 3]"]
    text = script(job, [], TWO_BY_TWO._replace(array=array), "")
    assert "--array=0-5" in directives(text)
    found = []
    for i in range(6):
        ids = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": str(i)}
        _, ((*_, setting, paradigm, _, seed, _, n, out, folder, resume),) = execute(text, tmp_path, **ids)
        assert (setting, n, out, folder, resume) == ("--set", "4", "--out", f"runs/small-6/{i}", "--resume")
        found.append((paradigm, seed))
    dssp = 'paradigm={name = "dssp", staleness_min = 1, staleness_max = 3}'
    assert found == [(p, f"seed={i}") for p in ('paradigm={name = "bsp"}', dssp) for i in (1, 2, 3)]


def test_a_preemptible_job_is_requeued(job: Path, tmp_path: Path) -> None:
    text = script(job, [], TWO_BY_TWO._replace(preemptible=True), "")
    assert {"--requeue", "--open-mode=append", "--signal=TERM@120"} <= set(directives(text))
    for status in (0, 1, 2, 14, 75, 137):
        for restarts in (None, "0", "9", "10"):
            given = {} if restarts is None else {"SLURM_RESTART_COUNT": restarts}
            ended, calls = execute(text, tmp_path, STATUS=str(status), **given)
            assert calls[0][-1] == "--resume"
            again = status == 75 or (status > 2 and restarts != "10")
            assert calls[1:] == ([["scontrol", "3", "requeue", "7"]] if again else [])
            assert ended == status


def test_a_preemptible_array_requeues_the_task_alone(job: Path, tmp_path: Path) -> None:
    """Of the last task SLURM_JOB_ID is the number of the array, which names all tasks."""
    text = script(job, [], TWO_BY_TWO._replace(preemptible=True, array=["seed=[1, 2]"]), "")
    task = {"SLURM_JOB_ID": "5", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1", "STATUS": "75"}
    assert execute(text, tmp_path, **task)[1][1:] == [["scontrol", "3", "requeue", "5_1"]]


@pytest.mark.parametrize("step", [{"PMIX_RANK": "0"}, {"PMI_SIZE": "4", "PMI_RANK": "0", "PMI_JOBID": "6.0"}, {}])
def test_a_run_that_starts_its_ranks_is_none_of_a_step_from_which_the_job_was_submitted(
    job: Path, tmp_path: Path, step: dict[str, str]
) -> None:
    seen_by = f"json.dump(dict(os.environ), open({str(tmp_path / 'seen')!r}, 'w'))"
    (tmp_path / "python").write_text(f"#!{sys.executable}\nimport json, os\n{seen_by}\n")
    (tmp_path / "python").chmod(0o755)
    given = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "3", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "small", **step}
    environ = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", **given}
    assert rank_environment.under_launcher(environ), "the control"
    text = script(job, ['cluster.on_death="restart"'], TWO_BY_TWO, "")
    subprocess.run(["bash", "-c", text], env=environ, check=True)
    seen = json.loads((tmp_path / "seen").read_text())
    assert not rank_environment.under_launcher(seen)
    assert seen["MPIEXEC"] == "srun --mpi=pmix --kill-on-bad-exit=1 --export=ALL --cpus-per-task=3"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": [0]}, "--nodes 0: must be at least 1"),
        ({"nodes": [1], "ntasks_per_node": [1]}, "-n 1: must be at least 2: cluster.servers = 1 and a worker"),
        ({"cpus_per_task": [0]}, "--cpus-per-task 0: must be at least 1"),
        ({"gpus_per_node": [-1]}, "--gpus-per-node -1: must be at least 0"),
        ({"partition": ["a b"]}, "--partition a b: must be a name of letters, digits and _ . , @ + -"),
        ({"time": "soon"}, "--time soon: must be minutes, hours:minutes:seconds or days-hours:minutes"),
        (
            {"time": "99:99:99"},
            "--time 99:99:99: must be minutes, hours:minutes:seconds or days-hours:minutes, with up",
        ),
        ({"time": "1-24"}, "--time 1-24: must be minutes, hours:minutes:seconds or days-hours:minutes, with up to 59"),
        ({"mem": ["4 GB"]}, "--mem 4 GB: must be a whole number of megabytes per node, or one with K, M, G or T, "),
        ({"mpi": "pmix;ls"}, "--mpi pmix;ls: must be pmix, pmi2 or another kind that srun --mpi=list names"),
        (
            {"nodes": [1, 2], "ntasks_per_node": [1, 2, 3]},
            "--nodes: given 2 times; must be given once, or once per kind of node, 3 times",
        ),
        ({"array": ["seed=1"]}, "--array seed=1: must be KEY=[VALUE, ...], such as seed=[1, 2, 3]"),
        ({"array": ["seed=[]"]}, "--array seed=[]: must be KEY=[VALUE, ...], such as seed=[1, 2, 3]"),
        ({"array": ["seed=[1, 2, 1]"]}, "--array seed=[1, 2, 1]: must be different values; 1 is given twice"),
        (
            {"array": ["optimizer.lr=[1, 1.0]"]},
            "--array optimizer.lr=[1, 1.0]: must be different values; 1.0 is given twice",
        ),
        ({"array": ["seed=[1, -1]"]}, "seed = -1: must be at least 0"),
        (
            {"array": ['paradigm=["bsp", {name = "bsp"}]']},
            '--array: paradigm="bsp" and paradigm={name = "bsp"} must differ: they are the same job',
        ),
        ({"array": ["seed=[1]"], "nodes": [1, 2]}, "--array seed=[1]: must be left out with 2 kinds of node"),
    ],
)
def test_user_errors_are_one_line(job: Path, given: dict, message: str) -> None:
    assert refusal(script, job, [], TWO_BY_TWO._replace(**given), "").startswith(message)


@pytest.mark.parametrize("time", ["0", "90", "90:59", "100:59:59", "7-0", "7-23", "7-23:59:59"])
def test_the_forms_of_a_time_limit(job: Path, time: str) -> None:
    assert f"--time={time}" in directives(script(job, [], TWO_BY_TWO._replace(time=time), ""))


@pytest.mark.parametrize("time", ["1", "3", "2:59", "3:00", "0:03:00", "0-0:03"])
def test_a_preemptible_job_that_would_be_requeued_as_soon_as_it_starts_is_refused(job: Path, time: str) -> None:
    with pytest.raises(JobError, match=f"^--time {time}: must be more than 3 minutes with --preemptible, "):
        script(job, [], TWO_BY_TWO._replace(time=time, preemptible=True), "")
    assert f"--time={time}" in directives(script(job, [], TWO_BY_TWO._replace(time=time), ""))


@pytest.mark.parametrize("time", ["0", "4", "3:01", "0:03:01", "1:00:00", "0-1", "1-0", "0-0:04", "1-0:00:01"])
def test_a_preemptible_job_with_more_time(job: Path, time: str) -> None:
    assert f"--time={time}" in directives(script(job, [], TWO_BY_TWO._replace(time=time, preemptible=True), ""))


def test_a_list_of_one_for_each_worker_must_fit(job: Path) -> None:
    job.write_text(JOB + "[cluster]\nworkers = 2\ncompute = {model = 'constant', seconds = [0.1, 0.2]}\n")
    with pytest.raises(JobError, match="cluster.compute.seconds = .*: must be one number, or a list of .*workers = 3"):
        script(job, [], TWO_BY_TWO, "")


def test_srun_gets_the_kind_of_mpi_of_this_python(job: Path) -> None:
    text = script(job, [], TWO_BY_TWO._replace(mpi=None), "")
    library = subprocess.run(
        [sys.executable, "-m", "mpi4py", "--mpi-lib-version"], capture_output=True, text=True
    ).stdout
    assert f"srun --mpi={'pmix' if 'Open MPI' in library else 'pmi2'} " in text


@pytest.mark.parametrize(
    ("library", "kind"),
    [
        ("Open MPI v5.0.11, package: ...", "pmix"),
        ("MPICH Version:      5.0.2", "pmi2"),
        ("MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)", "cray_shasta"),
    ],
)
def test_each_library_has_its_kind(job: Path, monkeypatch: pytest.MonkeyPatch, library: str, kind: str) -> None:
    monkeypatch.setattr(launcher, "mpi_library", lambda: library)
    assert f"srun --mpi={kind} " in script(job, [], TWO_BY_TWO._replace(mpi=None), "")


# ---- the scripts of slurm/ ----

REPOSITORY = Path(__file__).parents[3]
TEMPLATES = sorted((REPOSITORY / "slurm").glob("*.sh"))


def written(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_is_the_output_of_its_command(
    template: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = template.read_text()
    command = text.splitlines()[1].removeprefix("# ")
    assert written(command, monkeypatch, capsys) == text
    other = command.replace("--time 1", "--time 2").replace("--time 8", "--time 2")
    assert written(other, monkeypatch, capsys) != text, "the control"


def test_list_of_templates() -> None:
    assert {path.stem for path in TEMPLATES} == {"array", "cpu", "gpu", "hetjob", "preemptible", "restart"}


@pytest.mark.parametrize("text", ["a\ntouch x\n.toml", "a\x1b[2J.toml", "a\r.toml"])
def test_control_characters_are_refused(text: str) -> None:
    asked = BatchRequest([1], [4], [1])
    for path, overrides, command in ((text, [], "x"), ("job.toml", [f"name={text}"], "x"), ("job.toml", [], text)):
        with pytest.raises(JobError, match="must not have control characters") as caught:
            script(Path(path), overrides, asked, command)
        assert len(str(caught.value).splitlines()) == 1


# ---- shellcheck ----


def complaints(text: str) -> str:
    """Return what shellcheck says of a script, except that single quotes keep a name as it is."""
    line = ["shellcheck", "--shell=bash", "--exclude=SC2016", "-"]
    ended = subprocess.run(line, input=text, capture_output=True, text=True)
    return ended.stdout + ended.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    """Of the templates, and of scripts whose paths and values hold what a shell would run."""
    assert {path.stem: complaints(path.read_text()) for path in TEMPLATES} == dict.fromkeys(
        (path.stem for path in TEMPLATES), ""
    )
    hostile = tmp_path / "$(touch x) `touch y` ; 'a' \"b\" & * $HOME.toml"
    hostile.write_text(JOB)
    for asked in (TWO_BY_TWO, TWO_BY_TWO._replace(preemptible=True, array=["seed=[1, 2]"])):
        text = script(hostile, ["optimizer.lr=0.5"], asked, f"hpcsync slurm {shlex.quote(str(hostile))}")
        assert complaints(text) == ""
        _, calls = execute(text, tmp_path, SLURM_ARRAY_TASK_ID="0", SLURM_ARRAY_JOB_ID="7")
        assert str(hostile) in calls[0]
        assert {path.name for path in tmp_path.iterdir()} <= {hostile.name, "srun", "scontrol", "calls"}
    assert "SC2086" in complaints("#!/bin/bash\nrm $1\n"), "the control"
