"""Slots that servers lend to workers, each for one push, where they have fewer slots than workers."""

from __future__ import annotations

from collections import deque


class SlotPool:
    """Which worker has which slot; the same on every server, since server 0 decides and commands.

    A worker asks for a slot, puts its contribution there, and pushes. The slot is free again once the contribution has
    been used. If a worker waits and no slot is free, it gets that of the contribution that arrived first, which moves
    to private memory. So a worker waits only while others put contributions, whatever the paradigm.

    Parameters
    ----------
    n_slots
        Number of slots, at least 1.
    """

    def __init__(self, n_slots: int) -> None:
        self._n_slots = n_slots
        self._slots: dict[int, int] = {}  # by worker
        self._arrived: dict[int, None] = {}  # workers whose contributions are complete, in order of arrival
        self._waiting: deque[int] = deque()

    def slot(self, worker: int) -> int | None:
        """Return the worker's slot, if it has one."""
        return self._slots.get(worker)

    def ask(self, worker: int) -> None:
        """Add a worker without a slot to those that wait for one."""
        self._waiting.append(worker)

    def loan(self) -> tuple[int, int] | None:
        """Return the worker that has waited longest, and the slot to lend it; None if no slot can be lent."""
        if not self._waiting:
            return None
        used = self._slots.values()
        free = (slot for slot in range(self._n_slots) if slot not in used)
        slot = next(free, next((self._slots[worker] for worker in self._arrived), None))
        return None if slot is None else (self._waiting.popleft(), slot)

    def lend(self, worker: int, slot: int) -> int | None:
        """Lend a slot; return the worker whose contribution is in it and must be moved first, if there is one."""
        moved = next((other for other, taken in self._slots.items() if taken == slot), None)
        if moved is not None:
            self.free(moved)
        self._slots[worker] = slot
        return moved

    def arrived(self, worker: int) -> None:
        """Note that the contribution in the worker's slot, if it has one, is complete and not to be used at once."""
        if worker in self._slots:
            self._arrived[worker] = None

    def free(self, worker: int) -> None:
        """Free the worker's slot, if it has one."""
        self._arrived.pop(worker, None)
        self._slots.pop(worker, None)

    def discard(self, worker: int) -> None:
        """Forget a worker that died, except for a contribution that has arrived."""
        if worker in self._waiting:
            self._waiting.remove(worker)
        if worker not in self._arrived:
            self.free(worker)
