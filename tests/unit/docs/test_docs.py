"""README and docs/: commands have valid options, jobs are valid, examples run, quoted messages exist.

- A `console` block is run line by line where it takes a second or two (RUN); output below a command must be that of the
  command, with numbers masked and `...` for lines that are left out. Commands that start ranks are parsed only; a
  folder that they would leave is a copy of a simulated run.
- Commands in indented and `bash` blocks are parsed: their options exist, and their job with `--set` is valid.
- `toml` blocks are complete jobs. `python` blocks compile; those that read the run are executed.
- A block below a line "`FILE`:" is that file, for the commands of its page.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from hpcsync import bench, figures
from hpcsync.cli.app import app
from hpcsync.config import job as jobs
from hpcsync.core.job_validation import check
from hpcsync.paradigms import OPTIONS
from hpcsync.trace.schema import SCHEMA

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_" not in p.parts[-2][:1])]
RUN = {"show", "simulate", "audit", "cite", "figure", "plan", "slurm"}  # in console blocks
OTHERS = {"cd", "git", "make", "module", "mpirun", "pip", "python", "python3", "sbatch", "scancel", "source", "srun"}
SHELL = {"$paradigm": "bsp", "$seed": "1"}  # variables of the loops in bash blocks


class Block(NamedTuple):
    kind: str  # the info string; "" of an indented one
    text: str
    line: int
    file: str  # the name that is said before it


def blocks(page: Path) -> Iterator[Block]:
    """The fenced and the indented blocks of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    named = at = 0
    while at < len(lines):
        fence = re.match(r"^(`{3,}|:{3,})\{?([\w-]*)\}?", lines[at])
        if fence:
            end = next(i for i in range(at + 1, len(lines)) if lines[i].startswith(fence[1]))
            file = re.match(r"^`([\w.]+)`:$", lines[named]) if named == at - 2 else None
            yield Block(fence[2], "\n".join(lines[at + 1 : end]), at + 1, file[1] if file else "")
            at = end
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            end = next((i for i in range(at, len(lines)) if not lines[i].startswith("    ")), len(lines))
            yield Block("", "\n".join(line[4:] for line in lines[at:end]), at + 1, "")
            at = end - 1
        elif lines[at].strip():
            named = at
        at += 1


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """The commands of a block, each with the output that is shown below it."""
    prompt = "$ " if block.kind == "console" else ""
    if block.kind not in ("console", "bash", ""):
        return
    command, output = "", []
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith(prompt) and (prompt or re.match(r"^ *(\.venv/bin/)?hpcsync ", line)):
            if command:
                yield command, output
            command, output = line[len(prompt) :].strip(), []
        elif prompt:
            output.append(line)
    if command:
        yield command, output


def words(command: str) -> list[str]:
    for variable, value in SHELL.items():
        command = command.replace(variable, value)
    found = shlex.split(command, comments=True)
    return found[: found.index(">")] if ">" in found else found


@cache
def hpcsync() -> Any:
    return typer.main.get_command(app)


def parse(arguments: list[str]) -> dict[str, Any]:
    """The options of a command line. Raises where hpcsync would refuse it."""
    command = hpcsync()
    name = "hpcsync"
    while hasattr(command, "commands") and not arguments[0].startswith("-"):
        name, arguments = arguments[0], arguments[1:]
        assert name in command.commands, f"hpcsync has no command {name}"
        command = command.commands[name]
    if hasattr(command, "commands"):
        return {}
    return dict(command.make_context(name, list(arguments)).params)


