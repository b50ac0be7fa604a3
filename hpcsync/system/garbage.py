"""Exclude the 300,000 objects of torch, none of which is garbage, from Python's garbage collection."""

import atexit
import contextlib
import functools
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Import modules without garbage collection, and exclude their objects from later ones.

    The collections during the import of torch take a tenth of its time, and find nothing.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(_unfreeze_for_nanobind)


@functools.cache
def freeze() -> None:
    """Exclude all current objects from garbage collection until the process ends.

    A full collection over torch's objects stops a rank, and the ranks that wait for it, for 0.16 s. Only the first
    call has an effect: objects that are created later may become garbage.
    """
    gc.freeze()
    atexit.register(_unfreeze_for_nanobind)


def freeze_at_end() -> None:
    """Skip garbage collection when the process ends, which saves up to a second."""
    atexit.register(_unfreeze_for_nanobind)  # runs after gc.freeze: handlers run in reverse order
    atexit.register(gc.freeze)


def _unfreeze_for_nanobind() -> None:
    """Undo the freeze if a module made with nanobind is loaded (torch for CUDA loads triton).

    Such modules print every object that is left at the end.
    """
    if any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type)):  # nanobind's metaclass
        gc.unfreeze()
