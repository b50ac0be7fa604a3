"""Commands that read a job file: the error for an unknown option names the key of the job file that replaces it."""

from __future__ import annotations

import itertools
from typing import Any

from typer.core import TyperCommand

KEYS = {
    "--workers": "cluster.workers",
    "--servers": "cluster.servers",
    "--device": "cluster.device",
    "--seed": "seed",
    "--lr": "optimizer.lr",
    "--batch-size": "workload.batch_size",
    "--paradigm": "paradigm",
    "--compression": "compression",
    "--samples": "stop.samples",
    "--seconds": "stop.seconds",
}


class JobCommand(TyperCommand):
    """Command whose first argument is a job file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; add a hint to the error for an unknown option."""
        given = list(args)  # the parser empties its list
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":  # a class of click, or of the copy of click inside typer
                self._point_at_key(error, given)
            raise

    def _point_at_key(self, error: Any, given: list[str]) -> None:
        has_ranks = any("-n" in parameter.opts for parameter in self.params)
        if words := hint(error.option_name, given, has_ranks=has_ranks):
            error.message, error.possibilities = error.message + words, None


def hint(option: str, args: list[str], *, has_ranks: bool) -> str:
    """Return ". Use --set KEY=VALUE" for an unknown option that is a key of the job; "" for any other."""
    if option not in KEYS:
        return ""
    given = [after for arg, after in itertools.pairwise(args) if arg == option]
    given += [arg.partition("=")[2] for arg in args if arg.startswith(f"{option}=")]
    value = given[0] if given else "VALUE"
    ranks = ", or -n RANKS (servers and workers)" if has_ranks and option == "--workers" else ""
    return f". Use --set {KEYS[option]}={value}{ranks}"
