"""Makes the images of docs/reference/figures.md: runs the commands of that page, in a few minutes.

    python docs/_ext/figures.py

The runs are simulated and their seeds are fixed, so the same versions of the packages give the same bytes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/figures.md"
FOLDER = ROOT / "docs/_static/figures"
COLOURS = 128  # of an image, which has a few colours and mixtures of these


def commands(page: str) -> str:
    """Return the bash blocks of a page as one script."""
    return "\n".join(re.findall(r"^```bash\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL))


def shrink(source: Path, target: Path) -> None:
    """Write an image of 300 dpi as one of 150 dpi with a palette."""
    with Image.open(source) as image:
        size = image.width // 2, image.height // 2
        image.convert("RGB").resize(size, Image.Resampling.LANCZOS).quantize(COLOURS, dither=Image.Dither.NONE).save(
            target, optimize=True
        )


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "jobs").symlink_to(ROOT / "jobs")
        (folder / "hpcsync").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hpcsync "$@"\n')
        (folder / "hpcsync").chmod(0o755)
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        script = "set -euo pipefail\n" + commands(PAGE.read_text(encoding="utf-8"))
        subprocess.run(["bash", "-c", script], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        for image in sorted(folder.glob("*.png")):
            shrink(image, FOLDER / image.name)
            print(f"{FOLDER / image.name}: {(FOLDER / image.name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
