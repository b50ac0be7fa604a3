"""Who is what under layer separation (Stanza, Wu et al. 2018): the first workers train the fully-connected layers, the
others the convolutions below them."""

from __future__ import annotations

from typing import NamedTuple


class Groups(NamedTuple):
    """n_workers: all; n_fc: those that train fully-connected layers, at least one and no more than the others."""

    n_workers: int
    n_fc: int

    @property
    def n_convolution(self) -> int:
        return self.n_workers - self.n_fc

    @property
    def fc(self) -> range:
        """The fully-connected workers."""
        return range(self.n_fc)

    @property
    def convolution(self) -> range:
        """The convolution workers."""
        return range(self.n_fc, self.n_workers)

    def is_fc(self, worker: int) -> bool:
        return worker < self.n_fc

    def served(self, fc: int) -> range:
        """The convolution workers whose activations this fully-connected worker takes; as many as others, or one more
        or less."""
        n = self.n_convolution
        return range(self.n_fc + n * fc // self.n_fc, self.n_fc + n * (fc + 1) // self.n_fc)

    def fc_of(self, worker: int) -> int:
        """The fully-connected worker that takes this convolution worker's activations."""
        return next(fc for fc in self.fc if worker in self.served(fc))

    # What both engines multiply gradients by, so that they round alike.

    def weight(self, fc: int) -> float:
        """How often this fully-connected worker's gradient counts in the mean of theirs: as often as it serves more
        convolution workers than they do on the average, so that the mean is that over all samples."""
        return len(self.served(fc)) * self.n_fc / self.n_convolution

    def own_mean(self, fc: int, n_pieces: int) -> float:
        """Of the mean loss over all that this fully-connected worker is given of a piece, of so many, activations have
        a gradient; so many times that is the one of the mean over the whole batch of their own convolution worker."""
        return len(self.served(fc)) * (1 / n_pieces)
