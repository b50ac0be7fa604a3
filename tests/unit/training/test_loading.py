"""The batches of each worker from whatever a script has: disjoint, together all, and no more loaded than needed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from hpcsync.config.errors import JobError
from hpcsync.training import loading
from hpcsync.training.batch_sources import Ordered, Part, Read, n_samples
from hpcsync.training.loading import different_data, source
from hpcsync.training.sampler import batches, sequence_indices

SEED, SIZE = 9, 22


class Data(Dataset[int]):
    """Samples that are their indices, and a list of those that were loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        assert type(index) is int
        self.loaded.append(index)
        return index


class Stream(IterableDataset[int]):
    """Samples that can only be read; each process of a loader reads its own."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(0, SIZE) if info is None else range(info.id, SIZE, info.num_workers)


class Shuffled(IterableDataset[float]):
    """Samples that depend on the global generators."""

    def __iter__(self) -> Iterator[float]:
        for _ in range(SIZE):
            yield random.random() + np.random.random() + float(torch.rand(()))


class Within(Sampler[int]):
    """A sampler around another one."""

    def __init__(self, inner: Sampler[int]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)


class Part3(Sampler[int]):
    """Draws one of three parts."""

    num_replicas = 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, SIZE, 3))


class Batches:
    """A loader of another library."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for first in range(0, SIZE, 4):
            yield {"name": "x", "nested": [{"i": torch.arange(first, min(first + 4, SIZE))}]}


def used(data: Any, worker: int, epoch: int = 0, *, n_workers: int = 3, skip: int = 0, **given: Any) -> list[list[Any]]:
    """Return the batches of a worker."""
    read = source(data, given.pop("batch_size", None), Part(SEED, worker, n_workers), **given).read(epoch, skip)
    found = []
    for n, batch in read:
        assert n == len(batch)
        found.append([*map(float, batch)] if isinstance(batch, torch.Tensor) else batch)
    return found


def dealt(of_workers: list[list[Any]]) -> list[Any]:
    """Return the batches of all workers in the order in which they take them."""
    longest = max(map(len, of_workers))
    return [mine[i] for i in range(longest) for mine in of_workers if i < len(mine)]


def flat(lists: list[Any]) -> list[Any]:
    return [each for some in lists for each in some]


# ---- data with indices ----


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("worker", [0, 1, 2])
def test_a_loader_and_a_data_set_have_the_same_batches(worker, epoch):
    expected = [
        batch.tolist()
        for batch in batches(Data(), SEED, worker, n_workers=3, batch_size=4, epochs=range(epoch, epoch + 1))
    ]
    assert used(Data(), worker, epoch, batch_size=4) == expected
    loader = DataLoader(data := Data(), 4, shuffle=True)
    assert used(loader, worker, epoch) == expected
    assert data.loaded == flat(expected), "no other sample is loaded"
    data.loaded.clear()
    assert used(loader, worker, epoch, skip=1) == expected[1:]
    assert data.loaded == flat(expected[1:]), "nor one that is skipped"
    assert used(loader, worker, 1 - epoch) != expected, "each training epoch has its own order"


def test_a_loader_that_does_not_shuffle_keeps_the_order():
    found = [used(DataLoader(Data(), 4), worker) for worker in range(3)]
    assert dealt(found) == [[*range(first, first + 4)] for first in range(0, 20, 4)]


def test_processes_change_no_batch():
    one, two = (
        used(DataLoader(Data(), 4, shuffle=True, num_workers=n, collate_fn=list), 1, n_workers=2) for n in (0, 2)
    )
    assert one == two != []


def test_a_collate_fn_makes_the_batch():
    loader = DataLoader(Data(), 4, collate_fn=lambda samples: {"a": samples, "n": (len(samples),)})
    (_, first), *_ = source(loader, None, Part(SEED, 0, 1)).read(0)
    assert first == {"a": [0, 1, 2, 3], "n": (4,)}


def test_a_data_set_may_load_several_samples_at_once():
    class Table(Data):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            return [{"i": index, "text": str(index)} for index in indices]

    for data in (Table(), DataLoader(Table(), 4, shuffle=True)):
        size = 4 if isinstance(data, Table) else None
        (n, first), *_ = source(data, size, Part(SEED, 0, 1)).read(0)
        assert n == 4 and [*map(str, first["i"].tolist())] == first["text"]
        assert data.loaded == [] if isinstance(data, Table) else True


