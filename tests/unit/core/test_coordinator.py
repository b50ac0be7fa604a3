"""The coordinator with real paradigms: commands, trace rows and the end of a run."""

import itertools
import math
import random

import pytest

from hpcsync.config.job import Stop
from hpcsync.core.assignments import Assignments, create_assignments
from hpcsync.core.coordinator import (
    AccumulateCommand,
    CancelCommand,
    Coordinator,
    UpdateCommand,
    coordinate,
)
from hpcsync.paradigms import create
from hpcsync.paradigms.bsp import BSP
from hpcsync.paradigms.events import Apply, Elapsed, Grant, PushInfo
from hpcsync.paradigms.records import UNTIL
from hpcsync.planning.batch_allocation import Allocator
from hpcsync.trace.schema import Change, Outcome
from hpcsync.training.lr_schedule import learning_rate
from tests.unit.jobs import make_job
from tests.unit.recorder import Recorder


class Run:
    """A coordinator with workers that push what they were last granted."""

    def __init__(
        self,
        name,
        n_workers,
        stop=None,
        *,
        lr=lambda samples, updates, n: 0.1,
        batch_total=None,
        allocator=None,
        **options,
    ):
        paradigm = create(name, n_workers, **options)
        self.trace = Recorder((*paradigm.decision_fields, *(allocator.decision_fields if allocator else ())))
        self.coordinator = Coordinator(
            paradigm,
            self.trace,
            n_workers=n_workers,
            lr=lr,
            stop=Stop(**(stop or {})),
            batch_total=batch_total,
            assignments=Assignments(map(paradigm.first, range(n_workers)), allocator=allocator),
        )
        self.granted = dict.fromkeys(range(n_workers), (1, 0))  # computing workers: iteration, version read
        self.stopped = set()

    def push(self, now_s, worker, batch_size=8, loss=1.0, **said):
        iteration, version = self.granted.pop(worker)
        times = (now_s - 0.5, now_s, 0.5, 0.25, 0.125)
        push_info = PushInfo(now_s, worker, iteration, version, *times, batch_size, 1, loss, 800, **said)
        return self.take(self.coordinator.pushed(now_s, push_info))

    def leave(self, now_s, worker, change=Change.LEFT):
        self.granted.pop(worker, None)
        return self.take(self.coordinator.left(now_s, worker, change))

    def join(self, now_s, worker):
        return self.take(self.coordinator.joined(now_s, worker))

    def take(self, commands):
        version = self.coordinator.version - sum(isinstance(command, UpdateCommand) for command in commands)
        for command in commands:
            if isinstance(command, UpdateCommand):
                version += 1
            elif isinstance(command, CancelCommand):
                _, read = self.granted[command.worker]
                assert (command.version, read) == (version - 1, version - 1), "cancelled, though it may count"
            elif isinstance(command, Grant):
                assert command.worker not in self.granted, "answered twice"
                assert command.version == version
                if command.local_steps:
                    self.granted[command.worker] = command.iteration, command.version
                else:
                    self.stopped.add(command.worker)
        return [without_lead(command) if isinstance(command, Grant) else command for command in commands]


def without_lead(grant):
    return grant._replace(gap_iters=0, credits=0, held_s=0.0)


def mean(workers, lr):
    """Return an update with equal weights."""
    return UpdateCommand(workers, (1.0,) * len(workers), float(len(workers)), lr)


def reply(worker, iteration, version, batch_size=8, first_sample=-1):
    return Grant(worker, iteration, version, first_sample=first_sample, batch_size=batch_size, local_steps=1)


def stop_grant(worker, iteration, version):
    return Grant(worker, iteration, version).stop()


def column(rows, *names):
    found = [tuple(row[name] for name in names) for row in rows]
    return [values[0] for values in found] if len(names) == 1 else found


# ---- commands and rows ----


def test_before_the_first_push_no_result_is_known():
    state = Run("asp", 2).coordinator.state()
    assert math.isnan(state["last_loss"]) and math.isnan(state["last_accuracy"])
    assert state["updated_s"] == 0.0


def test_asp_updates_and_answers_at_once():
    run = Run("asp", 2)
    assert run.push(1.0, 1) == [mean((1,), 0.1), reply(1, 2, 1)]
    assert run.push(2.0, 1) == [mean((1,), 0.1), reply(1, 3, 2)]
    assert run.push(3.0, 0) == [mean((0,), 0.1), reply(0, 2, 3)]
    assert column(run.trace["pushes"], "worker", "iteration", "version_read", "staleness", "outcome") == [
        (1, 1, 0, 0, Outcome.APPLIED),
        (1, 2, 1, 0, Outcome.APPLIED),
        (0, 1, 0, 2, Outcome.APPLIED),
    ]


def test_bsp_makes_one_update_of_all_in_worker_order():
    run = Run("bsp", 3)
    assert run.push(1.0, 2) == run.push(2.0, 0) == []
    assert run.push(4.0, 1) == [mean((0, 1, 2), 0.1), reply(0, 2, 1), reply(1, 2, 1), reply(2, 2, 1)]
    assert column(run.trace["pushes"], "seq", "worker", "staleness", "now_s") == [
        (1, 2, 0, 1.0),
        (2, 0, 0, 2.0),
        (3, 1, 0, 4.0),
    ]
    assert column(run.trace["grants"], "seq", "worker", "version", "held_s", "gap_iters") == [
        (4, 0, 1, 2.0, 0),
        (5, 1, 1, 0.0, 0),
        (6, 2, 1, 3.0, 0),
    ]
    assert column(run.trace["updates"], "version", "now_s", "n_contributions", "samples") == [(1, 4.0, 3, 24)]


