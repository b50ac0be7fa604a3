"""Draw random training scripts, train each on ranks, and compare it with plain PyTorch.

    python -m tests.random_scripts --scripts 100 --seed 1

A script has a model of some layers, one or two optimizers with parameter groups, a schedule, and a habit in each of the
things that loops do differently: how gradients are cleared and accumulate, who calls the step, what thaws. Its ranks
are threads. Under paradigms that wait for all workers the weights, in float64, and what the optimizers keep must be
those of one process that trains with the workers' batches joined, also where the run was resumed from a checkpoint.
Every trace must pass its audit. What fails is listed; its number draws the same script again (`--seed`).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import hpcsync
from hpcsync.audit.trace_audit import audit
from hpcsync.mpi.transport import thread_ranks
from hpcsync.system import garbage
from hpcsync.trace.reader import load
from hpcsync.training.sampler import batches

WIDTH, BATCH = 6, 4
LIMIT_S = 60.0  # of a run on ranks
TOLERANCE = 1e-8  # rounding, where centred squares are subtracted too
LAYERS = (
    *("scalar", "transposed", "empty", "unused", "frozen", "norm", "every other", "channels last", "recurrent"),
    *("weight norm", "attention", "tied", "counter"),
)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda given: torch.optim.SGD(given, 0.05),
    "momentum": lambda given: torch.optim.SGD(given, 0.05, 0.9, weight_decay=0.01),
    "nesterov": lambda given: torch.optim.SGD(given, 0.05, 0.9, nesterov=True),
    "dampened": lambda given: torch.optim.SGD(given, 0.05, 0.8, dampening=0.3),
    "adam": lambda given: torch.optim.Adam(given, 0.01),
    "amsgrad": lambda given: torch.optim.Adam(given, 0.01, amsgrad=True, weight_decay=0.02),
    "foreach": lambda given: torch.optim.Adam(given, 0.01, foreach=True),
    "maximizing": lambda given: torch.optim.Adam(given, 0.01, maximize=True),
    "adamw": lambda given: torch.optim.AdamW(given, 0.01, weight_decay=0.1),
    "fused": lambda given: torch.optim.AdamW(given, 0.01, fused=True),
    "adagrad": lambda given: torch.optim.Adagrad(given, 0.05, lr_decay=0.1),
    "adadelta": lambda given: torch.optim.Adadelta(given, 1.0),
    "adamax": lambda given: torch.optim.Adamax(given, 0.01),
    "nadam": lambda given: torch.optim.NAdam(given, 0.01),
    "radam": lambda given: torch.optim.RAdam(given, 0.01),
    "rmsprop": lambda given: torch.optim.RMSprop(given, 0.01, centered=True, momentum=0.5),
    "asgd": lambda given: torch.optim.ASGD(given, 0.05, t0=2),
    "rprop": lambda given: torch.optim.Rprop(given, 0.01),
    "adafactor": lambda given: torch.optim.Adafactor(given, lr=0.01),
}
Schedule = Callable[[torch.optim.Optimizer, int], Any]
SCHEDULES: dict[str, Schedule] = {
    "none": lambda optimizer, n: None,
    "by hand": lambda optimizer, n: None,
    "step": lambda optimizer, n: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lr_scheduler.CosineAnnealingLR,
    "one cycle": lambda optimizer, n: lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=n + 1, cycle_momentum=bool({"momentum", "betas"} & optimizer.defaults.keys())
    ),
    "lambda": lambda optimizer, n: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "plateau": lambda optimizer, n: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=-10.0),
    "warm-up": lambda optimizer, n: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)],
        [2],
    ),
}


@dataclass(frozen=True)
class Case:
    """A script, and the run that it becomes. `interrupted`: updates between checkpoints; 0: the run is not resumed."""

    seed: int
    layers: tuple[str, ...]
    optimizer: str
    n_optimizers: int
    n_groups: int
    schedule: str
    accumulates: int
    clip_norm: float | None
    clears: str
    steps_by: str
    n_steps: int
    n_epochs: int
    thaws: bool
    hooked: bool
    evaluates: bool
    copies: bool
    loader: bool
    paradigm: str
    servers: int
    workers: int
    interrupted: int


def draw(seed: int) -> Case:
    """Return the script of this number."""
    rng = random.Random(seed)
    choose = rng.choice
    layers = tuple(layer for layer in LAYERS if rng.random() < 0.3)
    steps_by = choose(["optimizer", "session", "closure", "scaler"])
    n_optimizers = 2 if steps_by == "optimizer" and rng.random() < 0.4 else 1
    servers, workers = choose([0, 1, 1, 2, 3]), choose([1, 2, 3, 4])
    clears = choose(["to None", "to zero", "after"])
    starts_alike = clears != "to zero" or "every other" not in layers  # a gradient of 0 at first is None after a resume
    with_servers = ["bsp", "k-sync"] if n_optimizers == 1 else ["bsp"]
    return Case(
        seed=seed,
        layers=layers,
        optimizer=choose([*OPTIMIZERS]),
        n_optimizers=n_optimizers,
        n_groups=choose([1, 1, 2, 3]),
        schedule=choose([*SCHEDULES]),
        accumulates=1 if n_optimizers == 2 or steps_by == "closure" else choose([1, 1, 2, 3]),
        clip_norm=choose([None, None, 0.05, 1.0]),
        clears=clears,
        steps_by=steps_by,
        n_steps=choose([3, 5, 7]),
        n_epochs=choose([1, 1, 2, 3]),
        thaws=rng.random() < 0.25,
        hooked=rng.random() < 0.15,
        evaluates=rng.random() < 0.3,
        copies=rng.random() < 0.2,
        loader=rng.random() < 0.3,
        paradigm="allreduce" if servers == 0 else choose(with_servers),
        servers=servers,
        workers=workers,
        interrupted=choose([0, 0, 1, 2, 3]) if n_optimizers == 1 < servers + workers and starts_alike else 0,
    )


class Net(nn.Module):
    """A model with some of the `LAYERS`."""

    def __init__(self, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.has = {*layers}
        self.scalar = nn.Parameter(torch.ones(())) if "scalar" in layers else None
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t() * 0.3) if "transposed" in layers else None
        self.empty = nn.Parameter(torch.empty(0)) if "empty" in layers else None
        self.unused = nn.Parameter(torch.ones(3)) if "unused" in layers else None
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False) if "frozen" in layers else None
        self.norm = nn.LayerNorm(WIDTH) if "norm" in layers else None
        self.convolution = nn.Conv2d(1, 1, 3, padding=1) if "channels last" in layers else None
        if self.convolution is not None:
            self.convolution.to(memory_format=torch.channels_last)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True) if "recurrent" in layers else None
        self.normed = (
            nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) if "weight norm" in layers else None
        )
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True) if "attention" in layers else None
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if "tied" in layers:
            self.second.weight = self.first.weight
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64) if "counter" in layers else None)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = x if self.scalar is None else x * self.scalar
        x = x if self.transposed is None else x + x @ self.transposed
        x = x if self.frozen is None else x * self.frozen
        x = x if self.norm is None or ("every other" in self.has and step % 2) else self.norm(x)
        x = x if self.convolution is None else x + self.convolution(x.view(-1, 1, 2, 3)).flatten(1)
        x = x if self.recurrent is None else self.recurrent(x.unsqueeze(1))[0][:, 0]
        x = x if self.normed is None else torch.tanh(self.normed(x))
        if self.attention is not None:
            sequence = x.unsqueeze(1)
            x = x + self.attention(sequence, sequence, sequence)[0][:, 0]
        if self.counter is not None and self.training:
            self.counter += 1
        return self.head(torch.tanh(self.body(self.second(torch.tanh(self.first(x))))))


def made(case: Case) -> tuple[Net, list[torch.optim.Optimizer]]:
    """Return the model and its optimizers."""
    torch.manual_seed(case.seed)
    model = Net(case.layers).double()
    if case.thaws:
        model.body.requires_grad_(False)
    if case.hooked:
        model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    parameters = [*model.parameters()]
    optimizers = []
    for own in (parameters[at :: case.n_optimizers] for at in range(case.n_optimizers)):
        groups = [{"params": own[at :: case.n_groups], "lr": 0.01 * (at + 1)} for at in range(case.n_groups)]
        given = own if case.n_groups == 1 else [group for group in groups if group["params"]]
        optimizers.append(OPTIMIZERS[case.optimizer](given))
    return model, optimizers


def data(case: Case) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    n_samples = BATCH * case.workers * case.n_steps * case.accumulates
    x = torch.randn(n_samples, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


class Loop:
    """The training loop of a script; `sync` is its session, None in plain PyTorch."""

    def __init__(self, case: Case, model: Net, optimizers: list[torch.optim.Optimizer], sync: Any = None) -> None:
        self.case, self.model, self.optimizers, self.sync = case, model, optimizers, sync
        n_steps = case.n_steps * case.n_epochs
        self.schedules = [SCHEDULES[case.schedule](optimizer, n_steps) for optimizer in optimizers]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=case.steps_by == "scaler")
        self.step = 0
        for _ in range(0 if sync is None else sync.batches_before // case.accumulates):
            self.prepare()
            self.advance()

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch[0], self.step), batch[1]) / self.case.accumulates

    def prepare(self) -> None:
        if self.case.thaws and self.step == 2:
            self.model.body.requires_grad_(True)
        if self.case.schedule == "by hand":
            for group in chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers):
                group["lr"] = 0.02 / (1 + self.step)

    def advance(self) -> None:
        for schedule in filter(None, self.schedules):
            schedule.step(*[1.0] * (self.case.schedule == "plateau"))
        self.step += 1

    def clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.case.clears != "to zero")

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        if self.sync is None and self.case.clip_norm is not None:  # which is hpcsync's part on ranks
            self.scaler.unscale_(optimizer)
            given = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(given, self.case.clip_norm)

    def run(self, epochs: Iterable[Iterable[Any]]) -> None:
        for epoch in epochs:
            for number, batch in enumerate(epoch):
                self.prepare()
                if self.case.clears != "after" and number % self.case.accumulates == 0:
                    self.clear()
                if self.case.steps_by != "closure":
                    self.scaler.scale(self.loss(batch)).backward()
                if (number + 1) % self.case.accumulates:
                    continue
                self.make_step(batch)
                if self.case.clears == "after":
                    self.clear()
                self.advance()
                if self.case.evaluates:
                    with torch.no_grad():
                        self.loss(batch)
                if self.case.copies:
                    copy.deepcopy(self.model).state_dict()

    def make_step(self, batch: Any) -> None:
        def closure() -> torch.Tensor:
            self.clear()
            loss = self.loss(batch)
            loss.backward()
            return loss

        first, *others = self.optimizers
        if self.case.steps_by == "closure" and self.sync is not None:
            first.step(closure)
        elif self.case.steps_by == "session" and self.sync is not None:
            self.sync.step()
        else:
            if self.case.steps_by == "closure":
                closure()
            self.clip(first)
            self.scaler.step(first)
            self.scaler.update()
        for optimizer in others:
            self.clear()
            self.loss(batch).backward()
            self.clip(optimizer)
            optimizer.step()


# ---- the same script in one process, and on ranks ----

Trained = tuple[Net, list[torch.optim.Optimizer]]


def plain(case: Case) -> Trained:
    """Train with the workers' batches joined."""
    model, optimizers = made(case)

    def epochs() -> Iterator[list[Any]]:
        given = {"n_workers": case.workers, "batch_size": BATCH}
        for epoch in range(case.n_epochs):
            each = [batches(data(case), 0, w, epochs=range(epoch, epoch + 1), **given) for w in range(case.workers)]
            yield [tuple(map(torch.cat, zip(*together, strict=True))) for together in zip(*each, strict=True)]

    Loop(case, model, optimizers).run(epochs())
    return model, optimizers


