"""DeepSpeed in a folder of its own, for the tests that compare with it. The project's environment stays without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from moe_runtime.weights.demo_model import models_folder
from moe_runtime.weights.writing import build_folder

ROOT = Path(__file__).parents[2]
# Without what the project's environment has already, above all torch.
PACKAGES = ("deepspeed", "einops", "hjson", "msgpack", "ninja", "py-cpuinfo")


def deepspeed_folder() -> Path:
    """A folder for `sys.path` with DeepSpeed in the version of constraints.txt; installed by pip the first time."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = [re.search(rf"^{name}==\S+$", constraints, re.MULTILINE) for name in PACKAGES]
    wanted = [pin[0] for pin in pins if pin]
    assert len(wanted) == len(PACKAGES), f"constraints.txt does not pin all of {', '.join(PACKAGES)}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    folder = models_folder().parent / "test-packages" / f"{wanted[0].replace('==', '-')}-{python}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        build_folder(folder, lambda made: _install(wanted, made))
    return folder


def _install(packages: list[str], folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(folder),
        *packages,
    ]
    # No C++ or CUDA extension is built.
    environment = os.environ | {"DS_BUILD_OPS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"
