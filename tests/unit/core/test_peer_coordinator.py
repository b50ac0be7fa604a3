"""Records and end of a run without servers."""

import math

import pytest

from hpcsync.core.assignments import decision_fields
from hpcsync.core.peer_coordinator import (
    BatchDivision,
    Lockstep,
    PeerCoordinator,
    create_batch_division,
    default_bucket_bytes,
    gradient_buckets,
)
from hpcsync.core.peer_machine import create_method
from hpcsync.paradigms.records import ALL_PEERS, NO_PEER, StepInfo
from hpcsync.planning.batch_allocation import Allocated, Allocator, Estimate
from hpcsync.trace.schema import Change
from tests.unit.jobs import make_job
from tests.unit.recorder import Recorder

ALLREDUCE = {"name": "allreduce"}
LOCAL = {"name": "local-sgd", "steps": 4}
PULL = {"name": "gossip", "mode": "pull"}


def coordinator(paradigm=PULL, workers=2, **tables) -> tuple[PeerCoordinator, Recorder]:
    trace = Recorder()
    return PeerCoordinator(make_job(paradigm=paradigm, cluster={"workers": workers}, **tables), trace), trace


def step_info(worker, iteration, batch_size=4, **more) -> StepInfo:
    row = {
        "worker": worker, "iteration": iteration, "peer": NO_PEER, "begin_s": 1.0, "end_s": 2.0, "compute_s": 1.0,
        "wait_s": 0.5, "comm_s": 0.25, "batch_size": batch_size, "loss": 3.0, "wire_bytes": 80, "n_received": 1,
        "weight": 0.75,
    }  # fmt: skip
    return StepInfo(**{**row, **more})


def test_a_step_info_is_a_row():
    run, trace = coordinator()
    run.exchanged(7.0, step_info(1, 1, peer=0))
    (row,) = trace["exchanges"]
    assert row.pop("now_s") == 7.0
    assert row == step_info(1, 1, peer=0)._asdict()
    assert run.last_loss == 3.0


def test_each_step_of_a_worker_of_its_own_is_an_update():
    schedule = {"name": "multistep", "milestones": [8, 16], "gamma": 0.5}
    run, trace = coordinator(optimizer={"name": "sgd", "lr": 1.0, "schedule": schedule})
    for now_s, (worker, iteration) in enumerate([(0, 1), (0, 2), (1, 1), (0, 3)]):
        run.exchanged(float(now_s), step_info(worker, iteration))
    updates = [tuple(row.values())[:5] for row in trace["updates"]]
    # The clock of a worker's schedule extrapolates its own samples to all workers: 0, 8, 0, 16 samples.
    assert updates == [(1, 0.0, 1, 1.0, 4), (2, 1.0, 1, 0.5, 8), (3, 2.0, 1, 1.0, 12), (4, 3.0, 1, 0.25, 16)]
    assert (run.version, run.samples, run.updated_s) == (4, 16, 3.0)


def test_under_all_reduce_the_steps_of_all_are_one():
    schedule = {"name": "multistep", "milestones": [8], "gamma": 0.5}
    run, trace = coordinator(ALLREDUCE, optimizer={"name": "sgd", "lr": 1.0, "schedule": schedule})
    run.exchanged(1.0, step_info(1, 1, peer=ALL_PEERS))
    assert (run.version, run.samples) == (0, 0)
    run.exchanged(2.0, step_info(0, 1, peer=ALL_PEERS))
    run.exchanged(3.0, step_info(0, 2, peer=ALL_PEERS))
    run.exchanged(4.0, step_info(1, 2, peer=ALL_PEERS))
    assert [tuple(row.values())[:5] for row in trace["updates"]] == [(1, 2.0, 2, 1.0, 8), (2, 4.0, 2, 0.5, 16)]
    assert len(trace["exchanges"]) == 4