def test_a_push_info_is_recorded_unchanged():
    run = Run("asp", 1)
    run.push(
        2.0,
        0,
        batch_size=5,
        loss=0.75,
        share=0.5,
        predicted_fixed_s=3.0,
        predicted_sample_s=0.25,
        pull_s=0.0625,
        encode_s=0.5,
        load_s=0.03125,
        lr=0.3,
        gradient_sq=0.7,
    )
    (row,) = run.trace["pushes"]
    said = [1.5, 2.0, 0.5, 0.25, 0.125, 5, 1, 0.75, 800, 0.5, 3.0, 0.25, 0.0625, 0.5, 0.03125, 0.3, 0, 0.7]
    assert list(row.values()) == [1, 2.0, 0, 1, 0, 0, *said, 1.0, Outcome.APPLIED]
    assert run.coordinator.last_loss == 0.75
    assert run.coordinator.updated_s == 2.0


def test_the_samples_are_those_of_the_contributions():
    run = Run("bsp", 2)
    for now_s, (worker, batch_size) in enumerate([(0, 3), (1, 5), (1, 7), (0, 11)]):
        run.push(float(now_s), worker, batch_size)
    assert column(run.trace["updates"], "samples") == [8, 26]
    assert column(run.trace["grants"], "batch_size") == [3, 5, 11, 7]
    assert run.coordinator.samples == 26


@pytest.mark.parametrize(
    ("clock", "scale", "paradigm", "expected"),
    [
        ("samples", 1.0, "asp", [0.4, 0.4, 0.2, 0.2]),  # 8 samples an update, halved at 16 samples
        ("updates", 1.0, "asp", [0.4, 0.4, 0.4, 0.2]),  # halved at 3 updates
        ("samples", "1/workers", "asp", [0.2, 0.2, 0.1, 0.1]),
        ("samples", 1.0, "bsp", [0.4, 0.2]),
        ("samples", "1/workers", "bsp", [0.4, 0.2]),
        ("updates", 1.0, "bsp", [0.4, 0.4]),
    ],
)
def test_the_learning_rate_follows_the_clock_and_the_share(clock, scale, paradigm, expected):
    milestone = 16 if clock == "samples" else 3
    schedule = {"name": "multistep", "milestones": [milestone], "gamma": 0.5}
    optimizer = {"name": "sgd", "lr": 0.4, "lr_clock": clock, "async_lr_scale": scale, "schedule": schedule}
    run = Run(paradigm, 2, lr=learning_rate(make_job(optimizer=optimizer)))
    ordered = [command for t, worker in enumerate([0, 1, 0, 1]) for command in run.push(float(t), worker)]
    assert column(run.trace["updates"], "lr") == pytest.approx(expected)
    assert [command.lr for command in ordered if isinstance(command, UpdateCommand)] == column(
        run.trace["updates"], "lr"
    )


def test_decisions_are_recorded_before_the_grant_they_lead_to():
    run = Run("dssp", 2, staleness_min=0, staleness_max=4)
    for now_s, worker in enumerate([0, 1, 1, 1, 0, 1]):
        if worker in run.granted:
            run.push(float(now_s), worker)
    seqs = column(run.trace["decisions"], "seq")
    assert seqs
    assert set(column(run.trace["decisions"], "controller")) == {"dssp"}
    for seq, chosen in column(run.trace["decisions"], "seq", "chosen"):
        granted = [row for row in run.trace["grants"] if row["seq"] == seq + 1]
        assert bool(granted) == (chosen > 0)


# ---- the stopping rule ----


def test_the_update_that_reaches_the_rule_ends_the_run():
    run = Run("ssp", 3, {"updates": 3}, staleness=0)
    assert run.push(1.0, 0) == [mean((0,), 0.1)]  # blocked
    assert run.push(2.0, 1) == [mean((1,), 0.1)]  # blocked
    assert run.push(4.0, 2) == [mean((2,), 0.1), *(stop_grant(worker, 2, 3) for worker in (2, 0, 1))]
    assert run.coordinator.stopping
    assert column(run.trace["grants"], "held_s", "credits", "local_steps") == [(0.0, 0, 0), (3.0, 0, 0), (2.0, 0, 0)]


def test_blocked_workers_are_released_and_computing_ones_stopped_at_their_next_push():
    run = Run("ssp", 3, {"samples": 80}, staleness=0)
    for worker in (0, 1, 2):  # one push each, so that a lead is not a number of pushes
        run.push(1.0, worker)
    run.push(2.0, 0)
    run.push(3.0, 1)
    run.take(run.coordinator.stop(3.5))
    assert column(run.trace["grants"][3:], "worker", "held_s", "gap_iters") == [(0, 1.5, 1), (1, 0.5, 1)]
    assert run.push(4.0, 2) == [stop_grant(2, 3, 5)]
    assert run.trace["pushes"][-1]["outcome"] == Outcome.DROPPED
    assert (run.coordinator.version, run.coordinator.samples) == (5, 40)


def test_a_stop_takes_back_the_credits_of_a_grant():
    def grants(stop):
        run = Run("dssp", 2, stop, staleness_min=0, staleness_max=4)
        for now_s, worker in enumerate([0, 1, 1, 1, 0, 1]):
            if worker in run.granted:
                run.push(float(now_s), worker)
        return column(run.trace["grants"], "version", "credits", "local_steps")

    version, credits, _ = next(row for row in grants({}) if row[1] > 0)
    assert (version, credits, 1) in grants({"updates": version + 1})
    assert (version, 0, 0) in grants({"updates": version})


