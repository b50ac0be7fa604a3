"""Comparison of variants: means and intervals by hand, pairs of seeds, censored runs, and the tables."""

from __future__ import annotations

import csv
import io
import math

import numpy as np
import pytest
from rich.console import Console

from hpcsync.report import variants
from hpcsync.report.summary import Summary
from hpcsync.report.variants import (
    compare,
    escaped,
    estimate,
    mean_and_band,
    merit,
    paired,
    probabilities,
    row_cells,
    table,
    to_csv,
    to_latex,
)

T_2 = 4.302652729911275  # Student's t for 95 % and 2 degrees of freedom, from tables


def summary(time_s: float | None, **fields: object) -> Summary:
    given = dict.fromkeys(Summary.model_fields) | {
        "target": "accuracy 0.9",
        "time_to_target_s": time_s,
        "samples_per_s": 100.0,
        "wait_share": 0.25,
        "staleness_mean": 1.5,
        "wire_bytes": 2_000_000,
        "final_accuracy": 0.95,
        "final_loss": 0.5,
    }
    return Summary.model_construct(**(given | fields))


def runs(*times: float | None, **fields: object) -> dict[int, Summary]:
    return {seed: summary(time_s, **fields) for seed, time_s in enumerate(times, 1)}


def test_an_interval_is_students() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(T_2 / math.sqrt(3))
    assert estimate([1.0, 2.0]) == (1.5, None)


def test_a_difference_is_taken_seed_by_seed() -> None:
    """What a seed does to both cancels: the interval of the difference is narrow though those of the times are wide."""
    slow, fast = {1: 11.0, 2: 21.0, 3: 31.0}, {1: 10.0, 2: 20.0, 3: 30.0}
    assert paired(slow, fast) == (1.0, pytest.approx(0.0))
    shuffled = {1: 30.0, 2: 10.0, 3: 20.0}  # the same times with other seeds: pairs count, not means
    assert paired(slow, shuffled).half_width > 10.0
    assert paired({1: 3.0, 4: 9.0}, {1: 1.0, 5: 2.0}) == (2.0, None)
    assert paired({1: math.inf}, {1: 1.0}) is None
    assert paired({1: 3.0}, {2: 1.0}) is None


def test_probabilities_of_being_the_fastest() -> None:
    assert probabilities(np.array([[1.0, 2.0, 3.0], [1.5, 2.5, 3.5]])).tolist() == [1.0, 0.0]
    assert probabilities(np.array([[1.0, 2.0], [1.0, 2.0]])).tolist() == [0.5, 0.5]
    # Differences -1, -1 and +3: the sum of three drawn ones is negative only if the third is not among them.
    first = probabilities(np.array([[0.0, 0.0, 3.0], [1.0, 1.0, 0.0]]))[0]
    assert first == pytest.approx((2 / 3) ** 3, abs=0.02)


def test_a_censored_run_never_makes_its_variant_the_fastest() -> None:
    found = probabilities(np.array([[1.0, 1.0, math.inf], [5.0, 5.0, 5.0]]))
    assert found[0] == pytest.approx((2 / 3) ** 3, abs=0.02)  # samples without the third seed
    assert found.sum() == pytest.approx(1.0)
    both = probabilities(np.array([[math.inf, 1.0], [math.inf, 2.0]]))
    assert both.sum() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("target", [None, "accuracy 0.9"])
def test_where_no_run_arrives_no_probability_is_known(target: str | None) -> None:
    none = {label: runs(None, None, None, target=target) for label in ("a", "b")}
    assert [row.fastest for row in compare(none).rows] == [None, None]
    once = {**none, "c": runs(1.0, 1.0, None, target=target)}  # control: with 8 of 27 samples of seeds
    assert [row.fastest for row in compare(once).rows] == [0.0, 0.0, pytest.approx(8 / 27, abs=0.02)]