def test_a_worker_that_leaves_blocks_no_round():
    run, trace = coordinator(ALLREDUCE, workers=3)
    for worker in (0, 1):
        run.exchanged(1.0, step_info(worker, 1))
    assert run.version == 0
    run.left(2.0, 2)
    assert [tuple(row.values())[:5] for row in trace["updates"]] == [(1, 2.0, 2, 0.1, 8)]
    run.exchanged(3.0, step_info(0, 2))
    run.left(4.0, 0)  # after its second iteration, which worker 1 has not reported
    assert run.version == 1
    run.exchanged(5.0, step_info(1, 2))
    assert (run.version, run.samples) == (2, 16)
    run.left(6.0, 1)
    assert [(row["seq"], row["worker"], row["change"]) for row in trace["membership"]] == [
        (1, 2, Change.LEFT), (2, 0, Change.LEFT), (3, 1, Change.LEFT)
    ]  # fmt: skip
    assert run.active == set()


def test_a_round_without_those_that_take_batches_is_no_update():
    """Convolution workers of a script may leave the loop before their step: their losses are NaN."""
    stanza = {"name": "stanza", "cut": "2", "fc_workers": 1, "fc_share": 0.3}
    run, trace = coordinator(stanza, workload={"name": "script"})
    run.exchanged(1.0, step_info(0, 1, lr=0.1))
    run.left(2.0, 1)
    run.left(3.0, 0)
    assert trace["updates"] == [] and not run.active


def test_models_received_after_the_end_are_no_iteration():
    run, trace = coordinator()
    run.exchanged(1.0, step_info(0, 1))
    run.left(1.0, 0)
    run.exchanged(2.0, step_info(0, 1, batch_size=0, loss=math.nan, n_received=3))
    assert [row["n_received"] for row in trace["exchanges"]] == [1, 3]
    assert (run.version, run.samples, run.updated_s, run.last_loss) == (1, 4, 1.0, 3.0)


def test_an_evaluation_is_a_row_with_the_distance():
    run, trace = coordinator()
    run.evaluated(3.0, 5, 20, 0.5, 0.75, 0.125)
    assert [tuple(row.values()) for row in trace["evaluations"]] == [(3.0, 5, 20, 0.5, 0.75, 0.125)]
    assert (run.last_accuracy, run.stopping) == (0.75, False)


def test_all_workers_are_in_their_first_iterations_at_the_start():
    run, _ = coordinator()
    assert {*run.stalls.running} == run.active
    run.left(0.5, 0)
    assert {*run.stalls.running} == run.active


def test_a_worker_stalls_in_its_next_iteration_counted_from_a_checkpoint():
    run, _ = coordinator()
    for n in range(1, 7):
        run.exchanged(float(n), step_info(0, n))  # half a second without its wait
    for begin_s in (6.0, 8.0):
        looks = [run.stalls.look(begin_s + lasted_s) for lasted_s in (0.0, 0.75, 1.4, 1.6)]
        assert [[(stall.worker, stall.iteration) for stall in look] for look in looks] == [[], [], [], [(0, 7)]]
        assert looks[-1][0].lasted_s == pytest.approx(1.6)
        run.continued(8.0)
    run.exchanged(10.0, step_info(0, 7))
    run.left(10.0, 0)
    assert [*run.stalls.running] == [1]


@pytest.mark.parametrize(
    ("stop", "enough"),
    [({"samples": 12}, 3), ({"samples": 13}, 4), ({"updates": 2}, 2), ({"seconds": 5.0}, 5)],
    ids=str,
)
def test_when_it_is_enough(stop, enough):
    run, _ = coordinator(stop=stop)
    for n in range(1, enough + 1):
        assert not run.stopping
        run.exchanged(float(n), step_info(0, n))
    assert run.stopping


