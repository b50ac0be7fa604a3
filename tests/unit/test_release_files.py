"""What a release holds besides the package: the files agree with its version and its licence."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

from hpcsync import __version__

ROOT = Path(__file__).parents[2]


def test_the_citation_file_is_of_this_version_and_licence() -> None:
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert lines[0] == "cff-version: 1.2.0"
    assert f"version: {__version__}" in lines
    assert f"license: {setup['metadata']['license']}" in lines
    assert "Apache License" in (ROOT / setup["metadata"]["license_files"]).read_text()


def test_the_changelog_has_this_version() -> None:
    headings = re.findall(r"^## \[(.+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", __version__]


def test_the_guide_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:hpcsync|tests|jobs)/[\w/.]+)`", text)) | {"setup.cfg", "ARCHITECTURE.md"}
    assert len(named) > 20
    assert [name for name in sorted(named) if "NAME" not in name and not (ROOT / name).exists()] == []
    for module, names in re.findall(r"`(\w+)` (?:and `\w+` )?in\s+`(hpcsync/[\w/.]+\.py)`", text):
        assert module in (ROOT / names).read_text(), module


def test_make_clean_deletes_all_that_git_ignores_but_results(tmp_path: Path) -> None:
    results = ["beside_real", "beside_recording", "extrapolation", "failures", "figures", "reproductions", "runs"]
    for line in (ROOT / ".gitignore").read_text().split():
        (tmp_path / line.strip("/").replace("*", "hpcsync")).mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", tmp_path)
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["Makefile", "docs", *results])
    assert not any((tmp_path / "docs").iterdir())