@pytest.mark.parametrize(
    ("stop", "updates"),
    [({"samples": 24}, 3), ({"samples": 17}, 3), ({"samples": 16}, 2), ({"updates": 5}, 5), ({"seconds": 4.0}, 4)],
)
def test_stopping_rules(stop, updates):
    run = Run("asp", 1, stop)
    now_s = 0.0
    while not run.coordinator.stopping:
        now_s += 1.0
        run.push(now_s, 0)
    assert run.coordinator.version == updates


def test_time_passes_without_a_push_too():
    run = Run("bsp", 2, {"seconds": 4.0})
    run.push(1.0, 1)
    assert run.coordinator.passed(3.999) == []
    assert run.take(run.coordinator.passed(4.0)) == [stop_grant(1, 2, 0)]
    assert run.coordinator.passed(5.0) == []


@pytest.mark.parametrize(
    ("stop", "reached", "missed"),
    [({"target_accuracy": 0.9}, (math.nan, 0.9), (0.0, 0.89)), ({"target_loss": 0.5}, (0.5, math.nan), (0.51, 1.0))],
)
def test_targets(stop, reached, missed):
    run = Run("bsp", 2, stop)
    run.push(1.0, 0)
    assert run.coordinator.evaluated(2.0, 0, 0, *missed) == []
    assert run.take(run.coordinator.evaluated(3.0, 0, 0, *reached)) == [stop_grant(0, 2, 0)]
    assert len(run.trace["evaluations"]) == 2


EVENTS = {
    "push": lambda run: run.push(6.0, 2),
    "leave": lambda run: run.leave(6.0, 2),
    "join": lambda run: run.join(6.0, 1),
    "passed": lambda run: run.take(run.coordinator.passed(6.0)),
}


@pytest.mark.parametrize("event", EVENTS)
def test_an_evaluation_that_ends_the_run_does_so_now_and_not_when_it_began(event):
    run = Run("bsp", 4, {"target_accuracy": 0.5})
    run.push(5.0, 0)  # blocked, while the weights of second 1 are being evaluated
    run.leave(5.5, 1)
    EVENTS[event](run)
    run.coordinator.evaluated(1.0, 0, 0, 0.1, 0.9)
    assert (0, 6.0, 1.0) in column(run.trace["grants"], "worker", "now_s", "held_s")
    assert column(run.trace["evaluations"], "now_s", "version") == [(1.0, 0)]


def test_an_incomplete_round_is_dropped_when_the_run_closes():
    run = Run("bsp", 3)
    for worker in (2, 1, 0):
        run.push(1.0, worker)
    run.push(2.0, 1)
    run.push(3.0, 0)
    run.take(run.coordinator.stop(4.0))
    assert len(run.trace["pushes"]) == 3
    run.coordinator.close()
    assert column(run.trace["pushes"][3:], "worker", "version_read", "staleness", "outcome") == [
        (1, 1, 0, Outcome.DROPPED),
        (0, 1, 0, Outcome.DROPPED),
    ]
    assert run.coordinator.version == 1


# ---- departures ----


def test_a_departure_completes_a_round_and_is_recorded():
    run = Run("bsp", 2)
    run.push(1.0, 1)
    assert run.leave(2.0, 0) == [mean((1,), 0.1), reply(1, 2, 1)]
    assert run.trace["membership"] == [{"seq": 2, "now_s": 2.0, "worker": 0, "change": 0}]
    assert run.coordinator.active == {1}


def test_a_version_is_trained_by_those_that_took_part_when_it_was_made():
    """A worker that has not pushed does not count, nor does one that has left, from the next version on."""
    run = Run("asp", 3)
    assert run.coordinator.trained_by == []
    run.push(1.0, 2)
    assert run.coordinator.trained_by == [2]
    run.push(2.0, 0)
    run.push(3.0, 1)
    run.leave(4.0, 0)
    assert run.coordinator.trained_by == [0, 1, 2]
    run.push(5.0, 1)
    assert run.coordinator.trained_by == [1, 2]
    run.join(6.0, 0)
    assert run.coordinator.trained_by == [0, 1, 2]
    for worker in (2, 0, 1):
        run.leave(7.0, worker, Change.DIED if worker == 0 else Change.LEFT)
    assert run.coordinator.trained_by == [0, 1, 2], "as before the first of them left"


def test_a_worker_that_joins_is_recorded_and_continues_with_its_iteration():
    run = Run("asp", 2)
    run.push(1.0, 0, batch_size=5)
    run.leave(2.0, 0, Change.DIED)
    assert run.join(3.0, 0) == [reply(0, 2, 1, batch_size=5)]
    run.push(4.0, 0, batch_size=5)
    run.leave(5.0, 1)
    assert run.join(6.0, 1) == [reply(1, 1, 2, batch_size=0)], "it knows its own"
    assert column(run.trace["membership"], "now_s", "worker", "change") == [
        (2.0, 0, Change.DIED),
        (3.0, 0, Change.JOINED),
        (5.0, 1, Change.LEFT),
        (6.0, 1, Change.JOINED),
    ]
    assert column(run.trace["grants"], "worker", "iteration", "gap_iters", "held_s") == [
        (0, 2, 1, 0.0),
        (0, 2, 1, 0.0),
        (0, 3, 2, 0.0),
        (1, 1, 0, 0.0),
    ]
    run.coordinator.check()


