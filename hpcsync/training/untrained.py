"""Parameters of a script's model that no optimizer has: a frozen part of it, or a moving average of the weights.

A checkpoint holds those that have changed since the begin of the run, and checksums of the others, which a resumed run
must have again: a frozen part may be large, and the script creates it again, for example from a file.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hpcsync.state import StateError, built, restore_arrays


class UntrainedParameters:
    """Those parameters of a model that are in no optimizer, and what a checkpoint holds of them.

    Parameters
    ----------
    model
        The model, at the begin of the run.
    trained
        Parameters of all optimizers.
    """

    def __init__(self, model: torch.nn.Module, trained: Iterable[torch.nn.Parameter]) -> None:
        self._model, self._trained = model, {id(p) for p in trained}
        self._at_first = self._checksums()

    def state(self) -> dict[str, Any]:
        """Return the parameters that have changed, and the checksums of the others."""
        same = dict(self._checksums().items() & self._at_first.items())
        return {"changed": {name: p for name, p in self._found().items() if name not in same}, "same": same}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what had changed.

        Raises
        ------
        StateError
            If a parameter that had not changed has other initial values now, or one that had is missing.
        """
        for name, checksum in built(dict[str, int], state["same"]).items():
            if self._at_first.get(name) != checksum:
                raise StateError(
                    f"parameter {name}: is in no optimizer, and its initial values are not those of the run that is "
                    "resumed: initialise it as there, for example after torch.manual_seed"
                )
        changed = state["changed"]
        restore_arrays({name: p for name, p in self._found().items() if name in changed}, changed)

    def _found(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self._model.named_parameters() if id(p) not in self._trained}

    def _checksums(self) -> dict[str, int]:
        return {name: _checksum(p) for name, p in self._found().items()}


def _checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's elements."""
    return zlib.crc32(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