def test_other_ends():
    timed, _ = coordinator(stop={"seconds": 5.0})
    timed.passed(4.9)
    assert not timed.stopping
    timed.passed(5.0)
    assert timed.stopping
    timed.reconsider(4.9)
    assert not timed.stopping
    target, _ = coordinator(stop={"target_loss": 0.2})
    target.evaluated(1.0, 1, 4, 0.3, math.nan, 0.0)
    assert not target.stopping
    target.evaluated(2.0, 2, 8, 0.2, math.nan, 0.0)
    target.evaluated(3.0, 3, 12, 0.3, math.nan, 0.0)
    target.passed(4.0)
    assert target.stopping  # once true, it stays true


@pytest.mark.parametrize(
    ("size", "step", "buckets"),
    [(8, 4, [(4, 8), (0, 4)]), (9, 4, [(5, 9), (1, 5), (0, 1)]), (3, 4, [(0, 3)]), (0, 4, [])],
)
def test_buckets_cover_the_gradient_from_its_end(size, step, buckets):
    assert gradient_buckets(size, step) == buckets


@pytest.mark.parametrize(
    ("mb", "buckets"), [(0.4, 1), (1.0, 1), (1.5, 2), (4.0, 4), (4.000_001, 4), (16.0, 4), (32.0, 4), (100.0, 13)]
)
def test_there_are_at_least_four_buckets_between_nodes_unless_they_are_small(mb, buckets):
    n_bytes = round(mb * 1e6)
    found = gradient_buckets(n_bytes, default_bucket_bytes(n_bytes, between_nodes=True))
    assert len(found) == buckets
    assert len(gradient_buckets(n_bytes, default_bucket_bytes(n_bytes, between_nodes=False))) == -(
        -n_bytes // 25_000_000
    )


# ---- synchronous workers ----


@pytest.mark.parametrize(
    ("paradigm", "stop", "contributing", "iterations"),
    [
        (ALLREDUCE, {"updates": 5}, 3, 5),
        (LOCAL, {"updates": 5}, 3, 2),
        (LOCAL, {"updates": 6}, 3, 2),
        (LOCAL, {"updates": 7}, 3, 3),
        (ALLREDUCE, {"samples": 24}, 3, 2),
        (ALLREDUCE, {"samples": 25}, 3, 3),
        (LOCAL, {"samples": 24}, 2, 3),
    ],
    ids=str,
)
def test_how_many_iterations_are_enough(paradigm, stop, contributing, iterations):
    lockstep = Lockstep(make_job(paradigm=paradigm, stop=stop, cluster={"workers": contributing}))
    period = paradigm.get("steps", 1)
    counted = []
    for iteration in range(1, iterations + 1):
        if iteration % period == 0:
            lockstep.exchanged(contributing, period * contributing, period * contributing * 4)
        counted.append(lockstep.enough(iteration % period))
    assert counted == [False] * (iterations - 1) + [True]


@pytest.mark.parametrize("paradigm", [ALLREDUCE, LOCAL], ids=str)
@pytest.mark.parametrize("stop", [{"updates": 7}, {"samples": 30}], ids=str)
def test_synchronous_workers_count_as_the_coordinator(paradigm, stop):
    """Departures are counted at the next exchange."""
    run, _ = coordinator(paradigm, workers=3, stop=stop)
    lockstep, iteration, steps = Lockstep(make_job(paradigm=paradigm, stop=stop, cluster={"workers": 3})), 0, 0
    period = paradigm.get("steps", 1)
    while not (iteration % period == 0 and lockstep.enough()):
        iteration += 1
        active = 3 if iteration < 2 else 2
        for worker in range(active):
            run.exchanged(float(iteration), step_info(worker, iteration))
        if iteration == 1:
            run.left(1.0, 2)
        steps += active
        if iteration % period == 0:
            lockstep.exchanged(active, steps, 4 * steps)
            assert (lockstep.samples, lockstep.updates) == (run.samples, run.version)
            assert lockstep.enough() == run.stopping
            steps = 0


