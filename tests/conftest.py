"""Shared fixtures: uninitialised memory is poisoned with NaN, and every test has a fresh, printed seed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
import torch

if TYPE_CHECKING:
    from tests.helpers.live_server import LiveServer

# Without a GPU, Triton kernels run in the interpreter, here and in the processes that tests start. Read by triton when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Processes that tests start share cores with one another: a thread that waits for work must not keep one busy.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
torch.set_num_threads(1)
# In deterministic mode torch fills what `torch.empty` returns with NaN, so that reading it shows.
# Not through torch.use_deterministic_algorithms, which imports the compiler: seconds at every start.
torch._C._set_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def seed(record_property: Callable[[str, object], None]) -> int:
    """A seed drawn per run; MOE_RUNTIME_TEST_SEED repeats a failing one. Printed when the test fails."""
    value = int(os.environ.get("MOE_RUNTIME_TEST_SEED") or random.SystemRandom().randrange(2**31))
    record_property("seed", value)
    print(f"seed {value} (repeat with MOE_RUNTIME_TEST_SEED={value})")
    torch.manual_seed(value)
    random.seed(value)
    return value


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    """The real client of the module's `server`; it does not try again."""
    return openai.OpenAI(base_url=server.base_url + "/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    """Bare HTTP to the module's `server`."""
    with httpx.Client(base_url=server.base_url, timeout=30) as session:
        yield session
