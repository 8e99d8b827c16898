"""Checks that go wrong in every way, for the runner of benchmarks/gpu_check.py."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu_cases import Env, Skip


def right(env: Env) -> Iterator[dict[str, Any]]:
    yield {"case": "one", "pid": os.getpid()}
    yield {"case": "two"}


def wrong(env: Env) -> Iterator[dict[str, Any]]:
    yield {"case": "one"}
    raise AssertionError("two is wrong")


def skipped(env: Env) -> Iterator[dict[str, Any]]:
    raise Skip("not on this device")
    yield {}


def dies(env: Env) -> Iterator[dict[str, Any]]:
    yield {"case": "one"}
    os._exit(17)


def hangs(env: Env) -> Iterator[dict[str, Any]]:
    yield {"case": "one"}
    time.sleep(600)


def reads_the_roofline(env: Env) -> Iterator[dict[str, Any]]:
    yield {"known": env.known}