def test_a_worker_that_joins_while_its_contribution_waits_is_blocked():
    run = Run("bsp", 2, {"updates": 2})
    run.push(1.0, 0)
    run.leave(2.0, 0)
    assert run.join(3.0, 0) == []
    assert run.push(4.0, 1) == [mean((0, 1), 0.1), reply(0, 2, 1), reply(1, 2, 1)]
    run.leave(5.0, 0)
    assert run.join(6.0, 0) == [reply(0, 2, 1)]
    run.push(7.0, 0)
    run.leave(7.5, 0)
    run.join(8.0, 0)
    assert run.take(run.coordinator.stop(9.0)) == [stop_grant(0, 3, 1)]
    assert run.trace["grants"][-1]["held_s"] == 1.0
    assert run.trace["grants"][-1]["gap_iters"] == 1


def test_no_worker_joins_a_run_that_is_over_or_has_no_active_worker():
    run = Run("asp", 2)
    run.leave(1.0, 0)
    run.leave(2.0, 1)
    assert run.join(3.0, 0) == []
    assert run.coordinator.active == set()
    run = Run("asp", 2)
    run.leave(1.0, 0)
    run.take(run.coordinator.stop(2.0))
    assert run.join(3.0, 0) == []
    assert column(run.trace["membership"], "change") == [Change.LEFT]


def test_a_worker_that_leaves_while_blocked_is_not_granted():
    run = Run("bsp", 2)
    run.push(1.0, 0)
    run.leave(2.0, 0)
    assert run.take(run.coordinator.stop(3.0)) == []
    assert run.push(4.0, 1) == [stop_grant(1, 2, 0)]
    assert run.leave(5.0, 1) == []
    run.coordinator.close()
    assert column(run.trace["pushes"], "worker", "outcome") == [(1, Outcome.DROPPED), (0, Outcome.DROPPED)]


def test_where_grants_come_first_they_name_the_version_before():
    run = Run("easgd", 2, lr=lambda samples, updates, n: 0.45)
    assert run.push(1.0, 1) == [reply(1, 2, 0), mean((1,), 0.45)]
    assert run.push(2.0, 0) == [reply(0, 2, 1), mean((0,), 0.45)]
    assert run.push(3.0, 1) == [reply(1, 3, 2), mean((1,), 0.45)]
    assert column(run.trace["pushes"], "worker", "version_read", "staleness") == [(1, 0, 0), (0, 0, 1), (1, 0, 2)]
    assert column(run.trace["grants"], "seq", "version") == [(2, 0), (4, 1), (6, 2)]


def test_where_grants_come_first_the_last_update_is_noticed_with_the_next_contribution():
    run = Run("easgd", 2, {"updates": 2}, synchronous=True)
    for now_s in (1.0, 2.0):
        run.push(now_s, 0)
        assert run.push(now_s + 0.5, 1)[:2] == [
            reply(0, int(now_s) + 1, now_s - 1),
            reply(1, int(now_s) + 1, now_s - 1),
        ]
    assert run.coordinator.stopping
    assert run.push(3.0, 1) == [stop_grant(1, 4, 2)]
    assert run.push(3.5, 0) == [stop_grant(0, 4, 2)]
    assert column(run.trace["pushes"], "outcome") == [Outcome.APPLIED] * 4 + [Outcome.DROPPED] * 2


@pytest.mark.parametrize("updates", [7, 8])
def test_what_the_gate_of_ashl_keeps_back_is_an_update_of_its_own_unless_one_before_ends_the_run(updates):
    """After four pushes of the profile and one of each worker in the coarse stage, worker 0's waits for worker 1's."""
    options = {"warmup": 0, "profiled": 2, "ratio_coarse": None, "ratio_fine": None, "loss_preset": 2.0}
    run = Run("ashl", 2, {"updates": updates}, **options, staleness=0, commit="after-gate")
    for now_s, worker in enumerate((0, 1, 0, 1, 0, 0, 1)):
        commands = run.push(float(now_s), worker)
        assert bool(commands) == (now_s != 5), "only the gate keeps a push back"
    assert run.coordinator.is_pending(0) and run.coordinator.version == 6
    made = [command.workers for command in run.push(7.0, 1) if isinstance(command, UpdateCommand)]
    assert made == [(1,), (0,)][: updates - 6]
    assert run.coordinator.version == updates and run.stopped >= {0}
    run.coordinator.close()
    kept = [row for row in run.trace["pushes"] if row["worker"] == 0 and row["iteration"] == 4]
    assert column(kept, "outcome", "staleness") == [
        (Outcome.DROPPED, 2) if updates == 7 else (Outcome.APPLIED, 2),
    ]
    assert column(run.trace["grants"][-2:], "worker", "version") == [(1, 7), (0, updates)]


def test_the_rate_of_an_update_is_the_learning_rate_or_how_far_the_centre_moves():
    for paradigm, rate in (({"name": "bsp"}, 0.1), ({"name": "easgd"}, 0.45), ({"name": "easgd", "alpha": 0.2}, 0.2)):
        job, trace = make_job(paradigm=paradigm, cluster={"workers": 2}), Recorder()
        coordinator = coordinate(job, trace)
        for worker in (0, 1):
            coordinator.pushed(1.0, PushInfo(1.0, worker, 1, 0, 0.5, 1.0, 0.5, 0.25, 0.125, 8, 1, 1.0, 800))
        assert set(column(trace["updates"], "lr")) == {rate}


