"""`connect` in a single process, and settings that are refused everywhere."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import TensorDataset

from hpcsync import connect, device
from hpcsync.api.ranks import aborting, agree, world
from hpcsync.config.errors import JobError
from hpcsync.mpi import session_base
from hpcsync.run_dir.checkpoint import RUN, Checkpoints
from hpcsync.system import gpu_selection, launcher, rank_environment
from hpcsync.system.launcher import LaunchError
from hpcsync.training.sampler import batches, sequence_indices
from tests.unit.run_states import run_state

GENERATOR = torch.Generator().manual_seed(4)
DATA = TensorDataset(torch.randn(50, 3, generator=GENERATOR), torch.randn(50, 1, generator=GENERATOR))


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Linear(3, 1)


def sgd(model, **options) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **options})


def step(model, optimizer, batch) -> torch.Tensor:
    x, y = batch
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    return loss


def train(model, optimizer=None, epochs=None, batch_size=8, **settings) -> int:
    """Run a script's loop until the run stops; return the number of iterations."""
    optimizer = optimizer or sgd(model)
    iterations = 0
    with connect(model, optimizer, **settings) as sync:
        for batch in sync.shard(DATA, batch_size, epochs):
            iterations += 1
            if not sync.step(step(model, optimizer, batch)):
                break
        assert sync.stopped == (epochs is None)
    return iterations


def train_plainly(model, iterations, seed=0, rates=None) -> torch.Tensor:
    """Train the same way without hpcsync; return the weights."""
    optimizer = sgd(model)
    data = batches(DATA, seed, 0, n_workers=1, batch_size=8, epochs=range(100))
    for i, batch in zip(range(iterations), data, strict=False):
        step(model, optimizer, batch)
        optimizer.param_groups[0]["lr"] = rates[i] if rates else 0.1
        optimizer.step()
    return model.weight.detach().clone()


@pytest.mark.parametrize("paradigm", ["bsp", "asp"])
def test_one_process_is_plain_training_bit_for_bit(model, paradigm):
    twin = torch.nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    assert train(model, paradigm=paradigm, epochs=3, seed=7) == 18
    assert torch.equal(model.weight, train_plainly(twin, 18, seed=7))


def test_data_order_depends_on_the_seed(model):
    twin = torch.nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    train(model, epochs=3, seed=7)
    assert not torch.equal(model.weight, train_plainly(twin, 18, seed=8))


def test_attributes_of_the_session(model):
    with connect(model, sgd(model)) as sync:
        assert (sync.rank, sync.worker, sync.n_workers, sync.stopped) == (0, 0, 1, False)


def test_nothing_is_recorded(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(model, epochs=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("stop", "iterations"), [({"updates": 9}, 9), ({"samples": 80}, 10), ({"samples": 81}, 11)])
def test_stopping_rule(model, stop, iterations):
    assert train(model, stop=stop) == iterations


def test_each_loader_without_an_end_has_an_order_of_its_own(model):
    with connect(model, sgd(model), stop={"updates": 9}) as sync:
        one_after_another = [next(iter(sync.shard(range(64), 64, epochs=None))) for _ in range(2)]
        at_once = next(zip(*(sync.shard(range(64), 64, epochs=None) for _ in range(2)), strict=True))
    orders = {tuple(order.tolist()) for order in (*one_after_another, *at_once)}
    assert len(orders) == 4 and {tuple(sorted(order)) for order in orders} == {tuple(range(64))}


def test_loaders_end_with_the_run_and_steps_after_it_are_refused(model):
    optimizer = sgd(model)
    with connect(model, optimizer, stop={"updates": 2}) as sync:
        seen = [sync.step(step(model, optimizer, batch)) for batch in sync.shard(DATA, 8, epochs=None)]
        assert seen == [True, False]
        assert list(sync.shard(DATA, 8)) == []
        with pytest.raises(RuntimeError, match="step was called after the end of the run"):
            sync.step(0.0)


def test_evaluation_does_not_count_as_training_time(model, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))

    def evaluate(model):
        clock[0] += 1000.0
        return 1.0, 0.0

    pad = {"model": "constant", "seconds": 0.5}
    assert train(model, stop={"seconds": 3.0}, compute=pad, evaluate=evaluate, every_samples=8) == 6


