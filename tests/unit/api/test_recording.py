"""The trace that `hpcsync.record` writes: rows in closed form from the durations of two processes."""

import math
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpcsync.api import recording
from hpcsync.api.recording import Measured, Recorder, Step, _job, record, write
from hpcsync.audit.trace_audit import audit
from hpcsync.config.errors import JobError
from hpcsync.report.waiting import waits
from hpcsync.simulator.measured_cluster import network
from hpcsync.simulator.measured_time import updates_s
from hpcsync.simulator.what_if import study
from hpcsync.system.atomic_files import NotWritten
from hpcsync.trace.reader import load
from tests.unit.simulator.running import simulate, timing_job

N = 20
# Worker 1 computes for twice as long; the sum takes 0.1 s after it is ready.
FAST = [Step(0.1, 0.4, 0.6, 5.0 + 1.1 * i, 8, 4000, 0.5) for i in range(N)]
SLOW = [Step(0.0, 1.0, 0.1, 9.0 + 1.1 * i, 8, 4000, 0.5) for i in range(N)]  # another clock


def measured(steps, host="a", numbers_s=0.0, copy_s=0.05):
    return Measured(host, np.array(steps), np.full(3, numbers_s), copy_s)


def written(tmp_path, *each):
    job = _job("loop", "sgd", 0.5, len(each))
    return load(write(job, [one if isinstance(one, Measured) else measured(one) for one in each], tmp_path / "run"))


def test_waiting_is_what_exceeds_the_shortest_sum(tmp_path):
    trace = written(tmp_path, FAST, SLOW)
    rows = trace.tables["exchanges"]
    for worker, times in ((0, (0.1, 0.4, 0.5, 0.1)), (1, (0.0, 1.0, 0.0, 0.1))):
        own = rows[rows["worker"] == worker]
        assert len(own) == N
        for name, seconds in zip(("load_s", "compute_s", "wait_s", "comm_s"), times, strict=True):
            np.testing.assert_allclose(own[name][1:], seconds, atol=1e-12)
        assert own["wait_s"][0] == 0  # of the start
    np.testing.assert_allclose(trace.tables["updates"]["now_s"], 1.1 * np.arange(1, N + 1))
    assert trace.tables["updates"]["samples"][-1] == 2 * 8 * N
    np.testing.assert_allclose(waits(trace).between_s.toarray(), [[0, 0.5 * (N - 1)], [0, 0]], atol=1e-9)


def test_the_trace_passes_its_audit(tmp_path):
    trace = written(tmp_path, FAST, SLOW)
    assert [check.name for check in audit(trace) if not check.passed] == []
    assert trace.attributes["engine"] == "ddp"
    assert (tmp_path / "run" / "summary.json").exists()


def test_the_what_if_of_a_recorded_loop(tmp_path):
    found = study(written(tmp_path, FAST, SLOW), [{"name": "asp"}])
    assert found.replayed_s == pytest.approx(1.1 * N)
    assert found.of_worker(1) == pytest.approx(1.1 / 0.85, rel=0.01)  # the median of 0.5 and 1 s is 0.75 s
    (asp_s,) = found.others_s.values()  # every 0.6 and 1.1 s a batch
    assert asp_s == pytest.approx(2 * N / (1 / 0.6 + 1 / 1.1), rel=0.03)


def test_a_process_that_hears_of_a_sum_late_has_less_time_for_the_next_step(tmp_path):
    """The run takes no longer for it: both processes' own clocks say 1.1 s a step."""
    late_s = np.where(np.arange(N) % 4 == 1, 0.05, 0.0)
    jittered = [
        step._replace(compute_s=0.4 - before_s, sum_s=0.6 + own_s, end_s=step.end_s + own_s)
        for step, own_s, before_s in zip(FAST, late_s, [0.0, *late_s[:-1]], strict=True)
    ]
    trace = written(tmp_path, jittered, SLOW)
    assert trace.tables["updates"]["now_s"][-1] == pytest.approx(1.1 * N)
    assert [check.name for check in audit(trace) if not check.passed] == []
    assert study(trace).replayed_s == pytest.approx(1.1 * N)