@pytest.mark.parametrize(("scale", "rate"), [(1.0, 0.1), ("1/workers", 0.05)])
def test_pushes_that_meet_are_summed_with_the_rate_of_one(scale, rate):
    trace = Recorder()
    job = make_job(
        paradigm={"name": "ssp", "staleness": 0, "merge": True},
        optimizer={"name": "sgd", "lr": 0.1, "async_lr_scale": scale},
    )
    coordinator, size = coordinate(job, trace), job.workload.batch_size
    commands = [
        command
        for worker in (0, 1)
        for command in coordinator.pushed(1.0, PushInfo(1.0, worker, 1, 0, 0.5, 1.0, 0.5, 0.25, 0.125, size))
    ]
    assert gradient(commands, {0: 3.0, 1: 4.0}) == 7.0
    assert column(trace["updates"], "n_contributions", "lr") == [(2, rate)]
    assert column(trace["pushes"], "weight") == [1.0, 1.0]


# ---- weights of contributions ----


def partition(rng, total, n):
    """Draw n sizes of at least 1."""
    cuts = sorted(rng.sample(range(1, total), n - 1))
    return [end - begin for begin, end in itertools.pairwise([0, *cuts, total])]


def gradient(commands, contributions):
    """Return the result of these commands on a server: the accumulated sum, and the update from it."""
    total = 0.0
    for command in commands:
        if isinstance(command, AccumulateCommand):
            total += command.weight * contributions[command.worker]
        elif isinstance(command, UpdateCommand):
            pairs = zip(command.workers, command.weights, strict=True)
            return (total + sum(weight * contributions[worker] for worker, weight in pairs)) / command.divisor
    raise AssertionError("there is no update")


@pytest.mark.parametrize("batch_total", [64, 50, None])
@pytest.mark.parametrize("name", ["bsp", "k-sync"])
def test_however_a_batch_is_split_the_update_is_the_mean_over_its_samples(name, batch_total):
    rng = random.Random(5)
    options = {} if name == "bsp" else {"k": 4}
    for _ in range(50):
        sizes, samples = partition(rng, 64, 4), [rng.gauss(0, 1) for _ in range(64)]
        ends = list(itertools.accumulate(sizes))
        means = [sum(samples[end - size : end]) / size for end, size in zip(ends, sizes, strict=True)]
        run = Run(name, 4, batch_total=batch_total, **options)
        commands = [command for worker in (2, 0, 3, 1) for command in run.push(1.0, worker, sizes[worker])]
        found = gradient(commands, means)
        assert found == pytest.approx(sum(samples) / 64, abs=1e-12)
        if len(set(sizes)) > 1:
            assert sum(means) / 4 != pytest.approx(found, abs=1e-6), "the mean over workers is another"
        assert column(run.trace["pushes"], "weight") == pytest.approx([sizes[worker] / 64 for worker in (2, 0, 3, 1)])


def test_with_batches_alike_the_numbers_are_those_without_weights():
    run = Run("bsp", 3, batch_total=24)
    assert [*run.push(1.0, 2), *run.push(1.0, 0), *run.push(1.0, 1)][0] == mean((0, 1, 2), 0.1)
    run = Run("k-batch-async", 3, batch_total=24, k=2)
    assert run.push(1.0, 2)[0] == AccumulateCommand(2, 1.0)
    assert run.push(1.0, 0)[0] == UpdateCommand((0,), (1.0,), 2.0, 0.1)


def test_an_asynchronous_contribution_counts_by_its_size_against_the_mean_batch():
    run = Run("asp", 2, batch_total=16)
    assert run.push(1.0, 0, 12)[0] == UpdateCommand((0,), (1.5,), 1.0, 0.1)
    assert run.push(2.0, 1, 4)[0] == UpdateCommand((1,), (0.5,), 1.0, 0.1)
    assert column(run.trace["pushes"], "weight") == [1.5, 0.5]


def test_without_a_known_mean_batch_asynchronous_contributions_have_equal_weights():
    run = Run("asp", 2)
    assert run.push(1.0, 0, 12)[0] == run.push(2.0, 0, 3)[0] == mean((0,), 0.1)


def test_an_asynchronous_contribution_counts_less_the_staler_it_is():
    run = Run("k-async", 3, batch_total=24, k=1, staleness_weight="inverse")
    for now_s in (1.0, 2.0, 3.0):
        run.push(now_s, 0)
    assert run.push(4.0, 1, 12)[0] == UpdateCommand((1,), (12 / 8 / 3,), 1.0, 0.1)
    run.push(5.0, 2, 4)
    assert column(run.trace["pushes"], "staleness", "weight") == [
        (0, 1.0), (0, 1.0), (0, 1.0), (3, 12 / 8 / 3), (4, 4 / 8 / 4),
    ]  # fmt: skip


# ---- accumulated and cancelled contributions ----


def test_an_accumulated_contribution_leaves_its_slot_and_its_worker_continues():
    run = Run("k-batch-sync", 3, batch_total=24, k=3)
    assert run.push(1.0, 0, 6) == [AccumulateCommand(0, 6 / 8), reply(0, 2, 0, 6)]
    assert run.push(2.0, 0, 8) == [AccumulateCommand(0, 1.0), reply(0, 3, 0)]
    assert not run.trace["pushes"]
    assert run.push(3.0, 2, 10) == [UpdateCommand((2,), (10 / 8,), 3.0, 0.1), reply(2, 2, 1, 10)]
    assert column(run.trace["pushes"], "seq", "worker", "weight", "staleness") == [
        (1, 0, 6 / 24, 0),
        (3, 0, 8 / 24, 0),
        (5, 2, 10 / 24, 0),
    ]
    assert column(run.trace["updates"], "n_contributions", "samples") == [(3, 24)]


