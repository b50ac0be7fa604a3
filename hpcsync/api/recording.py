"""Recording of a loop that trains with DistributedDataParallel and keeps it: a trace of times, for `hpcsync explain`.

Within `record` the first DistributedDataParallel module that is called gets a communication hook, which reduces every
bucket as DDP does. In the last bucket of a step the hook notes when this process has computed its gradients, and waits
for the sums. What a process measures are durations: loading, computation, and from its gradients to their sum. The
process that is ready last only transfers, so the shortest of the latter in a step is the transfer, and what another
process takes longer is waiting. Clocks need not be synchronised: they are set such that the sums arrive everywhere at
the same time, in the median over all steps.

When the block ends, the processes measure what a transfer to a server would take: the latency of a message, from
all-reduces of one number, and the time of copying a gradient.
"""

# Without postponed annotations: torch compares those of a communication hook with the classes.

import math
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpcsync.api.user_errors import print_user_errors_in_one_line
from hpcsync.config.errors import JobError, refuse_empty
from hpcsync.config.job import Job
from hpcsync.core.peer_coordinator import PeerCoordinator, ring_bytes
from hpcsync.paradigms.records import ALL_PEERS, StepInfo
from hpcsync.run_dir import layout, lock
from hpcsync.system import rank_environment
from hpcsync.system.atomic_files import NotWritten
from hpcsync.trace.provenance import provenance
from hpcsync.trace.writer import TraceWriter

ENGINE = "ddp"
ROUNDS = 20  # all-reduces of one number; one more before them connects the processes
IDLE_S = 0.003  # before each of them: in the loop, too, a process comes to an all-reduce from other work


class Step(NamedTuple):
    """Step of a process: durations in seconds, samples, bytes of its gradients, and learning rate."""

    load_s: float
    compute_s: float
    sum_s: float
    end_s: float
    samples: int
    n_bytes: int
    lr: float = math.nan


class Measured(NamedTuple):
    """What a process measured, for process 0.

    Parameters
    ----------
    host
        Name of its host.
    steps
        Its steps, shape (n_steps, 7).
    numbers_s
        Time of each all-reduce of one number, shape (n_rounds,).
    copy_s
        Time of copying a gradient in the host's memory; NaN for gradients on a GPU.
    """

    host: str
    steps: np.ndarray
    numbers_s: np.ndarray
    copy_s: float


def record(out: str | Path | None = None, *, name: str | None = None) -> "Recorder":
    """Record the times of a loop that trains with DistributedDataParallel, as a context manager.

    Parameters
    ----------
    out
        Folder of the trace; runs/NAME-TIME/ by default.
    name
        Name of the run; that of the script by default.

    Returns
    -------
    Recorder
        Its method `loading` wraps a data loader, so that loading is not counted as computing. Rank 0 writes the
        trace when the block ends, after a collective call of all processes.

    Raises
    ------
    JobError
        On entering the block, if the folder holds a run or cannot be written, or the name is none of a run; in it, if
        the module has a communication hook already. If it is not caught, it ends the processes with status 2, and
        rank 0 prints one line instead of a traceback.

    Examples
    --------
    >>> with hpcsync.record("runs/ddp") as recorder:
    ...     for images, labels in recorder.loading(loader):
    ...         loss = criterion(model(images), labels)
    ...         loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    """
    print_user_errors_in_one_line()
    refuse_empty("out", out)
    return Recorder(out, name or layout.name_of_script("ddp"))


