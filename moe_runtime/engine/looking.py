"""Looks at the load: gather what all ranks have counted, and decide. Each runs on a thread of its own, so that no step waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError, MoeRuntimeError
from moe_runtime.peer_link import PeerClient
from moe_runtime.placement.balancer import (
    Costs,
    Decision,
    Plan,
    Policy,
    StepModel,
    balancedness,
    decide,
    expected_gain,
    judged_windows,
    rank_rows,
)
from moe_runtime.placement.live_loads import LiveTraffic, LiveWindow, join_windows
from moe_runtime.placement.record import PHASES
from moe_runtime.placement.transition import check_reachable, next_round, num_copies

logger = logging.getLogger(__name__)

GATHER_TIMEOUT_S = 30.0
LOOK_TIMEOUT_S = 120.0
"""A look that takes longer is given up; its thread is left behind."""


class ReadLoads(msgspec.Struct, tag="read_loads"):
    """Ask a rank for its windows of load; the answer is Windows in msgpack."""


class Windows(msgspec.Struct):
    """LiveLoads.snapshot() on the wire."""

    shape: tuple[int, int, int]
    """L, P, E."""
    numbers: list[int]
    steps: list[tuple[int, int]]
    """By kind."""
    counts: list[bytes]
    """int64, little-endian."""

    @classmethod
    def of(cls, windows: dict[int, LiveWindow], num_layers: int, num_experts: int) -> Windows:
        return cls(
            (num_layers, len(PHASES), num_experts),
            list(windows),
            [window.steps_P for window in windows.values()],
            [window.counts_LPE.astype("<i8").tobytes() for window in windows.values()],
        )

    def windows(self) -> dict[int, LiveWindow]:
        """Raises ValueError if sizes do not fit."""
        return {
            number: LiveWindow(np.frombuffer(data, dtype="<i8").reshape(self.shape), steps_P)
            for number, steps_P, data in zip(self.numbers, self.steps, self.counts, strict=True)
        }


def gather_loads(client: PeerClient, num_ranks: int) -> LiveTraffic:
    """What the tokens of all ranks asked for. Raises PeerError."""
    deadline = time.monotonic() + GATHER_TIMEOUT_S
    question = msgspec.msgpack.encode(ReadLoads())
    answers = [client.ask(rank, question, deadline) for rank in range(num_ranks)]
    return join_windows([msgspec.msgpack.decode(a, type=Windows).windows() for a in answers])


@dataclass
class Look:
    """One look at the load, on its own thread. Once `done`, the step thread reads the result."""

    current: ExpertPlacement
    costs: Costs
    wanted: ExpertPlacement | None = None
    """What an operator asks for; None: to be planned."""
    force: bool = False
    only_log: bool = False
    request: int = 0
    """An operator's, by number; 0: nobody's."""
    decision: Decision = field(default_factory=lambda: Decision(None, ""))
    failure: str = ""
    done: bool = False


class Looker:
    """Starts looks, one at a time."""

    def __init__(
        self,
        make_client: Callable[[], PeerClient],
        num_ranks: int,
        plan: Plan,
        policy: Policy,
        model: StepModel,
    ) -> None:
        self._make_client, self._num_ranks = make_client, num_ranks
        self._plan, self._policy, self._model = plan, policy, model
        self._look: Look | None = None
        self._thread: threading.Thread | None = None
        self._deadline = 0.0

    @property
    def busy(self) -> bool:
        return self._look is not None

    def start(self, look: Look) -> None:
        """Not while busy."""
        assert self._look is None
        self._look, self._deadline = look, time.monotonic() + LOOK_TIMEOUT_S
        self._thread = threading.Thread(target=self._run, args=(look,), name="load-look", daemon=True)
        self._thread.start()

    def poll(self) -> Look | None:
        """The look that has ended since the last call, if one has."""
        look, thread = self._look, self._thread
        if look is None or thread is None:
            return None
        if thread.is_alive():
            if time.monotonic() < self._deadline:
                return None
            # The thread may still write to the look it was given.
            look = replace(look, failure=f"planning takes longer than {LOOK_TIMEOUT_S:.0f} s")
        elif not look.done and not look.failure:
            look.failure = "the thread that plans has died"
        self._look = self._thread = None
        return look

    def _run(self, look: Look) -> None:
        client = self._make_client()
        try:
            traffic = gather_loads(client, self._num_ranks)
            if look.only_log:
                if len(loads_WLE := traffic.newest(1).loads):
                    balance = balancedness(rank_rows(loads_WLE, look.current))
                    logger.info("expert load: balancedness %.3f", balance)
            elif look.wanted is not None:
                look.decision = self._judge(look, look.wanted, traffic)
            else:
                look.decision = decide(
                    traffic,
                    look.current,
                    self._plan,
                    self._policy,
                    look.costs,
                    self._model,
                    force=look.force,
                )
            look.done = True
        except MoeRuntimeError as error:
            look.failure = str(error)
        except Exception as error:
            logger.exception("planning failed")
            look.failure = f"planning failed: {error!r}"
        finally:
            client.close()

    def _judge(self, look: Look, wanted: ExpertPlacement, traffic: LiveTraffic) -> Decision:
        """What an operator asks for is done, whatever it gains. Raises ConfigError if it cannot be."""
        check_reachable(look.current, wanted)
        copies = num_copies(look.current, wanted)
        if not next_round(look.current, wanted):
            raise ConfigError("this placement is in force already")
        num_windows = len(traffic.steps_WP)
        if not num_windows:
            return Decision(wanted, f"asked for: moves {copies} experts", num_copies=copies)
        newest = traffic.newest(judged_windows(num_windows))
        balance = balancedness(rank_rows(newest.loads, look.current))
        gain = expected_gain(*self._model.step_us(newest, [look.current, wanted]))
        text = f"asked for: moves {copies} experts, saves {gain:.1%} of the MoE layers' time in the newest windows"
        return Decision(wanted, text, balance, gain, copies)
