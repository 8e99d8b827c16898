"""Rank 0's part of rebalancing: when to look at the load, what operators ask for, and what becomes a proposal."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_runtime.engine.looking import Look, Looker
from moe_runtime.engine.mover import placement_of
from moe_runtime.placement.balancer import Costs

if TYPE_CHECKING:
    from moe_runtime.config import EplbConfig
    from moe_runtime.core import ExpertPlacement
    from moe_runtime.engine.control import StepTimes
    from moe_runtime.engine.messages import EplbStats, Rebalance

logger = logging.getLogger(__name__)

MOST_BACKOFF = 64
"""After failures looks become rarer: at 2, 4, 8, ... times the interval, up to this."""
FIRST_SLOWDOWN = 0.25
"""What steps are taken to be longer by while weights move, until it has been measured."""
_ENOUGH_STEPS = 20
_SMOOTHING = 0.02
_LOOK_FAILED = "the load could not be looked at"


@dataclass
class _StepTime:
    """Mean time of steps, once there are enough."""

    total_us: float = 0.0
    num_steps: int = 0

    def add(self, forward_us: int) -> None:
        self.total_us += forward_us
        self.num_steps += 1

    @property
    def mean_us(self) -> float | None:
        return self.total_us / self.num_steps if self.num_steps >= _ENOUGH_STEPS else None


@dataclass(frozen=True)
class Proposal:
    """A placement for all ranks to move to."""

    target: ExpertPlacement
    request: int
    """The operator's request it is for, by number; 0: nobody's."""


class Replanner:
    """Used by rank 0's step thread. Writes what it decides into `stats`."""

    def __init__(
        self, looker: Looker, stats: EplbStats, settings: EplbConfig, *, dry_run: bool, expert_bytes: int
    ) -> None:
        self._looker, self._stats, self._settings = looker, stats, settings
        self._dry_run, self._expert_bytes = dry_run, expert_bytes
        self._requests: deque[Rebalance] = deque()
        self._backoff = 1
        self._next_look = settings.step_interval
        self._num_steps = 0
        self._moving, self._quiet = _StepTime(), _StepTime()
        self._moe_share = 1.0

    @property
    def busy(self) -> bool:
        """A look is under way, or an operator waits for one."""
        return self._looker.busy or bool(self._requests)

    def request(self, command: Rebalance) -> None:
        """An operator's; it waits its turn."""
        self._requests.append(command)

    def poll(self, current: ExpertPlacement) -> Proposal | None:
        """Before each header while nothing moves: what to propose, if a look has found something."""
        look = self._looker.poll()
        if look is not None and (look.failure or not look.only_log):
            return self._judge(look)
        if self._requests and not self._looker.busy:
            command = self._requests.popleft()
            wanted = None if command.slots is None else placement_of(command.slots, current)
            self._look(Look(current, self._costs(), wanted, command.force, request=command.request))
        return None

    def step_done(self, times: StepTimes, current: ExpertPlacement, *, moving: bool) -> None:
        """After each step with tokens."""
        self._num_steps += 1
        (self._moving if moving else self._quiet).add(times.forward_us)
        share = min(1.0, (times.experts_us + times.wait_us) / times.forward_us)
        self._moe_share += _SMOOTHING * (share - self._moe_share)
        if moving or self.busy:
            return
        settings = self._settings
        if self._num_steps >= self._next_look:
            self._next_look = self._num_steps + settings.step_interval * self._backoff
            self._look(Look(current, self._costs()))
        elif settings.log_balancedness and not self._num_steps % settings.log_balancedness_interval:
            self._look(Look(current, self._costs(), only_log=True))

    def applied(self, proposal: Proposal) -> None:
        """The ranks have moved."""
        self._backoff = 1
        self._answer(proposal.request, "applied", self._stats.decision)

    def rolled_back(self, proposal: Proposal) -> None:
        """They have not."""
        self._back_off()
        self._answer(proposal.request, "rolled_back", self._stats.degraded)

    def _look(self, look: Look) -> None:
        if not look.only_log:
            self._stats.state = "planning"
        self._looker.start(look)

    def _costs(self) -> Costs:
        slowdown = FIRST_SLOWDOWN
        moving, quiet = self._moving.mean_us, self._quiet.mean_us
        if moving is not None and quiet is not None:
            slowdown = max(0.0, moving / quiet - 1.0)
        return Costs(self._expert_bytes, self._moe_share, slowdown)

    def _judge(self, look: Look) -> Proposal | None:
        stats, decision = self._stats, look.decision
        stats.state = "idle"
        if look.failure:
            self._failed(look)
            return None
        if stats.degraded.startswith(_LOOK_FAILED):
            stats.degraded = ""
        stats.gain, stats.balancedness = decision.gain, decision.balancedness
        if decision.target is not None and not self._dry_run:
            stats.decision = f"moving: {decision.reason}"
            logger.info("experts: %s", stats.decision)
            return Proposal(decision.target, look.request)
        dry = "" if decision.target is None else "dry run, "
        stats.decision = f"{dry}nothing is moved: {decision.reason}"
        stats.skipped += 1
        self._answer(look.request, "skipped", stats.decision)
        logger.info("experts: %s", stats.decision)
        return None

    def _failed(self, look: Look) -> None:
        self._stats.failed += 1
        self._stats.decision = f"failed: {look.failure}"
        if look.wanted is None:
            self._back_off()
            self._stats.degraded = f"{_LOOK_FAILED}: {look.failure}"
        self._answer(look.request, "failed", look.failure)
        logger.warning("experts: %s", self._stats.decision)

    def _back_off(self) -> None:
        self._backoff = min(MOST_BACKOFF, 2 * self._backoff)
        self._next_look = self._num_steps + self._settings.step_interval * self._backoff

    def _answer(self, request: int, result: str, reason: str) -> None:
        if request:
            self._stats.answered, self._stats.answer, self._stats.answer_reason = request, result, reason
