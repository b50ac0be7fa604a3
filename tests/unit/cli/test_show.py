"""Command `hpcsync show`."""

from pathlib import Path

import pytest

from hpcsync.cli import run
from hpcsync.cli.show import print_job, rows
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.run_dir import layout
from hpcsync.run_dir.progress_line import console
from tests.unit.jobs import make_job
from tests.unit.simulator.runs import simulated


def in_words(job: Job) -> str:
    return job.paradigm.describe(job.cluster.workers)


def job(paradigm: dict, **tables: dict) -> Job:
    workload, stop = {"name": "timing", "parameters": 1001, "batch_size": 4}, {"updates": 3000, "seconds": 250.5}
    return make_job(
        **{"name": "x", "seed": 0, "workload": workload, "stop": stop, "cluster": {}, **tables}, paradigm=paradigm
    )


def test_rows() -> None:
    cluster = {"servers": 2, "workers": 3, "compute": {"model": "constant", "seconds": 0.5}}
    assert rows(job({"name": "asp"}, cluster=cluster)) == [
        ("paradigm", "asp: each gradient is an update; no worker waits"),
        ("ranks", "5: servers 0 to 1, workers 2 to 4"),
        ("parameters", "1,001 of 4 bytes (float32)"),
        ("shard per server", "500 or 501 parameters"),
        ("an iteration moves", "4,004 bytes of weights to the worker, and as many bytes of gradient from it"),
        ("samples per iteration", "4 per worker, 12 together"),
        ("iterations take", "constant, 0.5 s (real iterations at least that)"),
        ("ends at", "updates = 3,000 or seconds = 250.5"),
    ]


def test_spread_servers() -> None:
    def ranks(servers: int, placement: str) -> str:
        cluster = {"servers": servers, "workers": 1, "placement": placement}
        return dict(rows(job({"name": "asp"}, cluster=cluster)))["ranks"]

    apart = "\nranks are numbered so that servers are on different nodes, as far as there are enough nodes"
    assert ranks(2, "spread") == ranks(2, "packed") + apart
    assert ranks(1, "spread") == ranks(1, "packed")


def test_compute_of_zero_seconds_is_shown() -> None:
    cluster = {"servers": 1, "workers": 1, "compute": {"model": "constant", "seconds": 0.0}}
    assert dict(rows(job({"name": "asp"}, cluster=cluster)))["iterations take"].startswith("constant, 0.0 s")


CONSTANT = {"model": "constant", "seconds": 0.5}


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ({}, "links of 10 Gbit/s (server: 10), 50 us per message"),
        (
            {"bandwidth_gbit": [1, 2.5, 10], "latency_us": 0.5},
            "links of 1, 2.5, 10 Gbit/s (server: 10), 0.5 us per message",
        ),
        ({"bandwidth_gbit": 1, "server_bandwidth_gbit": 100}, "links of 1 Gbit/s (server: 100), 50 us per message"),
    ],
)
def test_a_network_is_used_only_in_simulations(network: dict, words: str) -> None:
    cluster = {"workers": 3, "network": network}
    assert dict(rows(job({"name": "asp"}, cluster=cluster)))["when simulated"] == words


def test_recorded_times_replace_a_network() -> None:
    shown = rows(job({"name": "asp"}, cluster={"compute": CONSTANT, "network": {}, "times_from": "runs/a/trace.h5"}))
    assert [words for key, words in shown if key == "when simulated"] == [
        "iterations and transfers take the times recorded in runs/a/trace.h5"
    ]


def test_few_events_are_listed_and_many_are_counted() -> None:
    events = [
        {"worker": 1, "at_s": 2.5, "change": "slow", "factor": 4.0},
        {"worker": 1, "at_s": 1000, "change": "recover"},
        {"worker": 2, "at_iteration": 2000, "change": "leave"},
    ]
    few, many = (
        dict(rows(job({"name": "asp"}, cluster={"compute": CONSTANT, "events": each})))["events"]
        for each in (events, events * 2)
    )
    assert few.split("\n") == [
        "worker 1 is slowed by a factor of 4 from 2.5 s on",
        "worker 1 recovers at 1000 s",
        "worker 2 leaves at its iteration 2,000",
    ]
    assert many == "6, for 2 of 3 workers"


