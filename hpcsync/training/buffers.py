"""A model's buffers, such as the running statistics of BatchNorm: sent as one vector, and chosen among the workers'.

Buffers are no parameters: no optimizer changes them, and every worker has its own, which its forward passes change. The
model that several workers have trained is evaluated and saved with those that `evaluation.buffers` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from hpcsync.config.errors import JobError

Calibrate = Callable[[nn.Module], None]  # recomputes the running statistics of a model

WORD_BYTES = 8
ALIGNMENT_BYTES = 16  # of each buffer in the vector: the largest element, complex128, can be viewed there


class Buffers:
    """The buffers of a model, and copies of them in a vector of whole words, whatever their types.

    Persistent and non-persistent buffers count alike; one that several modules share counts once. Other tensors that
    a module holds stay as they are on each worker.

    Parameters
    ----------
    model
        The model.
    choice
        ``evaluation.buffers`` of the job file.

    Attributes
    ----------
    n_words
        Number of words of 8 bytes; 0 if the model has no buffers. Empty ones have a word: they are looked at, too.
    """

    def __init__(self, model: nn.Module, choice: str = "worker") -> None:
        self._model = model
        self.needs_all = choice == "mean"
        self._layout = self._found()
        buffers, end = dict(model.named_buffers()), 0
        self._spans = []
        for buffer in buffers.values():
            begin, end = end, end + math.ceil(buffer.nbytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES // WORD_BYTES
            self._spans.append((begin, end, buffer.nbytes))
        self.n_words = max(end, int(bool(buffers)))
        self._device = next((buffer.device for buffer in buffers.values()), torch.device("cpu"))

    def new(self) -> torch.Tensor:
        """Return a vector of zeros, int64 of shape (n_words,), on the device of the buffers."""
        return torch.zeros(self.n_words, dtype=torch.int64, device=self._device)

    def packed(self, buffers: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Return a vector with the present values of the model's buffers, or of others of the same names.

        Raises
        ------
        JobError
            If the model no longer has the same buffers.
        """
        if buffers is None:
            self.refuse_others()
            buffers = dict(self._model.named_buffers())  # looked up, since a forward pass may replace them
        vector = self.new()
        for view, (name, _, _) in zip(self._views(vector), self._layout, strict=True):
            view.copy_(buffers[name])
        return vector

    def adopt(self, vectors: Sequence[torch.Tensor], owners: Sequence[int] | None = None) -> None:
        """Set the model's buffers to those chosen among the workers'.

        Parameters
        ----------
        vectors
            Buffers of the workers, in their order, each of shape (n_words,). The choice is the first one, or the mean
            of all; of integers it is the maximum. Without a vector the buffers stay as they are.
        owners
            For each buffer, the index of the vector to take it from, where workers train different layers.
        """
        if not vectors or not self.n_words:
            return
        self.refuse_others()
        taken = [self._views(vector.to(self._device)) for vector in vectors]
        with torch.no_grad():
            for index, buffer in enumerate(self._model.buffers()):
                if owners is not None:
                    buffer.copy_(taken[owners[index]][index])
                elif self.needs_all:
                    buffer.copy_(_mean([views[index] for views in taken]))
                else:
                    buffer.copy_(taken[0][index])

    def _views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        octets = vector.view(torch.uint8)
        return [
            octets[begin * WORD_BYTES : begin * WORD_BYTES + n_bytes].view(dtype).view(shape)
            for (begin, _, n_bytes), (_, shape, dtype) in zip(self._spans, self._layout, strict=True)
        ]

    def _found(self) -> list[tuple[str, torch.Size, torch.dtype]]:
        return [(name, buffer.shape, buffer.dtype) for name, buffer in self._model.named_buffers()]

    def refuse_others(self) -> None:
        """Raise JobError if the model no longer has the same buffers."""
        if (found := self._found()) != self._layout:
            names = sorted({name for name, *_ in set(found) ^ set(self._layout)})
            raise JobError(
                f"the model's buffers {', '.join(names)} have been added, removed, or changed in shape or type since "
                "the run began"
            )


def _mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean, rounded once; exactly the value where all are equal. Of integers it is the maximum."""
    stacked = torch.stack(list(values))
    if not (stacked.is_floating_point() or stacked.is_complex()):
        return stacked.amax(0)
    wide = stacked.to(torch.complex128 if stacked.is_complex() else torch.float64).mean(0).to(stacked.dtype)
    return torch.where((stacked == stacked[0]).all(0), stacked[0], wide)


def recompute_statistics(model: nn.Module, batches: Iterable[Any], forward: Callable[[nn.Module, Any], Any]) -> None:
    """Set the running statistics of BatchNorm to the mean over these batches.

    Parameters
    ----------
    model
        The model. Its other layers are in evaluation mode meanwhile: dropout draws no numbers.
    batches
        Batches to pass through the model.
    forward
        `forward(model, batch)` passes a batch through the model.
    """
    modes = {module: module.training for module in model.modules()}
    update_bn(([batch] for batch in batches), _Normalising(model, forward))
    for module, training in modes.items():
        module.training = training


class _Normalising(nn.Module):
    """A model of which only the BatchNorm layers can be set to training mode."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def train(self, mode: bool = True) -> _Normalising:
        self.model.eval()
        for module in self.model.modules():
            if isinstance(module, _BatchNorm):
                module.training = mode
        return self

    def forward(self, batch: Any) -> Any:
        return self._forward(self.model, batch)