def test_a_process_that_enters_the_block_late_keeps_only_its_own_time(tmp_path):
    trace = written(tmp_path, [FAST[0]._replace(sum_s=3.6), *FAST[1:]], [SLOW[0]._replace(load_s=3.0), *SLOW[1:]])
    first = [trace.tables["exchanges"][w]["begin_s"] for w in (0, 1)]
    assert first == pytest.approx([3.5, 0.0])
    assert waits(trace).between_s.toarray()[0, 1] == pytest.approx(0.5 * (N - 1))  # not the 3 s of the start
    found = study(trace, [{"name": "asp"}])
    (asp_s,) = found.others_s.values()  # worker 0 does not wait in its first step
    assert asp_s == pytest.approx(2 * N / (1 / 0.6 + 1 / 1.1) + 3.0 * 0.6 / 1.7, rel=0.06)


def test_on_one_host_a_gradient_is_copied_and_a_cycle_has_six_messages(tmp_path):
    """The workers' copies do not slow each other."""
    each = [measured(own, numbers_s=0.02, copy_s=0.05) for own in (FAST, SLOW)]
    found = study(written(tmp_path, *each), [{"name": "bsp"}])
    assert found.replayed_s == pytest.approx(1.1 * N)
    (bsp_s,) = found.others_s.values()  # 2 messages of a ring of two processes take 0.02 s
    assert bsp_s == pytest.approx(N * (1.0 + 2 * 0.05 + 6 * 0.01), rel=0.05)


def test_between_hosts_the_workers_share_the_link_of_a_server(tmp_path):
    """Of the all-reduce's 0.1 s, 0.02 s are its two messages; the rest are 2 (n - 1) / n = 1 times the bytes."""
    each = [measured(own, host, numbers_s=0.02) for own, host in ((FAST, "a"), (SLOW, "b"))]
    trace = written(tmp_path, *each)
    assert trace.attributes["message_s"] == pytest.approx(0.01)
    assert trace.attributes["gradient_s"] == pytest.approx(0.08)
    found = study(trace, [{"name": "bsp"}])
    (bsp_s,) = found.others_s.values()  # both read the weights at once; the slow worker pushes alone
    assert bsp_s == pytest.approx(N * (1.0 + 2 * 0.08 + 0.08 + 6 * 0.01), rel=0.05)


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_an_advice_simulates_servers_with_the_link_that_explain_takes(hosts, tmp_path):
    each = [measured(own, host, numbers_s=0.02) for own, host in zip((FAST, SLOW), hosts, strict=True)]
    trace = written(tmp_path, *each)
    (explained_s,) = study(trace, [{"name": "bsp"}]).others_s.values()

    def bsp_s(links):
        workload = {"name": "timing", "parameters": 1000}
        return N * updates_s(timing_job(workload=workload, seconds=[0.5, 1.0], cluster={"network": links}), N)

    assert bsp_s(network(trace)) == pytest.approx(explained_s, rel=0.01)
    of_sums = network(trace, with_servers=False)  # the control: by the all-reduces alone, alike in a ring of two hosts
    assert hosts == "ab" or abs(bsp_s(of_sums) / explained_s - 1) > 0.03
    assert (of_sums["bandwidth_gbit"], of_sums["latency_us"]) == ([pytest.approx(8e-9 * 4000 / 0.1)] * 2, 0.0)


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_busy_measurement_of_the_link_is_limited_by_the_longest_sum(hosts, tmp_path):
    """Twenty numbers and the copies took longer than any gradient of the loop: the recording is as honest."""
    each = [measured(own, host, 0.5, 0.4) for own, host in zip((FAST, SLOW, SLOW), [*hosts, "a"], strict=True)]
    trace = written(tmp_path, *each)
    longest_s = trace.tables["exchanges"]["comm_s"].max()
    assert trace.attributes["message_s"] == pytest.approx(longest_s / 4)
    assert trace.attributes["gradient_s"] == pytest.approx(longest_s if hosts == "aa" else 0.0)
    assert [check.name for check in audit(trace) if not check.passed] == []


@pytest.mark.parametrize(
    ("hosts", "name", "value"),
    [
        ("aa", "message_s", 0.06),
        ("aa", "gradient_s", 0.11),
        ("aa", "message_s", math.nan),
        ("aa", "gradient_s", -0.01),
        ("ab", "message_s", 0.02),
        ("ab", "gradient_s", 0.04),
    ],
)
def test_altered_times_of_the_link_fail_the_audit(hosts, name, value, tmp_path):
    trace = written(tmp_path, *(measured(own, host, 0.02) for own, host in zip((FAST, SLOW), hosts, strict=True)))
    assert [check.name for check in audit(trace) if not check.passed] == []
    trace.attributes[name] = value
    assert [check.name for check in audit(trace) if not check.passed] == [
        "times of the link fit to the sums of gradients"
    ]