def test_accumulated_contributions_are_dropped_when_the_run_ends():
    run = Run("k-batch-async", 3, {"seconds": 4.0}, k=3)
    for now_s, worker in ((1.0, 0), (1.5, 1), (2.0, 1), (2.5, 0), (3.0, 0)):
        run.push(now_s, worker)
    assert run.take(run.coordinator.passed(4.0)) == [], "nobody waits"
    assert run.push(5.0, 1) == [stop_grant(1, 4, 1)]
    assert run.push(6.0, 0) == [stop_grant(0, 5, 1)]
    run.coordinator.close()
    rows = sorted(run.trace["pushes"], key=lambda row: row["seq"])
    assert column(rows, "outcome") == [Outcome.APPLIED] * 3 + [Outcome.DROPPED] * 4
    assert column(rows[3:], "worker", "iteration", "weight") == [(0, 2, 0.0), (0, 3, 0.0), (1, 3, 0.0), (0, 4, 0.0)]
    assert column(rows, "seq") == [1, 3, 5, 7, 9, 11, 13]
    assert run.coordinator.samples == 24


def test_an_update_of_an_accumulated_contribution_can_end_the_run():
    run = Run("k-batch-sync", 2, {"updates": 1}, k=2)
    assert isinstance(run.push(1.0, 0)[0], AccumulateCommand)
    assert run.push(2.0, 0) == [UpdateCommand((0,), (1.0,), 2.0, 0.1), stop_grant(0, 3, 1)]
    assert run.push(3.0, 1) == [stop_grant(1, 2, 1)]
    assert column(run.trace["pushes"], "worker", "outcome") == [
        (0, Outcome.APPLIED),
        (0, Outcome.APPLIED),
        (1, Outcome.DROPPED),
    ]


def test_a_worker_that_computes_from_an_old_version_is_cancelled():
    run = Run("k-sync", 3, k=1, cancel="abort")
    assert run.push(1.0, 1)[1:] == [reply(1, 2, 1), CancelCommand(0, 0), CancelCommand(2, 0)]
    assert run.push(2.0, 1)[1:] == [reply(1, 3, 2)], "who has been told is not told again"
    assert run.push(3.0, 0, share=0.5) == [reply(0, 2, 2)]
    assert run.push(4.0, 1)[1:] == [reply(1, 4, 3), CancelCommand(0, 2)]
    dropped = [row for row in run.trace["pushes"] if row["outcome"] == Outcome.DROPPED]
    assert column(dropped, "worker", "share", "staleness", "weight") == [(0, 0.5, 2, 0.0)]
    assert run.coordinator.samples == 24


def test_the_time_of_a_cancelled_iteration_is_extrapolated():
    assert PushInfo(0.5, 0, compute_s=0.5, share=0.25).iteration_s == 2.0


def test_a_push_is_timed_by_the_server_that_handles_it():
    run = Run("asp", 1)
    run.coordinator.pushed(7.0, PushInfo(math.nan, 0, comm_s=0.75, pull_s=0.5))
    assert column(run.trace["pushes"], "now_s") == [7.0]
    assert PushInfo(7.0, 0, comm_s=0.75, pull_s=0.5).push_s == 0.25


# ---- allocation of samples ----


def test_samples_are_allocated_with_grants_and_never_twice():
    run = Run("asp", 2, batch_total=16, allocator=Allocator(2, 16, maxima=[math.inf] * 2))
    assert run.push(1.0, 1)[1] == reply(1, 2, 1, 8, 16)
    assert run.push(2.0, 1)[1] == reply(1, 3, 2, 8, 24)
    assert run.push(3.0, 0)[1] == reply(0, 2, 3, 8, 32)
    run.take(run.coordinator.stop(3.5))
    assert run.push(4.0, 0) == [stop_grant(0, 3, 3)], "a stop takes no samples"
    assert column(run.trace["grants"], "first_sample", "batch_size") == [(16, 8), (24, 8), (32, 8), (-1, 0)]


def test_sizes_are_decided_before_the_grants_that_bring_them():
    run = Run("bsp", 2, batch_total=16, allocator=Allocator(2, 16, maxima=[math.inf] * 2, interval=1))
    run.push(1.0, 0, predicted_fixed_s=0.0, predicted_sample_s=1.0)
    commands = run.push(2.0, 1, predicted_fixed_s=0.0, predicted_sample_s=3.0)
    assert commands == [mean((0, 1), 0.1), reply(0, 2, 1, 12, 16), reply(1, 2, 1, 4, 28)]
    assert column(run.trace["decisions"], "seq", "now_s", "controller", "worker", "chosen", "batch_before") == [
        (3, 2.0, "batches", 0, 12.0, 8.0),
        (4, 2.0, "batches", 1, 4.0, 8.0),
    ]
    assert column(run.trace["decisions"], "gain") == [0.5, 0.5]


