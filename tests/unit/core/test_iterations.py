"""A worker's iterations: batches in the job's order, padded to the job's times, until the run is stopped."""

import itertools
import os
import time
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hpcsync.config.errors import JobError
from hpcsync.core.iterations import CALL_S, Iterations
from hpcsync.core.session import Asked
from hpcsync.training.sampler import batches, sequence_indices
from tests.unit.jobs import make_job

DATA = TensorDataset(torch.arange(22))


class Numbers(torch.utils.data.IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


def make_iterations(worker=0, workers=2, compute=None, now=time.perf_counter, events=(), **settings) -> Iterations:
    cluster = {"workers": workers, "events": list(events), **({"compute": compute} if compute else {})}
    return Iterations(make_job(cluster=cluster, seed=9), worker, now, **settings)


def samples(loader) -> list[list[int]]:
    return [x.tolist() for (x,) in loader]


def expected(epochs: range, worker=0) -> list[list[int]]:
    return samples(batches(DATA, 9, worker, n_workers=2, batch_size=4, epochs=epochs))


@pytest.mark.parametrize("worker", [0, 1])
def test_several_loaders_continue_as_one_of_more_training_epochs(worker):
    iterations = make_iterations(worker)
    found = [samples(iterations.shard(Asked(DATA, 4, epochs))) for epochs in (1, 0, 2)]
    assert found == [expected(range(1), worker), [], expected(range(1, 3), worker)]
    assert samples(make_iterations(worker).shard(Asked(DATA, 4, 3))) == found[0] + found[2]


def epochs_left_early(iterations: Iterations) -> Iterator[list[int]]:
    """Train on the first two batches of each of three epochs."""
    for _ in range(3):
        left = 2
        for (x,) in iterations.shard(Asked(DATA, 4, 1)):
            iterations.end()
            yield x.tolist()
            if (left := left - 1) == 0:
                break


def test_epochs_that_the_loop_left_early_are_over_after_a_resume_too():
    iterations = make_iterations()
    whole, trains = [], epochs_left_early(iterations)
    states = [iterations.state() for batch in trains if not whole.append(batch)]
    assert len(whole) == 6
    resumed = make_iterations()
    resumed.restore(states[2])  # in the middle of the second epoch, of which the loop now makes two batches more
    rest = list(epochs_left_early(resumed))
    assert rest[0] == whole[3] and rest[-2:] == whole[4:]


def two_loaders_at_once(iterations: Iterations) -> Iterator[tuple[list[int], list[int]]]:
    """Train for two epochs with a batch of each of two loaders in a step, of which the second has more batches."""
    for _ in range(2):
        for (x,), (y,) in zip(iterations.shard(Asked(DATA, 4, 1)), iterations.shard(Asked(DATA, 2, 1)), strict=False):
            iterations.end()
            yield x.tolist(), y.tolist()


@pytest.mark.parametrize("format_6", [False, True])
def test_each_of_several_loaders_resumes_after_its_own_batches(format_6):
    """The control: checkpoints of before have the sum of their batches only."""
    iterations = make_iterations()
    whole, rests = [], []
    for step in two_loaders_at_once(iterations):
        whole.append(step)
        state = iterations.state()
        if format_6:
            state |= {"used_by": [], "first_by": [], "training_epochs": 0}
        resumed = make_iterations()
        resumed.restore(state)
        rests.append(list(two_loaders_at_once(resumed)))
    assert len(whole) == 6
    assert (rests == [whole[n_done:] for n_done in range(1, 7)]) != format_6


def test_a_loader_of_which_only_the_length_is_asked_has_no_epoch():
    """As for a scheduler: ``total_steps=len(sync.shard(data, batch_size, 1))``. The control: one that is read has."""
    iterations = make_iterations()
    asked, first, second = (iterations.shard(Asked(DATA, 4, 1)) for _ in range(3))
    assert len(asked) == 3
    assert samples(second) == expected(range(1))
    assert samples(first) == expected(range(1, 2))


def test_a_further_loader_takes_no_pass_over_those_before():
    """A script may have a loader for each of many short epochs."""
    passes = []

    class Passed(list[int]):
        def __iter__(self) -> Iterator[int]:
            passes.append(len(self))
            return super().__iter__()

    iterations = make_iterations()
    iterations._used_by = Passed()
    for _ in range(3):
        loader = iterations.shard(Asked(DATA, 4, 1))
        assert len(loader) == len(samples(loader)) > 0
    assert passes == []


def test_a_checkpoint_of_before_may_be_resumed_twice():
    """Its sum is divided among the loaders as they skip their batches."""
    iterations = make_iterations()
    whole = [x.tolist() for _ in range(3) for (x,) in iterations.shard(Asked(DATA, 4, 1)) if iterations.end()]
    state = make_iterations().state() | {"used": 4}
    for n_done in (4, 6):
        iterations = make_iterations()
        iterations.restore(state)
        rest = (x.tolist() for _ in range(3) for (x,) in iterations.shard(Asked(DATA, 4, 1)) if iterations.end())
        assert [next(rest), next(rest)] == whole[n_done : n_done + 2]
        state = iterations.state()


@pytest.mark.parametrize(("unused", "n_samples", "begin_s"), [(True, 4, 20.0), (False, 8, 10.0)])
def test_a_batch_with_which_the_loop_was_left_belongs_to_no_step(unused, n_samples, begin_s):
    """As in ``for i, batch in enumerate(loader): if i == 1: break``. The control: its gradient accumulates."""
    clock = [0.0]

    def now():
        return clock[0]

    iterations = make_iterations(now=now, unused=lambda: unused)
    for _ in iterations.shard(Asked(DATA, 4, 1)):
        if iterations.batch_size == 4 and clock[0] == 10.0:
            break
        iterations.end()
        clock[0] = 10.0
    clock[0] = 20.0  # after a validation
    ((x,),) = itertools.islice(loader := iterations.shard(Asked(DATA, 4, 1)), 1)
    assert x.tolist() == expected(range(1, 2))[0]
    assert (iterations.end(), iterations.batch_size) == ((begin_s, 20.0), n_samples)
    resumed = make_iterations()
    resumed.restore(iterations.state())
    assert samples(resumed.shard(Asked(DATA, 4, 1))) == []  # the epoch that was left
    assert samples(resumed.shard(Asked(DATA, 4, 1))) == samples(loader)


def test_a_loader_within_the_loop_of_another_leaves_its_batch():
    iterations = make_iterations(unused=lambda: True)
    for _ in iterations.shard(Asked(DATA, 4, 1)):
        next(iterations.shard(Asked(DATA, 4, 1)))
        break
    assert (iterations.batch_size, iterations.under_way) == (8, True)


def test_batches_that_are_allocated_by_the_step_are_not_accumulated():
    iterations = make_iterations(allocated=lambda: (0, 4))
    with pytest.raises(JobError, match="accumulate = 2: must be 1 where batches are allocated"):
        next(iterations.shard(Asked(DATA, 4, 1, accumulate=2)))


def test_a_loader_without_end_continues_too():
    iterations = make_iterations()
    samples(iterations.shard(Asked(DATA, 4, 1)))
    endless = iterations.shard(Asked(DATA, 4, None))
    assert samples(itertools.islice(endless, 12)) == expected(range(1, 9))[:12]


@pytest.mark.parametrize(("epochs", "told"), [([3], [0, 1, 2]), ([1, 2], [1, 2]), ([1, 1], [])])
def test_a_loader_of_several_training_epochs_tells_its_data_each_of_them(epochs, told):
    """With a loader for each of them the script itself does."""

    class Told(Numbers):
        def set_epoch(self, epoch: int) -> None:
            epochs_told.append(epoch)

    epochs_told: list[int] = []
    data, iterations = DataLoader(Told(16), 4), make_iterations()
    for n in epochs:
        assert len(list(iterations.shard(Asked(data, None, n)))) == 2 * n
    assert epochs_told == told


def test_a_loader_ends_when_the_run_is_stopped():
    seen = []
    for (x,) in make_iterations(stopped=lambda: len(seen) == 2).shard(Asked(DATA, 4, None)):
        seen.append(x)
    assert len(seen) == 2
    assert list(make_iterations(stopped=lambda: True).shard(Asked(DATA, 4, None))) == []


@pytest.mark.parametrize("sharded", [False, True])
def test_a_worker_without_a_batch_in_endless_epochs_is_an_error_and_no_endless_loop(sharded):
    loader = DataLoader(Numbers(0 if sharded else 4), 4)
    with pytest.raises(JobError, match="worker 1 has no batch in a training epoch"):
        next(make_iterations(1).shard(Asked(loader, None, None, sharded=sharded)))
    assert list(make_iterations(1).shard(Asked(loader, None, 2, sharded=sharded))) == []
    assert sharded or next(make_iterations(0).shard(Asked(loader, None, None))).tolist() == [0, 1, 2, 3]


def guesses() -> Iterator[torch.Tensor]:
    """Batches without an end, from the global generator."""
    return iter(lambda: torch.rand(4), None)


@pytest.mark.parametrize("epochs", [1, None])
def test_an_iterator_of_batches_is_one_training_epoch(epochs):
    of_worker = [list(make_iterations(w).shard(Asked(iter(range(4, 9)), 2, epochs))) for w in range(2)]
    assert [[x.tolist() for x in found] for found in of_worker] == [[[4, 5], [8]], [[6, 7]]]
    with pytest.raises(JobError, match="shard: epochs = 2: must be 1 with a range_iterator, which can be read only on"):
        make_iterations().shard(Asked(iter(range(4)), 2, 2))
    with pytest.raises(TypeError, match="only reading tells"):
        len(make_iterations().shard(Asked(guesses(), None, epochs)))


def test_a_run_resumes_in_an_iterator_with_the_numbers_that_it_would_have_drawn():
    def trained(iterations: Iterations, n: int) -> list[list[float]]:
        found = []
        for x in itertools.islice(iterations.shard(Asked(guesses(), None, None, sharded=True)), n):
            iterations.end()
            found.append(x.tolist())
        return found

    whole, first, resumed = make_iterations(1), make_iterations(1), make_iterations(1)
    expected = trained(whole, 5)
    assert trained(first, 2) == expected[:2]
    resumed.restore(first.state())
    assert trained(resumed, 3) == expected[2:]


def test_a_small_data_set_is_an_error_and_not_an_empty_loader():
    with pytest.raises(JobError, match="batch_size = 23: must be 1 to 22"):
        list(make_iterations().shard(Asked(DATA, 23, 1)))


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_a_batch_without_samples_is_refused(sizes):
    loader = DataLoader([torch.ones(size, 2) for size in sizes], batch_size=None)
    message = "shard: the first tensor of a batch has length 0: every batch must have a sample"
    with pytest.raises(JobError, match=f"^{message}$"):
        list(make_iterations(workers=1).shard(Asked(loader, None, 1)))


def test_without_data_the_batches_are_empty_and_without_end():
    loader = make_iterations().shard(Asked(None, 4, None))
    assert list(itertools.islice(loader, 30)) == [()] * 30


def test_an_iteration_knows_its_batch_size():
    iterations = make_iterations()
    next(iterations.shard(Asked(DATA, 4, 1)))
    assert iterations.batch_size == 4
    iterations.end()
    next(iterations.shard(Asked(DATA, 5, 1)))
    assert iterations.batch_size == 5


def test_batches_between_two_steps_are_one_iteration():
    times = iter([1.0, 1.5, 3.0, 3.25, 4.0, 6.0, 7.0, 7.0, 7.0, 9.0])
    over = False
    iterations = make_iterations(now=lambda: next(times), stopped=lambda: over)
    loader = iterations.shard(Asked(DATA, 4, None))
    next(loader)
    next(loader)
    assert (iterations.batch_size, iterations.end()) == (8, (1.0, 4.0))
    assert (iterations.load_s, iterations.computed_s) == (0.75, 2.25)
    iterations.begin_again()
    assert (iterations.batch_size, iterations.end()) == (8, (6.0, 7.0))
    assert (iterations.load_s, iterations.computed_s) == (0.0, 1.0)
    next(loader)
    iterations.end()
    over = True
    assert iterations.left_over, "it drew ahead at its first step"
    resumed = make_iterations()
    resumed.restore(iterations.state())
    assert samples(resumed.shard(Asked(DATA, 4, 2))) == expected(range(2))[3:]
    assert expected(range(2))[3:] != expected(range(2))[2:]


def test_an_iteration_begins_when_its_batch_is_requested_and_ends_unpadded():
    times = iter([1.0, 1.5, 4.0, 6.0, 6.0, 9.0])
    over = False
    iterations = make_iterations(now=lambda: next(times), stopped=lambda: over)
    loader = iterations.shard(Asked(DATA, 4, 1))
    next(loader)
    assert (iterations.end(), iterations.load_s, iterations.computed_s) == ((1.0, 4.0), 0.5, 2.5)
    next(loader)
    assert (iterations.end(), iterations.load_s, iterations.computed_s) == ((6.0, 9.0), 0.0, 3.0)
    over = True
    assert not iterations.left_over


@pytest.mark.parametrize(
    ("n_optimizers", "ahead", "unused", "begins"),
    [(1, False, False, False), (2, False, True, True), (1, True, False, True), (1, True, True, False)],
)
def test_which_steps_without_a_batch_begin_another_iteration(n_optimizers, ahead, unused, begins):
    now, over, settings = itertools.count(), False, {"n_optimizers": n_optimizers, "unused": lambda: unused}
    iterations = make_iterations(now=lambda: float(next(now)), stopped=lambda: over, **settings)
    loader = iterations.shard(Asked(DATA, 4, None))
    for _ in range(1 + ahead):
        next(loader)
    iterations.begin_again()
    assert not iterations.left_over
    over = True
    assert iterations.left_over
    assert iterations.end()[0] == 0.0, "one that is under way continues"
    assert iterations.left_over == (ahead or n_optimizers > 1)
    iterations.begin_again()
    assert iterations.under_way == begins


def test_the_length_of_a_resumed_loader_is_that_of_the_rest():
    iterations = make_iterations()
    loader = iterations.shard(Asked(DATA, 4, 3))
    n_batches = len(loader)
    for n_used, _ in enumerate(loader):
        resumed = make_iterations()
        resumed.restore(iterations.state())
        assert len(resumed.shard(Asked(DATA, 4, 3))) == n_batches - n_used
        iterations.end()


class Slow(torch.utils.data.Dataset):
    """A data set that takes a time to load a sample."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Clock that advances by sleeping."""
    clock = [10.0]
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    return clock


@pytest.mark.parametrize(("computed_s", "slept_s"), [(0.2, 0.3), (0.5, 0.0), (2.0, 0.0)])
def test_an_iteration_is_padded_up_to_its_time(clock, computed_s, slept_s):
    iterations = make_iterations(worker=1, compute={"model": "constant", "seconds": [9.0, 0.5]}, now=lambda: clock[0])
    next(iterations.shard(Asked(DATA, 4, 1)))
    clock[0] += computed_s
    assert iterations.end() == (10.0, pytest.approx(10.0 + computed_s + slept_s))


def test_no_sleep_is_longer_than_the_system_takes(clock, monkeypatch):
    slept_s, sleep = [], time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept_s.append(seconds), sleep(seconds)))
    iterations = make_iterations(compute={"model": "constant", "seconds": 1e10}, now=lambda: clock[0])
    next(iterations.shard(Asked(DATA, 4, 1)))
    assert iterations.end() == (10.0, pytest.approx(1e10 + 10.0))
    assert max(slept_s) < 9.2e9