def on_ranks(case: Case, out: Path, *, resume: bool = False) -> list[Trained]:
    """Train on ranks that are threads; return what each of them has at the end."""
    options: dict[str, Any] = {"k": case.workers} if case.paradigm == "k-sync" else {}
    if case.servers > 1:
        options["servers"] = case.servers
    if case.interrupted:
        options |= {"checkpoint": {"updates": case.interrupted, "keep": 99}, "resume": resume}
    trained = []

    def rank(comm: Any) -> None:
        model, optimizers = made(case)
        given = {**options, "out": out, "clip_norm": case.clip_norm, "comm": comm}
        source = (DataLoader(data(case), BATCH, shuffle=True), None) if case.loader else (data(case), BATCH)
        with hpcsync.connect(model, optimizers, case.paradigm, **given) as sync:
            epochs = (sync.shard(*source, accumulate=case.accumulates) for _ in range(case.n_epochs))
            Loop(case, model, optimizers, sync).run(epochs)
        trained.append((model, optimizers))

    thread_ranks.run(case.servers + case.workers, rank, limit_s=LIMIT_S)
    return trained


def resumed(case: Case, run: Path) -> list[Trained] | None:
    """Train again from one of the checkpoints of a run; None if it has none."""
    numbers = sorted(int(path.name) for path in run.glob("checkpoints/*"))
    if not numbers:
        return None
    newest = numbers[case.seed % len(numbers)]
    for path in [run / "summary.json", run / "weights.safetensors"]:
        path.unlink()
    for number in numbers[numbers.index(newest) + 1 :]:
        shutil.rmtree(run / "checkpoints" / str(number))
    return on_ranks(case, run, resume=True)


