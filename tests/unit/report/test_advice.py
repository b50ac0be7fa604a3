"""What is advised: the simplest of those that cannot be told from the fastest, and one sentence why."""

import io
import math
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from hpcsync.report.advice import (
    Trial,
    by_loss,
    coarseness,
    conclude,
    numbers,
    prediction,
    rounded,
    simplest,
    table,
    trial_numbers,
    verdict,
    why,
)
from hpcsync.report.variants import compare

ORDER = ["allreduce", "bsp", "asp", "gossip"]


def runs(*times_s, samples_per_s=100.0, loss=1.0):
    """Summaries by seed, of runs that reach the target at these times; None: not at all."""
    numbers = dict.fromkeys(("wait_share", "staleness_mean", "wire_bytes", "final_accuracy"), 1.0)
    return {
        seed: SimpleNamespace(
            time_to_target_s=time_s, samples_per_s=samples_per_s, final_loss=loss, target="loss 0.3", **numbers
        )
        for seed, time_s in enumerate(times_s)
    }


def shown(what):
    console = Console(file=io.StringIO(), width=80)
    console.print(what)
    return console.file.getvalue()


def test_the_simplest_of_those_that_cannot_be_told_apart_is_advised():
    variants = {
        "gossip": runs(10.0, 11.0, 12.0),
        "asp": runs(10.5, 10.9, 12.8),  # behind by 0.4 ± 1.1
        "bsp": runs(20.0, 21.0, 22.0),
    }
    advice = conclude(compare(variants), ORDER)
    assert (advice.advised, advice.alike) == ("asp", ("asp", "gossip"))
    assert [row.label for row in advice.ranking] == ["gossip", "asp", "bsp"]


def test_a_simpler_one_that_takes_much_longer_is_not_advised_however_little_is_known():
    slow, fast = (9.0, 20.0, 10.0), (10.0, 9.0, 11.0)
    advice = conclude(compare({"bsp": runs(*slow), "gossip": runs(*fast)}), ORDER)
    assert (advice.advised, advice.alike) == ("gossip", ("bsp", "gossip"))
    assert simplest(("bsp", "gossip"), {"bsp": 1.05, "gossip": 1.0}) == "bsp"  # control: about as fast
    assert simplest(("bsp", "gossip"), {"bsp": 1.06, "gossip": 1.0}) == "gossip"


def test_a_sure_difference_is_one():
    variants = {"gossip": runs(10.0, 11.0, 12.0), "asp": runs(10.5, 11.5, 12.5)}
    assert conclude(compare(variants), ORDER).alike == ("gossip",)


def test_who_is_behind_with_each_of_three_seeds_is_not_told_apart_by_that():
    """Of two equal candidates one is, in a quarter of all advices; its probability of being the fastest is then 0."""
    found = compare({"gossip": runs(1.0, 1.0, 1.0), "bsp": runs(1.5, 9.0, 2.0)})  # behind by 3.2 ± 10
    assert [row.fastest for row in found.rows] == [1.0, 0.0]
    advice = conclude(found, ORDER)
    assert (advice.advised, advice.alike) == ("gossip", ("bsp", "gossip"))


def test_equal_candidates_are_seldom_told_apart():
    """With Student's 95 % intervals one in twenty; beside the best of four of them, a few more."""
    draw, n_told, n_pairs = np.random.default_rng(0), 0, 0
    for _ in range(200):
        times_s = 10 + draw.normal(size=3) + draw.normal(size=(len(ORDER), 3))  # seeds differ, candidates do not
        found = compare({label: runs(*own) for label, own in zip(ORDER, times_s, strict=True)})
        n_told += len(ORDER) - len(conclude(found, ORDER).alike)
        n_pairs += len(ORDER) - 1
    assert 0.02 < n_told / n_pairs < 0.12


def test_without_intervals_nothing_can_be_told_apart():
    advice = conclude(compare({"gossip": runs(10.0), "bsp": runs(30.0)}), ORDER)
    assert (advice.advised, advice.alike) == ("gossip", ("bsp", "gossip"))


def test_who_misses_the_target_once_is_not_advised_and_without_any_nobody_is():
    advice = conclude(compare({"bsp": runs(1.0, 1.0, None), "asp": runs(9.0, 9.1, 9.2)}), ORDER)
    assert (advice.advised, advice.ranking[-1].label) == ("asp", "bsp")
    assert conclude(compare({"bsp": runs(None, None, None)}), ORDER).advised is None


def test_without_any_time_the_loss_ranks_them():
    losses = {"bsp": 0.5, "asp": math.nan, "gossip": 0.2}
    none = {label: runs(None, None, None, loss=loss) for label, loss in losses.items()}
    none["allreduce"] = runs(1.0, None, None, loss=9.0)
    advice = conclude(compare(none), ORDER)
    assert [row.label for row in advice.ranking] == ["allreduce", "gossip", "bsp", "asp"], "arrivals come first"
    words = shown(table(advice, dict.fromkeys(none, 1.0)))
    assert "by loss" in words and "behind" not in words
    timed = conclude(compare({"bsp": runs(1.0), "asp": runs(None)}), ORDER)
    assert "behind" in shown(table(timed, {"bsp": 1.0, "asp": 1.0})), "control"