def test_items_that_are_batches_are_used_one_by_one():
    class Items(Data):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((3 + index,), index)

    loader = DataLoader(Items(), batch_size=None, shuffle=True)
    found = [list(source(loader, None, Part(SEED, worker, 2)).read(0)) for worker in range(2)]
    assert sorted(int(batch[0]) for mine in found for _, batch in mine) == [*range(SIZE)]
    assert all(n == len(batch) == 3 + int(batch[0]) for mine in found for n, batch in mine)


def test_allocated_batches_are_loaded_when_they_are_known():
    given = iter([(0, 3), (10, 5), (20, 4), (24, 1)])
    data = Data()
    loader = DataLoader(data, 4, shuffle=True, num_workers=2, collate_fn=tuple)
    ordered = source(loader, None, Part(SEED, 0, 2), at_once=True)
    assert isinstance(ordered, Ordered)
    seen = []
    for n, batch in ordered.allocated(lambda: next(given), range(1)):
        seen.append(batch)
        assert n == len(batch) and data.loaded == flat(seen)
    assert [*map(list, seen)] == [
        sequence_indices(SEED, *work, size=SIZE).tolist() for work in ((0, 3), (10, 5), (20, 4))
    ]


@pytest.mark.parametrize("loader", [DataLoader(Stream(), 4), DataLoader(Data(), 4, sampler=[1, 2]), Batches()])
def test_allocated_batches_need_samples_in_the_runs_order(loader):
    with pytest.raises(JobError, match="batches of allocated sizes need samples with indices"):
        source(loader, None, Part(SEED, 0, 2), at_once=True)


@pytest.mark.parametrize(
    ("size", "drop_last", "said"),
    [
        (4, False, "2 of 22 samples are left out in each training epoch, because whole batches of 4 are used"),
        (11, False, None),
        (4, True, None),
    ],
)
def test_samples_that_are_left_out_are_said(size, drop_last, said):
    assert source(DataLoader(Data(), size, drop_last=drop_last), None, Part(SEED, 0, 2)).notice() == said
    if not drop_last:
        assert source(Data(), size, Part(SEED, 0, 2)).notice() == said


# ---- samplers of the script ----


def uneven(_: object = None) -> list[list[int]]:
    return [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10, 11]]


def test_batches_of_a_batch_sampler_are_taken_in_turn():
    found = [used(DataLoader(data := Data(), batch_sampler=uneven()), worker, n_workers=2) for worker in range(2)]
    assert dealt(found) == uneven()
    assert data.loaded == [3, 6, 7, 8, 9], "only the worker's own are loaded"
    again = DataLoader(data := Data(), batch_sampler=uneven())
    assert used(again, 0, n_workers=2, skip=1) == [[4, 5], [10, 11]] and data.loaded == [4, 5, 10, 11]


def test_all_workers_draw_the_same_batches_whatever_their_generators():
    def of_worker(worker: int) -> list[list[int]]:
        torch.manual_seed(worker)
        return used(DataLoader(Data(), 4, sampler=WeightedRandomSampler(range(1, SIZE + 1), 24)), worker)

    found = dealt([of_worker(worker) for worker in range(3)])
    assert found == used(DataLoader(Data(), 4, sampler=WeightedRandomSampler(range(1, SIZE + 1), 24)), 0, n_workers=1)
    torch.manual_seed(0)
    first = [*WeightedRandomSampler(range(1, SIZE + 1), 24)]
    torch.manual_seed(1)
    assert first != [*WeightedRandomSampler(range(1, SIZE + 1), 24)], "by themselves they would not"


def test_a_generator_of_the_samplers_own_is_left_alone():
    """Plain PyTorch in one process with the joint batch uses the same samples, also after a resumption."""

    def loader() -> DataLoader[int]:
        generator = torch.Generator().manual_seed(4)
        return DataLoader(Data(), 4, sampler=RandomSampler(range(SIZE), True, 40, generator=generator))

    plain = loader()
    epochs = [[batch.tolist() for batch in plain] for _ in range(3)]
    mine = source(loader(), None, Part(SEED, 1, 2))
    for epoch in range(3):
        assert [batch.tolist() for _, batch in mine.read(epoch)] == epochs[epoch][1::2]
        assert mine.counted() == 5
    resumed = source(loader(), None, Part(SEED, 1, 2))
    resumed.pass_over(0)
    resumed.pass_over(1)
    assert [batch.tolist() for _, batch in resumed.read(2)] == epochs[2][1::2]


