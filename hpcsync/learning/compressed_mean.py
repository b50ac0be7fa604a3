"""The mean of vectors that are compressed, the same bits for all who form it.

Either everybody is given what every one sends, decodes it and adds it up in the same order. Or, with PowerSGD, what
comes about is no mean of products but the product of mean factors: those travel, and of factors it takes two means.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from hpcsync.compression.feedback import ErrorFeedback
from hpcsync.compression.powersgd import PowerSGD
from hpcsync.learning.compressing import Compression, as_array, as_tensor


def mean_of_payloads(compression: Compression, payloads: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """Fill `into` with the mean of what these payloads of whole vectors say, added up in this order."""
    whole = slice(0, len(into))
    compression.decode(payloads[0], into, whole)
    if len(payloads) == 1:
        return
    one = torch.empty_like(into)
    for payload in payloads[1:]:
        compression.decode(payload, one, whole)
        into.add_(one)
    into.div_(len(payloads))


def has_factors(compression: Compression) -> bool:
    """Whether means are formed of `Factors`."""
    codec = compression.compressor(0).codec
    return isinstance(codec.codec if isinstance(codec, ErrorFeedback) else codec, PowerSGD)


def next_of(part: Generator[torch.Tensor, torch.Tensor | None, None], mean: torch.Tensor | None) -> torch.Tensor | None:
    """What comes out of a worker's part after this mean, None before the first; None at its end."""
    try:
        return part.send(mean)
    except StopIteration:
        return None


class Factors:
    """One worker's part in PowerSGD's means; all begin with the same Q.

    With error feedback it keeps by how much its vector, with what it had kept, differs from the mean of all (Algorithm
    2 of Vogels et al., NeurIPS 2019).
    """

    def __init__(self, compression: Compression) -> None:
        codec = compression.compressor(0).codec
        bare = codec.codec if isinstance(codec, ErrorFeedback) else codec
        assert isinstance(codec, ErrorFeedback | PowerSGD) and isinstance(bare, PowerSGD)
        self._codec, self._bare = codec, bare

    def averaging(
        self, vector: torch.Tensor, contributing: bool = True
    ) -> Generator[torch.Tensor, torch.Tensor | None, None]:
        """Let the vector, 1-D, be the mean of all that contribute, who all do this.

        Now and then a 1-D tensor comes out of which each has one, and their mean is to be sent in, for good. A worker
        that does not contribute has zeros, and keeps what it has kept.
        """
        steps = (self._codec if contributing else self._bare).averaging(as_array(vector))
        try:
            given = next(steps)
            while True:
                mean = yield as_tensor(given)
                assert mean is not None
                given = steps.send(as_array(mean))
        except StopIteration as end:
            vector.copy_(as_tensor(end.value))
