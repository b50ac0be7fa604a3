"""What Python's search for garbage need not look through: the 300,000 objects of torch, none of which is garbage."""

import atexit
import gc


def freeze() -> None:
    """Leave out what is loaded now, until the process ends: a search of all of torch stops a rank for 0.16 s, and who
    waits for it. Once is enough: what is loaded later may be garbage some day."""
    if not gc.get_freeze_count():
        gc.freeze()
        atexit.register(_unfreeze_for_nanobind)


def freeze_at_end() -> None:
    """Leave out everything when the process ends, which else takes up to a second longer."""
    atexit.register(_unfreeze_for_nanobind)  # after the next, as the last registered is called first
    atexit.register(gc.freeze)


def _unfreeze_for_nanobind() -> None:
    """Modules made with nanobind, such as the triton that torch for CUDA loads, print every object that is left."""
    if any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type)):  # the type of all its types
        gc.unfreeze()
