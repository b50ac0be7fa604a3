"""`python -m hpcsync`, which is also what every rank of a run is started as."""

from hpcsync.system.signals import ending_at_once


def main() -> None:
    """Run the command line. SIGINT ends it at once while it is loaded."""
    with ending_at_once():
        from hpcsync.cli import app
    app.main()


if __name__ == "__main__":
    main()