class Recorder:
    """Times of this process; see `record`.

    Parameters
    ----------
    out, name
        As of `record`.
    """

    def __init__(self, out: str | Path | None, name: str) -> None:
        self.steps: list[Step] = []
        self._out, self._name = out, name
        self._began_s = self._last_s = time.perf_counter()
        self._load_s = 0.0
        self._samples = 0
        self._n_bytes = 0
        self._futures: list[torch.futures.Future[torch.Tensor]] = []
        self._module: DistributedDataParallel | None = None
        self._handles: list[Any] = []
        self._optimizer = "unknown"
        self._ended = False

    def __enter__(self) -> Self:
        _job(self._name, self._optimizer, math.nan, 1)  # at the end an error would cost the trained model
        if self._out is not None:
            layout.refuse_taken(Path(self._out))
        if _is_rank_0():
            layout.refuse_unwritable(self._out)
        self._handles.append(register_module_forward_pre_hook(self._find))
        self._handles.append(register_optimizer_step_pre_hook(self._note_rate))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._ended = True
        if kind is not None:
            print("hpcsync: record: nothing is written, since the loop ended with an error", file=sys.stderr)
            return
        if self._module is None:
            if _is_rank_0():
                print(
                    "hpcsync: record: nothing is written: no DistributedDataParallel module was called", file=sys.stderr
                )
            return
        given: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        on = torch.cuda.device_of(next(self._module.parameters()))  # NCCL sends objects from the current GPU
        with _group_of_all() as group, on:
            dist.gather_object(self._measure(self._module, group), given, group=group)
        if given is not None:
            job = _job(self._name, self._optimizer, self.steps[0].lr if self.steps else math.nan, len(given))
            try:
                write(job, given, self._out)
            except (JobError, NotWritten) as error:  # must not cost the trained model
                print(f"hpcsync: record: failed: {error}", file=sys.stderr)

    def _measure(self, module: DistributedDataParallel, group: dist.ProcessGroup) -> Measured:
        """Measure the link, together with all other processes, and return this with the steps."""
        number = torch.zeros(1, device=next(module.parameters()).device)
        numbers_s = []
        for _ in range(1 + ROUNDS):
            time.sleep(IDLE_S)
            begin_s = _now(number)
            dist.all_reduce(number, group=group)
            numbers_s.append(_now(number) - begin_s)
        copy_s = math.nan if number.is_cuda or not self.steps else _copy_s(self.steps[-1].n_bytes)
        return Measured(socket.gethostname(), np.array(self.steps), np.array(numbers_s[1:]), copy_s)

    def loading(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader, and measure how long each takes to come, with the start of its processes."""
        batches = None
        while True:
            begin_s = time.perf_counter()
            try:
                batches = iter(loader) if batches is None else batches
                batch = next(batches)
            except StopIteration:
                return
            self._load_s += time.perf_counter() - begin_s
            yield batch

    def _find(self, module: torch.nn.Module, args: Any) -> None:
        """Attach to the first DistributedDataParallel module that is called."""
        if not isinstance(module, DistributedDataParallel):
            return
        self._handles.pop(0).remove()
        self._module = module
        print_user_errors_in_one_line()  # torch replaces the hook when it makes a process group
        try:
            module.register_comm_hook(None, self._reduce)
        except RuntimeError as error:
            raise JobError(f"record: the module must not have a communication hook already: {error}") from None
        self._last_s = time.perf_counter() - self._load_s
        self._handles.append(module.register_forward_hook(self._count, with_kwargs=True))  # also for this call

    def _count(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Add the samples of a call for training: the length of its first tensor."""
        if not torch.is_grad_enabled():
            return
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.dim())
        self._samples += next((len(tensor) for tensor in tensors), 0)

    def _note_rate(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Note the learning rate of the first parameter group, with which the last sum is used."""
        if self.steps:
            self._optimizer = type(optimizer).__name__.lower()
            self.steps[-1] = self.steps[-1]._replace(lr=float(optimizer.param_groups[0]["lr"]))

    def _reduce(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Sum a bucket as DDP does; after the last one the step has ended.

        The module keeps the hook, which measures nothing any more once the block has ended.
        """
        assert self._module is not None
        if self._ended:
            return allreduce_hook(self._module.process_group, bucket)
        gradient = bucket.buffer()
        self._n_bytes += gradient.numel() * gradient.element_size()
        ready_s = _now(gradient) if bucket.is_last() else 0.0
        future = allreduce_hook(self._module.process_group, bucket)
        self._futures.append(future)
        if bucket.is_last():
            for each in self._futures:
                each.wait()
            end_s = _now(gradient)
            between_s = ready_s - self._last_s
            load_s = min(self._load_s, between_s)
            times = (load_s, between_s - load_s, end_s - ready_s, end_s - self._began_s)
            self.steps.append(Step(*times, self._samples, self._n_bytes))
            self._futures, self._last_s, self._load_s, self._samples, self._n_bytes = [], end_s, 0.0, 0, 0
        return future


def _is_rank_0() -> bool:
    if dist.is_initialized():
        return dist.get_rank() == 0
    rank = rank_environment.number(os.environ, "RANK")
    return (rank_environment.expected_rank() if rank is None else rank) == 0


@contextmanager
def _group_of_all() -> Iterator[dist.ProcessGroup]:
    """Yield a new group of all processes, and destroy it.

    Some of gloo's threads drop the tensors of a collective call only after it has returned. They need the interpreter
    for that, so that a process which then ends at once may be aborted. Destroying the group joins its threads.
    """
    group = dist.new_group()
    yield group
    dist.destroy_process_group(group)


def _now(tensor: torch.Tensor) -> float:
    """Return the time at which the work on the tensor's device is done."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()


def _copy_s(n_bytes: int) -> float:
    """Return the median time of copying so many bytes in the memory."""
    source = torch.zeros(n_bytes, dtype=torch.uint8)
    target = source.clone()
    times_s = []
    for _ in range(ROUNDS):
        begin_s = time.perf_counter()
        target.copy_(source)
        times_s.append(time.perf_counter() - begin_s)
    return float(np.median(times_s))


def _link(measured: Sequence[Measured], comm_s: np.ndarray) -> dict[str, float]:
    """Return the times of a message, and of the bytes of a gradient over one link, as attributes of the trace.

    Parameters
    ----------
    measured
        Of each worker.
    comm_s
        Transfer times of the all-reduces, shape (n_steps,).

    Notes
    -----
    A ring of P workers sends 2 (P - 1) messages one after another, and 2 (P - 1) / P times the bytes over each link.
    On one host there is no link: a worker copies its gradient into the server's memory. The time of a copy from a GPU
    is not measured, so that of the bytes of the all-reduces stands for it. Both are measured after the loop. If the
    machine was busier then, they may be longer than any sum of gradients; the longest one is then taken.
    """
    if (n_hops := 2 * (len(measured) - 1)) == 0:
        return {}
    longest_s = float(comm_s.max())
    numbers_s = min(longest_s, float(np.array([each.numbers_s for each in measured]).min(axis=0).mean()))
    copy_s = float(np.mean([each.copy_s for each in measured]))
    if len({each.host for each in measured}) > 1 or math.isnan(copy_s):
        copy_s = max(0.0, float(comm_s.mean()) - numbers_s) * len(measured) / n_hops
    return {"message_s": numbers_s / n_hops, "gradient_s": min(longest_s, copy_s)}


def _own_times(steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return when each worker's steps begin and end, each of shape (n_workers, n_steps), on one clock from 0.

    A step begins when the sum of the one before has arrived at this worker. The first one begins as early as its
    durations say, without waiting: the processes do not enter the block at the same time.
    """
    durations_s = steps[:, :, :3].sum(axis=2)
    ended_s = steps[:, :, Step._fields.index("end_s")]
    ended_s = ended_s - np.median(ended_s - ended_s[0], axis=1, keepdims=True)
    began_s = np.hstack([ended_s[:, :1] - durations_s[:, :1], ended_s[:, :-1]])
    return began_s - began_s.min(), ended_s - began_s.min()


@lock.released_on_error()
def write(job: Job, measured: Sequence[Measured], out: str | Path | None) -> Path:
    """Write the trace of a recorded run; return its folder.

    Parameters
    ----------
    job
        All-reduce with a worker for each process.
    measured
        Of each worker. Steps that not all workers made are left out.
    out
        As of `record`.

    Raises
    ------
    JobError
        If there is no step, or the folder cannot be written.
    NotWritten
        If a file of the run cannot be written.
    """
    n_workers, n_steps = len(measured), min(len(each.steps) for each in measured)
    if not n_steps:
        raise JobError("no step was made")
    if n_left_out := max(len(each.steps) for each in measured) - n_steps:
        print(f"hpcsync: record: {n_left_out} steps that not all workers made are left out", file=sys.stderr)
    of_all = np.array([each.steps[:n_steps] for each in measured])
    load_s, compute_s, sum_s, _, samples, n_bytes, lr = np.moveaxis(of_all, 2, 0)  # shape (n_workers, n_steps) each
    comm_s = sum_s.min(axis=0)
    sum_s[:, 0] = comm_s[0]  # the rest is waiting for processes that start later, and no waiting of the training
    began_s, ended_s = _own_times(of_all)
    ready_s = began_s + load_s + compute_s
    all_ended_s = ended_s.max(axis=0)
    folder = layout.choose(job, out)
    layout.create(folder, job)
    attributes = provenance(job, engine=ENGINE, mpi_library=None, hosts=[each.host for each in measured])
    attributes |= _link(measured, comm_s)
    with TraceWriter(folder / layout.TRACE, attributes) as trace:
        trace.append("starts", (0, 0.0, 0, attributes["created"], rank_environment.batch_job()))
        for worker, each in enumerate(measured):  # a sum arrives within the time of its transfer
            trace.append("clocks", (0, worker, each.host, 0.0, float(np.median(comm_s))))
        coordinator = PeerCoordinator(job, trace)
        for step, worker in np.ndindex(n_steps, n_workers):
            at = worker, step
            info = StepInfo(
                worker=worker,
                iteration=step + 1,
                peer=ALL_PEERS,
                wire_bytes=ring_bytes(int(n_bytes[at]), n_workers),
                compute_s=compute_s[at],
                wait_s=sum_s[at] - comm_s[step],
                comm_s=comm_s[step],
                batch_size=max(1, int(samples[at])),
                begin_s=float(began_s[at]),
                end_s=float(ready_s[at]),
                n_received=n_workers - 1,
                load_s=load_s[at],
                lr=lr[at],
            )
            coordinator.exchanged(all_ended_s[step], info)
            trace.flush_if_due(0.0)
        for worker in range(n_workers):
            coordinator.left(all_ended_s[-1], worker)
    layout.conclude(folder, Console(highlight=False))
    lock.release(folder)
    return folder


def _job(name: str, optimizer: str, lr: float, n_workers: int) -> Job:
    return Job.from_table(
        {
            "name": name,
            "workload": {"name": "script"},
            "optimizer": {"name": optimizer, "lr": lr if lr > 0 else 1.0},
            "stop": {},
            "evaluation": {"every_samples": 0},
            "paradigm": {"name": "allreduce"},
            "cluster": {"workers": n_workers, "servers": 0},
        }
    )