def normal(text: str) -> list[str]:
    """Lines to be compared: without numbers, and without what differs between machines, and ranks and simulations."""
    text = text.replace("\\\n", " ")
    text = re.sub(r"\b(mpi|recorded)(?= .*ratio)", "simulator", re.sub(r"-?\d[\d,]*(\.\d+)?(e-?\d+)?", "#", text))
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def missing(expected: list[str], actual: str) -> str:
    """The first part of what a page shows that the command has not printed; "": none."""
    printed = normal(actual)
    for chunk in "\n".join(expected).split("\n...\n" if "..." in expected else "\0"):
        wanted = [line for line in normal(chunk) if line != "..."]
        starts = [i for i in range(len(printed)) if printed[i : i + len(wanted)] == wanted]
        if wanted and not starts:
            return "\n".join(wanted)
        printed = printed[starts[0] + len(wanted) :] if wanted else printed
    return ""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `hpcsync run` would leave: the folder of a simulated run."""
    folder = tmp_path_factory.mktemp("runs") / "dssp"
    job = str(ROOT / "jobs/digits-dssp.toml")
    result = CliRunner().invoke(app, ["simulate", job, "--set", "stop.samples=3000", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    for name in ("jobs", "analysis", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.file:
            (tmp_path / block.file).write_text(block.text)
        if block.kind == "toml":
            (tmp_path / "block.toml").write_text(block.text)
            check_job(tmp_path / (block.file or "block.toml"), where)
        elif block.kind == "python":
            check_python(block, where, run_folder)
        for command, output in commands(block):
            check_command(words(command), output, block, f"{where}: {command}", run_folder)


def check_job(path: Path, where: str) -> None:
    table = tomllib.loads(path.read_text())
    assert {"name", "workload", "paradigm"} <= table.keys(), f"{where}: not a complete job"
    if ":" not in table["workload"]["name"]:
        check(jobs.load(path))


def check_python(block: Block, where: str, run_folder: Path) -> None:
    code = compile(block.text, where, "exec")
    assert not (lacking := missing_options(block.text)), f"{where}: connect lacks {lacking}"
    if "runs/dssp" in block.text:
        copy_run(Path("runs/dssp"), run_folder)
        exec(code, {})


def missing_options(code: str) -> set[str]:
    """The options of their paradigm that the calls of `connect` in a script lack."""
    lacking = set()
    for call in ast.walk(ast.parse(code)):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "connect" and len(call.args) == 3:
            options = OPTIONS[ast.literal_eval(call.args[2])]
            needed = {field.name for field in fields(options) if field.default is field.default_factory is MISSING}
            lacking |= needed - {keyword.arg for keyword in call.keywords}
    return lacking


def test_options_that_a_script_lacks_are_found() -> None:
    assert missing_options('hpcsync.connect(model, optimizer, "dssp", log="x")') == {"staleness_min", "staleness_max"}
    assert missing_options('hpcsync.connect(model, optimizer, "ssp", staleness=3)') == set()


def check_command(arguments: list[str], output: list[str], block: Block, where: str, run_folder: Path) -> None:
    program = Path(arguments[0]).name
    if program != "hpcsync":
        assert program in OTHERS, where
        return
    options = parse(arguments[1:])
    if "job" in options:
        job = jobs.load(options["job"], options.get("overrides") or []) if not uses_trace(arguments) else None
        assert job is None or job.name
    if block.kind != "console":
        return
    if arguments[1] in RUN:
        sys.argv = ["hpcsync", *arguments[1:]]  # which a batch script names
        result = CliRunner().invoke(app, arguments[1:])
        assert result.exit_code == 0, f"{where}\n{result.output}\n{result.exception!r}"
        assert not (lacking := missing(output, result.output)), (
            f"{where}: not printed:\n{lacking}\nbut:\n{result.output}"
        )
    elif options.get("out") is not None:
        copy_run(Path(options["out"]), run_folder)


def uses_trace(arguments: list[str]) -> bool:
    return any("times_from" in word or word == "--resume" for word in arguments)


def copy_run(folder: Path, run_folder: Path) -> None:
    if not folder.exists():
        shutil.copytree(run_folder, folder)


def folder_of(arguments: list[str]) -> str | None:
    """The folder in which a command starts runs; None: it starts none, resumes, or makes a new folder each time."""
    name, options = arguments[1], parse(arguments[1:])
    jobs_given = [word for word in arguments if word.endswith(".toml")]
    if name not in ("run", "simulate", "compare", "advise") or options.get("resume") or not jobs_given:
        return None
    suffix = {"compare": "compare", "advise": "advice"}.get(name)
    default = f"runs/{jobs.load(jobs_given[0]).name}-{suffix}" if suffix else None
    folder = str(options["out"]) if options["out"] is not None else default
    return f"{folder}/workers-N" if folder and name == "advise" and options["workers"] else folder


def taken_twice(every: Iterable[list[str]]) -> list[str]:
    """The folders in which two different commands start runs: the second one would be refused."""
    first: dict[str, list[str]] = {}
    folders = [(folder_of(arguments), arguments) for arguments in every]
    return [folder for folder, arguments in folders if folder and first.setdefault(folder, arguments) != arguments]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_can_follow_each_other(page: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    found = []
    for block in blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
        found += [words(command) for command, _ in commands(block)]
    assert taken_twice(arguments for arguments in found if Path(arguments[0]).name == "hpcsync") == []


def test_the_pages_can_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    first: dict[str, Path] = {}
    for page in PAGES:
        for block in blocks(page):
            if block.file:
                (tmp_path / block.file).write_text(block.text)
            for arguments in (words(command) for command, _ in commands(block)):
                if Path(arguments[0]).name == "hpcsync" and arguments[1] in ("run", "simulate"):
                    folder = folder_of(arguments)
                    assert folder is None or first.setdefault(folder, page) == page, f"{page}: {folder} is taken"


def test_two_commands_of_a_page_in_one_folder_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    grid = ["hpcsync", "compare", "jobs/digits-dssp.toml", "--vary", 'paradigm=["bsp", "asp"]']
    assert taken_twice([grid, grid, [*grid, "--out", "other"]]) == []
    assert taken_twice([grid, [*grid, "--simulate"]]) == ["runs/digits-dssp-compare"]
    run = ["hpcsync", "run", "jobs/digits-dssp.toml", "--out", "mine"]
    assert taken_twice([run, [*run, "--resume"], [*run, "-n", "3"]]) == ["mine"]


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.toml")), ids=lambda path: path.name)
def test_settings_that_a_job_file_proposes_are_valid(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():
        if settings := re.findall(r"--set ('[^']*'|\S+=\S+)", line):
            assert jobs.load(path, [shlex.split(each)[0] for each in settings]).name


# ---- what else the pages say to run ----


def unknown_targets(text: str, makefile: str) -> set[str]:
    """Return the targets of the `make` commands of a text that a Makefile lacks."""
    asked = re.findall(r"(?:^ {4}|^\$ |`)make ([a-z][\w-]*)", text, flags=re.MULTILINE)
    return set(asked) - set(re.findall(r"^([a-z][\w-]*):", makefile, flags=re.MULTILINE))


def test_targets_of_make_and_scripts_that_texts_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md"]:
        text = page.read_text(encoding="utf-8")
        assert unknown_targets(text, makefile) == set(), page
        for path in re.findall(r"python (?:-m pytest )?(?:-x )?((?:analysis|jobs|tests)/[\w/.-]+)", text):
            assert (ROOT / path).exists(), f"{page}: {path}"
    assert unknown_targets("    make tests\n`make docs`", makefile) == {"tests"}, "control"


def test_files_that_recipes_of_make_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w./-])(?:tests|jobs)/[\w/.*-]*\w", re.sub(r"^#.*", "", makefile, flags=re.MULTILINE))
    assert len(named) > 8
    assert [path for path in named if not any(ROOT.glob(path))] == []


def test_commands_of_reproductions_have_valid_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "analysis"))
    import reproduce

    command = re.compile(r"^ {4}python analysis/reproduce.py (.*)$", re.MULTILINE)
    found = [line for page in PAGES for line in command.findall(page.read_text(encoding="utf-8"))]
    assert len(found) > 15
    group: Any = typer.main.get_command(reproduce.app)
    for name, *options in map(partial(shlex.split, comments=True), found):
        group.commands[name].make_context(name, options)


# ---- what the pages say of the code ----


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 160
    assert [line for line in lines if len(line) > 120 and not line.startswith(("|", "    "))] == []
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("https:") or (ROOT / target).is_file(), target


@pytest.mark.parametrize(
    ("page", "pattern", "folder", "least"),
    [
        ("troubleshooting", r"^\| `([^`]+)` \|", "hpcsync", 40),
        ("scripts", r"^\| `([^`]* [^`]*)` \|", "hpcsync", 15),
        ("audit", r"[|;] `([^`-][^`]*)`", "hpcsync/audit", 20),
    ],
)
def test_every_message_and_check_of_a_page_is_one_of_hpcsync(page: str, pattern: str, folder: str, least: int) -> None:
    said = [text for path in (ROOT / folder).rglob("*.py") for text in strings(ast.parse(path.read_text()))]
    text = (ROOT / f"docs/how-to/{page}.md").read_text(encoding="utf-8")
    messages = re.findall(pattern, text, flags=re.MULTILINE)
    assert len(messages) > least
    for message in messages:
        parts = [part.strip(" :=;,") for part in message.split("...")]
        parts = [part for part in parts if len(part) > 3]
        for part in parts:
            assert any(part in text for text in said), f"{message}: {part!r} is in no message"


def strings(tree: ast.AST) -> Iterator[str]:
    """Every string, with `\\0` for what is put into it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)  # type: ignore[misc]