def test_if_batches_may_differ_no_worker_ends_between_exchanges():
    stop = {"samples": 5}
    of_job, of_script = (
        Lockstep(make_job(paradigm=LOCAL, stop=stop, **workload)) for workload in ({}, {"workload": {"name": "script"}})
    )
    assert of_job.enough(1) and not of_script.enough(1)
    of_script.exchanged(2, 4, 6)
    assert of_script.enough()


def test_after_resuming_only_workers_that_were_and_are_there_count():
    lockstep = Lockstep(make_job(paradigm=LOCAL, stop={"samples": 24}, cluster={"workers": 3}))
    assert lockstep.enough(2)
    for n_present in (2, 3):
        lockstep.resume(n_present)
        assert not lockstep.enough(2) and lockstep.enough(3)


def test_the_peer_selection_of_a_job():
    paradigm = {"name": "gossip", "mode": "pull", "topology": "ring", "include_self": False}
    peers = create_method(make_job(seed=7, paradigm=paradigm, cluster={"workers": 5})).peers
    assert (peers.n_workers, peers.seed, peers.topology, peers.include_self) == (5, 7, "ring", False)


# ---- allocated batches ----

UNKNOWN = Estimate(math.nan, math.nan)


def division(n_workers=3, total=24, interval=2, **limits) -> BatchDivision:
    return BatchDivision(Allocator(n_workers, total, interval=interval, **{"maxima": [math.inf] * n_workers, **limits}))


def speeds(*each):
    """Return estimates of workers with these speeds in samples/s; None for one that has left."""
    return [None if speed is None else Estimate(0.0, 1.0 / speed) for speed in each]


def sizes(run, *workers):
    return [run.work(worker)[1] for worker in workers]


def never():
    raise AssertionError("nobody was to be asked")


def test_batches_are_equal_by_default():
    job = make_job(paradigm=ALLREDUCE)
    assert create_batch_division(job) is None and decision_fields(job) == {}
    allocated = make_job(paradigm=ALLREDUCE, batches={"policy": "proportional"})
    assert isinstance(create_batch_division(allocated), BatchDivision)
    assert tuple(decision_fields(allocated)) == ("iteration", "batch_before", "fixed_s", "sample_s", "gain")


def test_each_sample_of_the_sequence_is_allocated_once():
    run, taken = division(), []
    for iteration in range(1, 9):
        for worker in range(3):
            first, n_samples = run.work(worker)
            taken += range(first, first + n_samples)
        run.exchanged(3, lambda iteration=iteration: speeds(1.0, iteration, 2.0))
        assert sum(sizes(run, 0, 1, 2)) == 24
    assert taken == list(range(8 * 24))
    assert sizes(run, 0, 1, 2) != [8, 8, 8]


def test_estimates_are_gathered_at_the_interval():
    run, asked = division(interval=3), []
    for iteration in range(1, 10):
        run.exchanged(3, lambda iteration=iteration: asked.append(iteration) or speeds(1.0, 1.0, 1.0))
    assert asked == [3, 6, 9]


def test_equal_estimates_give_equal_sizes_with_their_inputs():
    one, other = division(), division()
    for run in (one, other):
        assert run.exchanged(3, never) == []
    said = speeds(1.0, 2.0, 4.1)
    rows = one.exchanged(3, lambda: said)
    assert rows == other.exchanged(3, lambda: said)
    assert sizes(one, 0, 1, 2) == sizes(other, 0, 1, 2) == [3, 7, 14] == [row.size for row in rows]
    assert [row.inputs[:3] for row in rows] == [(8.0, *estimate) for estimate in said]


def test_no_allocation_before_all_estimates_are_known():
    run = division(interval=1)
    assert run.exchanged(3, lambda: [*speeds(1.0, 4.0), UNKNOWN]) == []
    assert sizes(run, 0, 1, 2) == [8, 8, 8]