def test_the_scripts_generators_are_left_alone():
    before = random.getstate(), torch.get_rng_state()
    used(DataLoader(Data(), 4, sampler=WeightedRandomSampler(range(1, SIZE + 1), 24)), 0)
    used(DataLoader(Shuffled(), 4), 0)
    used(DataLoader(Data(), 4, shuffle=True), 0)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


# ---- data that can only be read ----

EVERY = [[*map(float, range(first, min(first + 4, SIZE)))] for first in range(0, SIZE, 4)]


class Other:
    """An iterable data set of another library."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


@pytest.mark.parametrize("data", [DataLoader(Stream(), 4), Stream(), Other()], ids=["loader", "set", "other"])
def test_every_worker_uses_every_pth_batch(data):
    given = {} if isinstance(data, DataLoader) else {"batch_size": 4}
    found = [used(data, worker, n_workers=2, **given) for worker in range(2)]
    assert dealt(found) == EVERY
    assert used(data, 1, n_workers=2, skip=1, **given) == found[1][1:]


def test_loaders_of_other_libraries_and_their_nested_batches():
    mine = list(source(Batches(), None, Part(SEED, 1, 2)).read(0))
    assert [(n, batch["nested"][0]["i"].tolist()) for n, batch in mine] == [
        (4, [4, 5, 6, 7]), (4, [12, 13, 14, 15]), (2, [20, 21]),
    ]  # fmt: skip


class Filtering(DataLoader):
    """Changes batches in the process that trains, as the loaders of PyTorch Geometric do."""

    def _get_iterator(self) -> Iterator[Any]:
        return (-batch for batch in super()._get_iterator())


def test_a_loader_with_an_iterator_of_its_own_is_used_as_it_is():
    found = [used(Filtering(Data(), 4, shuffle=True), worker, n_workers=2) for worker in range(2)]
    assert sorted(flat(flat(found))) == [*range(1 - SIZE, 1)]


@pytest.mark.parametrize("n_processes", [0, 2])
def test_processes_of_a_loader_divide_the_stream(n_processes):
    found = [used(DataLoader(Stream(), 4, num_workers=n_processes), worker) for worker in range(3)]
    assert sorted(flat(flat(found))) == [*range(SIZE)]


@pytest.mark.parametrize("n_processes", [0, 2])
def test_streams_that_draw_are_the_same_on_all_workers(n_processes):
    def of_worker(worker: int, **given: Any) -> list[list[float]]:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(worker)
        return used(DataLoader(Shuffled(), 4, num_workers=n_processes), worker, n_workers=2, **given)

    together = used(DataLoader(Shuffled(), 4, num_workers=n_processes), 0, n_workers=1)
    assert dealt([of_worker(worker) for worker in range(2)]) == together
    assert used(DataLoader(Shuffled(), 4, num_workers=n_processes), 0, 1, n_workers=1) != together
    assert of_worker(0, sharded=True) != of_worker(1, sharded=True)


class Guesses:
    """Batches that depend on the global generators, of an iterable that is none of torch's."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.rand(4) + random.random() + np.random.rand() for _ in range(3))


@pytest.mark.parametrize(
    "make",
    [
        Guesses,
        lambda: iter(Guesses()),
        lambda: DataLoader(Shuffled(), 4),
        lambda: DataLoader(Data(), 4, sampler=WeightedRandomSampler(range(1, SIZE + 1), 24)),
    ],
    ids=["iterable", "iterator", "stream", "sampler"],
)
def test_each_worker_draws_its_own_part_by_itself_though_all_are_seeded_alike(make):
    def of_worker(worker: int, sharded: bool) -> list[list[float]]:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(3)
        return used(make(), worker, n_workers=2, sharded=sharded)

    found = [of_worker(worker, sharded=True) for worker in range(3)]
    assert found[0] != found[1] != found[2] != found[0]
    random.seed(4)
    assert used(make(), 1, n_workers=2, sharded=True) == found[1]  # a resumed run draws the same
    assert of_worker(0, sharded=False) + of_worker(1, sharded=False) not in found


