"""In-memory transport: communicators and windows of ranks that are threads of one process (`thread_ranks`).

They have the names and the meaning of mpi4py's, as far as hpcsync uses them (`communicator`). The transport is as lazy
as MPI permits, and stricter where MPI leaves a mistake undefined: new memory holds garbage; a large copy is made in two
parts, between which other ranks may run; a collective that ranks call in different orders raises. Transfers are
passive, ranks share a node unless they are told otherwise, and no rank dies.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.turns import Turns, Wait

WORD_BYTES = 8  # copied at once
WORDS_BYTES = cuda.paged(1)  # a window of at most so many bytes may hold words that ranks wait for
PAUSE_S = 5e-3  # longest pause of a rank that waits: it may wait for a time, too
OFFERED = 1 / 16  # share of operations that do not wait at which a rank passes its turn nevertheless
GARBAGE = 0xA5
GARBAGE_BYTES = 1 << 20  # memory beyond this is zero, and not committed before it is used


class Aborted(BaseException):
    """Another rank failed: this one ends too. Not an Exception, so that nothing recovers from it."""


# ---- what all ranks share ----


class Message:
    """Message on its way, with its own copy of the data."""

    def __init__(self, source: int, tag: int, data: np.ndarray) -> None:
        self.source = source
        self.tag = tag
        self.data = data


class World:
    """State that the ranks of a run share.

    Tests of what a broken transport does override `deliver` or `copy`.

    Parameters
    ----------
    n_ranks
        Number of ranks.
    nodes
        Node of each rank; by default all share one.
    """

    def __init__(self, n_ranks: int, nodes: Sequence[int] | None = None) -> None:
        self.n_ranks = n_ranks
        self.nodes = [0] * n_ranks if nodes is None else list(nodes)
        self.turns = Turns(n_ranks)
        self.lock = threading.RLock()
        self.causes: list[BaseException] = []  # what ranks have raised
        self.ended = threading.Event()
        self.threads: list[threading.Thread] = []  # of the ranks, and those that they start
        self._waits: list[list[Wait]] = [[] for _ in range(n_ranks)]  # of each rank's threads
        self._n_changes = [0] * n_ranks
        self._seen = threading.local()  # what a thread that waits has seen of the changes for its rank
        self._chance = random.Random(0)

    def check(self) -> None:
        """Raise Aborted if a rank has failed."""
        if self.ended.is_set():
            raise Aborted("another rank failed")

    def abort(self, cause: BaseException | None) -> None:
        """End all ranks: each raises Aborted at its next call of the transport."""
        while isinstance(cause, Aborted):
            cause = cause.__context__
        with self.lock:
            if cause is not None:
                self.causes.append(cause)
            self.ended.set()
            for rank in range(self.n_ranks):
                self.notify(rank)

    def operate(self) -> None:
        """Mark an operation that does not wait: now and then, other ranks go first."""
        self.check()
        if self._chance.random() < OFFERED:
            self.turns.offer()

    def notify(self, rank: int) -> None:
        """End the waits of a rank's threads that have what they wait for; the caller holds the lock."""
        self._n_changes[rank] += 1
        waits, self._waits[rank] = self._waits[rank], []
        for wait in waits:
            if self.ended.is_set() or wait.ready():
                self.turns.end(wait)
            else:
                self._waits[rank].append(wait)

    def wait(self, rank: int, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`, which `notify` of this rank announces."""
        self._wait(rank, ready)
        self.check()

    def pause(self, rank: int) -> None:
        """Wait for `PAUSE_S`, or until something has changed for this rank since this thread's latest pause."""
        seen = getattr(self._seen, "n_changes", -1)
        if not self._wait(rank, lambda: self._n_changes[rank] != seen, PAUSE_S):
            self.turns.offer()
        self.check()
        self._seen.n_changes = self._n_changes[rank]

    def _wait(self, rank: int, ready: Callable[[], bool], limit_s: float = -1.0) -> bool:
        """Wait until `ready()`, for so long at most; return False if nothing had to be waited for."""
        with self.lock:
            if self.ended.is_set() or ready():
                return False
            wait = Wait(ready, has_turn=self.turns.mine)
            self._waits[rank].append(wait)
        if not self.turns.wait(wait, limit_s):
            with self.lock:
                if wait in self._waits[rank]:
                    self._waits[rank].remove(wait)
                    self.turns.end(wait)
            self.turns.wait(wait)
        return True

    def sleep(self, seconds: float) -> None:
        """Sleep, while other ranks compute."""
        with self.turns.passed():
            self.ended.wait(seconds)
        self.check()

    # ---- what a broken transport does differently ----

    def deliver(self, post: Post, message: Message) -> None:
        """Deliver a message; the caller holds the lock."""
        post.deliver(message)

    def copy(self, into: np.ndarray, source: np.ndarray) -> None:
        """Copy bytes; words are copied at once, a larger vector in two parts."""
        half = len(source) // 2 // WORD_BYTES * WORD_BYTES
        if half:
            into[:half] = source[:half]
            self.operate()
        into[half:] = source[half:]


class Post:
    """Receives and messages of one rank on one communicator that have not met yet."""

    def __init__(self) -> None:
        self.receives: list[Receive] = []
        self.messages: list[Message] = []

    def deliver(self, message: Message) -> None:
        """Give the message to the receive that was posted first, or keep it."""
        for receive in self.receives:
            if receive.matches(message):
                self.receives.remove(receive)
                receive.take(message)
                return
        self.messages.append(message)


class Group:
    """State that the ranks of one communicator share: messages, and collectives under way by their number."""

    def __init__(self, world: World, members: Sequence[int]) -> None:
        self.world = world
        self.members = list(members)  # ranks of the world
        self.posts = [Post() for _ in members]
        self.collectives: dict[int, _Meeting] = {}


class _Meeting:
    """One collective operation."""

    def __init__(self, kind: str, n_ranks: int) -> None:
        self.kind = kind
        self.n_ranks = n_ranks
        self.given: dict[int, Any] = {}
        self.made: Any = None  # from what was given, by the first rank that may
        self.is_made = False
        self.n_left = 0


# ---- requests ----


class Done:
    """Request that is complete."""

    def Test(self) -> bool:
        """Return True."""
        return True

    def Wait(self) -> None:
        """Return at once."""


class Receive:
    """Persistent receive."""

    def __init__(self, comm: MemoryCommunicator, into: np.ndarray, source: int, tag: int) -> None:
        self._comm = comm
        self._into = into
        self._source = source
        self._tag = tag
        self._active = False

    def matches(self, message: Message) -> bool:
        """Return whether this receive takes the message."""
        return self._source in (MPI.ANY_SOURCE, message.source) and self._tag in (MPI.ANY_TAG, message.tag)

    def take(self, message: Message) -> None:
        """Copy the message; the caller holds the lock."""
        self._into[: len(message.data)] = message.data
        self._active = False

    def Start(self) -> None:
        """Post the receive."""
        self._active = True
        with self._comm.world.lock:
            post = self._comm.post
            for message in post.messages:
                if self.matches(message):
                    post.messages.remove(message)
                    self.take(message)
                    return
            post.receives.append(self)

    def Test(self) -> bool:
        """Return whether a message has arrived."""
        if self._active:
            self._comm.world.operate()
        return not self._active

    def Wait(self) -> None:
        """Wait for a message."""
        self._comm.world.wait(self._comm.world_rank, lambda: not self._active)

    def Cancel(self) -> None:
        """Withdraw the receive."""
        with self._comm.world.lock:
            if self._active:
                self._active = False
                self._comm.post.receives.remove(self)

    def Free(self) -> None:
        """Do nothing."""


class Collective:
    """Non-blocking collective operation."""

    def __init__(self, comm: MemoryCommunicator, turn: int, finish: Callable[[Any], None]) -> None:
        self._comm = comm
        self._turn = turn
        self._finish = finish
        self._finished = False

    def Test(self) -> bool:
        """Return whether the operation is complete."""
        if not self._finished:
            if not self._comm.all_given(self._turn):
                self._comm.world.operate()
                return False
            self.Wait()
        return True

    def Wait(self) -> None:
        """Wait for the operation."""
        if not self._finished:
            self._finish(self._comm.take(self._turn))
            self._finished = True


# ---- communicators ----


class MemoryCommunicator:
    """Communicator of one rank, with the names and the meaning of mpi4py's `Intracomm`.

    Objects and buffers are copied, so that no rank sees another's memory.
    """

    def __init__(self, group: Group, rank: int) -> None:
        self.rank = rank
        self.size = len(group.members)
        self.world = group.world
        self.world_rank = group.members[rank]
        self.post = group.posts[rank]
        self.members = group.members
        self._group = group
        self._turn = itertools.count()
        self._freed = False

    def __eq__(self, other: object) -> bool:
        return self is other or (self._freed and other == MPI.COMM_NULL)

    __hash__ = object.__hash__

    def pause(self, seconds: float) -> None:
        """Wait until something may have changed for this rank, however many seconds MPI's ranks would sleep."""
        self.world.pause(self.world_rank)

    def Free(self) -> None:
        """Free the communicator: it then equals MPI.COMM_NULL."""
        self._freed = True

    def Abort(self, status: int = 1) -> None:
        """End all ranks.

        Raises
        ------
        Aborted
            Always; the other ranks raise it at their next call.
        """
        self.world.abort(sys.exception())
        raise Aborted(f"aborted with status {status}")

    # ---- collectives ----

    def _give(self, kind: str, value: Any) -> int:
        """Give this rank's value to its next collective; return the number of that."""
        self.world.operate()
        turn = next(self._turn)
        with self.world.lock:
            meeting = self._group.collectives.setdefault(turn, _Meeting(kind, self.size))
            if meeting.kind != kind:
                raise RuntimeError(f"rank {self.rank} calls {kind} where another rank calls {meeting.kind}")
            meeting.given[self.rank] = value
            for member in self._group.members:
                self.world.notify(member)
        return turn

    def all_given(self, turn: int) -> bool:
        """Return whether all ranks have given their values to this collective."""
        with self.world.lock:
            meeting = self._group.collectives[turn]
            return len(meeting.given) == meeting.n_ranks

    def take(self, turn: int, of: int | None = None, make: Callable[[list[Any]], Any] = list) -> Any:
        """Wait for the values of all ranks, or for that of one; return `make` of all, made once, or that one."""
        meeting = self._group.collectives[turn]
        if of is None:
            self.world.wait(self.world_rank, lambda: len(meeting.given) == meeting.n_ranks)
        else:
            self.world.wait(self.world_rank, lambda: of in meeting.given)
        with self.world.lock:
            if of is not None:
                found = meeting.given[of]
            else:
                if not meeting.is_made:
                    meeting.made = make([meeting.given[rank] for rank in range(meeting.n_ranks)])
                    meeting.is_made = True
                found = meeting.made
            self._leave(turn, meeting)
        return found

    def _leave(self, turn: int, meeting: _Meeting) -> None:
        meeting.n_left += 1
        if meeting.n_left == meeting.n_ranks:
            del self._group.collectives[turn]

    def _pass(self, turn: int) -> None:
        """Leave a collective whose result this rank does not get."""
        with self.world.lock:
            self._leave(turn, self._group.collectives[turn])

    def Dup(self) -> MemoryCommunicator:
        """Return a communicator of the same ranks."""
        turn = self._give("Dup", None)
        return MemoryCommunicator(self.take(turn, make=lambda _: Group(self.world, self._group.members)), self.rank)

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Return a communicator of the ranks with this color, in the order of their keys."""
        turn = self._give("Split", (color, key, self.rank))

        def make(all_ranks: list[tuple[int, int, int]]) -> dict[int, tuple[Group, int]]:
            found = {}
            for one in {its for its, *_ in all_ranks if its != MPI.UNDEFINED}:
                ranks = [rank for _, _, rank in sorted(given for given in all_ranks if given[0] == one)]
                group = Group(self.world, [self._group.members[rank] for rank in ranks])
                found.update({rank: (group, place) for place, rank in enumerate(ranks)})
            return found

        found = self.take(turn, make=make).get(self.rank)
        return MPI.COMM_NULL if found is None else MemoryCommunicator(*found)

    def Split_type(self, kind: int) -> MemoryCommunicator:
        """Return a communicator of the ranks of this node."""
        found: MemoryCommunicator = self.Split(self.world.nodes[self.world_rank], self.rank)
        return found

    def Barrier(self) -> None:
        """Wait for all ranks."""
        self.take(self._give("Barrier", None))

    def Ibarrier(self) -> Collective:
        """Begin to wait for all ranks."""
        return Collective(self, self._give("Ibarrier", None), lambda _: None)

    def bcast(self, value: Any = None, root: int = 0) -> Any:
        """Return the root's value."""
        turn = self._give("bcast", copy.deepcopy(value) if self.rank == root else None)
        return copy.deepcopy(self.take(turn, of=root))

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        turn = self._give("allgather", copy.deepcopy(value))
        return copy.deepcopy([*self.take(turn)])

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return the values of all ranks on the root."""
        turn = self._give("gather", copy.deepcopy(value))
        if self.rank != root:
            self._pass(turn)
            return None
        return copy.deepcopy([*self.take(turn)])

    def allreduce(self, value: Any, op: Any = MPI.SUM) -> Any:
        """Return the sum of all values, or another reduction."""
        return _reduce(self.allgather(value), op)

    def Bcast(self, buffer: Any, root: int = 0) -> None:
        """Copy the root's buffer into those of the other ranks."""
        array = _octets(buffer)
        turn = self._give("Bcast", array.copy() if self.rank == root else None)
        found = self.take(turn, of=root)
        if self.rank != root:
            array[:] = found

    def Allreduce(self, in_place: Any, array: np.ndarray) -> None:
        """Replace the array of every rank by their sum, added in the order of the ranks."""
        self.Iallreduce(in_place, array).Wait()

    def Iallreduce(self, in_place: Any, array: np.ndarray) -> Collective:
        """Begin to replace the array of every rank by their sum."""

        def finish(arrays: list[np.ndarray]) -> None:
            array[...] = _reduce(arrays, MPI.SUM)

        return Collective(self, self._give("Iallreduce", array.copy()), finish)

    def Iallgather(self, own: np.ndarray, into: np.ndarray) -> Collective:
        """Begin to copy the arrays of all ranks into `into`, shape (n_ranks, ...)."""

        def finish(arrays: list[np.ndarray]) -> None:
            into.reshape(self.size, -1)[:] = arrays

        return Collective(self, self._give("Iallgather", own.ravel().copy()), finish)

    def Allgatherv(self, in_place: Any, places: Any) -> None:
        """Copy every rank's part of an array to all ranks; `places` is (array, sizes, begins, type)."""
        array, sizes, begins, _ = places
        spans = [slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
        turn = self._give("Allgatherv", array[spans[self.rank]].copy())
        for span, part in zip(spans, self.take(turn), strict=True):
            array[span] = part

    # ---- messages ----

    def Send(self, buffer: Any, dest: int, tag: int = 0) -> None:
        """Send a copy of the buffer."""
        self.world.operate()
        message = Message(self.rank, tag, _octets(buffer).copy())
        with self.world.lock:
            self.world.deliver(self._group.posts[dest], message)
            self.world.notify(self._group.members[dest])

    def Isend(self, buffer: Any, dest: int, tag: int = 0) -> Done:
        """Send a copy of the buffer."""
        self.Send(buffer, dest, tag)
        return Done()

    def Irecv(self, buffer: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> Receive:
        """Begin to receive a message."""
        receive = self.Recv_init(buffer, source, tag)
        receive.Start()
        return receive

    def Recv_init(self, buffer: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> Receive:
        """Return a persistent receive."""
        return Receive(self, _octets(buffer), source, tag)

    def Recv(self, buffer: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> None:
        """Wait for a message and copy it into the buffer."""
        self.Irecv(buffer, source, tag).Wait()

    def Iprobe(self) -> bool:
        """Return whether a message waits to be received."""
        self.world.operate()
        with self.world.lock:
            return bool(self.post.messages)

    # ---- windows ----

    def window(self, n_bytes: int, unit: int) -> MemoryWindow:
        """Allocate a window; collective."""
        return self.expose(_garbage(n_bytes), unit)

    def expose(self, memory: Any, unit: int) -> MemoryWindow:
        """Create a window over this memory, or over none; collective."""
        octets = np.empty(0, np.uint8) if memory is None else _octets(memory)
        return MemoryWindow(self, self.take(self._give("window", octets)), unit)


def _octets(buffer: Any) -> np.ndarray:
    """Return the memory of an array, or of mpi4py's [array, type], as octets."""
    array = np.asarray(buffer[0] if isinstance(buffer, list | tuple) else buffer)
    return array.reshape(-1).view(np.uint8)


def _garbage(n_bytes: int) -> np.ndarray:
    memory = np.zeros(n_bytes, np.uint8)
    memory[:GARBAGE_BYTES] = GARBAGE
    return memory


def _reduce(values: Sequence[Any], op: Any) -> Any:
    if op == MPI.LAND:
        return all(values)
    combine: Callable[[Any, Any], Any] = operator.add if op == MPI.SUM else max if op == MPI.MAX else min
    return functools.reduce(combine, values)


class MemoryWindow:
    """Window, with the names and the meaning of mpi4py's `Win`."""

    def __init__(self, comm: MemoryCommunicator, memories: list[np.ndarray], unit: int) -> None:
        self._comm = comm
        self._world = comm.world
        self._memories = memories
        self._unit = unit
        self._stored = b""

    def tomemory(self) -> np.ndarray:
        """Return this rank's memory."""
        return self._memories[self._comm.rank]

    def Shared_query(self, rank: int) -> tuple[np.ndarray, int]:
        """Return a rank's memory and the unit of offsets in it."""
        return self._memories[rank], self._unit

    def Lock_all(self) -> None:
        """Do nothing."""

    def Unlock_all(self) -> None:
        """Do nothing."""

    def Sync(self) -> None:
        """Order loads and stores; wake the ranks that may wait for this rank's stores."""
        own = self._memories[self._comm.rank]
        if len(own) <= WORDS_BYTES and (stored := own.tobytes()) != self._stored:
            self._stored = stored
            with self._world.lock:
                for rank in range(self._comm.size):
                    self._wake(rank)
        self._world.operate()

    def _wake(self, rank: int) -> None:
        self._world.notify(self._comm.members[rank])

    def Flush(self, rank: int) -> None:
        """Complete the operations on a rank, which take place at once."""
        self._world.operate()

    def _at(self, rank: int, offset: int, n_bytes: int) -> np.ndarray:
        begin = offset * self._unit
        found = self._memories[rank][begin : begin + n_bytes]
        if len(found) != n_bytes or begin < 0:
            raise IndexError(f"{n_bytes} bytes at {begin} of rank {rank}, which has {len(self._memories[rank])}")
        return found

    def Put(self, source: Any, rank: int, place: tuple[int, int]) -> None:
        """Copy to a rank's memory; `place` is (offset, number of elements)."""
        octets = _octets(source)
        self._world.copy(self._at(rank, place[0], len(octets)), octets)
        with self._world.lock:
            self._wake(rank)

    def Get(self, into: Any, rank: int, place: tuple[int, int]) -> None:
        """Copy from a rank's memory."""
        octets = _octets(into)
        self._world.copy(octets, self._at(rank, place[0], len(octets)))

    def Rput(self, source: Any, rank: int, place: tuple[int, int]) -> Done:
        """Copy to a rank's memory."""
        self.Put(source, rank, place)
        return Done()

    def Rget(self, into: Any, rank: int, place: tuple[int, int]) -> Done:
        """Copy from a rank's memory."""
        self.Get(into, rank, place)
        return Done()

    def Fetch_and_op(self, operand: np.ndarray, before: np.ndarray, rank: int, offset: int, op: Any) -> None:
        """Add one element atomically, after copying it to `before`."""
        with self._world.lock:
            word = self._at(rank, offset, operand.nbytes).view(operand.dtype)
            before[:] = word
            word += operand
            self._wake(rank)
        self._world.operate()

    def Compare_and_swap(
        self, value: np.ndarray, expected: np.ndarray, before: np.ndarray, rank: int, offset: int
    ) -> None:
        """Replace one element atomically if it is the expected one, after copying it to `before`."""
        with self._world.lock:
            word = self._at(rank, offset, value.nbytes).view(value.dtype)
            before[:] = word
            if word[0] == expected[0]:
                word[:] = value
            self._wake(rank)
        self._world.operate()

    def Free(self) -> None:
        """Free the window; collective."""
        self._comm.Barrier()
        self._memories = []