SPEED = {"policy": "proportional"}


@pytest.mark.parametrize(
    ("batches", "lines"),
    [
        (
            SPEED,
            [
                "12 together, allocated in proportion to the workers' predicted speeds (blend)",
                "at least 1 per worker; allocated again every 10 iterations, if that gains 5 %",
            ],
        ),
        (
            {"policy": "equal-finish", "predictor": "last", "total": 40, "minimum": 2, "maximum": 20, "interval": 7},
            [
                "40 together, allocated so that all workers are predicted to take the same time (last)",
                "at least 2 per worker, at most 20; allocated again every 7 iterations, if that gains 5 %",
            ],
        ),
        (
            {**SPEED, "maximum": [4, 8, 8], "gain": 0.125},
            [
                "12 together, allocated in proportion to the workers' predicted speeds (blend)",
                "at least 1 per worker, at most 4, 8, 8; allocated again every 10 iterations, if that gains 12.5 %",
            ],
        ),
    ],
    ids=str,
)
def test_allocation_of_batches(batches: dict, lines: list[str]) -> None:
    assert dict(rows(job({"name": "asp"}, batches=batches)))["samples per iteration"].split("\n") == lines


# ---- bytes and times of pushes ----


def moves(paradigm: dict, **tables: dict) -> str:
    return next(words for key, words in rows(job(paradigm, **tables)) if key.endswith(("moves", "move")))


@pytest.mark.parametrize(
    ("paradigm", "tables", "words"),
    [
        ({"name": "asp"}, {"compression": {"name": "none"}}, "and as many bytes of gradient from it"),
        ({"name": "asp"}, {"compression": {"name": "fp16"}}, "and about 2,004 bytes (fp16) of gradient from it"),
        ({"name": "adsp"}, {"compression": {"name": "fp16"}}, "and about 2,004 bytes (fp16) of weight change from it"),
        ({"name": "adsp"}, {}, "4,004 bytes of weights to the worker, and as many bytes of weight change from it"),
        ({"name": "ashl"}, {}, "4,004 bytes of weights to the worker, and as many bytes of weight change from it"),
        (
            {"name": "allreduce"},
            {"compression": {"name": "fp16"}},
            "about 2,004 bytes (fp16) of gradient (4,004 bytes) from each worker to the others",
        ),
    ],
    ids=str,
)
def test_compression_moves_fewer_bytes(paradigm: dict, tables: dict, words: str) -> None:
    assert moves(paradigm, **tables).endswith(words)


LINEAR = {"name": "linear", "features": 1001}  # of 8 bytes; 100 values and their positions (4 bytes) are a tenth


@pytest.mark.parametrize(("servers", "sent"), [(1, "1,208"), (4, "1,248")])  # each payload has a header with its count
def test_every_server_receives_its_own_payload(servers: int, sent: str) -> None:
    found = moves(
        {"name": "bsp"}, workload=LINEAR, compression={"name": "top-k", "ratio": 0.1}, cluster={"servers": servers}
    )
    assert found == f"8,008 bytes of weights to the worker, and about {sent} bytes (top-k) of gradient from it"


def test_ashl_has_a_ratio_for_each_stage() -> None:
    found = moves({"name": "ashl"}, workload=LINEAR, compression={"name": "top-k"})
    sent = "and about 608 bytes (top-k; in the fine stage about 1,208 bytes) or more of weight change from it"
    assert found == f"8,008 bytes of weights to the worker, {sent}"


