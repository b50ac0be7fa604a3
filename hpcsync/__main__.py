"""`python -m hpcsync`, which is also what every rank of a run is started as."""

import os
import signal
import sys

try:
    here = os.getcwd()
except OSError as error:
    print(f"hpcsync: the current folder: {error.strerror}; change to one that exists", file=sys.stderr)
    sys.exit(2)
if sys.path and sys.path[0] in ("", here):
    # `python -m` puts the current folder first: a file there must not take the place of an installed package.
    sys.path.append(sys.path.pop(0))

from hpcsync.system import garbage
from hpcsync.system.signals import SAVING, ending_at_once


def main() -> None:
    """Run the command line. SIGINT ends it at once while it is loaded; there is nothing to save yet."""
    signal.signal(SAVING, signal.SIG_IGN)
    with ending_at_once(), garbage.loading():
        from hpcsync.cli import app
    app.main()


if __name__ == "__main__":
    main()