def test_the_reference_describes_every_key_option_and_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs/_ext"))
    import reference

    reference.write(tmp_path)
    text = "".join(path.read_text(encoding="utf-8") for path in tmp_path.iterdir())
    for expected in (
        "`staleness_max`",
        "`--times-from",
        "`--audit, --no-audit` | automatic",
        "a whole number of at least 1 and at most 2,147,483,647 |",
        "| `wait_s` | float64 | s | Time the worker waited for the grant of this iteration. |",
        "| `outcome` | enum (int8) |  | Outcome of the push. applied = 0, dropped = 1. |",
        "| `host` | text (64 bytes) |  |",
        "| `reward` | 1/s |",
    ):
        assert expected in text
    assert re.findall("^### /(.*)", text, re.MULTILINE) == [*SCHEMA]


def test_the_page_about_benchmarks_shows_each_target():
    """Its table is generated, which fails if docs/benchmarks.json lacks a target of the CPU."""
    page = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    on_a_gpu = json.loads((ROOT / "docs/benchmarks-gpu.json").read_text("utf-8"))["targets"]
    shown = [name for name, target in bench.TARGETS.items() if "cpu" in target.devices]
    for target in [*shown, *(f"gpu-{name}" for name in on_a_gpu)]:
        assert f"```{{include}} _generated/benchmarks-{target}.md" in page


