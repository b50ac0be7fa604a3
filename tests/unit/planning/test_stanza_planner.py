"""Stanza planner: bytes of six well-known models, times against an event loop, and optimality of the plan."""

import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpcsync.planning import stanza_planner
from hpcsync.planning.layer_groups import Groups
from hpcsync.planning.split_cost import Shape, Times
from hpcsync.planning.stanza_planner import (
    Link,
    SplitProfile,
    all_reduce_s,
    choose,
    convolution_link_bytes,
    dedicated_server_s,
    fc_link_bytes,
    label_bytes,
    parameter_server_bytes,
    ring_bytes,
    ring_link_bytes,
    sharded_server_s,
    stanza_bytes,
    stanza_s,
    without_separation,
)

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)

TEN = Groups(10, 1)


def sized(conv, fc, activations, batch=32):
    return SplitProfile(Times(1.0, 2.0, 0.5), Shape(conv, fc, activations), batch)


ALEXNET = (2_469_696, 58_631_144, 9_216)
VGG_16 = (14_714_688, 123_642_856, 25_088)
VGG_19 = (20_024_384, 123_642_856, 25_088)
INCEPTION = (21_785_568, 2_049_000, 2_048)
RESNET_152 = (58_143_808, 2_049_000, 2_048)

# Of ten workers, one of them fully-connected: parameter server, Stanza, the busiest link of ring or shards, of a
# convolution worker and of the fully-connected worker, all in decimal megabytes.
TABLE = [
    (sized(*ALEXNET, 128), 4888.1, 243.0, 439.9, 22.3, 42.5),
    (sized(*ALEXNET), 4888.1, 179.3, 439.9, 18.7, 10.6),
    (sized(*VGG_16), 11068.6, 999.5, 996.2, 107.8, 28.9),
    (sized(*VGG_19), 11493.4, 1339.4, 1034.4, 145.6, 28.9),
    (sized(*INCEPTION), 1906.8, 1399.0, 171.6, 155.2, 2.4),
    (sized(*RESNET_152), 4815.4, 3725.9, 433.4, 413.7, 2.4),
]


def megabytes(profile, groups=TEN):
    return (
        parameter_server_bytes(profile, groups.n_workers),
        stanza_bytes(profile, groups),
        ring_link_bytes(profile.shape.model_bytes, groups.n_workers),
        convolution_link_bytes(profile, groups),
        fc_link_bytes(profile, groups),
    )


@pytest.mark.parametrize(("profile", "row"), [(profile, row) for profile, *row in TABLE])
def test_the_bytes_of_ten_workers(profile, row):
    assert [round(n / 1e6, 1) for n in megabytes(profile)] == row
    assert round(stanza_planner.stanza(profile, SLOW, TEN, 1).link_bytes / 1e6, 1) == max(row[-2:])
    # Controls: as many convolution workers as workers, and activations that travel one way.
    (_, sent, *_), alone = megabytes(profile), profile.cut_bytes
    assert round((sent + 2 * profile.shape.conv_bytes) / 1e6, 1) != row[1] != round((sent - 9 * alone) / 1e6, 1)


def test_bytes_are_integers_without_labels():
    profile = sized(*ALEXNET, 128)
    assert stanza_bytes(profile, TEN) == 2 * 8 * 2_469_696 * 4 + 2 * 9 * 128 * 9_216 * 4 == 242_995_200
    assert stanza_bytes(profile, Groups(10, 3)) == 2 * 6 * 9_878_784 + 2 * 2 * 234_524_576 + 2 * 7 * 128 * 9_216 * 4
    assert label_bytes(profile, Groups(10, 3)) == 7 * 128 * 8
    assert parameter_server_bytes(profile, 10) == 2 * 10 * (2_469_696 + 58_631_144) * 4 == 4_888_067_200
    assert ring_bytes(profile, 10) * 10 == parameter_server_bytes(profile, 10) * 9


shapes = st.builds(sized, st.integers(1, 10**8), st.integers(1, 10**8), st.integers(1, 10**5), st.integers(1, 512))