def test_a_row_has_its_star_its_difference_and_its_rate():
    variants = {"gossip": runs(10.0, 11.0, 12.0), "asp": runs(10.5, 10.9, 12.8), "bsp": runs(20.0, 21.0, 22.0)}
    advice = conclude(compare(variants), ORDER)
    rows = shown(table(advice, {"gossip": 0.5, "asp": 1.0, "bsp": 2.0})).splitlines()[2:5]
    assert [row.split()[:2] for row in rows] == [["gossip", "*"], ["asp", "*"], ["bsp", "21"]]
    assert [row.split()[-1] for row in rows] == ["0.5", "1", "2"]
    found = numbers(advice)
    assert (found[0]["behind_s"], found[0]["time_s"]["mean"], found[2]["behind_s"]["mean"]) == (None, 11.0, 10.0)


def test_a_long_label_is_wrapped_and_numbers_are_not():
    label = "dssp staleness_min=3 staleness_max=15"
    variants = {"asp": runs(0.0081, 0.0092, 0.0097), label: runs(0.0083, 0.0094, 0.0115)}
    lines = shown(table(conclude(compare(variants), ORDER), dict.fromkeys(variants, 1.0))).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("0.009733 ± 0.004  0.0007333 ± 0.0023" in line for line in lines)


def test_a_legend_says_what_the_columns_are():
    words = shown(table(conclude(compare({"bsp": runs(1.0), "asp": runs(2.0)}), ORDER), {"bsp": 1.0, "asp": 1.0}))
    assert max(map(len, words.splitlines())) <= 80
    words = " ".join(words.split())
    for part in (
        "behind: seconds after the fastest",
        "*: not distinguishable from the fastest",
        "lr x: factor of the job's learning",
    ):
        assert part in words


@pytest.mark.parametrize(
    ("n", "words"), [(1, "asp (1 seed gives no interval, 3 would)"), (2, "(2 seeds give no"), (3, "asp.")]
)
def test_what_few_seeds_cannot_tell_apart_is_said_to_follow_from_few(n, words):
    advice = conclude(compare({"bsp": runs(*[1.0, 2.0, 3.0][:n]), "asp": runs(*[1.0, 2.1, 2.9][:n])}), ORDER)
    assert words in verdict(advice, "loss 0.3", Trial(3, 1.0, 9.0, n))[1]


def test_what_is_indistinguishable_is_so_from_the_fastest_which_need_not_be_advised():
    """Here bsp is behind asp by 1 s with every seed."""
    fast, near = (10.0, 11.0, 12.0), (12.9, 8.2, 12.3)
    variants = {"gossip": runs(*fast), "asp": runs(*near), "bsp": runs(*(time_s + 1.0 for time_s in near))}
    advice = conclude(compare(variants), ["asp", "bsp", "gossip"])
    lines = ["Train with asp.", "Not distinguishable from the fastest, gossip: asp, bsp."]
    assert (advice.ranking[0].label, verdict(advice, None, Trial(3, 1.0, 9.0, 3))) == ("gossip", lines)
    advice = conclude(compare(variants), ["gossip", "asp", "bsp"])
    lines = ["Train with gossip.", "Not distinguishable from it: asp, bsp."]
    assert verdict(advice, None, Trial(3, 1.0, 9.0, 3)) == lines


def test_of_equals_the_one_that_others_are_beside_is_ranked_first():
    advice = conclude(compare({"bsp": runs(1.0, 2.0, 3.0), "asp": runs(3.0, 2.0, 1.0, loss=0.5)}), ORDER)
    assert [row.behind_s is None for row in advice.ranking] == [True, False]
    same = conclude(compare({"bsp": runs(1.0, 2.0, 3.0), "asp": runs(1.0, 2.0, 3.0)}), ORDER)
    assert same.alike == ("bsp", "asp"), "also where every seed takes both as long"


def test_the_verdict_says_which_trial_it_is_of():
    none = conclude(compare({"bsp": runs(None)}), ORDER)
    assert verdict(none, None, Trial(3, 1.0, 9.0, 1)) == [
        "No candidate reached the target with every seed, so none is advised."
    ]
    said = "Too early for advice: in trial 1, with 11 % of the time, no candidate reached loss 0.3"
    lines = ["The ranking is provisional: by the loss after 1 of 9 virtual s."]
    assert verdict(none, "loss 0.3", Trial(1, 1 / 9, 9.0, 1)) == [f"{said}.", *lines]
    assert verdict(none, "loss 0.3", Trial(1, 1 / 9, 9.0, 3)) == [f"{said} with every seed.", *lines]
    some = conclude(compare({"bsp": runs(1.0, 2.0, 3.0), "asp": runs(1.0, 2.1, 2.9)}), ORDER)
    lines = ["Train with bsp.", "Not distinguishable from it: asp."]
    assert verdict(some, None, Trial(3, 1.0, 9.0, 3)) == lines
    early = "This is from trial 2, with 33 % of the time; the learning rates were selected with one of its seeds."
    assert verdict(some, None, Trial(2, 1 / 3, 9.0, 3)) == [*lines, early]