def differences(expected: Trained, found: Trained) -> Iterator[str]:
    """Name what differs of the weights, and of what optimizers keep."""
    for (name, p), q in zip(expected[0].named_parameters(), found[0].parameters(), strict=True):
        if not torch.allclose(p, q, rtol=0, atol=TOLERANCE):
            yield f"{name} by {float((p - q).detach().abs().max()):.1e}"
    for number, pair in enumerate(zip(expected[1], found[1], strict=True)):
        one, other = (optimizer.state_dict()["state"] for optimizer in pair)
        if one.keys() != other.keys():
            yield f"optimizer {number}: it keeps something of parameters {[*other]}, not of {[*one]}"
            continue
        for index, key in ((index, key) for index, kept in one.items() for key in kept):
            p, q = (torch.as_tensor(kept[index].get(key, torch.nan)).double() for kept in (one, other))
            if p.shape != q.shape or not torch.allclose(p, q, rtol=0, atol=TOLERANCE):
                yield f"optimizer {number}: {key} of parameter {index}"


def examine(case: Case) -> list[str]:
    """Train a script in each way; return what is wrong."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedulers that make more steps than optimizers
        run, expected = Path(folder) / "run", plain(case)
        wrong = []
        for how, train in (("trained", on_ranks), ("resumed", resumed)):
            trained = train(case, run) if how == "trained" or case.interrupted else None
            for model_and_optimizers in trained or []:
                wrong += [f"{how}: {each}" for each in differences(expected, model_and_optimizers)]
            if trained and len(trained) > 1:
                wrong += [f"{how}: audit: {check.name}" for check in audit(load(run / "trace.h5")) if not check.passed]
    return [*dict.fromkeys(wrong)]


def main() -> None:
    """Examine scripts and list what fails."""
    parser = argparse.ArgumentParser(description="Random training scripts beside plain PyTorch.")
    parser.add_argument("--scripts", type=int, default=100, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="number of the first one")
    asked = parser.parse_args()
    garbage.freeze = lambda: None  # one process is not at an end after a run
    n_failed = 0
    for seed in range(asked.seed, asked.seed + asked.scripts):
        case, said = draw(seed), io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                wrong = examine(case)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            n_failed += 1
            print(case, *wrong, sep="\n    ", flush=True)
    print(f"{asked.scripts} scripts, {n_failed} failed")
    raise SystemExit(n_failed > 0)


if __name__ == "__main__":
    main()
