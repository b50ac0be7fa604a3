"""Which publications rank 0 reads for an evaluation."""

from types import SimpleNamespace

import pytest
import torch

from hpcsync.mpi.peer import rank0_session
from hpcsync.mpi.peer.rank0_session import Rank0Session


class Publications:
    """What one worker publishes: a vector of its serial number, of which a later one comes with every look."""

    def __init__(self, *serials: int) -> None:
        self.serials, self.n_copied = list(serials), 0

    def serial_of(self, peer: int, reader: int) -> int:
        return self.serials.pop(0) if len(self.serials) > 1 else self.serials[0]

    def read(self, peer: int, into: torch.Tensor, reader: int, weight: torch.Tensor, extra: None) -> int:
        self.n_copied += 1
        into.fill_(self.serials[0])
        return self.serials[0]


@pytest.mark.parametrize(
    ("serials", "wanted", "is_read"),
    [((2, 2, 4, 4), 4, True), ((4,), 4, True), ((2, 6), 4, False), ((6,), 4, False), ((3,), None, True)],
)
def test_an_evaluation_waits_for_its_version_and_copies_once(monkeypatch, serials, wanted, is_read):
    monkeypatch.setattr(rank0_session.time, "sleep", lambda _: None)
    published, into = Publications(*serials), torch.zeros(2)
    session = SimpleNamespace(_link=SimpleNamespace(published=published))
    read = Rank0Session._reading(session, 5, wanted)  # type: ignore[arg-type]
    assert read(1, into, torch.zeros(1), None) == is_read
    assert published.n_copied == 1 and (not is_read or (into == (wanted or 3)).all())
