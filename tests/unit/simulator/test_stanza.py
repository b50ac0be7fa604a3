"""Separated layers in virtual time: the numbers of one process, those of ranks to the bit, closed forms, and ends."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpcsync.job import Job
from hpcsync.job_errors import JobError
from hpcsync.learning.data import batch_indices, batches
from hpcsync.learning.replica import worker_seed
from hpcsync.learning.workloads import Workload, build, half_squared_error
from hpcsync.planning import node_assignment
from hpcsync.planning.halves import SEPARATED
from hpcsync.simulator.collectives import ring_allreduce_s
from hpcsync.simulator.links import build as build_workers
from hpcsync.simulator.run import prepare
from hpcsync.simulator.separated_arithmetic import TwoHalves, _Half
from hpcsync.traces.schema import EVERYBODY, TABLES
from tests.unit.jobs import make_job
from tests.unit.simulator.running import simulate
from tests.unit.simulator.test_peers import Recorder

LR = 0.1
NESTEROV = {"name": "sgd", "lr": LR, "momentum": 0.9, "nesterov": True}
GBIT, LATENCY_S = 125e6, 1e-3
NETWORK = {"bandwidth_gbit": 1.0, "latency_us": 1e6 * LATENCY_S}
TIMING = {"name": "timing", "batch_size": 8, "parameters": 3_000_000, "classifier": 1_000_000, "activations": 50_000}
FC_SHARE = 0.2
ALEXNET = {"name": "timing", "batch_size": 128, "activations": 9216, "classifier": 58_631_144}
ALEXNET |= {"parameters": 2_469_696 + ALEXNET["classifier"]}


def separated(n_convolution: int, n_fc: int, *, pieces: int = 1, cluster: Any = (), **tables: Any) -> Job:
    options = {"cut": "classifier", "fc_workers": n_fc, "fc_share": FC_SHARE, "micro_batches": pieces}
    compute = {"compute": {"model": "constant", "seconds": tables.pop("seconds", 1.0)}}
    return make_job(
        **{
            "paradigm": {"name": "stanza", **options, **tables.pop("options", {})},
            "optimizer": NESTEROV,
            "stop": {"updates": 6},
            "cluster": {"workers": n_convolution + n_fc, **compute, **dict(cluster)},
            **tables,
        }
    )


class Net(nn.Module):
    def __init__(self, *, noisy: bool, dtype: torch.dtype) -> None:
        super().__init__()
        norm, dropout = (nn.BatchNorm1d(6), nn.Dropout(0.3)) if noisy else (nn.Identity(), nn.Identity())
        self.features = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), norm, nn.Linear(6, 4))
        self.classifier = nn.Sequential(nn.Tanh(), dropout, nn.Linear(4, 1))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


def workload(job: Job, *, noisy: bool = False, dtype: torch.dtype = torch.float64) -> Workload:
    torch.manual_seed(job.seed)
    linear, net = build(job), Net(noisy=noisy, dtype=dtype)
    linear.train.tensors = tuple(tensor.to(dtype) for tensor in linear.train.tensors)
    return Workload(net, half_squared_error, linear.train, None if noisy else linear.evaluate)


class Run:
    def __init__(self, job: Job, training: Workload | None = None) -> None:
        self.workload = training or Workload(nn.Linear(1, 1), None, None, None)  # of which nothing is looked at
        self.trace = Recorder()
        self.simulation: Any = prepare(job, self.workload)(self.trace, lambda now_s, _: None)
        self.simulation.run()

    @property
    def weights(self) -> np.ndarray:
        return flat(self.workload.model)

    def iteration_s(self) -> float:
        """What the iterations take that are all alike."""
        took = np.diff(self.trace["updates"]["now_s"])
        assert np.allclose(took, took[0], rtol=1e-9)
        return float(took[0])


def flat(model: nn.Module) -> np.ndarray:
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


def trained(job: Job) -> np.ndarray:
    return Run(job, workload(job)).weights


def in_one_process(job: Job) -> np.ndarray:
    """The weights that a plain PyTorch loop comes to with the batches of all convolution workers together."""
    training, n = workload(job), job.groups.n_convolution
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[job.optimizer.name]
    optimizer = kind(training.model.parameters(), lr=LR, **job.optimizer.options)
    for iteration in range(job.stop.updates):
        numbers = range(iteration * n, (iteration + 1) * n)
        at = torch.from_numpy(np.concatenate([batch_indices(job.seed, j, batch_size=4, size=60) for j in numbers]))
        optimizer.zero_grad()
        training.loss(training.model, *(tensor[at] for tensor in training.train.tensors)).backward()
        optimizer.step()
    return flat(training.model)


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, rtol=1e-10, atol=1e-13))


# ---- what is computed ----


@pytest.mark.parametrize("optimizer", [NESTEROV, {"name": "adam", "lr": LR}], ids=["nesterov", "adam"])
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize(("n_convolution", "n_fc"), [(1, 1), (2, 1), (3, 2)])
def test_it_is_one_process_with_a_larger_batch(n_convolution, n_fc, pieces, optimizer):
    job = separated(n_convolution, n_fc, pieces=pieces, optimizer=optimizer)
    assert close(trained(job), in_one_process(job))
    longer = job.model_copy(update={"stop": job.stop.model_copy(update={"updates": 7})})
    assert not close(trained(longer), in_one_process(job))


def unweighted(monkeypatch):
    contribute = _Half.contribute
    monkeypatch.setattr(_Half, "contribute", lambda self, worker, weight=1.0: contribute(self, worker))


def of_the_wrong_mean(factor):
    compute = TwoHalves.compute

    def scaled(self, fc):
        loss = compute(self, fc)
        for worker in self._groups.served(fc):
            self._back[worker] = [gradient * factor(self, fc) for gradient in self._back[worker]]
        return loss

    return lambda monkeypatch: monkeypatch.setattr(TwoHalves, "compute", scaled)


@pytest.mark.parametrize(
    "broken",
    [
        unweighted,
        of_the_wrong_mean(lambda halves, fc: 1 / len(halves._groups.served(fc))),
        of_the_wrong_mean(lambda halves, fc: halves._n_pieces),
    ],
    ids=["fully-connected workers' weights", "workers served", "pieces"],
)
def test_a_factor_that_is_wrong_leads_elsewhere(broken, monkeypatch):
    job = separated(3, 2, pieces=2)
    broken(monkeypatch)
    assert not np.allclose(trained(job), in_one_process(job), rtol=1e-4)


@pytest.mark.parametrize("pieces", [1, 4])
def test_the_first_layer_has_the_gradient_of_the_whole_model(pieces):
    job = separated(3, 2, pieces=pieces, stop={"updates": 1}, optimizer={"name": "sgd", "lr": LR})
    start, first = flat(workload(job).model), slice(0, 5 * 6)
    gradient = (start - in_one_process(job))[first] / LR
    assert np.abs(gradient).min() > 1e-6
    assert np.allclose((start - trained(job))[first] / LR, gradient, rtol=1e-8)


class Rank:
    """A worker with everything of its own, as there would be one a process."""

    def __init__(self, job: Job, worker: int, number: int, whole: nn.Module) -> None:
        model = copy.deepcopy(whole)
        self.model = model.classifier if job.groups.is_fc(worker) else model.features
        self.batches = batches(
            workload(job, dtype=torch.float32).train, job.seed, number,
            n_workers=job.groups.n_convolution, batch_size=job.workload.batch_size, epochs=range(99),
        )  # fmt: skip
        self.generator = torch.Generator().manual_seed(worker_seed(job.seed, worker)).get_state()
        self.flat = nn.Parameter(nn.utils.parameters_to_vector(self.model.parameters()).detach())
        self.optimizer = torch.optim.SGD([self.flat], lr=LR, fused=True, **job.optimizer.options)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_rng_state(self.generator)
        found = self.model(x)
        self.generator = torch.get_rng_state()
        return found

    def gradient(self) -> torch.Tensor:
        found = nn.utils.parameters_to_vector([p.grad for p in self.model.parameters()]).clone()
        self.model.zero_grad()
        return found

    def step(self, gradient: torch.Tensor) -> None:
        self.flat.grad = gradient
        self.optimizer.step()
        nn.utils.vector_to_parameters(self.flat.data.clone(), self.model.parameters())


def by_ranks(job: Job) -> list[Rank]:
    """What ranks do, written down anew."""
    groups, pieces = job.groups, job.paradigm.micro_batches
    whole = workload(job, noisy=True, dtype=torch.float32).model
    ranks = [Rank(job, worker, worker - groups.n_fc, whole) for worker in range(groups.n_workers)]
    for _ in range(job.stop.updates):
        parts = {w: [t.split(len(t) // pieces) for t in next(ranks[w].batches)] for w in groups.convolution}
        crossing = {w: [ranks[w](x) for x in parts[w][0]] for w in groups.convolution}
        above = []
        for fc in groups.fc:
            total: Any = 0.0
            for piece in range(pieces):
                h = torch.cat([crossing[w][piece].detach() for w in groups.served(fc)]).requires_grad_()
                half_squared_error(ranks[fc], h, torch.cat([parts[w][1][piece] for w in groups.served(fc)])).backward()
                total = ranks[fc].gradient() / pieces + total
                back = len(groups.served(fc)) * (1 / pieces) * h.grad
                for w, rows in zip(groups.served(fc), back.chunk(len(groups.served(fc))), strict=True):
                    crossing[w][piece] = (crossing[w][piece], rows)
            above.append(total * (len(groups.served(fc)) * groups.n_fc / groups.n_convolution))
        below = []
        for w in groups.convolution:
            for h, rows in crossing[w]:
                h.backward(rows)
            below.append(ranks[w].gradient())
        for group, gradients in ((groups.fc, above), (groups.convolution, below)):
            mean = sum(gradients[1:], gradients[0]) / len(gradients)
            for w in group:
                ranks[w].step(mean.clone())
    return ranks


@pytest.mark.parametrize("pieces", [1, 2])  # a half is exact
@pytest.mark.parametrize(("n_convolution", "n_fc"), [(1, 1), (3, 2)])
def test_generators_and_running_statistics_are_each_workers_own(n_convolution, n_fc, pieces):
    job = separated(n_convolution, n_fc, pieces=pieces)
    run, ranks = Run(job, workload(job, noisy=True, dtype=torch.float32)), by_ranks(job)
    model, first = run.workload.model, job.groups.convolution[0]
    for half, rank in ((model.classifier, ranks[0]), (model.features, ranks[first])):
        assert np.array_equal(flat(half), rank.flat.detach().numpy())
        for ours, theirs in zip(half.buffers(), rank.model.buffers(), strict=True):
            assert torch.equal(ours, theirs)
    assert model.features[2].num_batches_tracked == 6 * pieces


# ---- how long it takes ----


@pytest.mark.parametrize("pieces", [1, 2, 8])
@pytest.mark.parametrize("seconds", [0.01, 0.3], ids=["transfers take longer", "computing takes longer"])
@pytest.mark.parametrize(("n_convolution", "n_fc"), [(1, 1), (3, 1), (4, 2)])
def test_an_iteration_takes_what_its_parts_do(n_convolution, n_fc, seconds, pieces):
    """With little above the cut, so that its all-reduce is no load."""
    below = 4 * 2_999_999
    job = separated(
        n_convolution, n_fc, pieces=pieces, seconds=seconds, cluster={"network": NETWORK},
        workload={**TIMING, "classifier": 1},
    )  # fmt: skip
    n_served = n_convolution // n_fc
    convolution_s, fc_s = (1 - FC_SHARE) * seconds, FC_SHARE * seconds * n_served
    parts = convolution_s / 3, convolution_s * 2 / 3, FC_SHARE * seconds
    profile = node_assignment.Profile(*parts, below // 4, 1, 50_000, batch=8)
    ring_s = ring_allreduce_s(n_convolution, below, LATENCY_S, GBIT)
    links = node_assignment.Links(GBIT, LATENCY_S)
    done_s = node_assignment.stanza_s(profile, links, job.groups, micro_batches=pieces) - ring_s
    run = Run(job)
    assert run.iteration_s() == pytest.approx(done_s + ring_s, rel=1e-6)
    rows = run.trace["exchanges"]
    later = rows[rows["iteration"] > 1]
    spent = later["compute_s"] + later["wait_s"] + later["comm_s"]
    assert spent == pytest.approx(done_s + ring_s, rel=1e-6)
    is_fc = later["worker"] < n_fc
    assert later["compute_s"][is_fc] == pytest.approx(fc_s) and later["compute_s"][~is_fc] == pytest.approx(
        convolution_s
    )
    assert later["comm_s"][~is_fc] == pytest.approx(ring_s)
    if pieces == 1:
        span = later["end_s"] - later["begin_s"]
        assert (span[is_fc] > fc_s + parts[0]).all() and span[~is_fc] == pytest.approx(done_s)


def test_pieces_are_computed_while_others_are_under_way():
    """As in a pipeline: all stages once, and the slowest of them, the last, for each further piece; until a convolution
    worker is never idle.
    """
    seconds, took = 0.1, []
    for pieces in (1, 2, 4, 8):
        network = {"network": {**NETWORK, "latency_us": 0.0}}
        job = separated(1, 1, pieces=pieces, seconds=seconds, workload=TIMING, cluster=network)
        forward_s, backward_s = 0.8 * seconds / 3, 0.8 * seconds * 2 / 3
        there_s, back_s = 8 * 200_008 / GBIT, 8 * 200_000 / GBIT
        stages = [forward_s, there_s, 0.2 * seconds, back_s, backward_s]
        took.append(Run(job).iteration_s())
        in_a_pipeline = (sum(stages) + (pieces - 1) * backward_s) / pieces
        assert max(stages) == backward_s
        assert took[-1] == pytest.approx(max(in_a_pipeline, forward_s + backward_s), rel=1e-9)
    assert took[0] > took[1] > took[2] == pytest.approx(took[3])


def test_gradients_share_links_with_the_all_reduce_above_the_cut():
    """Half of the link is the all-reduce's until it is over: gradients arrive that much later."""
    tables = {"seconds": 0.1, "cluster": {"network": {**NETWORK, "latency_us": 0.0}}}
    alone, beside = (
        Run(separated(2, 2, workload={**TIMING, "parameters": 3_000_000 + above, "classifier": above}, **tables))
        for above in (1, 100_000)
    )
    assert beside.iteration_s() - alone.iteration_s() == pytest.approx(4 * 99_999 / GBIT, rel=1e-6)