@pytest.mark.parametrize(
    ("paradigm", "expected"),
    [
        (
            {"name": "ashl", "warmup": 2, "profiled": 6},
            {
                "initial pushes": "8 pushes of one local step, the last 6 timed",
                "coarse stage": "16 local steps by the slowest worker, and by the others as many as take the same "
                "time; no worker waits; until the average loss improves by less than 1 % over five rounds",
                "fine stage": "4 local steps by the slowest worker, and by the others as many as take the same time; "
                "no worker starts more than 2 pushes ahead of the slowest",
            },
        ),
        (
            {"name": "adsp", "check_period_s": 3},
            {
                "pushes": "the same number by each worker every 3 s, at least 0.5 s apart; missed pushes are made up "
                "for\nthe number is searched every 50 s and when the average loss has risen by 30 %"
            },
        ),
        (
            {"name": "adsp", "commits": 4, "rule": "released", "interval_min_s": 5},
            {"pushes": "4 by each worker every 60 s, at least 5 s apart"},
        ),
    ],
    ids=str,
)
def test_times_of_commits(paradigm: dict, expected: dict[str, str]) -> None:
    shown = dict(rows(job(paradigm)))
    assert {key: shown[key] for key in expected} == expected


def test_the_coarse_stage_may_end_at_a_loss() -> None:
    shown = dict(rows(job({"name": "ashl", "loss_preset": 0.25})))
    assert shown["coarse stage"].endswith("; until the average loss is 0.25")


@pytest.mark.parametrize(("commit", "waits"), [("on-arrival", False), ("after-gate", True)])
def test_pushes_may_be_applied_after_the_wait(commit: str, waits: bool) -> None:
    shown = dict(rows(job({"name": "ashl", "commit": commit})))
    assert shown["fine stage"].endswith("; a push that is farther ahead is applied after its worker's wait") == waits


def test_a_fixed_share_of_the_time_is_shown() -> None:
    shown = rows(job({"name": "asp"}, cluster={"compute": {**CONSTANT, "fixed_share": 0.3}}))
    assert dict(shown)["iterations take"] == (
        "constant, 0.5 s (real iterations at least that), 30 % of it independent of the batch size"
    )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"k": 2}, None),
        ({"k": "state"}, "1 to 3, initially 3: adapts to the workers' speeds"),
        ({"k": "loss", "k_min": 2, "k_start": 3}, "2 to 3, initially 3: adapts to the loss"),
        (
            {"k": "min"},
            "1 to 3, initially 1: adapts to the workers' speeds and the loss, whichever gives the smaller k",
        ),
    ],
)
@pytest.mark.parametrize("name", ["k-sync", "k-batch-sync", "k-async", "k-batch-async"])
def test_adaptive_k(name: str, keys: dict, words: str | None) -> None:
    assert dict(rows(job({"name": name, **keys}))).get("k") == words


@pytest.mark.parametrize(
    ("paradigm", "words"),
    [
        ({"name": "k-sync", "k": 2}, "the first 2 workers' gradients; late gradients are dropped"),
        (
            {"name": "k-batch-sync", "k": "min", "cancel": "abort"},
            "the first k gradients of its version; a worker may contribute several; late gradients are cancelled "
            "between their 4 micro-batches",
        ),
        (
            {"name": "k-async", "k": 2},
            "the next 2 workers' gradients; these workers wait for it, the others continue",
        ),
        (
            {"name": "k-async", "k": "state"},
            "continue; gradients older than 2 workers / k updates are dropped; the weight of a gradient is 1 / age",
        ),
        (
            {"name": "k-batch-async", "k": 3, "staleness_max": 4},
            "the next 3 gradients; no worker waits; gradients older than 4 updates are dropped",
        ),
    ],
    ids=str,
)
def test_description_of_the_k_family(paradigm: dict, words: str) -> None:
    assert in_words(job(paradigm)).startswith("each update is the mean of ")
    assert in_words(job(paradigm)).endswith(words)


