"""Packages that tests need beside the environment, not in it. Downloaded the first time, then kept in the user's cache."""

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
DEEPSPEED = ("deepspeed", "einops", "hjson", "msgpack", "ninja", "py-cpuinfo")


def installed_packages(*requirements: str) -> Path:
    """A folder for `sys.path` with just these packages, named by the first, without what they depend on."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    folder = models_folder().parent / "packages" / f"{requirements[0].replace('==', '-')}-{python}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        build_folder(folder, lambda made: _install(requirements, made))
    return folder


def deepspeed_folder() -> Path:
    """DeepSpeed in the version of constraints.txt."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = [re.search(rf"^{name}==\S+$", constraints, re.MULTILINE) for name in DEEPSPEED]
    wanted = [pin[0] for pin in pins if pin]
    assert len(wanted) == len(DEEPSPEED), f"constraints.txt does not pin all of {', '.join(DEEPSPEED)}"
    return installed_packages(*wanted)


def _install(packages: tuple[str, ...], folder: Path) -> None:
    options = ["--quiet", "--no-deps", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *options, *packages]
    # No C++ or CUDA extension of DeepSpeed is built.
    environment = os.environ | {"DS_BUILD_OPS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"
