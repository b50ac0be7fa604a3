"""What a model is like that is cut in two: how large its halves are, and what a batch takes in them."""

from __future__ import annotations

from typing import NamedTuple

# Root attributes of a trace, in bytes: of the weights below the cut and above it, and of what a sample sends across,
# activations and labels.
SEPARATED = ("stanza_conv_bytes", "stanza_fc_bytes", "stanza_activation_bytes", "stanza_label_bytes")

LABEL_BYTES = 8  # the number of a class


class Shape(NamedTuple):
    """parameters: of the trainable ones below and above the cut, of itemsize bytes. activations: numbers at the cut, of
    a sample, of as many bytes. label_bytes: of a sample. flops: of a sample's forward pass; 0 of layers that compute
    nothing."""

    conv_parameters: int
    fc_parameters: int
    activations: int
    label_bytes: int = LABEL_BYTES
    itemsize: int = 4
    conv_flops: int = 0
    fc_flops: int = 0

    @property
    def fc_share(self) -> float:
        """Of an iteration's computation, by operations; backward passes have as many times those of forward ones."""
        return self.fc_flops / (self.conv_flops + self.fc_flops)

    @property
    def conv_bytes(self) -> int:
        return self.conv_parameters * self.itemsize

    @property
    def fc_bytes(self) -> int:
        return self.fc_parameters * self.itemsize

    @property
    def model_bytes(self) -> int:
        return self.conv_bytes + self.fc_bytes

    @property
    def activation_bytes(self) -> int:
        return self.activations * self.itemsize

    def attributes(self) -> dict[str, int]:
        """What a trace says of it."""
        sizes = (self.conv_bytes, self.fc_bytes, self.activation_bytes, self.label_bytes)
        return dict(zip(SEPARATED, sizes, strict=True))


class Times(NamedTuple):
    """Of a batch. fc_s: forward and backward pass above the cut; fc_fixed_s of it is the same for any number of
    samples."""

    conv_forward_s: float
    conv_backward_s: float
    fc_s: float
    fc_fixed_s: float = 0.0

    @property
    def batch_s(self) -> float:
        """Of the whole model on one node."""
        return self.conv_forward_s + self.conv_backward_s + self.fc_s

    def above_s(self, n_batches: int) -> float:
        """Above the cut, of so many batches together."""
        return self.fc_fixed_s + n_batches * (self.fc_s - self.fc_fixed_s) if n_batches else 0.0

    @classmethod
    def of(cls, batch_s: float, fc_share: float, forward_share: float = 1 / 3) -> Times:
        """Of a batch that takes so long in the whole model, of which what is above the cut has the share fc_share, and
        the forward pass below it forward_share of the rest."""
        fc_s = fc_share * batch_s
        forward_s = forward_share * (batch_s - fc_s)
        return cls(forward_s, batch_s - fc_s - forward_s, fc_s)
