"""`python -m hpcsync`, which is also what every rank of a run is started as."""

from hpcsync.cli.app import main

main()