@pytest.mark.parametrize(
    ("paradigm", "words"),
    [
        ({"name": "bsp"}, "all wait for the slowest"),
        ({"name": "ssp", "staleness": 2}, "more than 2 iterations ahead"),
        ({"name": "ssp", "staleness": float("inf")}, "no worker waits (no bound)"),
        ({"name": "dssp", "staleness_min": 1, "staleness_max": 4}, "more than 1 iterations ahead"),
        ({"name": "dssp", "staleness_min": 1, "staleness_max": 4}, "never more than 4"),
        ({"name": "dssp", "staleness_min": 1, "staleness_max": 4, "mode": "paper"}, "no bound"),
        ({"name": "ashl"}, "a push counts in proportion to its share of the data"),
        ({"name": "ashl", "share": "equal"}, "a push counts equally"),
        ({"name": "adsp"}, "equally often"),
    ],
)
def test_description_of_each_paradigm(paradigm: dict, words: str) -> None:
    assert words in in_words(job(paradigm))


SEPARATED = {"name": "timing", "parameters": 1001, "classifier": 900, "activations": 30, "batch_size": 4}


def separated(workers: int = 4, compute: bool = True, workload: dict | None = None, **paradigm: object) -> Job:
    paradigm = {"name": "stanza", "cut": "classifier", **paradigm}
    cluster = {"workers": workers, **({"compute": CONSTANT} if compute else {})}
    return job(paradigm, cluster=cluster, workload=workload or SEPARATED)


def test_separated_layers() -> None:
    shown = dict(rows(separated(fc_share=0.25, fc_workers=2, micro_batches=2)))
    assert shown["paradigm"].startswith("stanza: one model with separated layers; ")
    assert shown["ranks"] == "4: workers 0 to 1 fully-connected, workers 2 to 3 convolution"
    assert shown["cut"] == "classifier: 900 parameters above it, 25 % of the computation"
    assert shown["an iteration moves"] == (
        "512 bytes of activations and labels from each convolution worker, and 480 bytes of gradients to it, "
        "in 2 pieces"
    )
    assert shown["gradients"] == "404 bytes summed among convolution workers, 3,600 among fully-connected ones"
    assert shown["samples per iteration"] == "4 per convolution worker, 8 together"


def test_fc_workers_auto_is_resolved_or_left_to_the_run() -> None:
    chosen = dict(rows(separated(fc_share=0.5, fc_workers="auto")))
    assert chosen["ranks"].startswith("4: workers 0 to 1 fully-connected, ")  # half of the work for half of them
    assert "(auto: 2 here; " in chosen["ranks"]
    assert chosen["samples per iteration"] == "4 per convolution worker"
    digits = {"name": "digits", "batch_size": 4}
    later = dict(rows(separated(compute=False, workload=digits, cut="7", fc_workers="auto")))
    assert later["ranks"].endswith("is chosen when the run starts")
    assert later["cut"] == "7: 8,906 parameters above it, 9.62 % of the computation"
    assert later["an iteration moves"].startswith("2,080 bytes of activations and labels")


def test_the_resolved_job_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    asp = job({"name": "asp"})
    print_job(asp)
    assert capsys.readouterr().out.endswith(asp.to_toml())


def test_markup_in_file_names_is_not_interpreted(capsys: pytest.CaptureFixture[str]) -> None:
    print_job(job({"name": "asp"}, cluster={"times_from": "[red]/[/x].h5"}))
    table, _, _ = capsys.readouterr().out.partition("name = ")
    assert "[red]/[/x].h5" in table


def test_a_run_is_shown_as_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = simulated(tmp_path, {"name": "bsp"}, [0.1, 0.2]).path
    layout.conclude(trace.parent, console())
    at_its_end = capsys.readouterr().out
    for path in (trace.parent.relative_to(tmp_path), trace.relative_to(tmp_path)):
        run.show(path, [], load=False)
        assert capsys.readouterr().out == at_its_end
    assert "finished" in at_its_end and at_its_end.endswith("trace.h5\n")


def test_what_is_no_run_or_comes_with_options_of_a_job_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.h5").write_text("")
    for path, why in ((tmp_path, "trace.h5: no such file"), (tmp_path / "no.h5", "not a trace")):
        with pytest.raises(JobError, match=why):  # one line
            run.show(path, [], load=False)
    for options, name in ((["seed=1"], "--set"), ([], "--load")):
        with pytest.raises(JobError, match=f"^{name}: must come with a job file: .* is a run that has been made$"):
            run.show(tmp_path, options, load=not options)
