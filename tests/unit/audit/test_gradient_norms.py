"""Squared norms of gradients in traces: what they are, where there are none, and wrong ones, which the audit finds."""

import numpy as np
import pytest
from safetensors.torch import load_file

from hpcsync.audit.gradient_norms import check_norms
from hpcsync.audit.trace_audit import audit
from hpcsync.config.job import Job
from hpcsync.core.job_validation import check
from hpcsync.trace.schema import TABLES, Outcome
from tests.unit.jobs import LINEAR, REQUIRED
from tests.unit.simulator.runs import simulated
from tests.unit.trace.recorder import edit, with_rows

SECONDS = [0.1, 0.13, 0.21]
GRADIENTS = ["bsp", "asp", "ssp", "k-sync", "k-batch-sync", "k-async", "k-batch-async", "sync-switch"]
OTHERS = ["easgd", "ashl", "adsp", "async-diloco"]
PEERS = ["allreduce", "local-sgd", "gossip", "ad-psgd"]


def trained(folder, name, **how):
    how = {"workload": LINEAR, "stop": {"updates": 12, "samples": 10_000}, "jitter": 0.2, **how}
    if name in PEERS:
        how["servers"] = 0
    return simulated(folder, {"name": name, **REQUIRED.get(name, {})}, SECONDS, **how)


def wrong(trace):
    return [check.name for check in check_norms(trace) if not check.passed]


@pytest.mark.parametrize("name", [*GRADIENTS, *OTHERS, *PEERS])
def test_every_paradigm_records_them_where_there_are_gradients(tmp_path, name):
    trace = trained(tmp_path, name)
    assert all(check.passed for check in audit(trace))
    rows, updates = trace.tables["exchanges" if name in PEERS else "pushes"], trace.tables["updates"]
    known = np.isfinite(rows["gradient_sq"])
    if name in OTHERS:
        assert not known.any() and np.isnan(updates["gradient_sq"]).all()
    else:
        assert known[rows["batch_size" if name in PEERS else "share"] >= 1].all()
        assert (updates["gradient_sq"] > 0).all()


@pytest.mark.parametrize("name", ["bsp", "asp", "allreduce"])
def test_they_are_the_lengths_of_plain_steps(tmp_path, name):
    """Without momentum, the first step moves the weights by the rate times the norm."""
    trace = trained(tmp_path, name, stop={"updates": 1}, optimizer={"name": "sgd", "lr": 0.1, "async_lr_scale": 1.0})
    job: Job = trace.job
    start = dict(check(job).model.named_parameters())
    end = load_file(trace.path.parent / "weights.safetensors")
    moved_sq = sum(float(((start[key].detach() - end[key]) ** 2).sum()) for key in end)
    assert moved_sq == pytest.approx(0.1**2 * trace.tables["updates"]["gradient_sq"][0], rel=1e-5)


def test_batches_by_speed_are_weighted(tmp_path):
    for name in ("bsp", "allreduce"):
        trace = trained(tmp_path, name, batches={"policy": "equal-finish"}, stop={"updates": 40})
        assert all(check.passed for check in audit(trace))


def test_without_arithmetic_there_are_none(tmp_path):
    trace = simulated(tmp_path, {"name": "bsp"}, SECONDS)
    assert np.isnan(trace.tables["pushes"]["gradient_sq"]).all()
    assert wrong(trace) == []
    for table in ("pushes", "updates"):
        assert wrong(edit(trace, table, 3, gradient_sq=1.0)) == [KNOWN]


KNOWN = "norms of gradients are known where there are gradients"
MEAN = "the norm of an update fits to those of its contributions"
COMMON = "the norm of a common step fits to those of the workers' gradients"
OWN = "the norm of an update is that of its step's gradient"


@pytest.mark.parametrize(
    ("name", "table", "column", "factor", "expected"),
    [
        ("bsp", "updates", "gradient_sq", 100.0, MEAN),
        ("bsp", "updates", "gradient_sq", np.nan, MEAN),
        ("asp", "updates", "gradient_sq", 1.01, MEAN),
        ("asp", "updates", "gradient_sq", 0.99, MEAN),
        ("asp", "pushes", "gradient_sq", 1.01, MEAN),
        ("asp", "pushes", "gradient_sq", np.inf, MEAN),
        ("bsp", "pushes", "gradient_sq", np.inf, MEAN),
        ("allreduce", "exchanges", "gradient_sq", np.inf, COMMON),
        ("asp", "pushes", "gradient_sq", -1.0, KNOWN),
        ("asp", "updates", "gradient_sq", -1.0, KNOWN),
        ("asp", "pushes", "gradient_sq", np.nan, KNOWN),
        ("allreduce", "updates", "gradient_sq", 1.01, COMMON),
        ("allreduce", "exchanges", "mean_gradient_sq", 1.01, COMMON),
        ("allreduce", "exchanges", "gradient_sq", 1000.0, COMMON),
        ("local-sgd", "exchanges", "gradient_sq", 1.01, OWN),
        ("local-sgd", "updates", "gradient_sq", np.nan, OWN),
    ],
)
def test_wrong_norms_are_found(tmp_path, name, table, column, factor, expected):
    trace = trained(tmp_path, name)
    assert wrong(trace) == []
    rows = trace.tables[table]
    row = 4
    assert table != "pushes" or rows["outcome"][row] == Outcome.APPLIED
    assert wrong(edit(trace, table, row, **{column: factor * rows[column][row]})) == [expected]


@pytest.mark.parametrize("others", [1.0, np.inf])
def test_the_square_of_a_large_gradient_is_infinite_in_float32_but_that_of_the_mean_may_not_be(tmp_path, others):
    trace = trained(tmp_path, "bsp")
    rows = trace.tables["pushes"].copy()
    of_one = np.flatnonzero((rows["version_read"] == 3) & (rows["outcome"] == Outcome.APPLIED))
    rows["gradient_sq"][of_one] *= others
    rows["gradient_sq"][of_one[0]] = np.inf
    large = with_rows(trace, "pushes", rows)
    for square in (np.inf, 1e38):
        assert wrong(edit(large, "updates", 3, gradient_sq=square)) == []
    assert wrong(large) == ([MEAN] if others == 1.0 else [])


def test_only_several_servers_on_real_ranks_may_not_know_the_norm(tmp_path):
    unknown = edit(trained(tmp_path, "bsp"), "updates", 4, gradient_sq=np.nan)
    for engine, n_servers, expected in (("mpi", 1, [MEAN]), ("mpi", 2, []), ("simulator", 2, [MEAN])):
        unknown.attributes.update(engine=engine, n_servers=n_servers)
        assert wrong(unknown) == expected


def test_a_push_of_an_older_format_may_be_handled_after_the_run_has_resumed(tmp_path):
    trace = trained(tmp_path, "k-sync")
    pushes, starts = trace.tables["pushes"].copy(), np.zeros(2, TABLES["starts"])
    computed_s = pushes["end_s"][4]
    pushes["gradient_sq"][pushes["end_s"] <= computed_s] = np.nan
    pushes["now_s"] += 0.01
    resumed = with_rows(trace, "pushes", pushes)
    for start_s, expected in ((computed_s + 0.005, []), (computed_s - 0.005, [KNOWN])):
        starts["now_s"][1] = start_s
        assert wrong(with_rows(resumed, "starts", starts)) == expected


def test_a_trace_of_an_older_format_has_no_check(tmp_path):
    trace = trained(tmp_path, "asp")
    trace.attributes["format_version"] = 8
    assert check_norms(trace) == []
