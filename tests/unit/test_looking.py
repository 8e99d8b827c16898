"""Looks at the load on their own thread: what they find, and what becomes of one that fails, dies or does not end."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from moe_runtime.core import ExpertPlacement
from moe_runtime.engine import looking
from moe_runtime.engine.looking import Look, Looker, Windows
from moe_runtime.engine.mover import placement_of
from moe_runtime.peer_link import SECRET_BYTES, PeerClient, PeerServer
from moe_runtime.placement.balancer import Costs, Policy
from moe_runtime.placement.layout import contiguous
from moe_runtime.placement.live_loads import LiveWindow
from moe_runtime.placement.transition import with_empty_slots
from tests.helpers.live_traffic import rows_model

SECRET = secrets.token_bytes(SECRET_BYTES)
POLICY = Policy(1.0, 0.05, 0.0, 1000, 100)
CURRENT = with_empty_slots(contiguous(1, 4, 2), 1)
BETTER = ExpertPlacement((((2, 1, -1), (0, 3, -1)),), 4)
COSTS = Costs(1000, 1.0, 0.1)


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Two ranks that have counted: together 30, 30, 10, 10 in each of 8 windows."""
    counted = ([20, 10, 4, 0], [10, 20, 6, 10])

    def serve(counts: list[int]) -> PeerServer:
        window = LiveWindow(np.array([[[0] * 4, counts]], dtype=np.int64), (0, 1))
        answer = msgspec.msgpack.encode(Windows.of(dict.fromkeys(range(8), window), 1, 4))
        return PeerServer("127.0.0.1", SECRET, lambda question: answer)

    servers = [serve(counts) for counts in counted]
    yield [server.port for server in servers]
    for server in servers:
        server.close()


def looker(ports: list[int], plan: Any) -> Looker:
    addresses = [("127.0.0.1", port) for port in ports]
    return Looker(lambda: PeerClient(addresses, SECRET), len(ports), plan, POLICY, rows_model(2))


def result(looking_now: Looker) -> Look:
    deadline = time.monotonic() + 20
    while (look := looking_now.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert not looking_now.busy
    return look


def test_a_look_finds_what_the_ranks_have_counted(ports: list[int]) -> None:
    seen: list[Any] = []

    def plan(loads: Any, current: ExpertPlacement) -> ExpertPlacement:
        seen.append(loads)
        return BETTER

    made = looker(ports, plan)
    made.start(Look(CURRENT, COSTS))
    assert made.busy
    look = result(made)
    assert not look.failure
    assert look.decision.target == BETTER
    assert look.decision.gain == pytest.approx(1 / 3)
    assert seen[0].tolist() == [[[30, 30, 10, 10]]] * 6
    # Also as operators may write it, with more or fewer empty slots.
    for slots in ([[[2, 1, -1], [0, 3, -1]]], [[[2, 1], [0, -1, 3, -1, -1]]]):
        made.start(Look(CURRENT, COSTS, wanted=placement_of(slots, CURRENT), request=7))
        look = result(made)
        assert not look.failure
        assert (look.request, look.decision.num_copies) == (7, 2)
        assert "saves 33.3%" in look.decision.reason


@pytest.mark.parametrize(
    ("wanted", "part"),
    [
        (CURRENT, "in force already"),
        (ExpertPlacement((((1, 0, -1), (-1, 3, 2)),), 4), "in force already"),
        (ExpertPlacement((((1, 1, -1), (0, 3, 2)),), 4), "holds an expert twice"),
    ],
)
def test_what_an_operator_cannot_have(ports: list[int], wanted: ExpertPlacement, part: str) -> None:
    made = looker(ports, None)
    made.start(Look(CURRENT, COSTS, wanted=wanted))
    assert part in result(made).failure


def test_a_rank_that_does_not_answer(ports: list[int]) -> None:
    made = looker([*ports, 1], lambda loads, current: BETTER)
    made.start(Look(CURRENT, COSTS))
    assert "rank 2 does not answer" in result(made).failure


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_planner_that_fails_dies_or_hangs(ports: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def fail(loads: Any, current: ExpertPlacement) -> ExpertPlacement:
        raise ZeroDivisionError("oops")

    def die(loads: Any, current: ExpertPlacement) -> ExpertPlacement:
        raise SystemExit

    def hang(loads: Any, current: ExpertPlacement) -> ExpertPlacement:
        release.wait(30)
        return BETTER

    monkeypatch.setattr(looking, "LOOK_TIMEOUT_S", 0.5)
    for plan, part in ((fail, "oops"), (die, "has died"), (hang, "takes longer than")):
        made = looker(ports, plan)
        made.start(Look(CURRENT, COSTS))
        look = result(made)
        assert part in look.failure
        assert look.decision.target is None
        # The next one is not disturbed by what is left of the last.
        made._plan = lambda loads, current: BETTER
        made.start(Look(CURRENT, COSTS))
        if plan is hang:
            release.set()
        assert result(made).decision.target == BETTER
