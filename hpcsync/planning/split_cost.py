"""Sizes of the two halves of a model that is cut, and times of a batch in them."""

from __future__ import annotations

from typing import NamedTuple

# Root attributes of a trace, in bytes: weights below and above the cut, activations and labels of a sample.
SEPARATED = ("stanza_conv_bytes", "stanza_fc_bytes", "stanza_activation_bytes", "stanza_label_bytes")

LABEL_BYTES = 8  # a class number


class Shape(NamedTuple):
    """Sizes of a model cut in two.

    Attributes
    ----------
    conv_parameters, fc_parameters
        Trainable parameters below and above the cut.
    activations
        Numbers per sample at the cut.
    label_bytes
        Bytes of a sample's label.
    itemsize
        Bytes of a parameter or an activation.
    conv_flops, fc_flops
        Floating-point operations of a sample's forward pass below and above the cut; 0 for layers that compute nothing.
    """

    conv_parameters: int
    fc_parameters: int
    activations: int
    label_bytes: int = LABEL_BYTES
    itemsize: int = 4
    conv_flops: int = 0
    fc_flops: int = 0

    @property
    def fc_share(self) -> float:
        """Share of an iteration's operations above the cut; backward passes have the same ratio as forward ones."""
        return self.fc_flops / (self.conv_flops + self.fc_flops)

    @property
    def conv_bytes(self) -> int:
        """Bytes of the parameters below the cut."""
        return self.conv_parameters * self.itemsize

    @property
    def fc_bytes(self) -> int:
        """Bytes of the parameters above the cut."""
        return self.fc_parameters * self.itemsize

    @property
    def model_bytes(self) -> int:
        """Bytes of all parameters."""
        return self.conv_bytes + self.fc_bytes

    @property
    def activation_bytes(self) -> int:
        """Bytes of a sample's activations at the cut."""
        return self.activations * self.itemsize

    def attributes(self) -> dict[str, int]:
        """Return the root attributes of a trace for this model."""
        sizes = (self.conv_bytes, self.fc_bytes, self.activation_bytes, self.label_bytes)
        return dict(zip(SEPARATED, sizes, strict=True))


class Times(NamedTuple):
    """Times of a batch in the two halves, in seconds.

    Attributes
    ----------
    conv_forward_s, conv_backward_s
        Forward and backward pass below the cut.
    fc_s
        Forward and backward pass above the cut.
    fc_fixed_s
        Part of `fc_s` that is the same for any number of samples.
    conv_fixed_share
        Share of the times below the cut that is the same for any number of samples.
    """

    conv_forward_s: float
    conv_backward_s: float
    fc_s: float
    fc_fixed_s: float = 0.0
    conv_fixed_share: float = 0.0

    @property
    def batch_s(self) -> float:
        """Seconds of a batch in the whole model on one node."""
        return self.conv_forward_s + self.conv_backward_s + self.fc_s

    def below_s(self, batch_s: float, pieces: int) -> float:
        """Return the seconds of one of equal pieces of a batch, whose pass below the cut takes `batch_s` as a whole."""
        return batch_s * (self.conv_fixed_share + (1.0 - self.conv_fixed_share) / pieces)

    def above_s(self, n_batches: float) -> float:
        """Return the seconds of `n_batches` batches together, or of a part of one, above the cut."""
        return self.fc_fixed_s + n_batches * (self.fc_s - self.fc_fixed_s)

    @classmethod
    def of(cls, batch_s: float, fc_share: float, forward_share: float = 1 / 3) -> Times:
        """Divide the time of a batch among the two halves.

        Parameters
        ----------
        batch_s
            Seconds of a batch in the whole model.
        fc_share
            Share of `batch_s` above the cut.
        forward_share
            Share of the forward pass in the time below the cut.
        """
        fc_s = fc_share * batch_s
        forward_s = forward_share * (batch_s - fc_s)
        return cls(forward_s, batch_s - fc_s - forward_s, fc_s)