def test_schedule_sets_the_learning_rate(model):
    twin = torch.nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    rates = [0.1] * 3 + [0.01] * 4
    milestones = {"name": "multistep", "milestones": [24]}
    assert train(model, stop={"updates": 7}, schedule=milestones) == 7
    assert torch.equal(model.weight, train_plainly(twin, 7, rates=rates))


@pytest.mark.parametrize("own_step", [True, False])
def test_a_script_s_scheduler_and_groups_are_its_own(model, own_step):
    """The optimizer's own `step` is the session's."""
    twin = torch.nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    weights = []
    for each, alone in ((model, False), (twin, True)):
        groups = [{"params": [each.weight], "lr": 0.2}, {"params": [each.bias]}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        if alone:
            for batch in batches(DATA, 0, 0, n_workers=1, batch_size=8, epochs=range(1)):
                step(each, optimizer, batch)
                optimizer.step()
                schedule.step()
        else:
            with connect(each, optimizer) as sync:
                for batch in sync.shard(DATA, 8):
                    loss = step(each, optimizer, batch)
                    optimizer.step() if own_step else sync.step(loss)
                    schedule.step()
        weights.append(torch.cat([p.detach().flatten() for p in each.parameters()]))
    assert torch.equal(*weights)


def test_single_process_trains_all_allocated_samples(model):
    """Samples that do not fill a batch are trained too: two epochs of 50 samples end in the seventh batch of 16."""
    seen = []
    batches = {"policy": "proportional", "total": 16}
    with connect(model, sgd(model), batches=batches, seed=7) as sync:
        for _ in range(2):
            for batch in sync.shard(DATA, batch_size=99):
                seen.append(batch[0])
                sync.step(step(model, sync._optimizers[0], batch))
    order = sequence_indices(7, 0, 7 * 16, size=50)
    assert [len(x) for x in seen] == [16] * 7
    assert torch.equal(torch.cat(seen), DATA.tensors[0][torch.from_numpy(order)])


@pytest.mark.parametrize("paradigm", ["bsp", "ashl", "adsp"])
def test_single_process_does_not_compress(model, paradigm):
    twin = torch.nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    assert train(model, paradigm=paradigm, epochs=1, seed=7, compression={"name": "top-k"}) == 6
    assert torch.equal(model.weight, train_plainly(twin, 6, seed=7))


@pytest.mark.parametrize("k", [{"k": 3}, {"k": "min", "k_min": 2, "k_start": 3}], ids=str)
def test_single_process_ignores_options_for_several_workers(model, k):
    twin = torch.nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    limits = {"policy": "equal-finish", "total": 8, "maximum": [6, 4], "minimum": 2}
    assert train(model, paradigm="k-sync", epochs=3, seed=7, **k) == 18
    assert torch.equal(model.weight, train_plainly(twin, 18, seed=7))
    with connect(model, sgd(model), "k-async", batches=limits, **k):
        pass


@pytest.mark.parametrize("paradigm", [("k-sync", {"cancel": "abort"}), ("k-batch-async", {})], ids=str)
def test_single_process_never_cancels(model, paradigm):
    with connect(model, sgd(model), paradigm[0], k=1, **paradigm[1]) as sync:
        assert not sync.cancelled(0.5)
        with pytest.raises(ValueError, match="share = 1: must be greater than 0 and less than 1"):
            sync.cancelled(1)


def test_evaluation_interval_and_target(model):
    seen = []

    def evaluate(judged):
        assert judged is model
        judged.eval()
        seen.append(None)
        return 1.0 / len(seen), float("nan")

    assert train(model, evaluate=evaluate, every_samples=20, stop={"target_loss": 0.34}) == 8
    assert len(seen) == 3  # at 24, 40 and 64 samples
    assert model.training


# ---- refused settings ----


def twice(model):
    return [sgd(model), sgd(model)]


def foreign(model):
    return torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters())


def counted(model):
    model.count = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    return torch.optim.Adam(model.parameters())


class Own(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure):
        closure()


class Derived(torch.optim.LBFGS):
    pass


