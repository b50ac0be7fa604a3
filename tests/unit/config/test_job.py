"""Job file: defaults, overrides, and errors in one line with the key, the value and what is allowed."""

import math
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from hpcsync.config.checkpoint import Checkpoint
from hpcsync.config.errors import shown
from hpcsync.config.job import Job, JobError, Stop, load, load_begun, of_any_seed, refuse_simulated, remarks
from hpcsync.config.overrides import KINDS
from hpcsync.config.workloads import Digits, Text
from hpcsync.paradigms import OPTIONS
from hpcsync.paradigms.dssp import DsspOptions
from hpcsync.paradigms.options import ParadigmOptions
from hpcsync.paradigms.ssp import SspOptions
from tests.unit.jobs import make_job, refusal

TOML = """
name = "example"
seed = 1

[workload]
name = "digits"

[optimizer]
name = "sgd"
lr = 0.05
momentum = 0.9

[optimizer.schedule]
name = "multistep"
milestones = [10, 20]

[stop]
samples = 100_000

[paradigm]
name = "dssp"
staleness_min = 3
staleness_max = 15

[cluster]
workers = 4

[cluster.compute]
model = "lognormal"
seconds = [0.02, 0.02, 0.02, 0.04]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "example.toml"
    path.write_text(TOML)
    return path


def error(path: Path, *overrides: str, ranks: int | None = None) -> str:
    return refusal(load, path, overrides, ranks)


def test_defaults_are_filled_in(path: Path) -> None:
    job = load(path)
    assert (job.seed, job.workload.batch_size, job.evaluation.every_samples) == (1, 32, 5000)
    assert (job.optimizer.lr_clock, job.optimizer.async_lr_scale) == ("samples", 1.0)
    assert job.optimizer.options == {"momentum": 0.9}
    assert job.optimizer.schedule.model_dump() == {
        "name": "multistep",
        "milestones": (10, 20),
        "gamma": 0.1,
        "warmup": 0,
    }
    cosine = load(path, ['optimizer.schedule={name="cosine",total=9}']).optimizer.schedule
    assert cosine.model_dump() == {"name": "cosine", "total": 9, "warmup": 0}
    assert job.paradigm == DsspOptions(name="dssp", staleness_min=3, staleness_max=15, mode="bounded")
    assert (job.cluster.servers, job.cluster.workers, job.cluster.ranks, job.cluster.device) == (1, 4, 5, "auto")
    assert job.cluster.window == "auto"
    assert job.cluster.compute.seconds == (0.02, 0.02, 0.02, 0.04)
    assert job.cluster.network is None


def test_a_small_file_is_enough() -> None:
    job = Job.from_toml(
        'name = "x"\nworkload.name = "timing"\noptimizer = {name = "sgd", lr = 1}\n'
        'stop.updates = 3\nparadigm.name = "asp"'
    )
    assert (job.cluster.servers, job.cluster.workers, job.seed) == (1, 3, 0)
    assert (job.workload.parameters, type(job.optimizer.lr)) == (1000, float)


def test_a_limit_or_a_target_is_reached_by_equality() -> None:
    stop = Stop(samples=100, updates=10, seconds=2.0, target_accuracy=0.9, target_loss=0.5)
    assert not stop.reached(samples=99, updates=9, seconds=1.9)
    assert stop.reached(samples=100) and stop.reached(updates=10) and stop.reached(seconds=2.0)
    assert not stop.satisfied(0.51, 0.89)
    assert stop.satisfied(0.5, 0.0) and stop.satisfied(math.inf, 0.9)
    assert stop.target == "accuracy 0.9 or loss 0.5"
    none, first = Stop(), Stop(samples=1, updates=1, seconds=1.0)
    assert not first.reached()
    assert not none.reached(samples=10**9, updates=10**9, seconds=1e9) and not none.satisfied(0.0, 1.0)
    assert none.target is None


def test_the_share_that_is_done_is_that_of_the_nearest_limit() -> None:
    stop = Stop(samples=100, updates=10, seconds=2.0)
    assert stop.share() == 0.0
    assert [stop.share(samples=50, updates=4), stop.share(updates=7, seconds=1.0)] == [0.5, 0.7]
    assert stop.share(samples=101) == 1.0
    assert math.isnan(Stop(target_loss=0.1).share(samples=5))


def test_a_checkpoint_is_due_after_some_seconds_or_updates() -> None:
    both = Checkpoint(seconds=10, updates=5)
    assert [both.due(9.9, 4), both.due(10, 0), both.due(0, 5)] == [False, True, True]
    assert not Checkpoint(seconds=0).due(1e9, 10**9)


JOBS = Path(__file__).parents[3] / "jobs"


@pytest.mark.parametrize("job", sorted(JOBS.glob("*.toml")), ids=lambda job: job.name)
def test_examples_are_valid_jobs_named_like_their_files(job: Path) -> None:
    assert load(job).name == job.stem


# ---- round trips ----

KIND_OVERRIDES = [
    'paradigm={name="bsp"}',
    'paradigm={name="ssp",staleness=inf}',
    'paradigm={name="ssp",staleness=0}',
    "paradigm.mode=paper",
    'paradigm={name="k-sync",k=4}',
    'paradigm={name="k-batch-async",k="min"}',
    'batches.policy="proportional"',
    'paradigm={name="ashl"}',
    'paradigm={name="adsp"}',
    'compression.name="top-k"',
    'workload={name="linear",features=3,noise=0}',
    'workload={name="text",context=32,width=10,heads=5}',
    'workload={name="my.package:function",options={depth=3,sizes=[1,2]}}',
    "optimizer.async_lr_scale=1/workers",
    'optimizer={name="adam",lr=0.1,betas=[0.9,0.99]}',
    'optimizer.schedule={name="cosine",total=100,warmup=10}',
    'optimizer.schedule={name="cosine",total=1}',
    'optimizer.schedule={name="multistep",milestones=[1]}',
    "stop={target_accuracy=0.95,seconds=1.5,target_loss=-1}",
    "cluster.compute.seconds=0",
    "cluster.compute.fixed_share=1",
    'cluster.compute={model="exponential",seconds=1}',
    "cluster.network={}",
    "name=a.b_c+d-e",
]


@pytest.mark.parametrize("override", KIND_OVERRIDES)
def test_resolved_jobs_are_restored_from_toml(path: Path, override: str) -> None:
    job = load(path, [override])
    assert job != load(path)
    assert Job.from_toml(job.to_toml()) == job
    assert Job.from_toml(job.to_toml()).to_toml() == job.to_toml()


@given(seed=st.integers(0, 2**63 - 1), lr=st.floats(1e-300, 1e300), low=st.integers(0, 99), more=st.integers(0, 99))
def test_numbers_are_restored_exactly(seed: int, lr: float, low: int, more: int) -> None:
    table = {
        "name": "x",
        "seed": seed,
        "workload": {"name": "digits"},
        "optimizer": {"name": "sgd", "lr": lr},
        "stop": {"updates": 1},
        "paradigm": {"name": "dssp", "staleness_min": low, "staleness_max": low + more},
    }
    job = Job.from_table(table)
    assert Job.from_toml(job.to_toml()) == job
    assert (job.seed, job.optimizer.lr) == (seed, lr)


@pytest.mark.parametrize(
    ("device", "windows"),
    [
        ("auto", ["auto", "host", "mpi", "ipc", "staged"]),
        ("cpu", ["auto", "host"]),
        ("cuda", ["auto", "mpi", "ipc", "staged"]),
    ],
)
def test_every_device_has_its_windows(path: Path, device: str, windows: list[str]) -> None:
    for window in ["auto", "host", "mpi", "ipc", "staged"]:
        overrides = [f"cluster.device={device}", f"cluster.window={window}"]
        if window in windows:
            job = load(path, overrides)
            assert (job.cluster.device, job.cluster.window) == (device, window)
            assert Job.from_toml(job.to_toml()) == job
        else:
            assert error(path, *overrides).startswith(f'cluster.window = "{window}": must be ')


def test_a_job_cannot_be_changed(path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(path).cluster.workers = 5


# ---- overrides ----


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("paradigm.staleness_max=20", 20),
        (" paradigm . staleness_max = 20 ", 20),
        ("paradigm.mode=paper", "paper"),
        ('paradigm.mode="paper"', "paper"),
        ("stop.seconds=1e3", 1000.0),
        ('paradigm={name="ssp",staleness=inf}', math.inf),
        ("evaluation.every_samples=0", 0),
        ("workload.name=pkg.mod:make", "pkg.mod:make"),
        ("optimizer.nesterov=true", True),
    ],
)
def test_overrides_are_toml_and_words_are_strings(path: Path, override: str, value: object) -> None:
    key = override.split("=")[0].replace(" ", "")
    found: object = load(path, [override]).model_dump()
    for part in key.split("."):
        found = found[part]
    if isinstance(found, dict):
        found = found["staleness"]
    assert found == value
    assert type(found) is type(value)


def test_later_overrides_win(path: Path) -> None:
    assert load(path, ["seed=2", "seed=3"]).seed == 3


def test_an_override_sets_only_its_key(path: Path) -> None:
    assert error(path, "seed=3\nname=4") == 'seed = "3\\nname=4": must be a whole number'


@pytest.mark.parametrize("override", ["seed", "=3", ".seed=3", "a..b=3"])
def test_an_override_has_a_key_and_a_value(path: Path, override: str) -> None:
    assert error(path, override) == f"--set {override}: must be KEY=VALUE, such as paradigm.staleness_max=20"


def test_an_override_goes_into_tables_only(path: Path) -> None:
    assert error(path, "seed.x=1") == "--set seed.x=1: seed must be a table, it is 1"


@pytest.mark.parametrize("override", ["paradigm.name=bsp", 'paradigm.name="bsp"', "paradigm=bsp"])
def test_another_paradigm_drops_and_reports_foreign_keys(path: Path, override: str) -> None:
    assert load(path, [override]) == load(path, ['paradigm={name="bsp"}'])
    path.write_text(TOML.replace('name = "dssp"', 'name = "dssp"\nmode = "paper"'))
    dropped = "paradigm.name changed from dssp to bsp: mode, staleness_min, staleness_max dropped"
    assert remarks(path, [override]) == [dropped]
    assert remarks(path, ["paradigm.name=dssp", "seed=3"]) == remarks(path, ['paradigm={name="bsp"}']) == []


def test_another_workload_drops_and_reports_foreign_keys(path: Path) -> None:
    images = 'name = "images"\nbatch_size = 8\nsize = 32\nwidth = 4'
    path.write_text(TOML.replace('name = "digits"', images))
    for override in ("workload.name=digits", "workload=digits"):
        changed = "workload.name changed from images to digits: size, width dropped; batch_size kept"
        assert remarks(path, [override]) == [changed]
        assert load(path, [override]).workload == Digits(name="digits", batch_size=8)
    assert load(path, ["workload=text", "workload.width=20"]).workload == Text(name="text", batch_size=8, width=20)
    assert remarks(path, ["workload=pkg.mod:make"]) == [
        "workload.name changed from images to pkg.mod:make: size, width dropped; batch_size kept"
    ]
    assert load(path, ["workload=cifar100"]).workload.width == 4
    assert error(path, "workload=digits", "workload.size=16").startswith("workload.size = 16: unknown key")


def test_keys_set_by_an_override_are_not_dropped(path: Path) -> None:
    for overrides in (["paradigm.name=ssp", "paradigm.staleness=2"], ["paradigm.staleness=2", "paradigm=ssp"]):
        assert load(path, overrides).paradigm == SspOptions(name="ssp", staleness=2)
    says = 'paradigm.mode = "paper": unknown key; must be one of name'
    assert error(path, "paradigm.name=bsp", "paradigm.mode=paper") == says


def test_a_later_override_replaces_a_whole_table(path: Path) -> None:
    assert load(path, ["cluster.compute=constant", "cluster.servers=2", "cluster={workers=4}"]).cluster.compute is None
    found = load(path, ["optimizer.schedule=cosine", 'optimizer={name="adam",lr=1}', "optimizer.lr=2"]).optimizer
    assert (found.schedule, found.lr, found.options) == (None, 2.0, {})
    assert error(path, "optimizer.schedule.name=cosine", "optimizer=3") == "optimizer = 3: must be a table"
    compute = '{model="constant",seconds=1,jitter=2}'
    message = error(path, "cluster.compute=lognormal", f"cluster={{workers=4,compute={compute}}}")
    assert message.startswith("cluster.compute.jitter = 2: unknown key"), "what is given stays as it is given"


def test_keys_that_the_kind_of_the_file_does_not_have_are_refused(path: Path) -> None:
    path.write_text(TOML.replace('name = "dssp"', 'name = "dssp"\nsteps = 3'))
    assert error(path, "paradigm.name=dssp").startswith("paradigm.steps = 3: unknown key")
    path.write_text(f"{TOML}[compression]\nratio = 0.1\n")
    assert error(path, "compression=fp16").startswith("compression.ratio = 0.1: unknown key")


def test_keys_that_both_kinds_have_are_kept_and_named(path: Path) -> None:
    overrides = ["paradigm.name=k-async", "paradigm.k=2", "cluster.compute.model=constant", "compression=top-k"]
    assert remarks(path, overrides) == [
        "paradigm.name changed from dssp to k-async: staleness_min dropped; staleness_max kept",
    ]
    path.write_text(TOML + "jitter = 0.1\n")
    assert remarks(path, overrides)[1:] == [
        "cluster.compute.model changed from lognormal to constant: jitter dropped; seconds kept",
    ]
    assert load(path, overrides).compression.name == "top-k"


def test_a_key_of_both_kinds_is_dropped_if_its_value_is_not_valid_any_more(path: Path) -> None:
    path.write_text(path.read_text().replace("staleness_max = 15", 'staleness_max = 15\nmode = "bounded"'))
    assert remarks(path, ["paradigm=gossip"]) == [
        "paradigm.name changed from dssp to gossip: staleness_min, staleness_max, mode dropped"
    ]
    path.write_text(TOML.replace('name = "digits"', 'name = "text"\nwidth = 2000\nbatch_size = 8'))
    assert remarks(path, ["workload=images"]) == [
        "workload.name changed from text to images: width dropped; batch_size kept"
    ]


@pytest.mark.parametrize("allreduce", ["paradigm=allreduce", 'paradigm={name="allreduce"}'])
def test_another_paradigm_drops_what_it_excludes_of_the_file(path: Path, allreduce: str) -> None:
    path.write_text(
        TOML.replace("lr = ", 'async_lr_scale = "1/workers"\nlr = ').replace("[cluster]", "[cluster]\nservers = 2")
    )
    assert remarks(path, [allreduce])[-1] == (
        "paradigm.name is allreduce: cluster.servers, optimizer.async_lr_scale dropped"
    )
    job = load(path, [allreduce])
    assert (job.cluster.servers, job.optimizer.async_lr_scale) == (0, 1.0)
    assert error(path, allreduce, "cluster.servers=2").startswith("cluster.servers = 2: must be 0")
    message = error(path, allreduce, "optimizer.async_lr_scale=1/workers")
    assert message.startswith('optimizer.async_lr_scale = "1/workers": must be 1.0 with')
    kept = load(path, ["paradigm=bsp"])
    assert (kept.cluster.servers, kept.optimizer.async_lr_scale) == (2, "1/workers")
    path.write_text(TOML.replace("lr = ", "async_lr_scale = 1.0\nlr = ").replace("[cluster]", "[cluster]\nservers = 1"))
    assert remarks(path, [allreduce])[-1] == "paradigm.name is allreduce: cluster.servers dropped"
    assert load(path, [allreduce]).cluster.servers == 0
    path.write_text(TOML.replace('name = "dssp"', 'name = "local-sgd"').replace("[cluster]", "[cluster]\nservers = 0"))
    assert load(path, ["paradigm=bsp"]).cluster.servers == 1


SEARCH = {"name": "adsp", "search_every_s": 20.0, "loss_rise": 0.3}
PLACED = {"workers": 4, "placement": "spread", "network": {"server_bandwidth_gbit": 40.0}}
IGNORED = [  # tables of a file, those with which a setting is ignored, an override to the same end
    (
        {"batches": {"policy": "equal-finish", "minimum": 4, "interval": 10}},
        {"batches": {"policy": "equal", "minimum": 4, "interval": 10}},
        'batches.minimum = 4: must be omitted with batches.policy = "equal", where all have the same batch size',
        "batches.policy=equal",
        "batches.policy is equal: batches.minimum, batches.interval dropped",
    ),
    (
        {"paradigm": {"name": "ashl", "ratio_fine": 0.3}, "compression": {"name": "random-k"}},
        {"paradigm": {"name": "ashl", "ratio_fine": 0.3}},
        'paradigm.ratio_fine = 0.3: must be omitted with compression.name = "none", which takes no ratio from a '
        "paradigm",
        "compression=none",
        "compression.name is none: paradigm.ratio_fine dropped",
    ),
    (
        {"paradigm": SEARCH},
        {"paradigm": {**SEARCH, "commits": 3}},
        "paradigm.search_every_s = 20.0: must be omitted with paradigm.commits = 3, where nothing is searched for",
        "paradigm.commits=3",
        "paradigm.commits is 3: paradigm.search_every_s, paradigm.loss_rise dropped",
    ),
    (
        {"paradigm": {"name": "bsp"}, "cluster": PLACED},
        {"paradigm": {"name": "allreduce"}, "cluster": PLACED},
        'cluster.placement = "spread": must be omitted with paradigm.name = "allreduce", which has no servers',
        "paradigm=allreduce",
        "paradigm.name is allreduce: cluster.placement, cluster.network.server_bandwidth_gbit dropped",
    ),
]


@pytest.mark.parametrize(("used", "ignored", "message", "override", "dropped"), IGNORED)
def test_a_setting_that_would_be_ignored_is_refused_and_dropped_by_an_override(
    path: Path, used: dict, ignored: dict, message: str, override: str, dropped: str
) -> None:
    def write(tables: dict) -> None:
        path.write_text(tomli_w.dumps({**tomllib.loads(TOML), **tables}))

    write(ignored)
    assert error(path) == message
    assert load_begun(path) == Job.from_toml(load_begun(path).to_toml()), "a trace or a begun run may have it"
    write(used)
    load(path)
    assert remarks(path, [override]) == [dropped]
    path.write_text(load(path, [override]).to_toml())
    load(path)  # a resolved job has all keys, with their defaults
    key = message.partition(":")[0].replace(" ", "")
    write(used)
    assert error(path, override, key).startswith(message.partition(" with ")[0]), "one that an override gives stays"


def test_a_target_accuracy_is_refused_where_there_is_none(path: Path) -> None:
    message = 'stop.target_accuracy = 0.5: must be omitted with workload.name = "linear", which has no accuracy; '
    assert error(path, "workload.name=linear", "stop.target_accuracy=0.5").startswith(message)
    assert load(path, ["stop.target_accuracy=0.5"]).stop.target_accuracy == 0.5


def test_without_servers_all_ranks_are_workers(path: Path) -> None:
    allreduce = 'paradigm={name="allreduce"}'
    assert load(path, [allreduce]).cluster.servers == 0
    assert load(path, [allreduce, "cluster.compute.seconds=1"], ranks=5).cluster.workers == 5
    assert error(path, allreduce, ranks=0) == "-n 0: must be at least 1: cluster.servers = 0 and a worker"
    message = 'cluster.servers = 1: must be 0, or left out, with paradigm.name = "allreduce", where all ranks train'
    assert error(path, allreduce, "cluster.servers=1") == message


def test_a_prediction_is_of_one_number_of_workers(path: Path) -> None:
    path.write_text(TOML.replace("[0.02, 0.02, 0.02, 0.04]", "0.02") + "\n[predicted]\nseconds = 3.0\n")
    for ranks, kept in ((None, True), (5, True), (6, False), (4, False)):
        assert (load(path, ranks=ranks).predicted is not None) == kept


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        (["seed=2"], 3.0),
        ([" seed = 2"], 3.0),
        (["name=y"], None),
        (["seed=2", "stop.updates=5"], None),
        (["stop.updates=5", "predicted.seconds=4"], 4.0),
        (["predicted.seconds=2.5"], 2.5),
        (["predicted={seconds=3,low_s=3,high_s=3}"], 3.0),  # of runs that all took as long
    ],
)
def test_a_prediction_of_another_job_is_dropped(path: Path, overrides: list[str], seconds: float | None) -> None:
    path.write_text(TOML + "\n[predicted]\nseconds = 3.0\nlow_s = 0.0\nhigh_s = 3.5\n")
    found = load(path, overrides).predicted
    assert (found and found.seconds) == seconds


def test_ranks_are_servers_and_workers(path: Path) -> None:
    assert load(path, ["cluster.servers=2", "cluster.compute.seconds=1"], ranks=5).cluster.workers == 3
    assert load(path, ["cluster.workers_min=2"], ranks=4).cluster.workers == 4
    assert error(path, ranks=1) == "-n 1: must be at least 2: cluster.servers = 1 and a worker"
    assert error(path, "cluster.servers=2", ranks=2) == "-n 2: must be at least 3: cluster.servers = 2 and a worker"
    assert error(path, "cluster=3", ranks=2) == "cluster = 3: must be a table"
    assert error(path, "cluster.servers=x", ranks=2) == 'cluster.servers = "x": must be a whole number'


ALLREDUCE = {"paradigm": {"name": "allreduce"}}
STANZA = {"paradigm": {"name": "stanza", "cut": "x", "fc_workers": 1}}


@pytest.mark.parametrize(
    ("tables", "workers_min", "starts", "resumes"),
    [
        ({}, None, [5], [2, 3, 4, 5]),
        ({}, 2, [3, 4, 5], [3, 4, 5]),
        ({}, 4, [5], [5]),
        (ALLREDUCE, None, [4], [1, 2, 3, 4]),
        (ALLREDUCE, 2, [4], [2, 3, 4]),
        (STANZA, None, [4], [4]),
        (STANZA, 4, [4], [4]),
    ],
)
def test_a_run_starts_with_all_workers_and_resumes_with_fewer_unless_the_job_says_otherwise(
    tables: dict, workers_min: int | None, starts: list[int], resumes: list[int]
) -> None:
    fewest = {} if workers_min is None else {"workers_min": workers_min}
    job = make_job(**tables, cluster={"workers": 4, **fewest})
    for allowed, resumed in ((starts, False), (resumes, True)):
        takes = f"{allowed[0]} to {allowed[-1]}" if len(allowed) > 1 else f"{allowed[0]}"
        for n_ranks in range(8):
            if n_ranks in allowed:
                job.refuse_ranks(n_ranks, resumes=resumed)
                continue
            assert refusal(job.refuse_ranks, n_ranks, resumes=resumed) == (
                f"cluster.workers = 4{f', cluster.workers_min = {workers_min}' if fewest else ''}: with "
                f"cluster.servers = {job.cluster.servers} this takes {takes} ranks, but there are {n_ranks}"
            )


def test_fewer_workers_are_refused_where_exchanges_need_all() -> None:
    assert refusal(make_job, **STANZA, cluster={"workers": 4, "workers_min": 3}) == (
        'cluster.workers_min = 3: must be cluster.workers = 4 with paradigm.name = "stanza", whose exchanges need all '
        "workers"
    )


def test_runs_of_one_job_differ_in_their_seeds_and_in_tables_of_times_that_are_named_after_them() -> None:
    def of(seed: int, table: str, **tables: Any) -> dict[str, Any]:
        compute = {"model": "table", "table": f"/x/{table}.csv"}
        return of_any_seed(make_job(seed=seed, cluster={"workers": 2, "compute": compute}, **tables))

    assert of(5, "times-5") == of(6, "times-6") == of(6, "times-6", predicted={"seconds": 3.0})
    assert of(5, "times-5") != of(5, "times-6")
    assert of(5, "times-15")["cluster"]["compute"]["table"] == "/x/times-15.csv", "which is not the seed"
    assert of(5, "times-5") != of(6, "times-6", stop={"updates": 11})


# ---- mistakes ----

SECONDS = "must be a number from 0 to 1e+15, or a list of them, one per worker"
MILESTONES = "must be a list of whole numbers of at least 1, each greater than the one before"
PARADIGMS = ", ".join(OPTIONS)
CODECS = "none, top-k, random-k, dgc, qsgd, one-bit, sign, powersgd, fp16, bf16"
A_NAME = (
    "must be letters, digits and . _ + -, first a letter or digit (it names the folder of a run), such as digits-dssp"
)

MISTAKES = {
    # unknown and missing keys
    "sed=3": "sed = 3: unknown key; must be one of name, seed, workload, optimizer, stop, evaluation, checkpoint, "
    "paradigm, batches, compression, cluster, predicted; did you mean seed?",
    "paradigm.stalenes_max=2": "paradigm.stalenes_max = 2: unknown key; must be one of name, staleness_min, "
    "staleness_max, mode, enforce_max, first_costs, interval_begin, overdue, merge; did you mean staleness_max?",
    "paradigm.name=ssp": "paradigm.staleness: missing; must be a whole number of at least 0, or inf",
    "cluster.network.latency=3": "cluster.network.latency = 3: unknown key; must be one of bandwidth_gbit, "
    "server_bandwidth_gbit, latency_us; did you mean latency_us?",
    "cluster.compute.xyz=3": "cluster.compute.xyz = 3: unknown key; must be one of model, seconds, jitter, "
    "fixed_share, backward_share",
    'paradigm={name="ssp"}': "paradigm.staleness: missing; must be a whole number of at least 0, or inf",
    "optimizer={}": 'optimizer.name: missing; must be the lower-case name of a torch.optim class, such as "sgd"',
    'optimizer={name="sgd"}': "optimizer.lr: missing; must be a number greater than 0",
    'optimizer.schedule={name="cosine"}': "optimizer.schedule.total: missing; must be a whole number of at least 1",
    'cluster.compute={model="constant"}': f"cluster.compute.seconds: missing; {SECONDS}",
    'cluster.compute={model="table"}': "cluster.compute.table: missing; "
    "must be a CSV file with the columns worker,iteration,seconds",
    "predicted.low_s=1": "predicted.seconds: missing; must be a number greater than 0",
    "predicted={seconds=1,low_s=0.5}": "predicted.low_s: must come with predicted.high_s",
    "predicted={seconds=1,high_s=3}": "predicted.low_s: must come with predicted.high_s",
    "predicted={seconds=1,low_s=2,high_s=3}": "predicted.seconds = 1: must be from 2 to 3",
    "predicted={seconds=4,low_s=2,high_s=3}": "predicted.seconds = 4: must be from 2 to 3",
    "predicted={seconds=0}": "predicted.seconds = 0: must be greater than 0",
    "predicted={seconds=1,samples_per_s=0}": "predicted.samples_per_s = 0: must be greater than 0",
    "stop={}": "stop: empty; must have at least one of samples, updates, seconds, target_accuracy, target_loss",
    # which kind of table
    "paradigm.name=dsp": f'paradigm.name = "dsp": must be one of {PARADIGMS}; did you mean dssp?',
    "paradigm.name=3": f"paradigm.name = 3: must be one of {PARADIGMS}",
    "paradigm.name=[]": f"paradigm.name = []: must be one of {PARADIGMS}",
    "paradigm={}": f"paradigm.name: missing; must be one of {PARADIGMS}",
    "workload.name=digit": 'workload.name = "digit": must be one of digits, images, cifar10, cifar100, linear, '
    'text, timing, "package.module:function"; did you mean digits?',
    "workload.name=script": 'workload.name = "script": must be one of digits, images, cifar10, cifar100, linear, '
    'text, timing, "package.module:function"',
    "workload.name=:f": 'workload.name = ":f": must be "package.module:function"',
    "workload.name=texts": 'workload.name = "texts": must be one of digits, images, cifar10, cifar100, linear, '
    'text, timing, "package.module:function"; did you mean text?',
    "optimizer.schedule.name=step": 'optimizer.schedule.name = "step": must be one of multistep, cosine'
    "; did you mean multistep?",
    "cluster.compute.model=normal": 'cluster.compute.model = "normal": must be one of constant, lognormal, '
    "exponential, table; did you mean lognormal?",
    "cluster.compute={}": "cluster.compute.model: missing; must be one of constant, lognormal, exponential, table",
    "compression.name=topk": f'compression.name = "topk": must be one of {CODECS}; did you mean top-k?',
    "compression.ratio=0.1": f"compression.name: missing; must be one of {CODECS}",
    # a key that is also the name of its table's kind
    'cluster.compute={model="table",table="x.csv",fixed_share=30}': "cluster.compute.fixed_share = 30: must be at most "
    "1",
    'cluster.compute={model="table",table="x.csv",share=1}': "cluster.compute.share = 1: unknown key; must be one of "
    "model, table, fixed_share, backward_share; did you mean fixed_share?",
    'paradigm={name="bsp",bsp=3}': "paradigm.bsp = 3: unknown key; must be one of name",
    'paradigm={name="sync-switch",then={name="asp",asp={}}}': "paradigm.then.asp = {}: unknown key; must be one of "
    "name, compensation, strength, mean_decay",
    'optimizer.schedule={name="cosine",total=9,cosine=3}': "optimizer.schedule.cosine = 3: unknown key; must be one of "
    "name, total, warmup",
    'workload={name="a:b",function=3}': "workload.function = 3: unknown key; must be one of name, batch_size, options",
    'compression={name="fp16",fp16=3}': "compression.fp16 = 3: unknown key; must be one of name, gbytes_per_s, "
    "error_feedback",
    # types
    "compression=3": "compression = 3: must be a table",
    "seed=x": 'seed = "x": must be a whole number',
    "seed=true": "seed = true: must be a whole number",
    "stop.samples=1e5": "stop.samples = 100000.0: must be a whole number",
    "optimizer.lr=fast": 'optimizer.lr = "fast": must be a number',
    "optimizer.name=3": "optimizer.name = 3: must be a string",
    "workload=3": "workload = 3: must be a table",
    "stop=3": "stop = 3: must be a table",
    "paradigm=3": "paradigm = 3: must be a table",
    "optimizer.schedule=3": "optimizer.schedule = 3: must be a table",
    'workload={name="a:b",options=3}': "workload.options = 3: must be a table",
    # ranges
    "name=": f'name = "": {A_NAME}',
    "name=_x": f'name = "_x": {A_NAME}',
    "name=../x": f'name = "../x": {A_NAME}',
    "seed=-1": "seed = -1: must be at least 0",
    "seed=9223372036854775808": "seed = 9223372036854775808: must be a whole number of at most 64 bits",
    "seed=-9223372036854775808": "seed = -9223372036854775808: must be at least 0",
    "seed=-9223372036854775809": "seed = -9223372036854775809: must be a whole number of at most 64 bits",
    "workload.options.sizes=[1, 9223372036854775808]": "workload.options.sizes[] = 9223372036854775808: must be a "
    "whole number of at most 64 bits",
    "workload.batch_size=0": "workload.batch_size = 0: must be at least 1",
    'workload={name="text",heads=0}': "workload.heads = 0: must be at least 1",
    "optimizer.lr=0": "optimizer.lr = 0: must be greater than 0",
    "optimizer.lr=-1": "optimizer.lr = -1: must be greater than 0",
    "optimizer.lr=nan": "optimizer.lr = NaN: must be a finite number",
    "optimizer.lr=inf": "optimizer.lr = inf: must be a finite number",
    "optimizer.lr_clock=epochs": "optimizer.lr_clock = \"epochs\": must be 'samples' or 'updates'",
    "optimizer.async_lr_scale=0.5": 'optimizer.async_lr_scale = 0.5: must be 1.0 or "1/workers"',
    "optimizer.clip_norm=1": "optimizer.clip_norm: must be left out: only a training script has it (`hpcsync.connect`)",
    "optimizer.groups=[]": "optimizer.groups: must be left out: only a training script has it (`hpcsync.connect`)",
    "optimizer.schedule.milestones=[]": f"optimizer.schedule.milestones = []: {MILESTONES}",
    "optimizer.schedule.milestones=[2,2]": f"optimizer.schedule.milestones = [2, 2]: {MILESTONES}",
    "optimizer.schedule.milestones=[0,2]": f"optimizer.schedule.milestones = [0, 2]: {MILESTONES}",
    "optimizer.schedule.milestones=3": f"optimizer.schedule.milestones = 3: {MILESTONES}",
    'optimizer.schedule.milestones=[1,"a"]': f'optimizer.schedule.milestones = [1, "a"]: {MILESTONES}',
    "optimizer.schedule.warmup=-1": "optimizer.schedule.warmup = -1: must be at least 0",
    'optimizer.schedule={name="cosine",total=5,warmup=-1}': "optimizer.schedule.warmup = -1: must be at least 0",
    "optimizer.schedule.gamma=-1": "optimizer.schedule.gamma = -1: must be greater than 0",
    "stop.updates=0": "stop.updates = 0: must be at least 1",
    "stop.target_accuracy=1.5": "stop.target_accuracy = 1.5: must be at most 1",
    "stop.target_accuracy=0": "stop.target_accuracy = 0: must be greater than 0",
    "stop.target_loss=inf": "stop.target_loss = inf: must be a finite number",
    "evaluation.every_samples=-1": "evaluation.every_samples = -1: must be at least 0",
    'paradigm={name="ssp",staleness=-1}': "paradigm.staleness = -1: must be a whole number of at least 0, or inf",
    'paradigm={name="ssp",staleness=1.5}': "paradigm.staleness = 1.5: must be a whole number of at least 0, or inf",
    "paradigm.mode=loose": "paradigm.mode = \"loose\": must be 'bounded' or 'paper'",
    "checkpoint.seconds=inf": "checkpoint.seconds = inf: must be a finite number",
    "cluster.servers=-1": "cluster.servers = -1: must be at least 0",
    "cluster.servers=0": 'cluster.servers = 0: must be at least 1 with paradigm.name = "dssp"',
    "cluster.workers=0": "cluster.workers = 0: must be at least 1",
    "cluster.device=tpu": "cluster.device = \"tpu\": must be 'auto', 'cpu' or 'cuda'",
    "cluster.window=nccl": "cluster.window = \"nccl\": must be 'auto', 'host', 'mpi', 'ipc' or 'staged'",
    'cluster={device="cpu",window="mpi"}': 'cluster.window = "mpi": must be "auto" or "host" with '
    'cluster.device = "cpu"',
    'cluster={device="cuda",window="host"}': 'cluster.window = "host": must be "auto", "mpi", "ipc" or "staged" with '
    'cluster.device = "cuda"',
    "cluster.compute.seconds=-1": f"cluster.compute.seconds = -1: {SECONDS}",
    "cluster.compute.seconds=inf": f"cluster.compute.seconds = inf: {SECONDS}",
    "cluster.compute.seconds=1e300": f"cluster.compute.seconds = 1e+300: {SECONDS}",
    "cluster.compute.jitter=1e300": "cluster.compute.jitter = 1e+300: must be at most 10",
    "cluster.compute.seconds=[]": f"cluster.compute.seconds = []: {SECONDS}",
    "cluster.compute.jitter=-1": "cluster.compute.jitter = -1: must be at least 0",
    "cluster.compute.fixed_share=-0.1": "cluster.compute.fixed_share = -0.1: must be at least 0",
    "cluster.compute.fixed_share=30": "cluster.compute.fixed_share = 30: must be at most 1",
    # combinations
    "paradigm.staleness_max=2": "paradigm.staleness_max = 2: must be at least paradigm.staleness_min = 3",
    'optimizer.schedule={name="cosine",total=5,warmup=5}': "optimizer.schedule.warmup = 5: must be less than "
    "optimizer.schedule.total = 5",
    'paradigm={name="easgd",alpha=0.1,beta=0.9}': "paradigm.beta = 0.9: must be omitted beside paradigm.alpha = 0.1",
    'paradigm={name="easgd",alpha=0.5,synchronous=true}': "paradigm.alpha = 0.5: must be at most 0.4 with "
    "cluster.workers = 4: above that, workers and centre diverge",
    'paradigm={name="easgd",beta=4.5}': "paradigm.beta = 4.5: must be at most 4 with cluster.workers = 4: above that, "
    "workers and centre diverge",
    'paradigm={name="gossip",mode="pull",topology="exponential",include_self=true}': "paradigm.include_self = true: "
    'must be false with paradigm.topology = "exponential", which visits the others in turn',
    'paradigm={name="gossip",mode="permutation",synchronous=false}': "paradigm.synchronous = false: must be true with "
    'paradigm.mode = "permutation", in which all workers are drawn together',
    'paradigm={name="gossip",mode="push",beta=0.2}': 'paradigm.beta = 0.2: must be 0.5 with paradigm.mode = "push"',
    'paradigm={name="k-async",k="throughput"}': 'paradigm.k = "throughput": must be a number, '
    '"state", "loss" or "min" with k-async',
    'paradigm={name="local-sgd"}': "paradigm.steps: missing; must be a whole number of at least 1: local steps from "
    "one averaging to the next",
    "cluster.compute.seconds=[1,2]": "cluster.compute.seconds = [1.0, 2.0]: must be one number, or a list of "
    "cluster.workers = 4 numbers",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_mistakes_are_reported_in_one_line(path: Path, override: str) -> None:
    assert error(path, override) == MISTAKES[override]


def test_the_largest_moving_rate_is_allowed(path: Path) -> None:
    load(path, ['paradigm={name="easgd",alpha=0.4,synchronous=true}'])


def test_a_run_of_adsp_lasts_until_after_its_first_push(path: Path) -> None:
    adsp = 'paradigm={name="adsp",check_period_s=3}'
    assert error(path, adsp, "stop.seconds=3") == (
        "stop.seconds = 3.0: must be greater than 3, the time of the first push by paradigm.check_period_s, commits "
        "and interval_min_s"
    )
    load(path, [adsp, "stop.seconds=3.1"])


@pytest.mark.parametrize("key", ["name", "workload", "optimizer", "stop", "paradigm"])
def test_required_tables(key: str) -> None:
    table = load_table()
    del table[key]
    with pytest.raises(JobError, match=f"^{key}: missing; must be (a table$|letters, digits )"):
        Job.from_table(table)


def load_table() -> dict:
    import tomllib

    return tomllib.loads(TOML)


def test_a_target_needs_evaluations(path: Path) -> None:
    overrides = ["stop.target_loss=0.1", "evaluation.every_samples=0"]
    message = "evaluation.every_samples = 0: must be at least 1, to find stop.target_loss during the run"
    assert error(path, *overrides) == message
    load(path, overrides[:1])
    load(path, overrides[1:])


def test_long_values_are_cut(path: Path) -> None:
    assert error(path, "seed=" + "x" * 1000) == f'seed = "{"x" * 76}...: must be a whole number'


def test_a_byte_order_mark_as_editors_on_windows_write_it_is_no_part_of_the_job(path: Path) -> None:
    plain = load(path)
    path.write_text(path.read_text().replace("\n", "\r\n"), encoding="utf-8-sig", newline="")
    assert load(path) == plain


def test_files_that_are_not_jobs(tmp_path: Path) -> None:
    assert error(tmp_path / "no.toml") == f"{tmp_path}/no.toml: No such file or directory"
    assert error(tmp_path) == f"{tmp_path}: Is a directory"
    path = tmp_path / "broken.toml"
    path.write_text("name = ")
    assert error(path) == f"{path}: must be TOML: Invalid value (at end of document)"
    script = tmp_path / "train.py"
    script.write_text("import torch")
    assert error(script).endswith("; hpcsync launch starts a script")
    path.write_bytes(b"\xff\xfe")
    assert error(path) == f"{path}: must be text in UTF-8"
    with pytest.raises(JobError, match="^job: must be TOML: "):
        Job.from_toml("=")


def test_the_job_of_a_script_cannot_be_loaded(path: Path) -> None:
    job = Job.from_table({**load_table(), "workload": {"name": "script"}, "stop": {}})
    assert Job.from_toml(job.to_toml()) == job


def test_every_kind_is_named_where_one_is_missing() -> None:
    assert {"bsp", "dssp", "stanza"} < set(KINDS["paradigm"])
    assert (
        {
            each.name
            for kind in OPTIONS.values()
            for each in fields(kind)
            if get_type_hints(kind)[each.name] is ParadigmOptions
        }
        == {"then"}
        < KINDS.keys()
    )
    assert KINDS["compression"] == CODECS.split(", ")
    assert KINDS["compute"] == ["constant", "lognormal", "exponential", "table"]
    assert KINDS["schedule"] == ["multistep", "cosine"]
    assert KINDS["workload"] == [
        "digits",
        "images",
        "cifar10",
        "cifar100",
        "linear",
        "text",
        "timing",
        '"package.module:function"',
    ]


# ---- files that a job names ----


def test_a_table_is_found_beside_the_job_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path.parent / "times.csv").write_text("worker,iteration,seconds\n0,0,1\n1,0,2\n2,0,3\n3,0,4\n")
    monkeypatch.chdir("/")
    override = 'cluster.compute={model="table",table="times.csv"}'
    job = load(path, [override])
    assert job.cluster.compute.table == str(path.parent / "times.csv")
    assert error(path, override, "cluster.workers=5").endswith("worker 4 has none")
    (path.parent / "times.csv").unlink()
    table = shown(str(path.parent / "times.csv"))
    assert error(path, override) == f"cluster.compute.table = {table}: No such file or directory"
    # The job in a trace can be read where the table is not.
    assert Job.from_toml(job.to_toml()) == job


def test_the_data_of_cifar_are_found_beside_the_job_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    for name in ("cifar10", "cifar100"):
        assert load(path, [f"workload.name={name}"]).workload.folder == str(path.parent / "data")
        assert load(path, [f"workload.name={name}", "workload.folder=../d"]).workload.folder == str(
            path.parents[1] / "d"
        )


def test_a_trace_is_found_beside_the_job_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path.parent / "run").mkdir()
    trace = path.parent / "run" / "trace.h5"
    trace.touch()
    monkeypatch.chdir("/")
    override = "cluster.times_from=run/trace.h5"
    job = load(path, [override])
    assert job.cluster.times_from == str(trace)
    assert load(path, [f"cluster.times_from={trace}"]) == job
    assert load(path, ["cluster.times_from=run"]) == job
    trace.unlink()
    message = f"cluster.times_from = {shown(str(trace))}: must be a trace, or a run's folder; no such file"
    for absent in (trace, trace.parent):
        assert error(path, f"cluster.times_from={absent}") == message
    assert Job.from_toml(job.to_toml()) == job


def test_jobs_for_simulation_only_are_refused(path: Path) -> None:
    refuse_simulated(load(path, ["cluster.network={}"]))  # which real ranks have no use for, but need not refuse
    assert refusal(refuse_simulated, load(path, [f"cluster.times_from={path}"])) == (
        f"cluster.times_from = {shown(str(path))}: must not be given to run: real ranks take their own times; "
        "hpcsync simulate takes it"
    )