def test_where_none_arrives_before_the_last_trial_the_loss_is_said_to_have_chosen():
    none = [{"label": label, "arrived": 0} for label in ("asp", "bsp", "bsp")]  # with two rates
    one = [none[0], none[1] | {"arrived": 1}]
    trials = [{"limit_s": limit_s, "candidates": none} for limit_s in (1 / 3, 1.0)]
    assert by_loss(trials, 1).startswith(
        "No candidate reached the target before the last trial, so its candidates were selected by their loss after "
        "0.333 and 1 virtual s, "
    )
    assert by_loss([trials[0], {"limit_s": 1.0, "candidates": one}], 1) == by_loss([], 1) == ""
    assert by_loss(trials, 2) == "", "none was left out"


def test_why_is_speed_and_need():
    fast, slow = runs(10.0, 20.0, samples_per_s=300.0), runs(20.0, 60.0, samples_per_s=100.0)
    expected = "Compared with bsp, it trains 3.00 times as many samples per second and needs 1.25 times as many "
    expected += "samples to reach the target."
    assert why(fast, slow, "bsp") == expected
    assert "did not reach the target" in why(fast, runs(None, None), "bsp")
    assert why(fast, {**slow, 2: slow[1]}, "bsp") == expected, "a seed that only one of them has does not count"


@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_speed_over_need_is_the_ratio_of_the_times(speed):
    words = why(runs(5.0, samples_per_s=speed), runs(10.0, samples_per_s=1.0), "bsp").split()
    numbers = [float(word) for word in words if word[0].isdigit()]
    assert numbers[0] / numbers[1] == pytest.approx(2.0)


def test_a_further_run_lies_within_the_predicted_interval_in_80_percent():
    """By a table of Student's distribution: 1.886 for the quantile 0.9 with two degrees of freedom."""
    found = prediction(runs(10.0, 11.0, 12.0, samples_per_s=7.0).values())
    half_s = 1.886 * (1 + 1 / 3) ** 0.5
    assert found == pytest.approx(
        {"seconds": 11, "low_s": 11 - half_s, "high_s": 11 + half_s, "samples_per_s": 7}, rel=1e-3
    )
    assert prediction(runs(10.0, None).values()) == {}
    assert prediction(runs(10.0).values()).keys() == {"seconds", "samples_per_s"}, "one run shows no spread"
    assert prediction(runs(1.0, 9.0).values())["low_s"] == 0, "no time is negative"


def test_an_interval_narrower_than_between_evaluations_is_said_to_be():
    at_the_same = prediction(runs(4.0, 4.0, 4.0, samples_per_s=200.0).values())
    assert (at_the_same["low_s"], at_the_same["high_s"]) == (4, 4)
    assert coarseness(at_the_same, 300).startswith(
        "This interval is narrower than the time between two evaluations (1.5 s), "
    )
    assert coarseness(prediction(runs(10.0, 11.0, 12.0, samples_per_s=200.0).values()), 300) == ""
    assert coarseness(prediction(runs(4.0, samples_per_s=200.0).values()), 300) == "", "one run has no interval"


def test_means_of_a_trial_need_a_value_of_every_seed():
    found = trial_numbers(runs(2.0, 4.0))
    assert (found["seeds"], found["arrived"], found["time_s"], found["loss"]) == ([0, 1], 2, 3.0, 1.0)
    found = trial_numbers({0: runs(2.0)[0], 1: runs(None, loss=None)[0]})
    assert (found["arrived"], found["time_s"], found["loss"], found["predicted"]) == (1, None, None, {})


def test_times_of_hours_are_written_in_full():
    variants = {"bsp": runs(10_000.0, 11_000.0, 12_345.6), "asp": runs(20_000.0, 22_000.0, 22_500.0)}
    text = shown(table(conclude(compare(variants), ORDER), dict.fromkeys(variants, 1.0)))
    assert "11,115 ± 2,924" in text
    assert "e+0" not in text
    assert [line.split("%")[0].split()[-1] for line in text.splitlines()[2:4]] == ["100", "0"]
    assert "1.117 ± 0.31 " in shown(table(conclude(compare({"bsp": runs(1.0, 1.1, 1.25)}), ORDER), {"bsp": 1.0}))
    assert [*map(rounded, (1.3094, 41.368, 999.96, 12_345.6))] == ["1.309", "41.37", "1000", "12,346"]
