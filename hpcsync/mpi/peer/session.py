"""Session of a worker in a run without servers, as the training script uses it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hpcsync.config.errors import JobError, shown
from hpcsync.core.peer_coordinator import BatchDivision, create_batch_division
from hpcsync.core.peer_machine import Computed, PeerMachine, create_method
from hpcsync.core.session import Asked, Batches
from hpcsync.core.stanza_resolution import stanza_options
from hpcsync.mpi.collectives.model_parts import Layers, SeparatedLayers
from hpcsync.mpi.peer.channel import PeerChannel
from hpcsync.mpi.peer.exchange import AllReducing, Averaging, Exchange, Setup, Swapping
from hpcsync.mpi.peer.gossip import Pulling, Pushing
from hpcsync.mpi.peer.pairs import Pairing
from hpcsync.mpi.peer.stanza import StanzaExchange
from hpcsync.mpi.session_base import Given, RankSession
from hpcsync.mpi.transport import cuda, messages
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.progress_engine import choose
from hpcsync.mpi.transport.published_replica import EVALUATED_ROWS, PEERS_ROWS, UNREAD_ROWS
from hpcsync.mpi.transport.ulfm import survivors
from hpcsync.paradigms.peer_method import ExchangeResult
from hpcsync.planning.batch_allocation import Estimate
from hpcsync.planning.speed_estimator import Estimator
from hpcsync.run_dir.checkpoint import RUN
from hpcsync.state import built, plain, restore_arrays
from hpcsync.trace.schema import Phase
from hpcsync.training.gradient import Loss
from hpcsync.training.speed_models import estimator

if TYPE_CHECKING:
    from hpcsync.mpi.peer.monitor import Monitor

TRANSPORTS: dict[str, type[Exchange]] = {
    "all-reduce": AllReducing,
    "separated-layers": StanzaExchange,
    "average": Averaging,
    "swap": Swapping,
    "published": Pulling,
    "inbox": Pushing,
    "pairs": Pairing,
}  # by the name in a method (`hpcsync.paradigms.peer_method`)


class PeerSession(RankSession):
    """Session in which all ranks are workers, each with its own weights and optimizer."""

    def __init__(self, given: Given) -> None:
        comm, job, checkpoints, transport = given.comm, given.job, given.checkpoints, given.placement.transport
        self._estimator = estimator(job, comm.rank)  # before the clock starts: it takes seconds
        layers = Layers(comm, given.model)
        if job.paradigm.separates_layers:
            layers = SeparatedLayers(comm, given.model, stanza_options(job).cut, job.groups)
        super().__init__(given, layers)
        run = checkpoints.state(RUN)
        self._monitor: Monitor | None = None  # on rank 0
        method = create_method(job)
        # A script may give an evaluation to rank 0 alone.
        evaluated = comm.bcast(given.evaluate is not None) and job.evaluation.every_samples > 0
        self._link = PeerChannel(
            comm,
            self.flat.size,
            self.flat.weights.dtype,
            transport,
            tolerant=self._tolerant,
            buffer_words=self._buffers.n_words,
            published_rows=PEERS_ROWS if method.peers_read else EVALUATED_ROWS if evaluated else UNREAD_ROWS,
        )
        self._division = create_batch_division(job)
        if not method.synchronous:  # if the run was resumed with fewer workers, the last ones are missing
            for missing in range(comm.size, job.cluster.workers):
                method.forget(missing)
        setup = Setup(
            job, method, self._link, self.flat, self._optimizer, self._layers,
            self._overlaps, self._end_of_backward, self._division,
        )  # fmt: skip
        self._exchange = TRANSPORTS[method.transport](setup)
        self._machine = PeerMachine(job, self.rank, method, self._exchange.peer, self._exchange, evaluated=evaluated)
        if run is not None and self._resumed is not None:
            built(BatchDivision | None, self._resumed["division"], self._division)
            built(Estimator | None, self._resumed["estimator"], self._estimator)
            self._exchange.restore(self._resumed["exchange"])
            self._machine.restore(self._resumed["machine"])
            self._machine.resume(comm.size, run["evaluated"])
        self._exchange.publish(1, None if self._resumed is None else self._resumed["buffers"])
        # In the other paradigms all workers are inside MPI during transfers; only an evaluation may have to wait there.
        self._progression = None
        if self._exchange.one_sided:
            self._progression = choose(self._link.comm, transport=transport, tolerant=self._tolerant)
        poll = self._progression.poll if self._progression and self._progression.kind == "hooks" else None
        trained = [p for p in self.flat.parameters if p.requires_grad]
        # Every computed gradient drives the progress of other workers' transfers.
        self._hooks = [] if poll is None else [p.register_post_accumulate_grad_hook(lambda _: poll()) for p in trained]
        self._clocks = self._link.start(0.0 if run is None else run["now_s"])
        allocated = None if self._division is None else partial(self._division.work, self.rank)
        self._iterations = self._create_iterations(self.rank, self._link.clock.now, allocated, poll)
        self._accumulate = 1  # backward passes of a step
        self._n_passes = 0  # made since the last step
        self._may_reduce = True  # outside of `no_sync`
        self._computed: Computed | None = None  # the last one until its step; a script may draw the next batch before

    # ---- training ----

    def loss_here(self, loss: Loss | None) -> Loss | None:
        """Return the loss; below the cut the sum of the model's placeholder, which only starts the backward pass."""
        below = isinstance(self._layers, SeparatedLayers) and not self._layers.is_fc
        return (lambda model, x, *rest: model(x).sum()) if below else loss

    def _batches(self, asked: Asked) -> Batches:
        """Return this worker's batches; restore the state of a resumed run first.

        Raises
        ------
        JobError
            If gradients are to accumulate where the layers are separated.
        """
        if asked.accumulate > 1 and self._job.paradigm.separates_layers:
            raise JobError(
                f"accumulate = {asked.accumulate}: must be 1 with paradigm.name = {shown(self._job.paradigm.name)}, "
                "whose groups exchange every batch"
            )
        if self._resumed is not None:  # not earlier: the script's setup may draw numbers and change the model, too
            with self._checkpoints.restoring(self._name):
                self._restore(self._resumed)
            self._keep_for_continuing()
            self._resumed = None
        own = self._iterations.shard(asked)
        return Batches(self._prepared(asked, own), own.__len__)

    def _prepared(self, asked: Asked, own: Batches) -> Iterator[Any]:
        """Yield this worker's batches, each prepared for the exchange."""
        attributes = self._exchange.prepare(self._iterations.source(asked), self._iterations)
        if self._monitor is not None:
            self._monitor.describe(attributes)
        self._link.phases.enter(Phase.COMPUTING, self._machine.iteration + 1)
        self._accumulate, self._n_passes = asked.accumulate, 0
        for batch in own:
            yield self._exchange.begin(batch)

    def _step(self, loss: torch.Tensor | float | None) -> None:
        """End an iteration: apply the step and exchange."""
        self._refuse_step()
        if self._job.paradigm.one_model and torch._C._current_graph_task_id() >= 0:
            raise JobError(
                f"step: must not be called within backward with paradigm.name = {shown(self._job.paradigm.name)}, "
                "which forms the mean of the gradients at its end"
            )
        if self._computed is None:
            self._iterations.begin_again()
            self._end_computation()
        self._end_iteration(self._look_at_step(loss))
        self._link.phases.enter(Phase.COMPUTING, self._machine.iteration + 1)

    def _end_iteration(self, loss: float) -> None:
        assert self._computed is not None
        ended, self._computed = self._computed, None
        exchange, self._n_passes = self._exchange, 0
        result = self._advance(ended.n_samples)
        lr, rates = self._rates()
        step_info = self._machine.step_info(
            result, ended, exchange.wait_s, exchange.comm_s, loss, lr, self._take_problem(), exchange.gradients_sq
        )
        self._link.step_info(step_info, rates)
        if self._estimator is not None:
            self._divide_batches(self._estimator.observe(ended.n_samples, step_info.iteration_s, step_info.comm_s))
        self._halt_if_requested()

    def _end_of_backward(self) -> None:
        """End the computation at the end of the step's last `backward`: from here on the gradient is the mean."""
        if self._computed is not None:
            raise RuntimeError(
                "several backward passes in one step: the first one's gradient is already the mean of all workers'; "
                "add the losses, pass accumulate to shard, or call all but the last backward in session.no_sync(); "
                "activation checkpointing needs use_reentrant=False"
            )
        if not self._is_of_step:
            return
        self._iterations.begin_again()
        if self._reduces:
            self._end_computation()
        else:
            self._n_passes += 1

    @property
    def _reduces(self) -> bool:
        """True if the mean of the gradients is formed at the end of the next backward pass."""
        return self._may_reduce and self._n_passes + 1 >= self._accumulate

    @property
    def _is_of_step(self) -> bool:
        """True if a backward pass is one of a step, and not of an evaluation between steps or after the end."""
        several = self._n_optimizers > 1  # a further one steps with the same batch
        return not self.stopped and (self._iterations.under_way or (several and self._iterations.in_loop))

    def _overlaps(self) -> bool:
        """Return whether the backward pass under way may exchange gradients before its end.

        Not in padded iterations, of which the gradient exists for the others only after the padding.
        """
        may = self._job.cluster.compute is None and self._computed is None
        return may and self._reduces and self._is_of_step

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without their mean."""
        self._may_reduce = False
        try:
            yield
        finally:
            self._may_reduce = True

    def _end_computation(self) -> None:
        cuda.ready(self.flat.gradient)  # the gradient is complete only then
        self._exchange.while_padding(self._iterations.pad)
        times, ended = self._iterations.end(), self._iterations
        self._computed = Computed(ended.batch_size, *times, ended.computed_s, ended.load_s)
        self._link.phases.enter(self._exchange.phase)
        self._link.poll_commands()
        self._exchange.end_computation(ended.batch_size)

    def _advance(self, n_samples: int) -> ExchangeResult:
        """Advance by one iteration of `n_samples` samples; 0 after a synchronous worker's last own iteration."""
        self._poll_commands()
        link = self._link
        actions = self._machine.advance(n_samples, stop=link.stop_requested, halt=link.halt_requested)
        result = self._exchange.run(actions)
        self.flat.spread()
        self.stopped = self.stopped or self._machine.stopped
        return result

    def _poll_commands(self) -> None:
        """Process rank 0's commands."""
        self._link.poll_commands()
        while self._link.died:
            died = self._link.died.pop(0)
            self._machine.method.forget(died)
            self._exchange.forget(died)

    def _divide_batches(self, expected: Estimate | None) -> None:
        """Divide the batches after a synchronous iteration, if the job allocates them.

        `expected` is this worker's estimate; None if its loop has ended.
        """
        agreed = self._machine.agreed
        if self._division is None or not self._machine.in_step:
            return
        assert agreed is not None
        allocated = self._division.exchanged(agreed.n_contributing, lambda: self._gather(expected))
        if allocated and self._monitor is not None:
            self._monitor.allocated(self._machine.iteration, allocated)

    def _gather(self, expected: Estimate | None) -> list[Estimate | None]:
        """Return every worker's estimate."""
        gathered = self._link.gather((expected is not None, *(expected or (0.0, 0.0))))
        known = [Estimate(*estimate) if continued else None for continued, *estimate in gathered.tolist()]
        return known + [None] * (self.n_workers - len(known))

    # ---- checkpoints ----

    def _halt_if_requested(self) -> None:
        """Halt after an iteration, if requested."""
        link = self._link
        link.poll_commands()
        if not self._machine.at_halt(link.halt_requested):
            return
        if not self._machine.all_halt(link.comm.size):
            if self._monitor is not None:
                self._monitor.cannot_halt()
            return
        link.phases.enter(Phase.WAITING)
        link.halt(lambda number: self._checkpoints.write(number, self._name, self._state()))

    def _state(self) -> dict[str, Any]:
        """Return this worker's state for a checkpoint, while all workers have halted."""
        return {
            "exchange": self._exchange.state(),
            "division": plain(self._division),
            "estimator": plain(self._estimator),
            "machine": self._machine.state(),
            **self._training_state(),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint before the next batch."""
        restore_arrays({"weights": self.flat.weights}, {"weights": state["exchange"]["peer"]["weights"]})
        self.flat.spread()
        self._restore_training(state)

    # ---- the end ----

    def _part(self) -> None:
        if self._computed is not None:  # the script left between `backward` and `step`; the others have this gradient
            self._end_iteration(math.nan)
        self._link.phases.enter(Phase.WAITING)
        self._exchange.end(early=self._machine.in_step)
        while self._machine.in_step and self._exchange.participates:
            self._advance(0)
            self._divide_batches(None)
            self._halt_if_requested()
        self._link.send_status(messages.StepInfoKind.ENDED)
        self._link.wait_for_all()
        self._poll_commands()
        if (step_info := self._machine.absorb_rest(self._link.clock.now())) is not None:  # no worker sends any more
            self._link.step_info(step_info)
        self._layers.compare(self.flat.weights)
        # The evaluation may still be reading earlier weights.
        self._link.backoff.until(lambda: self._exchange.publish(self._machine.serial + 1))
        self._link.send_status(messages.StepInfoKind.SETTLED)
        backoff = Backoff(survivors(self._link.comm)) if self._tolerant else self._link.backoff
        backoff.barrier()
        self._finish_training()
        backoff.barrier()

    def _finish_training(self) -> None:
        """Handle that all workers have published their final weights; on rank 0 only."""

    def _report_failure(self) -> None:
        self._link.send_status(messages.StepInfoKind.FAILED)

    def _free(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._progression is not None:
            self._progression.close()
        self._exchange.free()
        self._link.free()