def rates(model):
    return torch.optim.lr_scheduler.LinearLR(sgd(model))


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (foreign, {}, "optimizer: must have parameters of the model only"),
        (lbfgs, {}, "optimizer LBFGS: must be one without a closure"),
        (lambda model: Own(model.parameters()), {}, "optimizer Own: must be one without a closure"),
        (lambda model: Derived(model.parameters()), {}, "optimizer Derived: must be one without a closure"),
        (twice, {}, "optimizer: must have each parameter once"),
        (counted, {}, "^model: parameters of torch.int64 cannot be trained: .*; leave others out of the optimizer"),
        (rates, {}, "optimizer: must be a torch Optimizer or a list of them, not LinearLR"),
        (lambda model: [sgd(model), rates(model)], {}, "optimizer: .*, not LinearLR"),
        (lambda model: {"all": sgd(model)}, {}, "optimizer: .*, not dict"),
        (lambda model: None, {}, "optimizer: .*, not NoneType"),
        (sgd, {"clip_norm": 0.0}, "optimizer.clip_norm = 0.0: must be"),
        (sgd, {"paradigm": "bps"}, 'paradigm.name = "bps": must be one of .*; did you mean bsp?'),
        (sgd, {"staleness": 3}, "paradigm.staleness = 3: unknown key"),
        (sgd, {"paradigm": "ssp"}, "paradigm.staleness: missing"),
        (sgd, {"stop": {"sample": 3}}, "stop.sample = 3: unknown key; .*did you mean samples?"),
        (sgd, {"schedule": {"name": "step"}}, 'optimizer.schedule.name = "step": must be one of multistep, cosine'),
        (sgd, {"servers": 0}, "cluster.servers = 0: "),
        (sgd, {"compute": {"model": "constant", "seconds": [1, 2]}}, "cluster.compute.seconds"),
        (sgd, {"batches": {"policy": "proportional"}}, "batches.total: missing"),
        (sgd, {"batches": {"policy": "equal", "total": 8}}, "batches.total = 8: must be omitted"),
        (sgd, {"paradigm": "allreduce", "placement": "spread"}, 'cluster.placement = "spread": must be omitted'),
        (sgd, {"compression": {"name": "top-k", "levels": 3}}, "compression.levels = 3: unknown key"),
        (sgd, {"compression": {"name": "dgc"}}, "optimizer.momentum = 0.9: must be 0 or omitted with compression"),
        (sgd, {"paradigm": "ashl", "steps_fine": 20}, "paradigm.steps_fine = 20: must be at most"),
        (sgd, {"paradigm": "k-sync", "k": 0}, "paradigm.k = 0: must be"),
        (sgd, {"window": "ipc"}, 'cluster.window = "ipc": must be "auto" or "host" with cluster.device = "cpu"'),
        (sgd, {"paradigm": "sync-switch", "plateau": 0.1, "window": 0}, "paradigm.window = 0: must be"),
        (sgd, {"window": 5}, "paradigm.window = 5: unknown key"),
        (sgd, {"stop": {"target_accuracy": 0.5}}, "stop.target_accuracy = 0.5: needs evaluate"),
        (sgd, {"stop": {"target_loss": 0.5}}, "stop.target_loss = 0.5: needs evaluate"),
        (sgd, {"paradigm": "adsp", "loss": "evaluation"}, 'paradigm.loss = "evaluation": needs evaluate'),
        (sgd, {"out": ""}, 'out "": must not be empty'),
        (sgd, {"resume": True}, "resume: must come with out, the folder of the run to resume"),
    ],
)
def test_refused_settings(model, make, settings, message):
    with pytest.raises(JobError, match=message) as caught:
        connect(model, make(model), **settings)
    assert "\n" not in str(caught.value)