def test_rows_of_three_variants() -> None:
    found = compare({"bsp": runs(4.0, 5.0, 6.0), "asp": runs(3.0, 4.0, 5.0), "ssp": runs(2.0, None, 2.0)})
    bsp, asp, ssp = found.rows
    assert found.fastest == "asp"
    assert (bsp.runs, bsp.arrived, bsp.time_s.mean, bsp.behind_s.mean) == (3, 3, 5.0, 1.0)
    assert bsp.behind_s.half_width == pytest.approx(0.0)
    assert (asp.behind_s, ssp.time_s, ssp.arrived, ssp.behind_s) == (None, None, 2, None)
    assert bsp.fastest == 0.0
    assert asp.fastest + ssp.fastest == pytest.approx(1.0)
    assert ssp.fastest == pytest.approx((2 / 3) ** 3, abs=0.02)
    assert any("n of the m runs reached the target" in line for line in found.remarks)
    assert bsp[6:] == pytest.approx((100.0, 0.25, 1.5, 2_000_000, 0.95, 0.5))
    assert [row_cells(row, found, "accuracy")[2] for row in found.rows] == ["+1.00 ± 0.00", "fastest", "-"]


def test_seeds_may_come_in_any_order() -> None:
    a, b = runs(1.0, 2.0, 9.0), runs(2.0, 3.0, 5.0)
    expected = [row.fastest for row in compare({"a": a, "b": b}).rows]
    assert [row.fastest for row in compare({"a": dict(reversed(a.items())), "b": b}).rows] == expected


def test_a_band_is_the_interval_of_the_mean_or_the_range_of_two() -> None:
    two, three = mean_and_band(np.array([[1.0], [4.0]])), mean_and_band(np.array([[1.0], [2.0], [3.0]]))
    assert np.ravel(two).tolist() == [2.5, 1.0, 4.0]
    assert np.ravel(three) == pytest.approx([2.0, 2.0 - T_2 / math.sqrt(3), 2.0 + T_2 / math.sqrt(3)])


def test_means_need_a_value_of_every_run() -> None:
    row = compare({"a": {1: summary(1.0), 2: summary(2.0, staleness_mean=None)}}).rows[0]
    assert (row.samples_per_s, row.staleness) == (100.0, None)


@pytest.mark.parametrize(
    ("found", "remark"),
    [
        ({"a": runs(1.0, 2.0), "b": runs(1.0, 2.0)}, "no probabilities: 2 common seeds, at least 3 are needed"),
        ({"a": runs(1.0, 2.0, 3.0), "b": runs(1.0, 2.0, 3.0, 4.0)}, "the variants have different seeds"),
        ({"a": runs(1.0, 2.0), "b": runs(1.0, 2.0, 3.0)}, "no intervals for fewer than 3 seeds"),
        ({"a": runs(None, target=None), "b": runs(None, target=None)}, "no target, so no time to it"),
        ({"a": runs(1.0), "b": runs(1.0, target="loss 0.1")}, "different targets: accuracy 0.9, loss 0.1"),
    ],
)
def test_remarks(found: dict[str, dict[int, Summary]], remark: str) -> None:
    remarks = compare(found).remarks
    assert any(remark in line for line in remarks), remarks


def test_nothing_is_remarked_on_a_whole_grid() -> None:
    assert compare({"a": runs(1.0, 2.0, 3.0), "b": runs(1.0, 2.0, 3.0)}).remarks == ()


def printed(found: variants.Variants) -> list[str]:
    console = Console(width=80, file=io.StringIO())
    console.print(table([found]))
    return console.file.getvalue().splitlines()


def test_runs_without_a_target_are_not_said_to_have_missed_it() -> None:
    lines = printed(compare({"a": runs(None, None, None, target=None), "b": runs(None, None, None, target=None)}))
    assert not any(words in line for line in lines for words in ("of 3", "n of m", "to target:"))
    assert any("0 of 3" in line for line in printed(compare({"a": runs(None, None, None), "b": runs(1.0, 2.0, 3.0)})))


