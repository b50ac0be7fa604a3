"""`hpcsync bench` apart from its measurements: arguments, and jobs that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcsync import bench
from hpcsync.bench import BenchError, Target, compression
from hpcsync.bench.figures import Figure
from hpcsync.config.errors import JobError
from hpcsync.mpi.transport.window_trials import WindowTrial
from hpcsync.system.gpu_selection import Found
from hpcsync.system.launcher import Ended, LaunchError
from hpcsync.system.namespaces import Unavailable


def test_no_target_means_all_targets():
    assert bench.parse([]) == [
        "transfers", "round-trip", "latency", "allreduce", "decisions", "tracing", "prediction",
        "compression", "events", "simulation",
    ]  # fmt: skip


def test_targets_between_hosts_are_measured_where_they_are_named():
    assert bench.parse(["hosts"]) == ["hosts"]


def test_without_hosts_the_line_says_why(monkeypatch, capsys):
    def refuse(n, rate):
        raise Unavailable("only root may make network namespaces")

    monkeypatch.setattr(bench, "Hosts", refuse)
    monkeypatch.setattr(bench.launcher, "on_one_node", lambda environ: True)
    assert bench.main(["hosts"]) == 1
    printed = capsys.readouterr().out
    assert "hosts, 1gbit: only root may make network namespaces" in printed


def test_an_allocation_of_several_nodes_is_measured_as_it_is(launched, monkeypatch):
    def refuse(n, rate):
        raise AssertionError("no namespaces")

    monkeypatch.setattr(bench, "Hosts", refuse)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    assert bench.main(["hosts"]) == 0


def test_on_a_gpu_all_targets_are_those_for_it():
    assert bench.parse([], "cuda") == ["transfers", "round-trip", "latency", "training", "compression"]


def test_a_target_of_the_cpu_is_refused_on_a_gpu():
    allowed = 'bench "tracing": must be one of transfers, round-trip, latency, training, compression with --device cuda'
    with pytest.raises(JobError, match=allowed):
        bench.parse(["transfers", "tracing"], "cuda")


def test_a_target_of_gpus_is_refused_on_the_cpu_and_names_no_other():
    with pytest.raises(JobError, match='bench "training": must be one of transfers, .*, simulation with --device cpu$'):
        bench.parse(["training"])


@pytest.mark.parametrize(("condition", "wanted"), [("True", 11), ("target.ranks", 5)])
def test_make_benchmarks_names_targets_of_the_cpu(condition, wanted):
    root = Path(__file__).parents[3]
    if not (root / ".venv/bin/python").exists():
        pytest.skip("the Makefile's environment is not here")
    named = ["make", "--no-print-directory", "--eval", f"named: ; @$(call targets,{condition})", "named"]
    names = subprocess.run(named, cwd=root, check=True, capture_output=True, text=True, timeout=120).stdout.split()
    assert bench.parse(names) == names
    assert len(names) == wanted


def test_an_unknown_device_is_refused():
    with pytest.raises(JobError, match='--device "gpu": must be cpu or cuda$'):
        bench.parse([], "gpu")


def test_targets_are_measured_once_and_in_order():
    assert bench.parse(["tracing", "latency", "tracing"]) == ["tracing", "latency"]


def test_an_unknown_target_is_refused_with_the_allowed_ones():
    message = r'"traced": must be one of transfers, .*, simulation with --device cpu; did you mean tracing\?$'
    with pytest.raises(JobError, match=message):
        bench.main(["latency", "traced"])


def test_one_target_ends_in_a_table_and_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "figures.json"
    assert bench.main(["tracing"], path) == 0
    printed = capsys.readouterr().out
    assert "cores" in printed and "numpy" in printed and "append a row to /pushes" in printed
    measured = json.loads(path.read_text())
    assert all(figure["ratio"] > 0 for figure in measured["targets"]["tracing"]["figures"])


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "measure", None)
    with pytest.raises(JobError, match="--json .*: Is a directory"):
        bench.main(["latency"], tmp_path)
    with pytest.raises(JobError, match="--json .*: No such file or directory"):
        bench.main(["tracing"], tmp_path / "missing" / "figures.json")


def test_a_failed_measurement_is_reported_and_does_not_stop_the_others(capsys, monkeypatch):
    def fail(target, device, kind):
        raise BenchError("status 7")

    monkeypatch.setattr(bench, "measure", fail)
    assert bench.main(["transfers", "tracing"]) == 1
    printed = capsys.readouterr().out
    assert "transfers: status 7" in printed and "tracing: status 7" in printed


# ---- on a GPU, as far as this can be tested without one ----


@pytest.fixture
def launched(monkeypatch):
    """Pretend a GPU with two working kinds of windows, one of which crashes `transfers`; yield the jobs in order."""
    jobs = []

    def launch(n, argv, *, timeout_s, output, given):
        module, path, *where = argv[argv.index("hpcsync.bench.rank") + 1 :]
        jobs.append((n, module, *where))
        if (module, where) == ("transfers", ["cuda", "staged"]):
            return Ended(139)
        figures = [{"what": module, "unit": "us", "values": [1.0]}]
        with open(path, "w") as file:
            json.dump({"library": "Some MPI", "figures": figures}, file)
        return Ended(0)

    monkeypatch.setattr(bench.gpu_selection, "found", lambda: Found(1, ""))
    monkeypatch.setattr(compression, "measure", lambda device: [Figure(f"codecs on {device}", "us", [1.0])])
    monkeypatch.setattr(bench, "machine", lambda device: f"a machine with {device}")
    monkeypatch.setattr(bench, "versions", lambda device: f"versions of {device}")
    monkeypatch.setattr(bench, "windows", lambda: (["staged", "ipc"], "staged: in 1 ms; ipc: in 2 ms; mpi: hangs"))
    monkeypatch.setattr(bench.launcher, "launch", launch)
    return jobs


def test_each_kind_of_window_has_its_own_job_and_a_crash_stops_no_other(launched, tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert bench.main([], path, "cuda") == 0
    assert launched == [
        (2, "transfers", "cuda", "staged"),
        (2, "transfers", "cuda", "ipc"),
        (2, "round_trip", "cuda", "staged"),
        (4, "latency", "cuda", "staged"),
        (3, "gpu_training", "cuda", "staged"),
    ]
    printed = capsys.readouterr().out
    assert "a machine with cuda" in printed and "mpi: hangs" in printed and "transfers, staged: status 139" in printed
    measured = json.loads(path.read_text())
    assert (measured["device"], measured["versions"]) == ("cuda", "versions of cuda")
    assert "mpi: hangs" in measured["windows"]
    assert measured["targets"]["transfers"]["failed"] == {"staged": "status 139\n"}
    whats = [figure["what"] for target in measured["targets"].values() for figure in target["figures"]]
    moved = ["ipc: transfers", "staged: round_trip", "staged: latency", "staged: gpu_training"]
    assert whats == [*moved, "codecs on cuda"]


def test_on_the_cpu_tensors_move_in_host_windows_and_nothing_is_tried(launched, monkeypatch):
    monkeypatch.setattr(bench, "windows", None)
    assert bench.main(["transfers", "allreduce"]) == 0
    assert launched == [(2, "transfers", "cpu", "host"), (4, "allreduce")]


def test_without_mpi_no_target_with_ranks_is_measured(launched, monkeypatch):
    def refuse():
        raise LaunchError("mpi4py: not installed")

    monkeypatch.setattr(bench.launcher, "refuse_without_mpi", refuse)
    with pytest.raises(LaunchError, match="^mpi4py: not installed$"):
        bench.main(["decisions", "transfers"])
    assert launched == []


def test_without_a_gpu_nothing_is_measured(launched, monkeypatch, tmp_path):
    monkeypatch.setattr(bench.gpu_selection, "found", lambda: Found(0, "torch sees no GPU"))
    with pytest.raises(JobError, match="^--device cuda: torch sees no GPU$"):
        bench.main([], tmp_path / "figures.json", "cuda")
    assert launched == [] and not list(tmp_path.iterdir())


def test_windows_are_ordered_by_speed_and_failed_ones_left_out(monkeypatch):
    trials = [WindowTrial("staged", 0.003), WindowTrial("ipc", 0.002), WindowTrial("mpi", failure="crashes")]
    monkeypatch.setattr(bench, "rehearse", lambda: trials)
    kinds, why = bench.windows()
    assert kinds == ["ipc", "staged"]
    assert why.startswith("ipc: 8 MB") and "mpi: crashes" in why
    monkeypatch.setattr(bench, "rehearse", lambda: trials[2:])
    with pytest.raises(JobError, match="--device cuda: no kind of window works: mpi: crashes"):
        bench.windows()


CLAIMED = """
import sys
from hpcsync.system import gpu_selection as gpus
from hpcsync.bench import rank

