"""A wall clock may step back and forth: only times of files, and of a status that others read, are compared with it."""

import ast
from pathlib import Path

import hpcsync

WALL = {"time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime", "now", "utcnow", "today"}
ALLOWED = {
    "layout.py",  # the name of a folder, to which a number is added if need be
    "provenance.py",  # `created`
    "launcher.py",  # which segments of shared memory, by the times of their files, are of this run
    "process_cleanup.py",
    "loggers.py",  # when a point was logged
    "status_file.py",  # when a status was written, and so how old it is
    "watch.py",
}


def looks(source: str) -> bool:
    """Whether this source asks modules `time` or `datetime`, however imported, what time it is."""
    tree = ast.parse(source)
    names = {"time", "datetime", "date"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            if node.module == "time" and any(alias.name in WALL for alias in node.names):
                return True
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname for alias in node.names if alias.name in ("time", "datetime") and alias.asname}
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in WALL
        and (ast.unparse(node.value) in names or ast.unparse(node.value) == "datetime.datetime")
        for node in ast.walk(tree)
    )


def test_nothing_else_looks_at_the_wall_clock() -> None:
    sources = Path(hpcsync.__file__).parent.rglob("*.py")
    assert {path.name for path in sources if looks(path.read_text(encoding="utf-8"))} == ALLOWED


def test_who_looked_would_be_found() -> None:
    for source in (
        "import time\nprint(time.time())",
        "import time as t\nclock = t.time_ns",
        "from time import time",
        "from datetime import datetime\nx = datetime.now()",
        "import datetime\nx = datetime.datetime.utcnow()",
    ):
        assert looks(source), source
    assert not looks("import time\nx = time.perf_counter(), time.monotonic(), time.sleep(1)")