def test_sharded_data_are_used_whole():
    assert used(DataLoader(Stream(), 4), 1, sharded=True) == EVERY
    own = Subset(Data(), range(7, SIZE))
    assert sorted(flat(used(DataLoader(own, 5, shuffle=True), 2, sharded=True))) == [*range(7, SIZE)]
    sampler = DistributedSampler(range(SIZE), 2, 1, shuffle=False)
    assert used(DataLoader(Data(), 11, sampler=sampler), 1, sharded=True) == [[*range(1, SIZE, 2)]]


EPOCH = "batches in a training epoch for"
FIRST = "worker 0 uses one more than the others"


@pytest.mark.parametrize(
    ("data", "given", "said"),
    [
        (DataLoader(Stream(), 4), {}, f"6 {EPOCH} 4 workers: workers 0 to 1 use one more than the others"),
        (DataLoader(Stream(), 8), {"n_workers": 2}, f"3 {EPOCH} 2 workers: {FIRST}"),
        (DataLoader(Stream(), 4), {"n_workers": 3}, None),
        (
            DataLoader(Data(), batch_sampler=uneven()),
            {},
            f"5 {EPOCH} 4 workers: {FIRST}",
        ),
        (
            DataLoader(Stream(), 4),
            {"sharded": True},
            "worker 0's data ended after 6 batches; those of others may end earlier or later",
        ),
    ],
)
def test_workers_that_do_not_end_together_are_said(data, given, said):
    mine = source(data, None, Part(SEED, 0, given.pop("n_workers", 4)), **given)
    n = len(list(mine.read(0)))
    assert (mine.ended(), mine.counted()) == (said, n)


def differs(make: Callable[[int], Any], **given: Any) -> bool:
    """Return whether it is said that two workers have read different data."""
    read: list[dict[int, tuple[int, list[float]]]] = [{}, {}]
    for worker in range(2):
        note = lambda *noted, own=read[worker]: own.setdefault(0, noted)  # noqa: E731
        how = {"batch_size": None, "note": note, **given}
        assert list(source(make(worker), part=Part(SEED, worker, 2), **how).read(3))
        assert bool(read[worker]) != given.get("sharded", False)
    return different_data([{}, *read]) != ""


ROWS = TensorDataset(torch.arange(1.0 * SIZE).unsqueeze(1))