def claim(device):
    sys.exit(f"claimed {device}, MPI loaded: {'mpi4py.MPI' in sys.modules}")

gpus.claim = claim
rank.main("transfers", "nowhere", "cuda", "ipc")
"""


def test_a_rank_claims_its_gpu_before_mpi_is_loaded():
    result = subprocess.run([sys.executable, "-c", CLAIMED], check=False, capture_output=True, text=True)
    assert result.stderr.strip() == "claimed cuda, MPI loaded: False"


# ---- results of jobs ----


@pytest.mark.parametrize("status", [0, 3])
def test_a_job_without_figures_is_a_failure_whatever_its_status(status, monkeypatch):
    def launch(n, argv, *, timeout_s, output, given):
        output.write(b"last words")
        return Ended(status)

    monkeypatch.setattr(bench.launcher, "launch", launch)
    with pytest.raises(BenchError, match="last words"):
        bench.measure(Target("transfers", "", ranks=2))


def test_a_job_without_end_is_a_failure(monkeypatch):
    monkeypatch.setattr(bench.launcher, "launch", lambda *a, **k: Ended(124, timed_out=True))
    with pytest.raises(BenchError, match="not finished after 7 s"):
        bench.measure(Target("transfers", "", 2, 7.0))


def test_an_interrupted_job_ends_the_benchmark(monkeypatch):
    monkeypatch.setattr(bench.launcher, "launch", lambda *a, **k: Ended(130, signum=2))
    with pytest.raises(KeyboardInterrupt):
        bench.main(["transfers", "tracing"])


def test_importing_it_loads_no_mpi():
    code = "import sys, hpcsync.bench; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_results_are_compared_with_earlier_ones(tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert bench.main(["tracing"], path) == 0
    earlier = bench.read(path)
    assert [figure.what for figure in earlier.figures["tracing"]]
    assert bench.main(["tracing"], compared=path) == 0
    out = capsys.readouterr().out
    assert f"compared with {path}: hpcsync {earlier.hpcsync}" in " ".join(out.split())
    assert "to earlier" in out


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "No such file or directory"),
        ("{", "must be a file that hpcsync bench --json has written"),
        ('{"targets": []}', "must be a file that hpcsync bench --json has written"),
        ('{"targets": {"tracing": {"figures": [{}]}}}', "must be a file that hpcsync bench --json has written"),
    ],
)
def test_a_file_without_results_is_refused_before_anything_is_measured(tmp_path, content, line):
    path = tmp_path / "earlier.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(JobError, match=f"^--compare .*: {line}$"):
        bench.main(["tracing"], compared=path)