def test_a_gradient_that_a_ring_does_not_divide_passes_the_audit(tmp_path):
    """4000 bytes of three processes; four messages take 0.02 s, the rest of 0.1 s is 4 / 3 of a gradient's time."""
    hosts = ((FAST, "a"), (FAST, "a"), (SLOW, "b"))
    trace = written(tmp_path, *(measured(own, host, numbers_s=0.02) for own, host in hosts))
    assert trace.attributes["gradient_s"] == pytest.approx(0.08 * 3 / 4, rel=1e-9)
    assert [check.name for check in audit(trace) if not check.passed] == []


def test_a_simulation_with_times_from_a_recording_uses_its_link(tmp_path):
    """A server on worker 0's node shares its link, and worker 0 moves no bytes; on one host no link is shared."""
    for hosts, slow_s in (("ab", {False: 3 * 0.08, True: 2 * 0.08}), ("aa", {False: 2 * 0.05, True: 2 * 0.05})):
        each = [measured(own, host, numbers_s=0.02) for own, host in zip((FAST, SLOW), hosts, strict=True)]
        folder = tmp_path / hosts
        written(folder, *each)
        for colocated, bytes_s in slow_s.items():
            cluster = {"times_from": str(folder / "run"), "colocated": colocated}
            workload = {"name": "timing", "batch_size": 8}
            job = timing_job(workers=2, stop={"updates": N}, workload=workload, cluster=cluster)
            trace = simulate(job, tmp_path / f"{hosts}-{colocated}.h5")
            assert trace.tables["updates"]["now_s"][-1] == pytest.approx(N * (1.0 + bytes_s + 6 * 0.01), rel=0.05)


def test_a_simulation_with_other_batches_scales_loading_and_computation(tmp_path):
    written(tmp_path, FAST, [step._replace(load_s=0.3, compute_s=0.7) for step in SLOW])
    for batch_size, seconds in ((8, 1.0 + 0.1), (16, 2.0 + 0.1)):
        workload, cluster = {"name": "timing", "batch_size": batch_size}, {"times_from": str(tmp_path / "run")}
        job = timing_job(stop={"updates": N}, workload=workload, cluster=cluster, paradigm={"name": "allreduce"})
        trace = simulate(job, tmp_path / f"{batch_size}.h5")
        assert trace.tables["updates"]["now_s"][-1] == pytest.approx(N * seconds)


def test_steps_that_not_all_made_are_left_out_and_counted(tmp_path, capsys):
    trace = written(tmp_path, FAST, SLOW[:-3])
    assert len(trace.tables["updates"]) == N - 3
    assert "3 steps that not all workers made are left out" in capsys.readouterr().err


