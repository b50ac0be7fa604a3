"""The mean of vectors that are compressed, the same bits for all who form it.

Either everybody is given what every one sends, decodes it and adds it up in the same order. Or, with PowerSGD, what
comes about is no mean of products but the product of mean factors: those travel, and of factors it takes two means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    def mean(
        self, vector: torch.Tensor, all_mean: Callable[[torch.Tensor], torch.Tensor], contributing: bool = True
    ) -> None:
        """Let the vector, 1-D, be the mean of all that contribute: among them everybody calls this.

        all_mean: gives the mean of the 1-D tensors that they call it with. A worker that does not contribute has zeros,
        and keeps what it has kept.
        """
        codec = self._codec if contributing else self._bare
        found = codec.mean(as_array(vector), lambda array: as_array(all_mean(as_tensor(array))))
        vector.copy_(as_tensor(found))