@pytest.mark.parametrize("differ", [False, True])
def test_workers_that_read_different_data_are_noticed(differ):
    def of(worker: int) -> range:
        return range(worker if differ else 0, SIZE, 2)

    def tensors(worker: int) -> TensorDataset:
        return TensorDataset(torch.tensor([*of(worker)]).unsqueeze(1) * 1.0)

    makes: list[Callable[[int], Any]] = [
        lambda worker: DataLoader(Subset(Data(), of(worker)), 2, shuffle=True),
        lambda worker: DataLoader(Data(), 2, sampler=[*of(worker)]),
        lambda worker: DataLoader(Data(), batch_sampler=[[index] for index in of(worker)]),
        lambda worker: DataLoader(ROWS, batch_size=None, sampler=torch.tensor([*of(worker)])),  # type: ignore[arg-type]
        lambda worker: DataLoader(ROWS, batch_size=None, sampler=np.array([*of(worker)])),  # type: ignore[arg-type]
        lambda worker: iter([(torch.tensor([index]), "label") for index in of(worker)]),
        lambda worker: iter([np.array([[index, index]]) for index in of(worker)]),
    ]
    assert [differs(make) for make in makes] == [differ] * len(makes)
    assert differs(tensors, batch_size=2) == differ
    assert not differs(makes[0], sharded=True) and not differs(makes[1], sharded=True)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("data", "batch_size", "message"),
    [
        ({"train": Data()}, 4, r"a dict is several data sets: give one of them, such as data\['train'\]"),
        (DataLoader(Data(), 4), 4, "batch_size = 4: must be left out with a DataLoader"),
        (DataLoader(Data(), 4, sampler=DistributedSampler(range(4), 2, 1)), None, "a DistributedSampler has a part"),
        (DataLoader(Data(), 4, sampler=Within(DistributedSampler(range(4), 2, 1))), None, "a DistributedSampler has a"),
        (
            DataLoader(Data(), batch_sampler=BatchSampler(Part3(), 4, False)),
            None,
            "a Part3 has a part for each process",
        ),
        (Data(), None, "batch_size: must be given with a data set"),
        (Stream(), None, "batch_size: must be given with a data set"),
        (3, 4, "a int is no data"),
        (iter(DataLoader(Data(), 4)), None, "the iterator of a DataLoader was given: give the DataLoader itself"),
        (Stream(), 0, "batch_size = 0: must be a whole number of at least 1"),
        (None, -1, "batch_size = -1: must be a whole number of at least 1"),
        (Data(), 1.5, r"batch_size = 1\.5: must be a whole number of at least 1"),
        (Data(), "4", 'batch_size = "4": must be a whole number of at least 1'),
        (Data(), True, "batch_size = true: must be a whole number of at least 1"),
        (Data(), np.int64(0), "batch_size = 0: must be a whole number of at least 1"),
        (Data(), 999, "batch_size = 999: must be 1 to [0-9]+, the samples of the data set: whole batches are used"),
        (DataLoader(Data(), 999, shuffle=True), None, "batch_size = 999: must be 1 to [0-9]+, the samples"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(data, batch_size, message):
    with pytest.raises(JobError, match=message) as found:
        source(data, batch_size, Part(SEED, 0, 2))
    assert "\n" not in str(found.value)


def test_a_loader_whose_processes_cannot_be_started_is_refused():
    loader = DataLoader(Data(), 4, collate_fn=lambda samples: samples, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(JobError, match=r"num_workers = 1: data set, collate_fn and worker_init_fn must be picklable"):
        list(source(loader, None, Part(SEED, 0, 2)).read(0))


class Pair(NamedTuple):
    a: Any
    b: Any


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(5, 2),
        np.zeros(5),
        {"name": "x", "scale": torch.tensor(2.0), "x": torch.zeros(5)},
        [("a", "b"), torch.zeros(5, 3)],
        Pair(None, {"deep": (1, np.zeros((5, 1)))}),
        type("Graph", (), {})(),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_batch_has_the_samples_of_its_first_tensor(batch):
    if type(batch).__name__ == "Graph":
        batch.name, batch.x = "g", torch.zeros(5, 2)
    assert n_samples(batch) == 5


def test_a_function_that_returns_a_bare_array_is_refused():
    """Python compares what it returns with None."""
    with pytest.raises(JobError, match="return a tensor, or a tuple of arrays"):
        used(iter(lambda: np.zeros(4), None), 0)
    with pytest.raises(ValueError, match="truth value"):  # of the function itself
        used(iter(lambda: (1 if np.zeros(4) else 2,), None), 0)


def test_a_script_s_iterator_is_not_closed_where_a_loop_ends():
    """It may go on with it, or it is a file."""
    batches = (torch.full((4,), number) for number in range(5))
    read = source(batches, None, Part(0, 0, 1)).read(0)
    next(read)
    del read
    assert [int(batch[0]) for batch in batches] == [1, 2, 3, 4]


def test_a_batch_without_a_tensor_is_refused():
    with pytest.raises(JobError, match="a batch that is a list without a tensor"):
        n_samples(["a", 3, torch.tensor(1.0)])


def test_kinds_of_data():
    kinds: dict[str, list[Any]] = {
        "ordered": [Data(), TensorDataset(torch.zeros(9)), range(9), DataLoader(Data(), 2, shuffle=True)],
        "drawn": [
            DataLoader(Data(), 2, sampler=SequentialSampler([1, 2])),
            DataLoader(Data(), 2, sampler=SequentialSampler([1, 2])),  # it says two samples, which are not all
            DataLoader(Data(), batch_sampler=BatchSampler([1], 1, False)),
        ],
        "read": [Stream(), DataLoader(Stream(), 2), Batches()],
    }
    kinds["drawn"][0].sampler.__class__ = type("Other", (SequentialSampler,), {})
    for kind, several in kinds.items():
        for data in several:
            needs = not isinstance(data, DataLoader | Batches)
            found = source(data, 2 if needs else None, Part(SEED, 0, 1))
            drawn = isinstance(found, Read) and found._load is not None
            assert ("ordered" if isinstance(found, Ordered) else "drawn" if drawn else "read") == kind, data


def test_the_training_epoch_is_told_to_whoever_wants_to_know():
    class Told(Stream):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    loader = DataLoader(Told(), 4)
    loading.set_epoch(loader, 3)
    assert loader.dataset.epoch == 3
    sampler = DistributedSampler(range(SIZE), 2, 1)
    loading.set_epoch(DataLoader(Data(), 4, sampler=sampler), 5)
    assert sampler.epoch == 5
