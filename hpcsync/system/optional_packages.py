"""Packages that only some commands need."""

from __future__ import annotations

import traceback
from collections.abc import Collection
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
ERRORS = (ImportError, AttributeError, ValueError)  # of an import, the last one if binaries do not fit


def unusable(error: Exception, optional: Collection[str], install: str) -> str | None:
    """Return what is wrong with a package, from one of `ERRORS`; None if the error is one of hpcsync itself.

    Parameters
    ----------
    error
        The exception, while it is handled.
    optional
        Packages that may be missing.
    install
        Command that installs them.
    """
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError):
        return f"needs {package}, which is not installed: {install}" if package in optional else None
    innermost = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    if package == "hpcsync" or (not isinstance(error, ImportError) and innermost.is_relative_to(PACKAGE)):
        return None
    return f"a package that it needs cannot be imported: {str(error).strip().partition(chr(10))[0]}"
