"""Groups of workers under layer separation (Stanza; Wu, Xu, Li and Xiong 2018, arXiv:1812.10624).

The first workers train the fully-connected layers, the others the convolution layers below them.
"""

from __future__ import annotations

from typing import NamedTuple


class Groups(NamedTuple):
    """Division of the workers into fully-connected (FC) workers and convolution workers.

    Attributes
    ----------
    n_workers
        Number of all workers.
    n_fc
        Number of FC workers, at least one and at most as many as convolution workers.
    """

    n_workers: int
    n_fc: int

    @property
    def n_convolution(self) -> int:
        """Number of convolution workers."""
        return self.n_workers - self.n_fc

    @property
    def fc(self) -> range:
        """FC workers."""
        return range(self.n_fc)

    @property
    def convolution(self) -> range:
        """Convolution workers."""
        return range(self.n_fc, self.n_workers)

    def is_fc(self, worker: int) -> bool:
        """Return True for an FC worker."""
        return worker < self.n_fc

    def served(self, fc: int) -> range:
        """Return the convolution workers whose activations this FC worker processes.

        The numbers of two FC workers differ by at most one.
        """
        n = self.n_convolution
        return range(self.n_fc + n * fc // self.n_fc, self.n_fc + n * (fc + 1) // self.n_fc)

    def fc_of(self, worker: int) -> int:
        """Return the FC worker that processes this convolution worker's activations."""
        return next(fc for fc in self.fc if worker in self.served(fc))

    # Factors that both engines multiply gradients by, so that they round alike.

    def weight(self, fc: int) -> float:
        """Return the weight of this FC worker's gradient in the mean over the FC workers.

        It is the number of convolution workers served over the average number, so that the mean is that over all
        samples.
        """
        return len(self.served(fc)) * self.n_fc / self.n_convolution

    def own_mean(self, fc: int, n_pieces: int) -> float:
        """Return the factor that rescales activation gradients to the mean loss of each convolution worker's own batch.

        The gradients come from the mean loss over everything that the FC worker receives of one of `n_pieces` pieces.
        """
        return len(self.served(fc)) * (1 / n_pieces)