def test_convolution_workers_do_not_wait_for_an_all_reduce_above_the_cut():
    """They begin the next iteration; its activations are computed with when that is over."""
    above = 10_000_000
    tables = {"seconds": 0.1, "cluster": {"network": {**NETWORK, "latency_us": 0.0}}}
    run = Run(separated(2, 2, workload={**TIMING, "parameters": 3 + above, "classifier": above}, **tables))
    rows = run.trace["exchanges"]
    ends = {(row["worker"], row["iteration"]): row["now_s"] for row in rows}
    begins = {(row["worker"], row["iteration"]): row["begin_s"] for row in rows}
    for iteration in range(1, 6):
        assert begins[2, iteration + 1] == ends[2, iteration] < ends[0, iteration] == begins[0, iteration + 1]
        assert ends[0, iteration + 1] - ends[0, iteration] > ring_allreduce_s(2, 4 * above, 0.0, GBIT)


def test_the_slowest_of_a_group_holds_all_up():
    """Worker 3's iterations of the whole model take 2 s and not 1, from its third one on 4 s."""
    slow = {"worker": 3, "at_iteration": 3, "change": "slow", "factor": 2.0}
    run = Run(separated(3, 1, seconds=[1.0, 1.0, 1.0, 2.0], workload=TIMING, cluster={"events": [slow]}))
    rows = run.trace["exchanges"]
    fc_s, fast_s, slow_s = FC_SHARE * 3, 0.8, np.array([1.6, 1.6, 3.2, 3.2, 3.2, 3.2])
    assert np.diff(run.trace["updates"]["now_s"], prepend=0.0) == pytest.approx(slow_s + fc_s)
    assert rows[rows["worker"] == 3]["wait_s"] == pytest.approx(np.full(6, fc_s))
    assert rows[rows["worker"] == 2]["wait_s"] == pytest.approx(slow_s + fc_s - fast_s)
    assert rows[rows["worker"] == 3]["compute_s"] == pytest.approx(slow_s)


