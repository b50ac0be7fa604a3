"""Sentences of the verdict: the fastest variant, what seeds explain, runs that did not arrive, failed audits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcsync.audit.check import Check
from hpcsync.html_report.run_data import RunData, read
from hpcsync.html_report.verdict import checked, of_variants
from hpcsync.report.explanation import explain
from hpcsync.report.summary import Death, Summary, WorkerSummary, summarize
from hpcsync.report.variants import compare
from hpcsync.report.wording import plural
from hpcsync.trace.reader import load
from tests.unit.html_report.pages import simulated
from tests.unit.jobs import make_job


def run(time_s: float | None, parts_s: Any = ((0, 3, 1, 0), (0, 3, 1, 0)), **fields: object) -> RunData:
    given = dict.fromkeys(Summary.model_fields) | {
        "name": "small",
        "paradigm": "bsp",
        "engine": "simulator",
        "status": "finished",
        "target": "loss 0.3",
        "n_workers": 2,
        "n_servers": 1,
        "samples": 4096,
        "duration_s": 12.5,
        "samples_per_s": 100.0,
        "time_to_target_s": time_s,
        "wait_share": 0.25,
        "final_loss": 0.25,
        "deaths": (),
        "workers": [WorkerSummary.model_construct(iterations=10) for _ in parts_s],
    }
    parts = np.pad(np.array(parts_s, float), [(0, 0), (0, 5 - len(parts_s[0]))])
    data = dict.fromkeys(RunData._fields) | {
        "path": Path("a"),
        "summary": Summary.model_construct(**(given | fields)),
        "parts_s": parts,
        "slowness": parts[:, 1] / np.median(parts[:, 1]),
        "hosts": ("",) * len(parts_s),
        "n_stalls": 0,
        "job": make_job(),
        "checks": (Check("a", True, 1),),
    }
    return RunData(**data)  # type: ignore[arg-type]


def sentences(**variants: list[RunData]) -> list[str]:
    by_seed = {label: {seed: each.summary for seed, each in enumerate(runs)} for label, runs in variants.items()}
    return of_variants(compare(by_seed), variants)


def test_one_run() -> None:
    assert sentences(bsp=[run(9.5)]) == [
        "small (bsp, 2 workers and 1 server, in virtual time) reached loss 0.3 after 9.5 s.",
        "Workers computed 75 % of their time, waited 25 %, and communicated 0 %.",
        "The run passes every check of its audit.",
    ]
    assert "did not reach loss 0.3: it ended after 12.5 s and 4,096 samples." in sentences(bsp=[run(None)])[0]
    assert "it has no target." in sentences(bsp=[run(None, target=None)])[0]
    assert "its status is failed, after 12.5 s." in sentences(bsp=[run(None, status="failed")])[0]
    assert sentences(bsp=[run(9.5, n_servers=0)])[0].startswith("small (bsp, 2 workers, in virtual time) reached")


@pytest.mark.parametrize(("engine", "words"), [("mpi", "on MPI ranks"), ("ddp", "with DistributedDataParallel")])
def test_where_a_run_was_made(engine: str, words: str) -> None:
    assert sentences(bsp=[run(9.5, engine=engine)])[0].startswith(
        f"small (bsp, 2 workers and 1 server, {words}) reached"
    )


def test_several_seeds_of_one_variant() -> None:
    first, second = run(9.0), run(10.0, [(0, 1, 3, 0), (0, 1, 3, 0)])
    assert sentences(bsp=[first, second])[:2] == [
        "small (bsp, 2 workers and 1 server, in virtual time) reached loss 0.3 after 9.5 s, the mean of 2 seeds.",
        "Workers computed 50 % of their time, waited 50 %, and communicated 0 %.",
    ]
    assert sentences(bsp=[first, run(None)])[0].endswith("reached loss 0.3 in 1 of 2 runs.")


def test_several_seeds_end_on_average() -> None:
    runs = [run(None, duration_s=12.0, samples=4000), run(None, duration_s=13.0, samples=4001)]
    ended = "it ended after 12.5 s and 4,000 samples on average over 2 seeds."
    assert sentences(bsp=runs)[0].endswith(f"did not reach loss 0.3: {ended}")
    without = [run(None, target=None, duration_s=duration_s) for duration_s in (12.0, 14.0)]
    said = "ended after 13 s and 4,096 samples on average over 2 seeds; it has no target."
    assert sentences(bsp=without)[0].endswith(said)


def test_a_slow_worker_is_named() -> None:
    slow = run(9.5, [(0, 3, 1, 0), (0, 3, 1, 0), (1, 6, 0, 0)])
    assert sentences(bsp=[slow])[1] == (
        "Workers computed 80 % of their time, waited 13 %, and communicated 0 %; 6.7 % was loading; worker 2 is the "
        "slowest, its iterations take 2 times the median."
    )
    assert "slowest" not in sentences(bsp=[run(9.5, [(0, 3, 0, 0), (0, 3, 0, 0), (0, 3.3, 0, 0)])])[1]
    assert "slowest" not in sentences(bsp=[slow._replace(slowness=np.array([1.0, np.nan, 2.0]))])[1]
    assert "; worker 2 on b is the slowest" in sentences(bsp=[slow._replace(hosts=("a", "a", "b"))])[1]
    workload = {"name": "timing", "parameters": 10, "classifier": 5, "activations": 1}
    stanza = make_job(paradigm={"name": "stanza", "cut": "classifier"}, workload=workload, cluster={"workers": 3})
    of_some = sentences(bsp=[slow._replace(job=stanza)])[1]
    assert "; worker 2 is the slowest of those that train the same layers, its iterations take 2 times" in of_some


def test_a_slow_worker_whose_iterations_are_cancelled_is_as_slow_as_in_the_explanation(tmp_path: Path) -> None:
    path = simulated(tmp_path, 'paradigm={name = "k-sync", k = 2, cancel = "abort"}') / "trace.h5"
    trace = load(path)
    found = read(path, summarize(trace), audited=False)
    pushes = trace.frame("pushes")
    assert (pushes["share"] < 1).sum() > 50
    whole_s = (pushes["compute_s"] / pushes["share"]).groupby(pushes["worker"]).mean()
    np.testing.assert_allclose(found.slowness, explain(trace).slowness)
    assert found.slowness[2] == pytest.approx(whole_s[2] / whole_s.median(), rel=0.05)
    said = of_variants(compare({"k-sync": {5: found.summary}}), {"k-sync": [found]})[1]
    assert f"worker 2 is the slowest, its iterations take {found.slowness[2]:.2g} times the median" in said


def test_time_between_iterations_is_named() -> None:
    assert sentences(bsp=[run(9.5, [(0, 3, 1, 0, 4), (0, 3, 1, 0, 4)])])[1] == (
        "Workers computed 38 % of their time, waited 12 %, and communicated 0 %; 50 % was compression, steps of "
        "the optimizer and other work between iterations."
    )


def test_variants_without_a_common_seed_have_arrived() -> None:
    runs = {"a": {1: run(1.0)}, "b": {2: run(2.0)}}
    result = compare({label: {seed: each.summary for seed, each in of.items()} for label, of in runs.items()})
    second = of_variants(result, {label: [*of.values()] for label, of in runs.items()})[1]
    assert second == "No difference is known to b, because there is no common seed."


def test_a_variant_may_be_sooner_at_the_common_seeds_only() -> None:
    runs = {"a": {1: run(3.0), 2: run(1.0)}, "b": {1: run(2.5)}}
    result = compare({label: {seed: each.summary for seed, each in of.items()} for label, of in runs.items()})
    assert result.fastest == "a"
    second = of_variants(result, {label: [*of.values()] for label, of in runs.items()})[1]
    assert second == "At the common seeds it is behind b (by 0.5 s)."


def test_differences_that_seeds_explain_and_others() -> None:
    found = sentences(
        a=[run(1.0), run(2.0), run(3.0)],
        b=[run(2.0), run(3.1), run(4.0)],
        c=[run(1.0, wait_share=0.5), run(2.5), run(2.8)],
        d=[run(2.0), run(None), run(2.0)],
    )
    assert found[0] == (
        "a reached loss 0.3 soonest, after 2 s (95 % interval -0.484 to 4.48 s) on average over 3 seeds; its "
        "probability of being the fastest is 0.73."
    )
    assert found[1] == (
        "It is ahead of b (by 1.03 s) by more than the seeds explain; its lead over c (by 0.1 s) may be chance; no "
        "mean difference is known to d, because not all runs reached the target."
    )
    assert found[2].startswith(
        "Workers waited 25 % of their time under a and 33 % under c, and a ended with the smallest"
    )
    equal = [run(1.0), run(2.0), run(4.0)]
    assert sentences(a=equal, b=equal)[1] == "Its lead over b (by 0 s) may be chance."
    assert sentences(a=equal[:2], b=[run(9.0)] * 2)[0].endswith("soonest, after 1.5 s on average over 2 seeds.")
    few = sentences(a=[run(1.0)], b=[run(2.0)])
    assert few[0] == "a reached loss 0.3 soonest, after 1 s with one seed."
    assert few[1] == "Its lead over b (by 1 s) may be chance, since an interval needs 3 common seeds."


def test_the_best_accuracy_and_that_of_the_fastest() -> None:
    last = sentences(asp=[run(8.0, final_accuracy=0.8, wait_share=0.01)], bsp=[run(9.5, final_accuracy=0.9)])[2]
    assert last == (
        "Workers waited 1.0 % of their time under asp and 25 % under bsp, and bsp ended with the best accuracy (0.9), "
        "asp with 0.8."
    )
    last = sentences(bsp=[run(9.5)], asp=[run(8.0, final_loss=0.2)])[2]
    assert last.endswith(", and asp ended with the smallest loss (0.2).")
    last = sentences(bsp=[run(8.0, final_accuracy=0.9)], asp=[run(9.0, final_accuracy=0.8)])[2]
    assert last.endswith(", and bsp ended with the best accuracy (0.9).")


def test_a_loss_that_is_not_finite_is_in_the_verdict() -> None:
    lost = run(None, diverged_at=2)
    assert sentences(bsp=[lost])[3:] == ["No loss was finite at the end of 1 of 1 run of bsp."]
    found = sentences(a=[lost, run(1.0)], b=[run(1.0)], c=[lost, lost])
    assert found[3:] == ["No loss was finite at the end of 1 of 2 runs of a and 2 of 2 runs of c."]
    assert len(sentences(bsp=[run(None)])) == 3


def test_times_of_hours_have_no_powers_of_ten() -> None:
    found = sentences(a=[run(10_000.5), run(12_000.5), run(15_000.0)], b=[run(31_000.5), run(32_000.5), run(36_000.0)])
    assert found[0].startswith("a reached loss 0.3 soonest, after 12,334 s (95 % interval 6,083 to 18,585 s) on")
    assert found[1] == "It is ahead of b (by 20,667 s) by more than the seeds explain."
    assert "it ended after 12,346 s and" in sentences(a=[run(None, duration_s=12_345.6)])[0]


def test_no_variant_is_the_fastest() -> None:
    assert sentences(a=[run(1.0), run(None)], b=[run(None)])[0].endswith("so none is the fastest; a did in 1 of 2.")
    assert sentences(a=[run(None)], b=[run(None)])[0] == "No run reached loss 0.3."
    seldom = sentences(a=[*[run(1.0)] * 2, *[run(None)] * 4], b=[run(1.0), run(None)])[0]
    assert seldom.endswith("so none is the fastest; b did in 1 of 2."), "the largest share, not the most runs"
    none = sentences(a=[run(None, target=None)], b=[run(None, target=None, samples_per_s=1234.0)])
    assert none[0].endswith("so no variant is the fastest; b processed most samples per second (1,234).")


def test_a_failed_audit_is_in_the_verdict() -> None:
    failed = run(2.0)._replace(checks=(Check("a", False, 1),))
    assert sentences(a=[run(1.0)], b=[failed])[2] == "The audit found a failure in 1 of 2 runs."
    assert checked([failed, run(1.0)._replace(checks=None)]) == "The audit found a failure in 1 of 1 run."
    unknown = run(1.0)._replace(checks=None)
    assert checked([run(1.0), unknown]) == "Every audited run (1 of 2) passes every check."
    assert checked([unknown]) == "No run was audited."
    assert sentences(a=[unknown], b=[unknown])[2].startswith("Workers waited 25 % of their time under a")


def test_deaths_and_stalls_of_all_runs_are_counted() -> None:
    stalled, died = run(1.0)._replace(n_stalls=1), run(1.0, deaths=(Death(worker=0, now_s=0.5, left=1),))
    assert checked([run(1.0), stalled]).endswith("; there was 1 report of a stall.")
    assert checked([died, stalled]).endswith("; there were 1 death and 1 report of a stall.")


@pytest.mark.parametrize(("n", "words"), [(1, "1 report of a stall"), (2000, "2,000 reports of a stall")])
def test_plural(n: int, words: str) -> None:
    assert plural(n, "report of a stall") == words