def break_even(profile, n):
    """n_c b a < N P_f + (N - n_c + 1) P_c with n_c = N - 1."""
    numbers = (n - 1) * profile.batch * profile.shape.activations
    return numbers < n * profile.shape.fc_parameters + 2 * profile.shape.conv_parameters


@PROPERTY
@given(shapes, st.integers(2, 40))
def test_where_it_sends_as_much_as_a_parameter_server(profile, n):
    assert (stanza_bytes(profile, Groups(n, 1)) < parameter_server_bytes(profile, n)) == break_even(profile, n)


def test_the_break_even_tells_a_ring_from_a_parameter_server():
    profile = sized(40, 40, 46, 1)  # 9 x 46 is more than a ring's 9 x 40 + 40, and less than 10 x 40 + 2 x 40
    assert break_even(profile, 10) and stanza_bytes(profile, TEN) < parameter_server_bytes(profile, 10)
    assert not stanza_bytes(profile, TEN) < ring_bytes(profile, 10), "the control"


# ---- times ----


def pipeline_s(profile, links, groups, pieces=1, stages=("forward", "up", "above", "down")):
    """Return the time found piece by piece, on the node that serves the most."""
    m = -(-groups.n_convolution // groups.n_fc)
    wire_s = m * profile.batch * profile.shape.activations * profile.shape.itemsize / pieces / links.bandwidth
    fixed = profile.times.conv_fixed_share
    one = fixed + (1 - fixed) / pieces  # of a batch's time
    takes_s = {
        "forward": profile.times.conv_forward_s * one,
        "up": wire_s + m * profile.batch * profile.shape.label_bytes / pieces / links.bandwidth,
        "above": profile.times.fc_fixed_s + m * (profile.times.fc_s - profile.times.fc_fixed_s) / pieces,
        "down": wire_s,
    }
    free_s = dict.fromkeys(takes_s, 0.0)  # end of the previous piece in each stage
    arrived_s = []
    for _ in range(pieces):
        at_s = 0.0
        for stage in stages:
            free_s[stage] = max(at_s, free_s[stage]) + takes_s[stage]
            at_s = free_s[stage] + (links.latency_s if stage in ("up", "down") else 0.0)
        arrived_s.append(at_s)
    now_s = free_s["forward"]
    for at_s in arrived_s:
        now_s = max(now_s, at_s) + profile.times.conv_backward_s * one
    rings_s = [
        sum(links.latency_s + n_bytes / n / links.bandwidth for _ in range(2 * (n - 1)))
        for n, n_bytes in ((groups.n_convolution, profile.shape.conv_bytes), (groups.n_fc, profile.shape.fc_bytes))
    ]
    return max(now_s + rings_s[0], free_s["above"] + rings_s[1])


seconds = st.floats(1e-4, 10.0)


@st.composite
def profiles(draw):
    fc_s = draw(seconds)
    times = Times(draw(seconds), draw(seconds), fc_s, draw(st.floats(0, 1)) * fc_s, draw(st.floats(0, 1)))
    sizes = draw(st.tuples(st.integers(1, 10**8), st.integers(1, 10**8), st.integers(1, 10**5)))
    return SplitProfile(times, Shape(*sizes), draw(st.integers(1, 512)))


links = st.builds(Link, st.floats(1e6, 1e11), st.floats(0, 1e-2))
groups = st.integers(2, 24).flatmap(lambda n: st.builds(Groups, st.just(n), st.integers(1, n - 1)))


@PROPERTY
@given(profiles(), links, groups, st.integers(1, 8))
@example(sized(1, 10**8, 10), Link(1e6, 0.0), Groups(7, 2), 4).via("the layers above are summed last")
@example(sized(1, 10**8, 10), Link(1e6, 0.0), Groups(4, 2), 4).via("after forward passes, the longest stage")
@example(sized(1, 10**8, 10**5), Link(1e6, 0.0), Groups(4, 2), 4).via("after transfers, the longest stage")
@example(SplitProfile(Times(1.0, 0.1, 5.0), Shape(10, 1, 10), 32), Link(1e6, 0.0), Groups(7, 2), 4).via("layers above")
def test_the_time_of_an_iteration_equals_the_sum_over_its_pieces(profile, links, groups, pieces):
    stepwise = pipeline_s(profile, links, groups, pieces)
    assert stanza_s(profile, links, groups, pieces) == pytest.approx(stepwise)


def retimed(profile, **times):
    return profile._replace(times=profile.times._replace(**times))


BY_HAND = SplitProfile(Times(1.0, 2.0, 0.25), Shape(100, 1000, 10, label_bytes=0), 5)
SLOW = Link(100.0, 0.5)  # a batch's 200 bytes at the cut take 2 s


def test_times_by_hand():
    """Seven workers: two FC workers serve three and two others, each batch 200 bytes."""
    chain_s = 1 + (0.5 + 6) + 0.75 + (0.5 + 6) + 2
    assert stanza_s(BY_HAND, SLOW, Groups(7, 2)) == 1 + 6.5 + 0.75 + 2 * (0.5 + 4000 / 2 / 100) == 49.25
    few = BY_HAND._replace(shape=BY_HAND.shape._replace(fc_parameters=1))
    assert stanza_s(few, SLOW, Groups(7, 2)) == chain_s + 8 * (0.5 + 400 / 5 / 100)
    assert stanza_s(few, SLOW, Groups(2, 1)) == 1 + 2.5 + 0.25 + 2.5 + 2, "nobody to sum with: split training"
    assert all_reduce_s(BY_HAND, SLOW, 4) == 3.25 + 6 * (0.5 + 4400 / 4 / 100)
    assert dedicated_server_s(BY_HAND, SLOW, 4) == 3.25 + 2 * (0.5 + 3 * 44)
    assert sharded_server_s(BY_HAND, SLOW, 4) == 3.25 + 2 * (0.5 + 0.75 * 44)


def test_pieces_hide_all_but_the_slowest_stage():
    even = SplitProfile(Times(4.0, 4.0, 4.0), Shape(1, 1, 100, label_bytes=0), 1)
    of = [stanza_s(even, Link(100.0, 0.0), Groups(2, 1), micro_batches=pieces) for pieces in (1, 2, 4)]
    assert of == [20.0, 12.0, 8.0]
    assert pipeline_s(even, Link(100.0, 0.0), Groups(2, 1), pieces=2, stages=("forward", "above")) == 8.0, "the control"


# ---- the choice ----


def brute_force(profile, links, n, pieces=1):
    """Return the numbers of FC workers with the highest throughput, and all throughputs."""
    rates = {
        n_fc: (n - n_fc) * profile.batch / pipeline_s(profile, links, Groups(n, n_fc), pieces)
        for n_fc in range(1, n)
        if n_fc <= n - n_fc
    }
    return [n_fc for n_fc in rates if rates[n_fc] >= max(rates.values()) * (1 - 1e-9)], rates


def assert_best(choose, profile, links, n, pieces):
    best, rates = brute_force(profile, links, n, pieces)
    plan = choose(profile, links, n, micro_batches=pieces)
    assert plan.best.n_fc in best
    assert [row.n_fc for row in plan.rows] == list(rates)
    assert [row.samples_per_s for row in plan.rows] == pytest.approx(list(rates.values()))
    others = [rate for n_fc, rate in rates.items() if n_fc != plan.best.n_fc]
    assert plan.margin == pytest.approx(plan.best.samples_per_s / max(others) - 1 if others else math.inf, abs=1e-6)


@PROPERTY
@given(profiles(), links, st.integers(2, 16), st.integers(1, 4))
def test_no_number_of_fc_workers_is_better(profile, links, n, pieces):
    assert_best(choose, profile, links, n, pieces)


def test_a_choice_by_shortest_iteration_is_found_out():
    """Fewer convolution workers make shorter iterations, of fewer samples."""

    def shortest(*arguments, **options):
        plan = choose(*arguments, **options)
        return plan._replace(best=min(plan.rows, key=lambda row: row.seconds))

    case = (sized(*VGG_16), Link(1.25e9, 50e-6), 10, 1)
    assert_best(choose, *case)
    with pytest.raises(AssertionError):
        assert_best(shortest, *case)


def test_of_equals_the_one_with_fewer_fc_workers(monkeypatch):
    """Two workers serve two, or one serves three: equal throughput if an iteration takes half as long again."""
    at = {1: 3.0, 2: 2.0}
    monkeypatch.setattr(stanza_planner, "stanza_s", lambda _, __, groups, *rest: at[groups.n_fc])
    plan = choose(sized(1, 1, 1), Link(1.0, 0.0), 4)
    assert (plan.best.n_fc, plan.margin) == (1, 0.0)
    at[1] = at[2] = 0.0
    plan = choose(sized(1, 1, 1), Link(1.0, 0.0), 4)
    assert (plan.best.n_fc, plan.best.samples_per_s, plan.margin) == (1, math.inf, 0.0)
    at.update({1: 3.0, 2: 1.999})
    assert choose(sized(1, 1, 1), Link(1.0, 0.0), 4).best.n_fc == 2, "the control"


def rising(choose, profile, links, n, factors=(1.0, 1.5, 2.5, 6.0, 20.0)):
    """Return the numbers of FC workers chosen as the layers above take longer."""
    return [choose(retimed(profile, fc_s=profile.times.fc_s * by), links, n).best.n_fc for by in factors]


def load(n, n_fc):
    """Return the batches of an FC worker per batch of the iteration."""
    return -(-(n - n_fc) // n_fc) / (n - n_fc)


@PROPERTY
@given(profiles(), links, st.integers(2, 16))
def test_the_longer_the_layers_above_take_the_less_of_them_is_one_workers(profile, links, n):
    loads = [load(n, n_fc) for n_fc in rising(choose, profile, links, n)]
    assert all(later <= before + 1e-12 for before, later in itertools.pairwise(loads))


@PROPERTY
@given(profiles(), st.floats(1e6, 1e11), st.integers(2, 16))
def test_the_longer_the_layers_above_take_the_more_workers_are_chosen_for_them(profile, bandwidth, n):
    """Unless latencies or the convolutions' ring rule: then four workers may serve five, two at most, where three would
    serve six, two at most."""
    backward_s = max(profile.times.conv_backward_s, profile.shape.conv_bytes / bandwidth)
    chosen = rising(choose, retimed(profile, conv_backward_s=backward_s), Link(bandwidth, 0.0), n)
    assert chosen == sorted(chosen)


def test_a_choice_that_takes_fast_layers_for_slow_ones_is_found_out():
    def contrary(profile, links, n):
        return choose(retimed(profile, fc_s=1 / profile.times.fc_s), links, n)

    case = (sized(*VGG_16), Link(1.25e9, 0.0), 10)
    assert rising(choose, *case) == [2, 2, 5, 5, 5]
    chosen = rising(contrary, *case)
    assert chosen != sorted(chosen)


# ---- beside the others ----


def test_the_others_use_as_many_nodes():
    profile, links = sized(*VGG_16), Link(1.25e9, 50e-6)
    dedicated, sharded, ring = without_separation(profile, links, 10)
    assert [row.batches for row in (dedicated, sharded, ring)] == [9, 10, 10]
    assert dedicated.n_bytes == parameter_server_bytes(profile, 9) == ring_bytes(profile, 10) == ring.n_bytes
    assert dedicated.link_bytes == 9 * profile.shape.model_bytes and ring.link_bytes == sharded.link_bytes
    assert all((row.n_fc, row.label_bytes) == (0, 0) for row in (dedicated, sharded, ring))
    assert ring.samples_per_s == 10 * 32 / ring.seconds
    assert sharded.seconds < ring.seconds, "fewer latencies"