def test_decisions_of_two_controllers_leave_each_others_columns_open():
    batches = Allocator(3, 24, maxima=[math.inf] * 3, interval=1)
    run = Run("k-sync", 3, batch_total=24, allocator=batches, k="state", k_start=2)
    for now_s in range(1, 70):
        for worker in range(3):
            if worker in run.granted:
                size = batches.sizes[worker]
                sample_s = 1.0 + 4.0 * (worker == 2)
                run.push(float(now_s), worker, size, predicted_fixed_s=0.0, predicted_sample_s=sample_s)
    run.leave(70.0, 1)
    by = {name: [row for row in run.trace["decisions"] if row["controller"] == name] for name in ("k", "batches")}
    own = {"k": create("k-sync", 3, k="state").decision_fields, "batches": Allocator.decision_fields}
    assert by["k"] and by["batches"]
    for name, other in (("k", "batches"), ("batches", "k")):
        assert all(math.isnan(row[field]) for row in by[name] for field in own[other])
    assert not any(math.isnan(row["batch_before"]) for row in by["batches"])


def test_local_steps_are_those_of_the_grant_or_of_the_job():
    plain, several = Grant(0, 2), Grant(1, 2, local_steps=5, ratio=0.25)
    of_the_job, sequential = Assignments([plain], local_steps=3), Assignments([plain], step_samples=8)
    until = Grant(1, 3, local_steps=UNTIL, commit_s=0.5)
    assert of_the_job.first == [plain._replace(local_steps=3)]
    assert of_the_job.next(plain, plain.version) == plain._replace(local_steps=3), "the worker knows"
    for worker in (0, 1):
        of_the_job.pushed(worker, 24, 3)
    assert of_the_job.next(plain, plain.version) == plain._replace(batch_size=24, local_steps=3)
    assert of_the_job.next(several, several.version) == several._replace(batch_size=40)
    assert of_the_job.next(until, until.version) == until._replace(batch_size=8), "of one local step"
    assert sequential.first == [plain._replace(first_sample=0, batch_size=8, local_steps=1)]
    assert sequential.next(several, several.version) == several._replace(first_sample=8, batch_size=40)
    sequential.pushed(1, 40, 5)
    assert sequential.next(plain, plain.version) == plain._replace(first_sample=48, batch_size=8, local_steps=1)


def test_the_others_get_the_samples_of_a_worker_that_left():
    run = Run("asp", 3, batch_total=24, allocator=Allocator(3, 24, maxima=[math.inf] * 3))
    run.leave(1.0, 0)
    assert column(run.trace["decisions"], "worker", "chosen") == [(1, 12.0), (2, 12.0)]
    assert run.push(2.0, 1)[1] == reply(1, 2, 1, 12, 24)
    run.join(3.0, 0)
    assert column(run.trace["decisions"], "now_s", "worker", "chosen")[2:] == [(3.0, i, 8.0) for i in range(3)]


def test_once_the_run_stops_no_sizes_are_decided():
    run = Run("asp", 2, batch_total=16, allocator=Allocator(2, 16, maxima=[math.inf] * 2, interval=1))
    run.take(run.coordinator.stop(0.5))
    for worker in (0, 1):
        run.push(1.0, worker, predicted_fixed_s=0.0, predicted_sample_s=1.0 + worker)
    run.leave(2.0, 0)
    assert run.trace["decisions"] == []


def first_work(job):
    """Return first sample, samples and local steps of the first iterations."""
    return [(grant.first_sample, grant.batch_size, grant.local_steps) for grant in create_assignments(job).first]


def test_the_first_samples_are_those_of_the_job():
    settings = {"policy": "proportional", "total": 10}
    timing = {"workload": {"name": "timing", "batch_size": 8}, "cluster": {"workers": 3}}
    assert first_work(make_job(**timing)) == [(-1, 0, 1)] * 3
    uneven = make_job(**timing, batches=settings)
    assert first_work(uneven) == [(0, 4, 1), (4, 3, 1), (7, 3, 1)]
    elastic = make_job(**timing, batches=settings, paradigm={"name": "easgd", "period": 2})
    assert first_work(elastic) == [(0, 8, 2), (8, 6, 2), (14, 6, 2)]


# ---- whole runs ----

PARADIGMS = [
    ("bsp", {}),
    ("asp", {}),
    ("ssp", {"staleness": 1}),
    ("dssp", {"staleness_min": 1, "staleness_max": 4}),
    ("dssp", {"staleness_min": 0, "staleness_max": 3, "mode": "paper"}),
    ("easgd", {}),
    ("easgd", {"synchronous": True}),
    ("k-sync", {"k": 1, "cancel": "abort"}),
    ("k-batch-sync", {"k": "state"}),
    ("k-async", {"k": "loss", "staleness_max": None}),
    ("k-batch-async", {"k": 1, "staleness_weight": "inverse"}),
]


def play(name, options, seed) -> Run:
    """A run with random speeds, a departure, and an end by updates, by the clock or by the departure of all workers."""
    rng = random.Random(seed)
    n_workers = rng.randint(1, 5)
    stop = rng.choice([{"updates": 30}, {"seconds": 25.0}, {"samples": 200}, {}])
    run = Run(name, n_workers, stop, **options)
    now_s, leaves = 0.0, {worker: rng.randint(2, 40) for worker in range(n_workers)}
    while run.coordinator.active:
        now_s += rng.random()
        run.take(run.coordinator.passed(now_s))
        able = sorted(run.granted.keys() | run.stopped)
        assert able, "everybody waits for ever"
        worker = rng.choice(able)
        if worker in run.stopped or run.granted[worker][0] > leaves[worker]:
            run.stopped.discard(worker)
            run.leave(now_s, worker)
        else:
            run.push(now_s, worker, rng.randint(1, 9))
    run.coordinator.close()
    return run


