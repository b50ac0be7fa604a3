"""Keep optimizers from loading ``torch._dynamo``, the compiler behind ``torch.compile``.

Constructing an optimizer, and each of its steps, imports ``torch._dynamo`` only to mark where a compiled graph would
break. That import takes 1.4 to 2.7 s in every process, as long as torch itself. `defer` puts a stand-in in its place,
which loads the real module as soon as anything else of it is used, for example by ``torch.compile``.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"


def defer() -> None:
    """Put the stand-in into the place of ``torch._dynamo``, unless that is loaded already."""
    if NAME not in sys.modules:
        sys.modules[NAME] = torch._dynamo = _Deferred(NAME)


class _Deferred(ModuleType):
    """The two functions that `torch.optim` calls where nothing is compiled; every other attribute loads the module."""

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: there is no graph."""

    def disable(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
        """Return `fn` as the real module's ``disable`` would, once that is loaded, and call it plainly until then."""
        real: list[Callable[..., Any]] = []

        @functools.wraps(fn)
        def call(*given: Any, **named: Any) -> Any:
            module = sys.modules[NAME]
            if module is self:
                return fn(*given, **named)
            if not real:
                real.append(module.disable(fn, *args, **options))
            return real[0](*given, **named)

        return call

    def __getattr__(self, name: str) -> Any:
        # The import system looks for these on every module that it finds.
        if name in ("__spec__", "__loader__", "__file__", "__cached__"):
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
            del torch._dynamo
            importlib.import_module(NAME)
        return getattr(sys.modules[NAME], name)