def test_loading_is_not_padded(clock):
    """The times of a device are those of computing."""
    iterations = make_iterations(compute={"model": "constant", "seconds": 0.5}, now=lambda: clock[0])
    next(iterations.shard(Asked(Slow(0.25), 4, 1)))
    clock[0] += 0.125
    assert iterations.end() == (10.0, 11.5)
    assert (iterations.load_s, iterations.computed_s) == (1.0, 0.5)


def test_padding_leaves_time_for_calls(clock):
    """As within a computation; without a callback the padding is one sleep."""
    calls = []
    compute = {"model": "constant", "seconds": 0.5}
    iterations = make_iterations(compute=compute, now=lambda: clock[0], while_padding=lambda: calls.append(clock[0]))
    next(iterations.shard(Asked(DATA, 4, 1)))
    begin_s, end_s = iterations.end()
    assert end_s - begin_s == pytest.approx(0.5)
    assert len(calls) == pytest.approx(0.5 / CALL_S, abs=2)


def test_a_share_of_an_iteration_takes_that_share_of_its_time(clock):
    iterations = make_iterations(compute={"model": "constant", "seconds": 0.5}, now=lambda: clock[0])
    loader = iterations.shard(Asked(DATA, 4, None))
    next(loader)
    for share in (0.25, 0.5):
        iterations.pad(share)
        assert clock[0] == pytest.approx(10.0 + share * 0.5)
    assert iterations.end(0.5) == (10.0, pytest.approx(10.25)), "what is cancelled then"
    next(loader)
    assert iterations.end() == (pytest.approx(10.25), pytest.approx(10.75))


