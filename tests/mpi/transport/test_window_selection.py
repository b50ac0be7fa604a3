"""Selection of the window of a run on GPUs, and its refusal, with simulated answers of CUDA and the child job."""

from __future__ import annotations

import pytest
import torch

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.mpi.transport import backoff, window_selection
from hpcsync.mpi.transport.tensor_window import Transport
from hpcsync.mpi.transport.window_selection import WindowSelection, place
from hpcsync.mpi.transport.window_test import WindowTest
from hpcsync.mpi.transport.window_trials import WindowTrial
from hpcsync.system import gpu_selection
from hpcsync.system.gpu_selection import Found, Gpu

GPU = torch.device("cuda", 0)


def job(window: str = "auto") -> Job:
    table = {
        "name": "x",
        "workload": {"name": "linear"},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "stop": {"updates": 1},
        "paradigm": {"name": "bsp"},
        "cluster": {"workers": 1, "device": "cuda", "window": window},
    }
    return Job.from_table(table)


class Machine:
    """Results of a child job for each kind, and of the run's own ranks (None if the kind works)."""

    def __init__(self) -> None:
        self.took_s = {"staged": 0.004, "ipc": 0.001, "mpi": None}
        self.failures: dict[str, str] = {}
        self.tried: list[str] = []  # by this rank: in a child job, then here
        self.found = Found(2, "")
        self.note = ""

    def rehearse(self, kinds):
        self.tried += [f"child {kind}" for kind in kinds]
        times = {kind: took_s for kind, took_s in self.took_s.items() if kind in kinds}
        return [WindowTrial(kind, took_s, "" if took_s else "ended with status 139") for kind, took_s in times.items()]

    def attempt(self, comm, transport, count):
        self.tried.append(transport.kind)
        if failure := self.failures.get(transport.kind):
            return WindowTest(failure=failure)
        return WindowTest(0.1, note=self.note)


@pytest.fixture
def machine(comm, monkeypatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(window_selection, "rehearse", machine.rehearse)
    monkeypatch.setattr(window_selection, "attempt", machine.attempt)
    monkeypatch.setattr(gpu_selection, "found", lambda: machine.found)
    monkeypatch.setattr(gpu_selection, "describe", lambda device: Gpu("H200", "0000:01"))
    monkeypatch.setattr(gpu_selection, "versions", lambda: {"cupy_version": "14"})
    return machine


def child(comm, *kinds: str) -> list[str]:
    """Only rank 0 starts child jobs."""
    return [f"child {kind}" for kind in kinds] * (comm.rank == 0)


def refusal(comm, this: Job) -> str:
    with pytest.raises(JobError) as caught:
        place(comm, this, GPU)
    assert comm.allgather(str(caught.value)) == [str(caught.value)] * comm.size, "the same on all ranks"
    return str(caught.value)


def test_the_fastest_working_kind_is_selected_and_reported(comm, machine):
    found = place(comm, job(), GPU)
    assert (found.transport.kind, found.transport.device) == ("ipc", GPU)
    why = "ipc: 8 MB there and back in 1.00 ms; staged: 8 MB there and back in 4.00 ms; mpi: ended with status 139"
    assert found.why == why
    assert machine.tried == [*child(comm, "staged", "ipc", "mpi"), "ipc"]
    ranks = f"ranks 0 to {comm.size - 1}, which share it" if comm.size > 2 else ""
    assert len(found.used) == 1 and found.used[0].startswith("GPU 0000:01 (H200) of host ") and ranks in found.used[0]
    assert found.lines() == [*found.used, f"window: ipc ({why})"]
    assert found.attributes() == {
        "device": "cuda", "window": "ipc", "window_reason": why, "gpus": found.used[0], "cupy_version": "14"
    }  # fmt: skip


def test_a_kind_that_fails_among_the_ranks_of_the_run_is_not_selected(comm, machine):
    machine.failures = {"ipc": "rank 1 cannot open rank 0's memory"}
    found = place(comm, job(), GPU)
    assert found.transport.kind == "staged" and "ipc: rank 1 cannot open rank 0's memory" in found.why
    assert machine.tried == [*child(comm, "staged", "ipc", "mpi"), "ipc", "staged"]


def test_notes_of_the_runs_own_ranks_are_reported(comm, machine):
    machine.note = "pages not locked"
    assert place(comm, job("staged"), GPU).why == "staged: 8 MB there and back in 4.00 ms (pages not locked)"


def test_without_a_working_window_the_cpu_must_be_used(comm, machine):
    machine.took_s = dict.fromkeys(machine.took_s)
    assert refusal(comm, job()).startswith(
        'cluster.device = "cuda": must be "cpu" here, no kind of window works: staged: '
    )


@pytest.mark.parametrize("window", ["ipc", "staged"])
def test_a_requested_kind_is_selected_and_no_other_tried(comm, machine, window):
    assert place(comm, job(window), GPU).transport.kind == window
    assert machine.tried == [*child(comm, window), window]


def test_a_requested_kind_that_does_not_work_is_refused(comm, machine):
    assert refusal(comm, job("mpi")) == 'cluster.window = "mpi": must be another here: mpi: ended with status 139'
    machine.failures = {"staged": "rank 2 cannot lock pages"}
    assert (
        refusal(comm, job("staged"))
        == 'cluster.window = "staged": must be another here: staged: rank 2 cannot lock pages'
    )


def test_between_nodes_only_kinds_that_a_trial_on_one_node_can_verify_are_tried(comm, machine, monkeypatch):
    monkeypatch.setattr(backoff, "on_one_node", lambda comm: False)
    assert place(comm, job(), GPU).transport.kind == "staged"
    assert machine.tried == [*child(comm, "staged"), "staged"]
    assert "the ranks are on several nodes" in refusal(comm, job("ipc"))
    machine.took_s["mpi"] = 0.0001
    assert place(comm, job("mpi"), GPU).transport.kind == "mpi", "but it may be asked for"


def test_a_rank_without_a_gpu_is_named(comm, machine, needs):
    needs(2)
    if comm.rank == comm.size - 1:
        machine.found = Found(0, "torch sees no GPU")
    assert refusal(comm, job()).startswith(f"model: must be on the CPU: rank {comm.size - 1} on ")


def test_trial_and_confirmation_with_host_memory_in_the_place_of_gpus(comm, needs, monkeypatch):
    """Test the whole path with a real child job; on two ranks only, to save time."""
    needs(2)
    if comm.size > 2:
        pytest.skip("on two ranks")
    monkeypatch.setattr(gpu_selection, "found", lambda: Found(1, ""))
    monkeypatch.setattr(gpu_selection, "describe", lambda device: Gpu("none", "0000:01"))
    monkeypatch.setattr(window_selection, "Transport", lambda kind, device: Transport(kind))
    found = place(comm, job(), GPU)
    assert found.why.count("8 MB there and back in") == 3 and found.why.startswith(f"{found.transport.kind}: ")
    assert place(comm, job("mpi"), GPU).transport.kind == "mpi"


def test_on_the_cpu_there_is_nothing_to_choose_or_report(comm, machine):
    found = place(comm, job(), torch.device("cpu"))
    assert (found, found.lines(), machine.tried) == (WindowSelection(), [], [])
