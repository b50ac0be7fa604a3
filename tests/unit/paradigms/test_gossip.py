"""Selection of peers, and contraction by a round of mixing."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from hpcsync.paradigms.gossip import BLOCK, TOPOLOGIES, PeerSelection
from hpcsync.training.local_update import Peer, Received, mix
from hpcsync.training.optimizers import OptimizerSpec
from tests.unit.jobs import make_job

SELVES = [("complete", True), ("complete", False), ("ring", True), ("ring", False), ("exponential", False)]
SIZES = [1, 2, 3, 5, 8]


# ---- selection ----


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"topology": "star"}, "topology must be one of complete, ring, exponential, got 'star'"),
        ({"topology": "exponential"}, "include_self must be False"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        PeerSelection(4, 1, **options)


@pytest.mark.parametrize(("topology", "include_self"), SELVES)
@pytest.mark.parametrize("n", SIZES)
def test_only_neighbours_are_drawn(n, topology, include_self):
    peers = PeerSelection(n, 1, topology, include_self)
    for worker in range(n):
        neighbours = set(peers.neighbours(worker))
        drawn = {peers.drawn(worker, round) for round in range(1, 200)}
        assert drawn == neighbours <= set(range(n))
        assert (worker in neighbours) == (include_self or n == 1)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_neighbours_of_the_complete_topology(n, include_self):
    peers = PeerSelection(n, 1, "complete", include_self)
    for worker in range(n):
        assert list(peers.neighbours(worker)) == [peer for peer in range(n) if include_self or peer != worker]


def test_neighbours_on_a_ring():
    assert [list(PeerSelection(5, 1, "ring", False).neighbours(worker)) for worker in (0, 2, 4)] == [
        [4, 1],
        [1, 3],
        [3, 0],
    ]
    assert list(PeerSelection(5, 1, "ring", True).neighbours(0)) == [0, 1, 4]


@pytest.mark.parametrize(
    ("n", "hops"), [(2, [1]), (3, [1, 2]), (4, [1, 2]), (5, [1, 2, 4]), (8, [1, 2, 4]), (9, [1, 2, 4, 8])]
)
def test_exponential_neighbours_are_visited_in_turn(n, hops):
    peers = PeerSelection(n, 1, "exponential", False)
    for worker in range(n):
        visited = [peers.drawn(worker, round) for round in range(1, 2 * len(hops) + 1)]
        assert visited == [(worker + hop) % n for hop in hops + hops]
    assert [peers.permutation(round)[0] for round in range(1, len(hops) + 1)] == hops


@pytest.mark.parametrize(("topology", "include_self"), SELVES)
@pytest.mark.parametrize("dead", [(1,), (4, 0), (0, 1, 2, 3)])
def test_the_living_draw_each_other_as_if_the_dead_had_never_been(dead, topology, include_self):
    n = 5
    living = [worker for worker in range(n) if worker not in dead]
    fewer, peers = (
        PeerSelection(len(living), 1, topology, include_self),
        PeerSelection(n, 1, topology, include_self, dead),
    )
    for at, worker in enumerate(living):
        assert sorted(peers.neighbours(worker)) == sorted(living[i] for i in fewer.neighbours(at))
        drawn = {peers.drawn(worker, round) for round in range(1, 100)}
        assert drawn == set(peers.neighbours(worker))
    before = {
        PeerSelection(n, 1, topology, include_self).drawn(worker, round) for worker in living for round in range(1, 100)
    }
    assert before >= set(dead) or len(living) == 1, "they are drawn while they live"


@pytest.mark.parametrize(("topology", "include_self"), SELVES[:4])
def test_neighbours_are_drawn_with_equal_chances(topology, include_self):
    """Counts within four standard deviations, for every worker; also of pairs of rounds that follow each other."""
    n, rounds = 5, 4000
    peers = PeerSelection(n, 3, topology, include_self)
    for worker in range(n):
        drawn = [peers.drawn(worker, round) for round in range(1, rounds + 1)]
        k = len(peers.neighbours(worker))
        for counts, chance in ((Counter(drawn), 1 / k), (Counter(itertools.pairwise(drawn)), 1 / k**2)):
            assert len(counts) == round(1 / chance)
            tolerated = 4 * (rounds * chance * (1 - chance)) ** 0.5
            assert max(abs(count - rounds * chance) for count in counts.values()) < tolerated


def test_workers_and_seeds_draw_independently():
    rounds = range(1, 1001)
    sequences = [
        [PeerSelection(8, seed).drawn(worker, round) for round in rounds] for seed in (1, 2) for worker in (0, 1)
    ]
    for a, b in itertools.combinations(sequences, 2):
        same = sum(x == y for x, y in zip(a, b, strict=True))
        assert abs(same - 125) < 4 * (1000 / 8 * 7 / 8) ** 0.5


def test_a_draw_depends_on_nothing_but_seed_worker_and_round():
    rounds = [1, 2, BLOCK, BLOCK + 1, 10 * BLOCK, 1, 2 * BLOCK]
    asked_in_turn = {round: PeerSelection(8, 1).drawn(3, round) for round in range(1, 10 * BLOCK + 1)}
    assert [PeerSelection(8, 1).drawn(3, round) for round in rounds] == [asked_in_turn[round] for round in rounds]
    assert (
        PeerSelection(8, 1).permutation(7) == PeerSelection(8, 1).permutation(7) != PeerSelection(8, 1).permutation(8)
    )


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_alone_a_worker_draws_itself(topology):
    for include_self in (True, False) if topology != "exponential" else (False,):
        peers = PeerSelection(1, 1, topology, include_self)
        assert {peers.drawn(0, round) for round in range(1, 9)} == {0}
        assert {peers.permutation(round) for round in range(1, 9)} == {(0,)}


# ---- permutations ----


@pytest.mark.parametrize(("topology", "include_self"), SELVES)
@pytest.mark.parametrize("n", SIZES)
def test_a_permutation_has_every_worker_once(n, topology, include_self):
    peers = PeerSelection(n, 1, topology, include_self)
    for round in range(1, 100):
        permutation = peers.permutation(round)
        assert sorted(permutation) == list(range(n))
        if not include_self and n > 1:
            assert all(worker != target for worker, target in enumerate(permutation))


def test_all_permutations_have_equal_chances():
    rounds = 6000
    counts = Counter(PeerSelection(3, 1).permutation(round) for round in range(1, rounds + 1))
    assert len(counts) == 6
    assert max(abs(count - rounds / 6) for count in counts.values()) < 4 * (rounds / 6 * 5 / 6) ** 0.5


def test_without_include_self_permutations_are_single_cycles():
    rounds = 6000
    counts = Counter(PeerSelection(4, 1, include_self=False).permutation(round) for round in range(1, rounds + 1))
    assert len(counts) == 6  # 3!, of 9 without a fixed point
    assert max(abs(count - rounds / 6) for count in counts.values()) < 4 * (rounds / 6 * 5 / 6) ** 0.5
    for permutation in counts:
        assert len({0, permutation[0], permutation[permutation[0]]}) == 3


def test_a_ring_turns_one_way_and_the_other():
    right, left, itself = (1, 2, 3, 4, 0), (4, 0, 1, 2, 3), (0, 1, 2, 3, 4)
    assert [PeerSelection(5, 1, "ring", False).permutation(round) for round in (1, 2, 3)] == [right, left, right]
    selves = [PeerSelection(5, 1, "ring", True).permutation(round) for round in (1, 2, 3, 4, 5)]
    assert selves == [right, itself, left, itself, right]


# ---- contraction ----

UNUSED = OptimizerSpec("sgd", 0.1).on_worker(torch.zeros(1))  # averaging makes no steps


def spread(models: torch.Tensor, centre: torch.Tensor) -> float:
    """Return the mean squared distance from the centre of models, shape (p, size)."""
    return float(((models - centre) ** 2).sum(1).mean())


def pulled(peers: PeerSelection, models: torch.Tensor, round: int) -> torch.Tensor:
    after = models.clone()
    for worker in range(peers.n_workers):
        mix(after[worker], models[peers.drawn(worker, round)])
    return after


def permuted(peers: PeerSelection, models: torch.Tensor, round: int) -> torch.Tensor:
    after = models.clone()
    for worker, target in enumerate(peers.permutation(round)):
        mix(after[target], models[worker])
    return after


def pushed(peers: PeerSelection, models: torch.Tensor, round: int) -> torch.Tensor:
    after = models.clone()
    drawn = [peers.drawn(worker, round) for worker in range(peers.n_workers)]
    for worker in range(peers.n_workers):
        others = [k for k, target in enumerate(drawn) if target == worker != k]
        peer = Peer(after[worker], UNUSED)
        received = Received(models[others].sum(0), len(others), len(others))
        peer.absorb(received, drew_itself=drawn[worker] == worker)
    return after


def factors(mixed, peers: PeerSelection) -> np.ndarray:
    """What the spread is multiplied by, about the old mean and about the new one: means and their standard errors,
    shape (2, 2)."""
    models = torch.randn(peers.n_workers, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 5.0
    old, rounds = models.mean(0), 16_000 // max(8, peers.n_workers)
    before = spread(models, old)
    found = []
    for round in range(1, rounds + 1):
        after = mixed(peers, models, round)
        found.append((spread(after, old) / before, spread(after, after.mean(0)) / before))
    return np.array([np.mean(found, 0), np.std(found, 0) / rounds**0.5])


@pytest.mark.parametrize("p", [2, 8])
def test_a_pull_halves_the_spread(p):
    (old, new), (old_error, new_error) = factors(pulled, PeerSelection(p, 1))
    assert abs(old - 0.5) < 4 * old_error
    assert abs(new - (0.5 - 1 / (4 * p))) < 4 * new_error
    assert abs(new - 0.5) > 4 * new_error  # the mean moves, and so much


def test_a_pull_from_others_does_more():
    (_, new), (_, error) = factors(pulled, PeerSelection(8, 1, include_self=False))
    assert abs(new - 0.399) < 4 * error + 5e-4


@pytest.mark.parametrize("p", [2, 8])
def test_a_permutation_halves_it_and_keeps_the_mean(p):
    (old, new), (error, _) = factors(permuted, PeerSelection(p, 1))
    assert abs(old - 0.5) < 4 * error
    assert new == pytest.approx(old, rel=1e-12)


@pytest.mark.parametrize(("p", "about_old", "about_new"), [(8, 0.613, 0.601), (32, 0.628, 0.625)])
def test_a_push_leaves_more_than_a_pull(p, about_old, about_new):
    (old, new), (old_error, new_error) = factors(pushed, PeerSelection(p, 1))
    assert abs(old - about_old) < 4 * old_error + 5e-4
    assert abs(new - about_new) < 4 * new_error + 5e-4
    assert min(old, new) - 0.5 > 20 * old_error


@pytest.mark.parametrize("mixed", [pulled, permuted, pushed])
def test_mixed_models_lie_between_those_before(mixed):
    models = torch.randn(6, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for round in range(1, 50):
        after = mixed(PeerSelection(6, 1), models, round)
        assert bool((after <= models.amax(0) + 1e-15).all()) and bool((after >= models.amin(0) - 1e-15).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_models_stay_as_they_are(dtype):
    model = torch.randn(100, dtype=dtype, generator=torch.Generator().manual_seed(3))
    models = model.repeat(4, 1)
    for round in range(1, 30):
        for mixed in (pulled, permuted):
            assert torch.equal(mixed(PeerSelection(4, 1), models, round), models)
        assert torch.allclose(
            pushed(PeerSelection(4, 1), models, round), models, rtol=1e-6, atol=0
        )  # a mean of three rounds


def test_push_sum_keeps_its_last_weight():
    peers = PeerSelection(4, seed=1, topology="exponential", include_self=False)
    assert [peers.drawn(0, 1, 2.0**-k) for k in (0, 30, 31)] == [1, 1, 0]


@pytest.mark.parametrize(("period", "words"), [(1, "in every iteration"), (4, "every 4 iterations")])
def test_synchronous_workers_wait_for_all(period, words):
    paradigm = {"name": "gossip", "mode": "pull", "synchronous": True, "period": period}
    assert make_job(paradigm=paradigm).paradigm.bound == f"all workers wait for each other {words}"