def test_nothing_recorded_is_an_error(tmp_path):
    with pytest.raises(JobError, match="no step was made"):
        write(_job("loop", "sgd", math.nan, 1), [measured(np.zeros((0, 7)))], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_run_is_refused(tmp_path):
    written(tmp_path, FAST, SLOW)
    with pytest.raises(JobError, match="must not hold"):
        written(tmp_path, FAST, SLOW)


def test_a_loop_without_the_module_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with Recorder(tmp_path / "run", "loop"):
        pass
    assert capsys.readouterr().err == ""  # rank 0 says it
    monkeypatch.setenv("RANK", "0")
    with Recorder(tmp_path / "run", "loop") as recorder:
        assert list(recorder.loading([1, 2])) == [1, 2]
    assert "no DistributedDataParallel module was called" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# ---- a loop ----


@pytest.fixture
def module():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(torch.nn.Linear(4, 1))
    dist.destroy_process_group()


def train(module, n_steps):
    for _ in range(n_steps):
        module(torch.ones(8, 4)).sum().backward()


@pytest.mark.parametrize(("validates", "samples"), [(torch.no_grad, 8), (torch.enable_grad, 1008)])
def test_samples_of_a_validation_are_not_trained_on(validates, samples, module, tmp_path):
    """The control, with gradients enabled, counts them: a call for training looks the same."""
    with record(tmp_path / "run") as recorder:
        train(module, 2)
        with validates():
            module(torch.ones(1000, 4))
        train(module, 2)
    assert [step.samples for step in recorder.steps] == [8, 8, samples, 8]


class Starting:
    """A loader that takes a time to start, as one with processes does."""

    def __init__(self, clock):
        self.clock = clock

    def __iter__(self):
        self.clock[0] += 0.25
        return iter([1, 2])


def test_the_start_of_a_loader_is_loading(module, tmp_path, monkeypatch):
    clock = [10.0]
    monkeypatch.setattr(recording, "time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=lambda _: None))
    with record(tmp_path / "run") as recorder:
        train(module, 1)
        for _ in recorder.loading(Starting(clock)):
            train(module, 1)
        train(module, 1)
    assert [step.load_s for step in recorder.steps] == [0.0, 0.25, 0.0, 0.0]


def test_nothing_is_measured_after_the_block(module, tmp_path):
    with record(tmp_path / "run") as recorder:
        train(module, 2)
    gradient = module.module.weight.grad.clone()
    train(module, 3)
    assert len(recorder.steps) == 2
    assert torch.equal(module.module.weight.grad, gradient * 2.5)  # the module still sums gradients


def test_a_folder_with_a_run_and_a_wrong_name_are_refused_before_the_loop(tmp_path):
    written(tmp_path, FAST, SLOW)
    for out, name, message in ((tmp_path / "run", "run", "must not hold"), ("", "run", "empty"), (None, "a b", "name")):
        with pytest.raises(JobError, match=message), record(out, name=name):
            raise AssertionError("the loop has begun")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_refusal_is_one_line_of_rank_0(rank, module, tmp_path, monkeypatch, capsys):
    """Under torchrun, which srun may have started; torch has a hook of its own for errors that are not caught."""
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": str(rank), "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", lambda *raised: pytest.fail("a traceback"))
    written(tmp_path, FAST, SLOW)
    capsys.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with pytest.raises(JobError) as refused, record(tmp_path / "run"):
        pass
    with pytest.raises(SystemExit, match="2"):
        sys.excepthook(JobError, refused.value, None)
    line = f"hpcsync: out {tmp_path / 'run'}: must not hold a trace.h5 already: runs are never overwritten\n"
    assert capsys.readouterr().err == ("" if rank else line)


def test_a_hook_of_a_process_group_made_in_the_block_gives_way(module, tmp_path, monkeypatch):
    with record(tmp_path / "run"):
        monkeypatch.setattr(sys, "excepthook", torch_s := lambda *raised: None)
        train(module, 1)
        assert sys.excepthook is not torch_s


def test_a_full_disk_does_not_end_the_script(module, tmp_path, monkeypatch, capsys):
    def full(path, attributes):
        raise NotWritten(28, "No space left on device", "trace.h5")

    monkeypatch.setattr(recording, "TraceWriter", full)
    with record(tmp_path / "run"):
        train(module, 2)
    assert capsys.readouterr().err == "hpcsync: record: failed: trace.h5: No space left on device\n"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["job.toml"]  # it is not locked


@pytest.mark.parametrize("out", ["file", "file/run", None])
def test_a_folder_that_cannot_be_written_is_refused_before_the_loop(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    for name in ("file", "runs"):
        (tmp_path / name).touch()
    with pytest.raises(JobError, match=r"^out (file|file/run|runs/new): Not a directory$"), record(out, name="run"):
        raise AssertionError("the loop has begun")
    monkeypatch.setenv("RANK", "1")
    with record(out, name="run"):  # control: another process, whose host need not have the folder
        pass


def test_what_is_gathered_is_sent_from_the_gpu_of_the_module(monkeypatch):
    """A script need not have made it the current one, from which NCCL sends objects."""
    current, sent_from, module = ["another"], [], torch.nn.Linear(2, 1)

    @contextmanager
    def device_of(tensor):
        current.append("of the weight" if tensor is module.weight else "unknown")
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "new_group", lambda: "group")
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    monkeypatch.setattr(dist, "gather_object", lambda *sent, group: sent_from.append(current[-1]))
    monkeypatch.setattr(Recorder, "_measure", lambda *arguments: None)
    recorder = record(name="x")
    with recorder:
        recorder._module = module
    assert (sent_from, current) == (["of the weight"], ["another"])