def test_gradients_count_by_their_samples():
    run = division()
    assert [run.weight(worker) for worker in range(3)] == [1.0, 1.0, 1.0]  # exactly
    run.exchanged(3, never)
    run.exchanged(3, lambda: speeds(1.0, 2.0, 5.0))
    assert sizes(run, 0, 1, 2) == [3, 6, 15]
    assert [run.weight(worker) for worker in range(3)] == [3 * 3 / 24, 6 * 3 / 24, 15 * 3 / 24]
    assert run.correction(3, 24) == 1.0
    for present in ([0, 1], [0, 2], [2]):  # the mean over samples, of gradients that are these numbers
        n, n_samples = len(present), sum(sizes(run, *present))
        found = sum(run.weight(worker) * 10.0**worker for worker in present) / n * run.correction(n, n_samples)
        assert found == pytest.approx(sum(sizes(run, w)[0] * 10.0**w for w in present) / n_samples, rel=1e-12)
        assert run.correction(n, n_samples) != 1.0
    assert run.correction(0, 0) == 1.0


def test_a_departure_is_detected_and_its_samples_go_to_the_others():
    run = division(interval=2)
    run.exchanged(3, never)
    run.exchanged(3, lambda: speeds(1.0, 2.0, 5.0))
    first = run.work(2)[0] + run.work(2)[1]
    rows = run.exchanged(2, lambda: speeds(1.0, None, 5.0))  # at once
    assert [(row.worker, row.size) for row in rows] == [(0, 4), (2, 20)]
    assert math.isnan(rows[0].inputs[-1])  # no gain is required
    assert [run.work(0), run.work(2)] == [(first, 4), (first + 4, 20)]
    assert run.weight(0) == 4 * 2 / 24 and run.correction(2, 24) == 1.0
    both = run.exchanged(2, lambda: speeds(5.0, None, 1.0))
    assert [(row.worker, row.size) for row in both] == [(0, 20), (2, 4)]
    alone = run.exchanged(1, lambda: speeds(None, None, 1.0))
    assert [(row.worker, row.size) for row in alone] == [(2, 24)] and run.weight(2) == 1.0


def test_several_leave_and_the_others_are_faster_than_they_were():
    run = division(n_workers=4, interval=1)
    run.exchanged(4, lambda: speeds(1.0, 1.0, 1.0, 3.0))
    rows = run.exchanged(2, lambda: speeds(2.0, None, None, 1.0))
    assert [row.worker for row in rows] == [0, 2, 3, 0, 3, 0, 3]
    assert [row.size for row in rows[-2:]] == sizes(run, 0, 3) == [16, 8]


def test_samples_beyond_the_maxima_are_not_counted():
    run = division(maxima=[8, 8, 9], interval=1)
    run.exchanged(2, lambda: speeds(1.0, None, 1.0))
    assert sizes(run, 0, 2) == [8, 9]
    assert run.weight(0) == 8 * 2 / 17 and run.correction(2, 17) == 1.0


def test_an_allocation_is_a_row_for_each_worker():
    job = make_job(paradigm=ALLREDUCE, batches={"policy": "equal-finish"})
    trace = Recorder(tuple(decision_fields(job)))
    run = PeerCoordinator(job, trace)
    run.allocated(5.0, 10, [Allocated(0, 3, (4.0, 0.1, 0.2, 0.3)), Allocated(1, 5, (4.0, 0.4, 0.5, 0.3))])
    run.left(6.0, 1)
    assert trace.rows == [
        ("decisions", (1, 5.0, "batches", 0, 3.0, 10.0, 4.0, 0.1, 0.2, 0.3)),
        ("decisions", (2, 5.0, "batches", 1, 5.0, 10.0, 4.0, 0.4, 0.5, 0.3)),
        ("membership", (3, 6.0, 1, Change.LEFT)),
    ]
    assert len(trace["decisions"]) == 2  # the rows fit the columns