def recount(run: Run) -> None:
    """Assert from the rows alone that they are consistent."""
    trace, coordinator = run.trace, run.coordinator
    pushes = sorted(trace["pushes"], key=lambda row: row["seq"])
    events = [*pushes, *trace["grants"], *trace["decisions"], *trace["membership"]]
    assert sorted(column(events, "seq")) == list(range(1, len(events) + 1))
    times = column(sorted(events, key=lambda row: row["seq"]), "now_s")
    assert times == sorted(times)
    assert column(trace["updates"], "version") == list(range(1, coordinator.version + 1))
    applied = [row for row in pushes if row["outcome"] == Outcome.APPLIED]
    assert sum(column(trace["updates"], "n_contributions")) == len(applied)
    assert sum(column(applied, "batch_size")) == coordinator.samples == max([0, *column(trace["updates"], "samples")])
    answered = {(row["worker"], row["iteration"] - 1): row for row in trace["grants"]}
    assert len(answered) == len(trace["grants"]) == len(pushes), "a push without, or with two answers"
    for row in pushes:
        grant = answered[row["worker"], row["iteration"]]
        assert grant["seq"] > row["seq"]
        assert grant["held_s"] == grant["now_s"] - row["now_s"]
    _recount_staleness(trace)
    assert all((row["weight"] > 0) == (row["outcome"] == Outcome.APPLIED) for row in pushes)


def _recount_staleness(trace: Recorder) -> None:
    """In the order in which they were appended, an update's pushes follow it, and so do drops their time."""
    version = 0
    for table, values in trace.rows:
        row = trace.named(table, values)
        if table == "updates":
            version = row["version"]
        elif table == "pushes":
            newest = version - 1 if row["outcome"] == Outcome.APPLIED else version
            assert row["staleness"] == newest - row["version_read"] >= 0, "staleness"


@pytest.mark.parametrize(("name", "options"), PARADIGMS)
def test_the_rows_of_random_runs_are_consistent(name, options):
    runs = [play(name, options, seed) for seed in range(40)]
    for run in runs:
        recount(run)
    assert any(run.coordinator.stopping for run in runs)
    assert any(row["outcome"] == Outcome.DROPPED for run in runs for row in run.trace["pushes"])
    if name not in ("bsp", "k-sync", "k-batch-sync") and not options.get("synchronous"):
        assert any(row["staleness"] > 1 for run in runs for row in run.trace["pushes"])


class Forgetful(Coordinator):
    """Leaves one blocked worker without a grant at the end."""

    def _end(self, now_s):
        self._blocked.pop(min(self._blocked, default=None), None)
        return super()._end(now_s)


class CountsPushes(Coordinator):
    """Counts one update too many in the staleness of a push."""

    def _record_push(self, contribution, weight, outcome):
        self.version += 1
        super()._record_push(contribution, weight, outcome)
        self.version -= 1


@pytest.mark.parametrize(("broken", "seen"), [(Forgetful, "waits for ever"), (CountsPushes, "staleness")])
def test_the_recount_sees(broken, seen, monkeypatch):
    monkeypatch.setitem(globals(), "Coordinator", broken)
    with pytest.raises(AssertionError, match=seen):
        for seed in range(40):
            recount(play("ssp", {"staleness": 0}, seed))


# ---- times that a paradigm sets ----


class Impatient(BSP):
    """BSP that continues without the others two seconds after the first of them."""

    @property
    def due(self):
        if not self._blocked_since_s:
            return None
        worker, since_s = min(self._blocked_since_s.items(), key=lambda item: item[1])
        return Elapsed(since_s + 2.0, worker)

    def _elapsed(self, worker):
        workers = tuple(sorted(self._blocked_since_s))
        return [Apply(workers), *(self._grant(blocked) for blocked in workers)]


def impatient(**stop):
    run = Run("bsp", 3, stop)
    run.coordinator._paradigm = Impatient(3)
    return run


@pytest.mark.parametrize("now_s", [3.0, 3.25])
def test_a_paradigm_is_told_when_the_time_that_it_set_has_come(now_s):
    run = impatient()
    run.push(1.0, 2)
    run.push(2.0, 0)
    assert run.coordinator.due == Elapsed(3.0, 2)
    assert run.take(run.coordinator.passed(2.5)) == []
    assert run.take(run.coordinator.passed(now_s)) == [mean((0, 2), 0.1), reply(0, 2, 1), reply(2, 2, 1)]
    assert run.coordinator.due is None
    assert run.take(run.coordinator.passed(9.0)) == []
    names = ("seq", "now_s", "controller", "worker", "chosen")
    assert column(run.trace["decisions"], *names) == [(3, now_s, "elapsed", 2, 3.0)]
    assert column(run.trace["updates"], "now_s", "n_contributions") == [(now_s, 2)]
    assert column(run.trace["grants"], "seq", "now_s", "held_s") == [(4, now_s, now_s - 2.0), (5, now_s, now_s - 1.0)]


def test_other_events_may_come_before_and_nothing_is_due_after_the_end():
    run = impatient(seconds=6.0)
    for worker in range(3):
        run.push(1.0, worker)
    assert run.coordinator.due is None, "all have come"
    run.push(4.0, 0)
    assert run.coordinator.due == Elapsed(6.0, 0)
    assert run.take(run.coordinator.passed(6.0)) == [stop_grant(0, 3, 1)], "the run ends first"
    assert run.coordinator.due is None
    assert run.trace["decisions"] == []