def test_each_part_of_an_iteration_takes_its_share_of_the_time(clock):
    iterations = make_iterations(compute={"model": "constant", "seconds": 0.5}, now=lambda: clock[0])
    loader = iterations.shard(Asked(DATA, 4, None))
    for begin_s in (10.0, 11.5):
        next(loader)
        for share in (0.25, 0.75):
            clock[0] += 0.5  # the wait for another worker
            iterations.resume()
            clock[0] += 0.0625
            iterations.rest(share)
        assert iterations.end() == (begin_s, pytest.approx(begin_s + 1.5))
        assert iterations.computed_s == pytest.approx(0.5)
    next(loader)
    assert iterations.end() == (13.0, pytest.approx(13.5)), "the control: as a whole"


def test_a_share_without_a_batch_is_refused():
    with pytest.raises(JobError, match=r"step was called without a batch: the loop must run over sync.shard\(loader\)"):
        make_iterations().pad(0.5)


# ---- what a script may give ----


class Counting(torch.utils.data.Dataset):
    """Samples that are their indices, and a list of those that were loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(22))


def shuffled() -> DataLoader:
    return DataLoader(Counting(), 4, shuffle=True, collate_fn=list)


def drawn() -> DataLoader:
    generator = torch.Generator().manual_seed(2)
    sampler = torch.utils.data.RandomSampler(range(22), True, 30, generator=generator)
    return DataLoader(Counting(), 4, sampler=sampler, collate_fn=list)


def streamed() -> DataLoader:
    return DataLoader(Stream(), 4, collate_fn=list)


def trained(iterations: Iterations, loader: DataLoader, epochs: list[int]) -> Iterator[list[int]]:
    for n_epochs in epochs:
        for batch in iterations.shard(Asked(loader, None, n_epochs)):
            yield batch
            iterations.end()


@pytest.mark.parametrize("epochs", [[1, 1, 1], [3]], ids=["one-by-one", "at-once"])
@pytest.mark.parametrize("make", [shuffled, drawn, streamed])
def test_a_resumed_worker_continues_with_its_next_batch(make, epochs):
    whole = list(trained(make_iterations(), make(), epochs))
    assert len(whole) == {shuffled: 8, drawn: 12, streamed: 9}[make]
    for n_used in range(len(whole)):
        iterations, loader = make_iterations(), make()
        before = list(itertools.islice(trained(iterations, loader, epochs), n_used + 1))  # the last one is not stepped
        resumed, loader = make_iterations(), make()
        resumed.restore(iterations.state())
        after = list(trained(resumed, loader, epochs))
        assert before[:n_used] + after == whole
        if make is not streamed:
            assert loader.dataset.loaded == [i for batch in after for i in batch], "what was used is not loaded"


def test_the_lengths_of_streams_are_part_of_the_state():
    """The control: without them a resumed worker reads its used batches from the wrong training epoch."""
    iterations = make_iterations()
    whole = list(trained(make_iterations(), streamed(), [2]))
    list(itertools.islice(trained(iterations, streamed(), [2]), 5))
    assert iterations.state()["lengths"][0] == 3
    resumed = make_iterations()
    resumed.restore({**iterations.state(), "lengths": {0: 1}})
    assert list(trained(resumed, streamed(), [2])) != whole[4:]


class Processes(Stream):
    def __iter__(self):
        return iter([os.getpid()] * 4)


def test_a_loader_keeps_its_persistent_processes():
    for persistent in (True, False):
        loader = DataLoader(Processes(), 4, num_workers=1, persistent_workers=persistent, collate_fn=list)
        found = list(trained(make_iterations(workers=1), loader, [1, 1]))
        assert (found[0] == found[1]) == persistent


def of_script(worker: int, workers: int) -> Iterations:
    job = make_job(cluster={"workers": workers}, seed=9, workload={"name": "script"})
    return Iterations(job, worker, time.perf_counter)


def test_what_is_left_out_is_said_once_by_one_worker_of_a_script(capsys):
    for worker in range(2):
        iterations = of_script(worker, 2)
        list(trained(iterations, shuffled(), [1, 1]))
        list(trained(iterations, streamed(), [1, 1]))
    assert capsys.readouterr().out == (
        "shard: 2 of 22 samples are left out in each training epoch, because whole batches of 4 are used\n"
    )
    list(trained(make_iterations(), shuffled(), [1, 1]))
    assert capsys.readouterr().out == "", "a job says nothing"


def test_streams_that_end_apart_are_said_once(capsys):
    list(trained(of_script(0, 4), streamed(), [1, 1]))
    assert capsys.readouterr().out == (
        "shard: 6 batches in a training epoch for 4 workers: workers 0 to 1 use one more than the others\n"
    )


def separated(worker: int) -> Iterations:
    """Return the iterations of one of four workers, of which the first computes with the batches of the others."""
    paradigm = {"name": "stanza", "cut": "0", "fc_workers": 1, "fc_share": 0.5}
    cluster = {"workers": 4, "servers": 0}
    job = make_job(cluster=cluster, seed=9, workload={"name": "script"}, paradigm=paradigm)
    return Iterations(job, worker, time.perf_counter)


def test_workers_with_separated_layers_make_equally_many_iterations(capsys):
    assert [len(list(trained(separated(worker), shuffled(), [1]))) for worker in range(4)] == [1] * 4
    assert capsys.readouterr().out == (
        "shard: 2 of 22 samples are left out in each training epoch, because whole batches of 4 are used\n"
        "shard: 2 of 5 batches are left out at the end of the loop, because all workers make equally many iterations\n"
    )
    for make in (drawn, streamed):
        with pytest.raises(JobError, match='paradigm.name = "stanza" needs samples with indices in the run'):
            next(trained(separated(1), make(), [1]))


@pytest.mark.parametrize("skipped", [0, 2, 99])
def test_the_number_of_batches_is_known_where_workers_compute_with_those_of_others(skipped):
    for worker in range(3):
        iterations = separated(worker)
        iterations.skip(skipped)
        batches = iterations.shard(Asked(DATA, 4, 2))
        assert len(batches) == len([*batches])


def test_the_number_of_batches_after_an_epoch_that_the_loop_left_early():
    iterations = make_iterations()
    trains = epochs_left_early(iterations)
    states = [iterations.state() for _ in trains]
    resumed = make_iterations()
    resumed.restore(states[2])
    lengths = []
    for _ in range(3):
        left = resumed.shard(Asked(DATA, 4, 1))
        lengths.append(len(left))
        assert len([*left]) == lengths[-1]
    assert lengths[0] == 0 < lengths[1] < lengths[2]


def test_the_batch_size_of_a_loader_is_known():
    for worker, expected in enumerate([[4, 4, 4], [4, 4, 2]]):
        iterations = make_iterations(worker)
        assert [iterations.batch_size for _ in trained(iterations, streamed(), [1])] == expected


def test_allocated_batches_have_the_scripts_collate_fn():
    iterations = allocated(WORK)
    found = []
    for batch in iterations.shard(Asked(shuffled(), None, 3)):
        found.append(batch)
        iterations.end()
    assert found == [sequence(*work) for work in WORK[:-1]]


# ---- allocated batches ----


def allocated(work, **settings) -> Iterations:
    """Allocate the next of these when an iteration has ended."""
    given, iterations = list(work), None

    def next_work() -> tuple[int, int]:
        return given[0]

    iterations = make_iterations(allocated=next_work, **settings)
    ended = iterations.end

    def end(share: float = 1.0) -> tuple[float, float]:
        given.pop(0)
        return ended(share)

    iterations.end = end
    return iterations


def stepped(iterations, loader) -> list[list[int]]:
    found = []
    for (x,) in loader:
        assert iterations.batch_size == len(x)
        found.append(x.tolist())
        iterations.end()
    return found


def sequence(first: int, n_samples: int) -> list[int]:
    return sequence_indices(9, first, n_samples, size=22).tolist()


WORK = [(0, 3), (10, 5), (20, 4), (24, 1), (50, 2), (70, 9)]


def test_batches_are_the_allocated_samples_of_the_epoch_in_which_they_begin():
    """The third extends over the end of the first training epoch; the last is of the fourth, which is not requested."""
    iterations = allocated(WORK)
    found = [stepped(iterations, iterations.shard(Asked(DATA, 4, epochs))) for epochs in (1, 0, 1, 1)]
    assert found == [
        [sequence(0, 3), sequence(10, 5), sequence(20, 4)],
        [],
        [sequence(24, 1)],
        [sequence(50, 2)],
    ]
    iterations = allocated(WORK)
    assert stepped(iterations, iterations.shard(Asked(DATA, 4, 3))) == [sequence(*work) for work in WORK[:-1]]


def test_allocated_samples_that_were_not_computed_come_again():
    iterations = allocated(WORK)
    for _ in range(2):
        (x,) = next(iterations.shard(Asked(DATA, 4, None)))
        assert x.tolist() == sequence(0, 3)


def test_batches_of_another_size_take_another_time(clock):
    compute = {"model": "constant", "seconds": 0.5, "fixed_share": 0.2}
    iterations = allocated([(0, 4), (4, 8), (12, 1)], compute=compute, now=lambda: clock[0])
    took = []
    for _ in zip(range(3), iterations.shard(Asked(DATA, 4, None)), strict=False):
        begin_s, end_s = iterations.end()
        took.append(end_s - begin_s)
    assert took == pytest.approx([0.5, 0.5 * (0.2 + 0.8 * 2), 0.5 * (0.2 + 0.8 / 4)])


def test_items_that_are_batches_take_the_time_of_a_batch(clock):
    compute = {"model": "constant", "seconds": 0.5}
    iterations, took = make_iterations(compute=compute, now=lambda: clock[0]), []
    for _ in iterations.shard(Asked(DataLoader([torch.ones(6)] * 3 + [torch.ones(3)], batch_size=None), None, 1)):
        begin_s, end_s = iterations.end()
        took.append((iterations.batch_size, end_s - begin_s))
    assert took == [(6, pytest.approx(0.5))] * 2


def test_without_data_they_are_empty_and_have_their_sizes():
    iterations = allocated(WORK)
    for (_, n_samples), batch in zip(WORK[:3], iterations.shard(Asked(None, 4, None)), strict=False):
        assert (batch, iterations.batch_size) == ((), n_samples)
        iterations.end()


# ---- a device that changes ----


def test_the_padding_follows_the_device(clock):
    """A change within an iteration counts from its own time, during computation or padding."""
    events = [
        {"worker": 0, "at_s": 10.75, "change": "slow", "factor": 4.0},
        {"worker": 0, "at_iteration": 4, "change": "recover"},
        {"worker": 1, "at_s": 0.0, "change": "slow", "factor": 9.0},
    ]
    iterations = make_iterations(compute={"model": "constant", "seconds": 0.5}, now=lambda: clock[0], events=events)
    took = []
    for _ in itertools.islice(iterations.shard(Asked(DATA, 4, None)), 5):
        clock[0] += 0.125
        begin_s, end_s = iterations.end()
        took.append(end_s - begin_s)
    assert took == [0.5, 0.25 + 4 * 0.25, 2.0, 0.5, 0.5]


LEAVING = [{"at_iteration": 3}, {"at_s": 10.6}]  # iterations begin at 10.0, 10.5 and 11.0


@pytest.mark.parametrize("when", LEAVING, ids=str)
@pytest.mark.parametrize("compute", [None, {"model": "constant", "seconds": 0.5}], ids=["unpadded", "padded"])
def test_loaders_end_when_the_worker_leaves(clock, when, compute):
    left = []
    iterations = make_iterations(
        compute=compute,
        now=lambda: clock[0],
        events=[{"worker": 0, "change": "leave", **when}],
        leave=lambda joins_s: bool(left.append(clock[0])),
    )
    seen = []
    for batch in iterations.shard(Asked(DATA, 4, None)):
        assert left == []
        seen.append(batch)
        clock[0] += 0.5
        iterations.end()
    assert (len(seen), left) == (2, [11.0])
    with pytest.raises(JobError, match=r"step was called without a batch: the loop must run over sync.shard\(loader\)"):
        iterations.end()
    assert list(iterations.shard(Asked(DATA, 4, 1))) == [], "every later loader too"


@pytest.mark.parametrize("over", [False, True], ids=["going-on", "over"])
def test_the_loader_continues_when_the_worker_joins_again(clock, over):
    """With the next batch, unless the run has ended meanwhile."""
    asked = []

    def leave(joins_s):
        asked.append((clock[0], joins_s))
        clock[0] = joins_s
        return not over

    events = [{"worker": 0, "change": change, "at_s": at_s} for change, at_s in (("leave", 11.0), ("join", 20.0))]
    iterations = make_iterations(now=lambda: clock[0], events=events, leave=leave)
    seen = []
    for (x,) in iterations.shard(Asked(DATA, 4, 2)):
        seen.append(x.tolist())
        clock[0] += 0.5
        iterations.end()
    assert asked == [(11.0, 20.0)]
    assert seen == (expected(range(2))[:2] if over else expected(range(2)))


@pytest.mark.parametrize("when", LEAVING, ids=str)
def test_another_worker_stays(clock, when):
    events = [{"worker": 0, "change": "leave", **when}]
    iterations = make_iterations(worker=1, now=lambda: clock[0], events=events)
    for _ in itertools.islice(iterations.shard(Asked(DATA, 4, None)), 9):
        clock[0] += 0.5
        iterations.end()
    assert clock[0] == 14.5
