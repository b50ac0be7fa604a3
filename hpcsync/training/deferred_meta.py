"""Keep ``import torch`` from loading its kernels for the meta device, which are written in Python.

They are a quarter of the time that the import takes, and a process that trains on a CPU or a GPU needs none of them.
`defer` puts a stand-in for ``torch._meta_registrations`` in its place, before torch is imported; `restore` loads the
real module. It must be called before a tensor on the meta device is used, and before any code of the user is imported,
which may use one, or export or compile a model.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

NAME = "torch._meta_registrations"


def defer() -> None:
    """Put the stand-in into the place of the module, unless torch is loaded already."""
    if "torch" not in sys.modules:
        sys.modules[NAME] = _Deferred(NAME)


def restore() -> None:
    """Load the real module, if it was deferred."""
    if isinstance(sys.modules.get(NAME), _Deferred):
        del sys.modules[NAME]
        importlib.import_module(NAME)


class _Deferred(ModuleType):
    """Has no attributes of its own; asking for one loads the module."""

    def __getattr__(self, name: str) -> Any:
        # The import system looks for these on every module that it finds.
        if name in ("__spec__", "__loader__", "__file__", "__cached__", "__path__"):
            raise AttributeError(name)
        restore()
        return getattr(sys.modules[NAME], name)