def test_a_rate_that_the_loop_sets_may_be_0_at_first_but_not_be_missing(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    connect(model, optimizer)
    for lr in (None, "auto"):
        optimizer.param_groups[0]["lr"] = lr
        with pytest.raises(
            JobError, match=r"^optimizer SGD: must have a learning rate \(lr\), a number, in each of its gr"
        ):
            connect(model, optimizer)


def test_what_is_no_model_is_refused(model):
    for given in (sgd(model), torch.nn.Linear, {"net": model}, [model, sgd(model)]):
        with pytest.raises(JobError, match="^model: must be a torch Module or a list of them, not (SGD|type|dict)$"):
            connect(given, sgd(model))


def test_window_of_sync_switch(model):
    assert train(model, paradigm="sync-switch", plateau=0.1, window=5, stop={"updates": 3}) == 3


def test_single_process_cannot_resume(model, tmp_path):
    train(model, out=tmp_path / "never", resume=True, stop={"updates": 1})
    (tmp_path / "run").mkdir()
    store = Checkpoints(tmp_path / "run", 2, None, shared=True)
    store.begin(1)
    store.write(1, RUN, run_state())
    store.commit(1)
    with pytest.raises(JobError, match="^resume: needs several ranks: a single process cannot resume"):
        connect(model, sgd(model), out=tmp_path / "run", resume=True)


def test_device(monkeypatch):
    monkeypatch.setattr(gpu_selection, "found", lambda: gpu_selection.Found(0, "torch sees no GPU"))
    assert device() == torch.device("cpu")
    monkeypatch.setattr(gpu_selection, "found", lambda: gpu_selection.Found(2, ""))
    monkeypatch.setattr(gpu_selection, "claim", lambda kind: torch.device(kind, 1))
    assert device() == torch.device("cuda", 1)


def test_frozen_parameters_may_be_in_the_optimizer_or_not(model):
    model.bias.requires_grad = False
    for optimizer in (sgd(model), torch.optim.SGD([model.weight], lr=0.1)):
        connect(model, optimizer)


@pytest.mark.parametrize("script", ["train.py", "my script.py", "größe.py", "__main__.py", "-c", "-", "", "_.py"])
def test_every_script_name_gives_a_valid_job_name(model, monkeypatch, script):
    monkeypatch.setattr(sys, "argv", [script])
    connect(model, sgd(model))


# ---- ranks ----


class Comm(SimpleNamespace):
    """Communicator that broadcasts from rank 0 to the ranks called later."""

    sent = None

    def bcast(self, value):
        if self.rank == 0:
            Comm.sent = value
        return Comm.sent


def test_ranks_agree_on_the_result_of_rank_0():
    assert [agree(Comm(rank=rank), lambda: f"from {rank}") for rank in (0, 1)] == ["from 0", "from 0"]  # noqa: B023


def test_error_of_rank_0_is_raised_on_all_ranks():
    def fail():
        raise JobError("stop: empty")

    for rank in (0, 1):
        with pytest.raises(JobError, match="stop: empty"):
            agree(Comm(rank=rank), fail if rank == 0 else lambda: "fine")


SCRIPT = """
import sys, torch, hpcsync
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(8, 2))
with hpcsync.connect(model, optimizer, "dssp", staleness_min=1, staleness_max=2, stop={"updates": 3}) as sync:
    for (x,) in sync.shard(data, batch_size=4, epochs=None):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        sync.step(loss)
print(sorted({"mpi4py", "cupy"} & sys.modules.keys()), "torch" in sys.modules)
"""


def test_a_single_process_needs_no_mpi():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[] True", "")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_a_rank_that_ends_the_job_shows_where_unless_interrupted(kind, monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(session_base, "end_all", lambda comm, error: ended.append(type(error)))
    with pytest.raises(kind), aborting(SimpleNamespace(), but=JobError):
        raise kind
    assert ended == [kind]
    said = capsys.readouterr().err
    assert said == "hpcsync: interrupted\n" if kind is KeyboardInterrupt else "Traceback" in said


def test_a_single_process_says_that_it_writes_no_trace(model, tmp_path, capsys):
    train(model, paradigm="asp", stop={"updates": 2})
    assert capsys.readouterr().err == ""
    train(model, paradigm="asp", stop={"updates": 2}, out=tmp_path / "single")
    assert capsys.readouterr().err == f"hpcsync: single process: no trace is written to {tmp_path}/single\n"
    assert not (tmp_path / "single").exists()


def test_a_rank_that_cannot_load_mpi_says_so_in_one_line(monkeypatch, tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").write_text('raise RuntimeError("cannot load MPI library\\nlibmpi.so")')
    for name in [name for name in sys.modules if name.split(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rank_environment, "under_launcher", lambda: True)
    monkeypatch.setattr(launcher, "settings_of_rank", lambda environ: {})
    with pytest.raises(LaunchError, match="^mpi4py: cannot load MPI library; hpcsync doctor says what to install or "):
        world()