# ---- what is written down ----


@pytest.mark.parametrize(("n_convolution", "n_fc"), [(8, 1), (6, 2), (3, 1)])
@pytest.mark.parametrize("network", [{}, {"network": NETWORK}], ids=["", "network"])
def test_what_travels(n_convolution, n_fc, network):
    run = Run(separated(n_convolution, n_fc, pieces=2, workload=ALEXNET, stop={"updates": 2}, cluster=network))
    rows = run.trace["exchanges"]
    p_c, p_f, crossing = 2_469_696, 58_631_144, n_convolution * 128 * 9216
    floats = 2 * (n_convolution - 1) * p_c + 2 * (n_fc - 1) * p_f + 2 * crossing
    assert rows["wire_bytes"].sum() == 2 * (4 * floats + 8 * n_convolution * 128)
    is_fc = rows["worker"] < n_fc
    assert (rows["peer"][is_fc] == EVERYBODY).all()
    served = n_convolution // n_fc
    assert (rows["peer"] == (rows["worker"] - n_fc) // served)[~is_fc].all()
    assert (rows["batch_size"] == np.where(is_fc, 128 * served, 128)).all()
    assert (rows["n_received"] == np.where(is_fc, n_fc, n_convolution) - 1).all()
    updates = run.trace["updates"]
    assert updates["samples"].tolist() == [n_convolution * 128, 2 * n_convolution * 128]
    assert (updates["n_contributions"] == n_convolution).all()


def test_a_trace_says_what_sizes_the_halves_have(tmp_path):
    job = separated(3, 2, stop={"updates": 1})
    attributes = simulate(job, tmp_path / "trace.h5", workload(job)).attributes
    assert [attributes[name] for name in SEPARATED] == [8 * 64, 8 * 5, 8 * 4, 8]
    timing = separated(3, 2, workload=TIMING)
    assert list(Run(timing).simulation.attributes.values()) == [8_000_000, 4_000_000, 200_000, 8]


def test_ten_machines_that_train_alexnet_move_243_megabytes():
    rows = Run(separated(9, 1, workload=ALEXNET, stop={"updates": 1})).trace["exchanges"]
    labels = 9 * 128 * 8
    assert (rows["wire_bytes"].sum() - labels) / 1e6 == pytest.approx(243.0, abs=0.05)


def test_losses_are_of_those_who_know_them():
    job = separated(3, 2, pieces=2)
    rows = Run(job, workload(job)).trace["exchanges"]
    is_fc = rows["worker"] < 2
    assert np.isnan(rows["loss"][~is_fc]).all() and np.isfinite(rows["loss"][is_fc]).all()
    training = workload(job)
    for fc, numbers in ((0, [0]), (1, [1, 2])):
        at = torch.from_numpy(np.concatenate([batch_indices(1, j, batch_size=4, size=60) for j in numbers]))
        loss = training.loss(training.model, *(tensor[at] for tensor in training.train.tensors))
        assert rows["loss"][rows["worker"] == fc][0] == pytest.approx(float(loss.detach()), rel=1e-12)


@pytest.mark.parametrize("stop", [{"samples": 100}, {"samples": 96}, {"updates": 7}, {"seconds": 7.2}], ids=str)
@pytest.mark.parametrize("network", [{}, {"network": NETWORK}], ids=["", "network"])
def test_all_end_with_the_same_iteration(network, stop):
    run = Run(separated(3, 2, pieces=2, stop=stop, seconds=[1.0, 1.1, 1.3, 1.0, 1.2], workload=TIMING, cluster=network))
    rows = run.trace["exchanges"]
    made = [int(rows["iteration"][rows["worker"] == worker].max()) for worker in range(5)]
    updates = run.trace["updates"]
    assert made == [len(updates)] * 5 and not run.simulation.coordinator.active
    if "seconds" in stop:
        agreed = rows[(rows["worker"] < 2) & (rows["end_s"] >= 7.2)]["iteration"].min()
        assert len(updates) == agreed + 1 and updates["now_s"][-4] < 7.2
    else:
        assert len(updates) == {100: 5, 96: 4, 7: 7}[next(iter(stop.values()))]  # 24 samples an iteration


def test_an_evaluation_is_of_both_halves_after_the_same_step():
    """Evaluating leaves everything as it is. In each run's end the weights of that version are judged."""
    job = separated(3, 2, pieces=2, cluster={"network": NETWORK}, evaluation={"every_samples": 12})
    run = Run(job, workload(job))
    evaluations = run.trace["evaluations"]
    assert evaluations["version"].tolist() == [1, 2, 3, 4, 5, 6] and (evaluations["samples"] % 12 == 0).all()
    assert (evaluations["consensus_distance"] == 0.0).all()
    for n in (1, 3, 6):
        alone = separated(3, 2, pieces=2, cluster={"network": NETWORK}, stop={"updates": n})
        assert Run(alone, workload(alone)).trace["evaluations"]["loss"].tolist() == [evaluations["loss"][n - 1]]
    assert np.array_equal(run.weights, trained(separated(3, 2, pieces=2)))


def test_a_target_ends_the_run_two_iterations_later():
    """Fully-connected workers agree on it as they sum the next gradient, and tell the others in the iteration after."""
    tables = {"stop": {"target_loss": 0.3}, "evaluation": {"every_samples": 12}}
    job = separated(3, 2, cluster={"network": NETWORK}, **tables)
    trace = Run(job, workload(job)).trace
    reached = int(np.flatnonzero(trace["evaluations"]["loss"] <= 0.3)[0]) + 1
    assert len(trace["updates"]) == reached + 2


@pytest.mark.parametrize("network", [{}, {"network": NETWORK}], ids=["", "network"])
def test_the_same_job_gives_the_same_bytes(network):
    def tables(seed: int) -> tuple[list[bytes], bytes]:
        compute = {"model": "lognormal", "seconds": 1.0}
        job = separated(3, 2, pieces=2, seed=seed, cluster={**network, "compute": compute})
        run = Run(job, workload(job))
        return [run.trace[table].tobytes() for table in TABLES], run.weights.tobytes()

    assert tables(1) == tables(1)
    assert tables(1) != tables(2)


def test_the_network_changes_no_numbers():
    job, slow = separated(3, 2, pieces=2), separated(3, 2, pieces=2, cluster={"network": NETWORK})
    assert np.array_equal(trained(job), trained(slow))


@pytest.mark.parametrize(("seconds", "fc_share"), [(0.0, 0.5), ([1.0, 0.0, 0.0], 0.0), ([0.0, 1.0, 1.0], 1.0)], ids=str)
def test_time_must_pass_for_somebody(seconds, fc_share):
    """Worker 0 is the fully-connected one."""
    options = {"fc_share": fc_share}
    job = separated(2, 1, seconds=seconds, options=options, workload=TIMING, stop={"seconds": 1.0})
    with pytest.raises(JobError, match=r"^cluster.compute: worker 0's iterations take 0 seconds"):
        build_workers(job, build(job))
    ends = separated(2, 1, seconds=seconds, options=options, workload=TIMING)
    assert list(itertools.pairwise(Run(ends).trace["updates"]["now_s"].tolist())) == [(0.0, 0.0)] * 5