@pytest.mark.parametrize(("accuracies", "quality"), [((None, None), "loss"), ((None, 0.9), "accuracy")])
def test_the_last_column_is_the_loss_if_no_variant_has_an_accuracy(
    accuracies: tuple[float | None, ...], quality: str
) -> None:
    found = compare({f"v{i}": runs(1.0, final_accuracy=accuracy) for i, accuracy in enumerate(accuracies)})
    assert printed(found)[0].endswith(quality)


def test_arrivals_are_shown_where_variants_have_different_targets() -> None:
    found = compare({"a": runs(1.0, None, 3.0), "b": runs(1.0, 2.0, 3.0, target="loss 0.1")})
    assert found.target is None
    assert any(line.startswith("a ") and "2 of 3" in line for line in printed(found))


@pytest.mark.parametrize(("speed", "said"), [(9.996, "10.0"), (99.96, "100"), (999.7, "1,000")])
def test_numbers_are_rounded_to_three_digits_before_these_are_counted(speed: float, said: str) -> None:
    assert f" {said} " in printed(compare({"a": runs(1.0, samples_per_s=speed)}))[1]


def test_a_long_option_is_whole_in_place_of_the_bytes() -> None:
    short = {"asp": runs(9.25, 8.0, 9.0), "bsp": runs(3.0, 1.0, 2.0)}
    assert "MB" in printed(compare(short))[0]
    assert " 2.00 " in printed(compare(short))[1], "2,000,000 bytes"
    assert "MB: moved by all workers" in " ".join(printed(compare(short)))
    lines = printed(compare({"dssp staleness_min=3 staleness_max=15": runs(5.0, 4.0, 3.0), **short}))
    assert any(line.startswith("staleness_max=15 ") for line in lines)
    assert "MB" not in " ".join(lines)


def test_the_table_fits_into_80_columns() -> None:
    long = "dssp staleness_min=3 staleness_max=15 seconds=[0.02,0.02,0.02,0.04]"
    names = {long: runs(123.4, 125.4, 131.0), "asp": runs(99.25, 98.0, 91.0), "bsp": runs(None, 1.0, 2.0)}
    lines = printed(compare(names))
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for words in ("fastest", "2 of 3", "127 ± 9.79", "+30.5 ± 20.8", "samples/s", "25 %", "0.95"):
        assert words in text, text
    assert "…" not in text, "nothing is cut"


def test_csv_has_every_digit() -> None:
    found = compare({'a, "b"': runs(1.0, 2.0, 4.0), "c": runs(None, 2.0, 3.0)})
    first, second = csv.DictReader(io.StringIO(to_csv([found])))
    assert first["label"] == 'a, "b"'
    assert float(first["time_s"]) == 7 / 3
    assert float(first["time_s_ci95"]) == found.rows[0].time_s.half_width
    assert (second["time_s"], second["time_s_ci95"], second["arrived"], second["runs"]) == ("", "", "2", "3")


def test_latex_is_escaped() -> None:
    text = to_latex([compare({"k_sync k=2 100 %": runs(1.0, 2.0, 3.0)}, "a_b")] * 2)
    assert r"k\_sync k=2 100 \% & " in text
    assert r"$\pm$" in text
    assert escaped("~^<&$") == r"\textasciitilde{}\textasciicircum{}\textless{}\&\$"
    assert text.count(r"\\") == 1 + 2 * 2
    assert text.count(r"\multicolumn{9}{l}{a\_b} \\") == 2
    assert {line.count(" & ") for line in text.splitlines() if " & " in line} == {8}
    for rule in (r"\toprule", r"\midrule", r"\bottomrule"):
        assert rule in text


def test_the_merit_of_a_setting() -> None:
    arrives, later, seldom = runs(1.0, 2.0), runs(1.0, 3.0), runs(0.5, None)
    ordered = [arrives, later, seldom, {1: summary(0.5)}, runs(None, None), {1: summary(None, final_loss=0.1)}, {}]
    merits = [merit(each.values(), 2) for each in ordered]
    assert merits == sorted(merits)
    without = [runs(None, None, final_loss=loss) for loss in (0.1, 0.2, math.nan)]
    merits = [merit(each.values(), 2) for each in without]
    assert merits == sorted(merits)
    assert merits[2][2] == math.inf
