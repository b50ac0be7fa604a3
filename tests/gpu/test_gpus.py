"""What only a GPU can show: whose memory it is, when a stream is waited for, which windows are chosen."""

from __future__ import annotations

import threading

import pytest
import torch

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.mpi.transport import cuda, window_selection
from hpcsync.mpi.transport.node_memory import HostMemory
from hpcsync.mpi.transport.tensor_window import NodeWindow
from hpcsync.mpi.transport.window_trials import fastest
from hpcsync.trace.reader import load
from tests.gpu.device import DEVICE
from tests.mpi.training import failures, on_some
from tests.mpi.transport.test_window_selection import job

place = window_selection.place
LONG = 200_000_000  # clock cycles that the GPU is kept busy for


def test_torch_sees_the_memory_that_cupy_allocates(comm):
    import cupy

    before = torch.cuda.memory_allocated(DEVICE)
    tensor = cuda.allocate(1000, torch.float32, DEVICE)
    assert torch.cuda.memory_allocated(DEVICE) == before, "not from torch's pool"
    array = cupy.from_dlpack(tensor)
    assert array.data.ptr == tensor.data_ptr()
    assert (tensor == 0).all()
    cupy.cuda.runtime.memset(array.data.ptr, 255, array.nbytes)
    cupy.cuda.runtime.deviceSynchronize()
    assert tensor.isnan().all()


@pytest.mark.parametrize("waiting", [True, False])
def test_what_is_released_is_complete(comm, waiting, monkeypatch):
    """The control: without waiting for the stream, the image still has what it had."""
    local = torch.zeros(1000, device=DEVICE)
    window = NodeWindow(comm, HostMemory(comm, 1000, torch.float32, page_lock=True), local)
    window.release(0, 1000)
    if not waiting:
        monkeypatch.setattr(cuda, "ready", lambda tensor: None)
    torch.cuda._sleep(LONG)
    window.local.fill_(7)
    window.release(0, 1000)
    seen = window._image.clone()
    torch.cuda.synchronize()
    assert (seen == (7 if waiting else 0)).all()
    comm.Barrier()
    window.free()


@pytest.mark.parametrize("waiting", [True, False])
def test_another_thread_goes_on_after_what_was_begun_here(waiting, monkeypatch):
    """As buckets of a gradient do. The control: without the event they are seen before they are computed."""
    if not waiting:
        monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: None)
    gradient, seen = torch.zeros(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    gradient.fill_(7)
    call = cuda.after_this(lambda: seen.copy_(gradient), DEVICE, cuda.new_stream(DEVICE))
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert (seen == (7 if waiting else 0)).all()


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize(
    "paradigm",
    [
        {"name": "dssp", "staleness_min": 1, "staleness_max": 4},
        {"name": "gossip", "mode": "pull"},
        {"name": "allreduce"},
    ],
    ids=lambda paradigm: paradigm["name"],
)
def test_digits_are_learned_by_ranks_that_share_a_gpu(comm, needs, folder, paradigm, device):
    servers = int(paradigm["name"] == "dssp")
    needs(servers + 1)
    workers = comm.size - servers
    table = {
        "name": "gpu",
        "seed": 1,
        "workload": {"name": "digits", "batch_size": 32},
        "optimizer": {"name": "sgd", "lr": 0.02, "momentum": 0.9},
        "stop": {"samples": 40_000},
        "evaluation": {"every_samples": 10_000},
        "paradigm": paradigm,
        "cluster": {"servers": servers, "workers": workers, "device": device},
    }
    on_some(comm, Job.from_table(table), folder)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert (trace.status, trace.attributes["device"]) == ("finished", "cuda")
        assert trace.tables["evaluations"]["accuracy"][-1] > 0.9
        assert failures(folder / "trace.h5") == []


@pytest.mark.parametrize("optimizer", [{"name": "sgd", "momentum": 0.9}, {"name": "adam"}], ids=["sgd", "adam"])
def test_shards_of_a_large_model_have_the_same_bits(comm, needs, folder, optimizer):
    """Larger than what one block of torch's fused kernels takes, and cut where no block ends."""
    needs(3)
    table = {
        "name": "shards",
        "workload": {"name": "linear", "batch_size": 8, "features": 200_003, "samples": 64},
        "optimizer": {"lr": 1e-4, **optimizer},
        "stop": {"updates": 10},
        "evaluation": {"every_samples": 0},
        "paradigm": {"name": "bsp"},
    }
    weights = [
        on_some(comm, Job.from_table({**table, "cluster": {"servers": servers, "workers": 1}}), folder / str(servers))
        for servers in (1, 2)
    ]
    assert comm.rank or (weights[0] == weights[1]).all()


# ---- which windows ----


def test_the_fastest_window_that_serves_is_chosen_and_said(comm, trials):
    found = place(comm, job("auto"), DEVICE)
    assert trials[found.transport.kind].took_s is not None
    assert sum("rank" in line for line in found.used) == len(found.used) > 0
    assert found.why.startswith(found.transport.kind) and all(kind in found.why for kind in trials)
    assert len(set(comm.allgather((found.transport.kind, found.why, found.used)))) == 1


def test_a_window_that_is_asked_for_is_used_or_refused(comm, trials):
    for kind, trial in trials.items():
        if trial.took_s is None:
            with pytest.raises(JobError, match=f'cluster.window = "{kind}": must be another here: {kind}: '):
                place(comm, job(kind), DEVICE)
        else:
            assert place(comm, job(kind), DEVICE).transport.kind == kind


def test_there_is_a_window_for_this_machine(trials):
    assert fastest(list(trials.values())) is not None, trials