def lacking(page: str, folder: Path) -> set[str]:
    """The figures that lack a section with a command of theirs and an image in this folder."""
    sections = dict(re.findall(r"^## `([a-z]+)`$(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL))
    complete = set()
    for name, text in sections.items():
        images = re.findall(r"^!\[[^]]{20,}\]\(\.\./_static/figures/([\w-]+\.png)\)$", text, flags=re.MULTILINE)
        written = re.findall(rf"^hpcsync figure {name} runs/.* --out ([\w-]+\.png)$", text, flags=re.MULTILINE)
        if images and images == written and all((folder / image).is_file() for image in images):
            complete.add(name)
    return set(figures.FIGURES) - complete


def test_the_page_about_figures_shows_each_of_them_with_its_command(tmp_path: Path) -> None:
    page = (ROOT / "docs/reference/figures.md").read_text(encoding="utf-8")
    folder = ROOT / "docs/_static/figures"
    assert lacking(page, folder) == set()
    assert lacking(page, tmp_path) == set(figures.FIGURES), "control: no image exists there"
    assert lacking(page.replace("figure leads runs", "figure staleness runs"), folder) == {"leads"}, "control"
    assert lacking(page.replace("_static/figures/leads.png", "_static/figures/waiting.png"), folder) == {"leads"}
    named = set(re.findall(r"_static/figures/([\w-]+\.png)", page))
    sizes = {image.name: image.stat().st_size for image in folder.iterdir()}
    assert sizes.keys() == named
    assert max(sizes.values()) < 100_000 and sum(sizes.values()) < 500_000
