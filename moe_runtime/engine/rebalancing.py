"""Moving experts while serving: what one rank does between two steps.

Looking at the load, planning and copying happen on other threads (`engine.replanning`, `engine.mover`). The step thread tells
in each header how far its own copies are, and changes a layer's map once all ranks have staged the change: all see
the same headers, so all change it before the same step. If any rank cannot go on, all give the move up before the same
step, and take back the layers that the round has changed: what these held before is still in its slots.

    idle -- rank 0 proposes a plan --> moving -- all changes staged by all ranks --> idle  (applied)
                                             `-- a rank failed, or was late ------> idle  (rolled back)

A move takes one or several rounds (`placement.transition`); each is a whole placement, and taken back as a whole.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from moe_runtime.core import ExpertPlacement, LayerPlacement
from moe_runtime.engine.control import MoveVote
from moe_runtime.engine.messages import STALL_BOUNDS, EplbStats, PlacementNews, Rebalance
from moe_runtime.engine.mover import MoveFailure, Mover, Pace, ReadPlan, Slots, Staged, placement_of
from moe_runtime.engine.replanning import Look, ReadLoads, Replanner, Windows
from moe_runtime.experts.migration import DigestSlot, ReadSlot, SlotStore
from moe_runtime.peer_link import PeerError, PeerLink
from moe_runtime.placement.balancer import Costs, Plan, Policy
from moe_runtime.placement.layout import layer_placement
from moe_runtime.placement.transition import apply_changes

if TYPE_CHECKING:
    from moe_runtime.config import EplbConfig
    from moe_runtime.engine.control import Agreement, StepTimes
    from moe_runtime.placement.live_loads import LiveLoads
    from moe_runtime.topology import Topology

logger = logging.getLogger(__name__)

MOST_BACKOFF = 64
"""After failures looks become rarer: at 2, 4, 8, ... times the interval, up to this."""
FIRST_SLOWDOWN = 0.25
"""What steps are taken to be longer by while weights move, until it has been measured."""
_LOOK_FAILED = "the load could not be looked at"
_DECODER = msgspec.msgpack.Decoder(ReadSlot | DigestSlot | ReadPlan | ReadLoads)


@dataclass
class _StepTime:
    """Mean step times with and without a move, to tell what a move costs."""

    total_us: float = 0.0
    num_steps: int = 0

    def add(self, forward_us: int) -> None:
        self.total_us += forward_us
        self.num_steps += 1

    @property
    def mean_us(self) -> float | None:
        return self.total_us / self.num_steps if self.num_steps >= 20 else None


class PlacementInForce:
    """Which map the steps use; changed between steps only."""

    def __init__(self, placement: ExpertPlacement, layers: list[LayerPlacement]) -> None:
        """`layers` is what ExpertParallelMoe reads."""
        self.placement = placement
        self._layers = layers
        self._undo: list[tuple[int, LayerPlacement]] = []
        """Layers that the round has changed, and what they were."""
        self._changes: list[Staged] = []

    def flip(self, staged: Staged) -> None:
        """Put a change in force."""
        layer = staged.change.layer
        self._undo.append((layer, self._layers[layer]))
        self._changes.append(staged)
        self._layers[layer] = staged.placement
        if staged.ends_round:
            self.placement = apply_changes(self.placement, [s.change for s in self._changes])
            self._undo, self._changes = [], []

    def take_back(self) -> int:
        """Undo the unfinished round; how many layers that were."""
        for layer, old in reversed(self._undo):
            self._layers[layer] = old
        num = len(self._undo)
        self._undo, self._changes = [], []
        return num


class Rebalancer:
    """One rank's part. vote(), settle(), step_done() and request() are the step thread's; answer() is called by other threads."""

    def __init__(
        self,
        topology: Topology,
        in_force: PlacementInForce,
        store: SlotStore,
        loads: LiveLoads,
        plan: Plan,
        settings: EplbConfig,
        dry_run: bool,
    ) -> None:
        """Collective. `plan` is called on rank 0 only."""
        self.rank = topology.rank
        self.stats = EplbStats()
        self._news: PlacementNews | None = None
        self._changed = True
        self._device, self._in_force, self._store, self._loads = topology.device, in_force, store, loads
        self._settings, self._dry_run = settings, dry_run
        self._pace = Pace(settings.max_bytes_per_step)
        self._mover: Mover | None = None
        self._last_mover: Mover | None = None
        self._last_number = 0
        self._num_flipped = 0
        self._proposal: ExpertPlacement | None = None
        self._proposal_request = 0
        """The operator's request that the proposal, or the move under way, is for."""
        self._plans: dict[int, bytes] = {}
        """Rank 0: what it has proposed last, by number."""
        self._requests: deque[Rebalance] = deque()
        self._backoff = 1
        self._next_look = settings.step_interval
        self._num_steps = 0
        self._moving_time, self._quiet_time = _StepTime(), _StepTime()
        self._moe_share = 1.0
        self._link = PeerLink(topology, self.answer)
        policy = Policy(
            settings.min_utilization,
            settings.min_gain,
            settings.hysteresis,
            settings.max_bytes_per_step,
            settings.step_interval,
        )
        self._replanner = Replanner(self._link.client, topology.world_size, plan, policy)

    @property
    def slots(self) -> Slots:
        """[layer][rank][slot] -> expert, -1 for an empty slot: the placement in force."""
        return [[list(rank) for rank in layer] for layer in self._in_force.placement.slots]

    @property
    def busy(self) -> bool:
        """Something is under way that needs further headers, even if no rank has tokens."""
        return self._working or bool(self._requests)

    @property
    def _working(self) -> bool:
        return self._mover is not None or self._proposal is not None or self._replanner.busy

    def vote(self) -> MoveVote:
        """Before each header."""
        self._poll_look()
        if self._requests and not self._working:
            command = self._requests.popleft()
            wanted = None if command.slots is None else placement_of(command.slots, self._in_force.placement)
            self._look(wanted, force=command.force, request=command.request)
        mover = self._mover
        if mover is not None:
            # How far it is before how it is: what has been staged stays staged.
            staged = len(mover.staged)
            return MoveVote(mover.number, staged, mover.check())
        return MoveVote(self._last_number + 1 if self._proposal is not None else 0, 0, 0)

    def settle(self, agreed: Agreement) -> None:
        """After each header, before the step: what all ranks do alike."""
        if agreed.move > self._last_number:
            self._begin(agreed.move)
        elif self._mover is not None:
            self._go_on(self._mover, agreed)

    def step_done(self, times: StepTimes) -> None:
        """After each step with tokens."""
        self._loads.step_done()
        self._num_steps += 1
        (self._quiet_time if self._mover is None else self._moving_time).add(times.forward_us)
        share = min(1.0, (times.experts_us + times.wait_us) / times.forward_us)
        self._moe_share += 0.02 * (share - self._moe_share)
        if self.rank != 0 or self.busy:
            return
        if self._num_steps >= self._next_look:
            self._next_look = self._num_steps + self._settings.step_interval * self._backoff
            self._look()
        elif (
            self._settings.log_balancedness and not self._num_steps % self._settings.log_balancedness_interval
        ):
            self._look(only_log=True)

    def request(self, command: Rebalance) -> None:
        """Rank 0: an operator's. It waits its turn."""
        self._requests.append(command)

    def answer(self, question: bytes) -> bytes | memoryview:
        """What another rank asks; called on threads of the link."""
        asked = _DECODER.decode(question)
        if isinstance(asked, ReadPlan):
            if asked.move not in self._plans:
                raise PeerError(f"there is no plan for move {asked.move}")
            return self._plans[asked.move]
        if isinstance(asked, ReadLoads):
            placement = self._in_force.placement
            shape = (len(placement.slots), placement.num_experts)
            return msgspec.msgpack.encode(Windows.of(self._loads.snapshot(), shape))
        return self._store.answer(asked)

    def take_placement(self) -> PlacementNews | None:
        """The placement, if the front-end has not been told it yet."""
        news, self._news = self._news, None
        return news

    def take_changed(self) -> bool:
        """Whether `stats` says something new since the last call, beside counts."""
        changed, self._changed = self._changed, False
        return changed

    def close(self) -> None:
        """End what is under way; the ranks leave."""
        if self._mover is not None:
            self._mover.cancel()
        self._link.close()

    def _begin(self, number: int) -> None:
        self._last_number = number
        self._num_flipped = 0
        self._proposal = None
        self._changed = True
        self.stats.state = "moving"
        self._mover = Mover(
            number,
            self.rank,
            self._in_force.placement,
            self._store,
            self._link.client(),
            lambda placement, layer: layer_placement(placement, layer, self.rank, self._device),
            self._pace,
            time.monotonic() + self._settings.deadline_seconds,
            self._last_mover,
        )

    def _go_on(self, mover: Mover, agreed: Agreement) -> None:
        began = time.perf_counter()
        self.stats.moved_bytes += mover.take_moved_bytes()
        if agreed.move_failure is not None:
            self._give_up(mover, *agreed.move_failure)
            return
        ends_move = False
        first = self._num_flipped
        for staged in mover.staged[first : agreed.staged]:
            self._in_force.flip(staged)
            self._num_flipped += 1
            ends_move = staged.ends_move
            if staged.ends_round:
                self._tell_placement()
        if self._num_flipped > first:
            mover.flipped(self._num_flipped)
            self.stats.stalls_s.add(time.perf_counter() - began, STALL_BOUNDS)
        if ends_move:
            self._applied(mover)
        self._pace.step_done()

    def _applied(self, mover: Mover) -> None:
        self._changed = True
        self._mover, self._last_mover = None, mover
        self._backoff = 1
        self.stats.state, self.stats.degraded = "idle", ""
        self.stats.applied += 1
        self.stats.last_applied_at = time.time()
        self._answer(self._proposal_request, "applied", self.stats.decision)
        if self.rank == 0:
            logger.info("move %d of experts: applied, placement version %d", mover.number, self.stats.version)

    def _give_up(self, mover: Mover, rank: int, failure: int) -> None:
        mover.cancel()
        self._changed = True
        self._mover, self._last_mover = None, mover
        undone = self._in_force.take_back()
        reason = f"rank {rank}: {MoveFailure(failure).words}"
        self._backoff = min(MOST_BACKOFF, 2 * self._backoff)
        self.stats.state = "idle"
        self.stats.rolled_back += 1
        self.stats.degraded = f"move {mover.number} of experts was given up ({reason}); the map is as before"
        self._answer(self._proposal_request, "rolled_back", self.stats.degraded)
        if self.rank == 0:
            logger.error("%s; %d layers were taken back", self.stats.degraded, undone)

    def _look(
        self,
        wanted: ExpertPlacement | None = None,
        *,
        force: bool = False,
        only_log: bool = False,
        request: int = 0,
    ) -> None:
        self.stats.state = "idle" if only_log else "planning"
        look = Look(self._in_force.placement, self._costs(), wanted, force, only_log, request)
        self._replanner.start(look)

    def _answer(self, request: int, result: str, reason: str) -> None:
        if request:
            self._changed = True
            self.stats.answered, self.stats.answer, self.stats.answer_reason = request, result, reason

    def _costs(self) -> Costs:
        slowdown = FIRST_SLOWDOWN
        moving, quiet = self._moving_time.mean_us, self._quiet_time.mean_us
        if moving is not None and quiet is not None:
            slowdown = max(0.0, moving / quiet - 1.0)
        expert_bytes = max(
            (self._store.slot_bytes(layer) for layer in range(len(self._store.parts))), default=0
        )
        return Costs(expert_bytes, self._moe_share, slowdown)

    def _poll_look(self) -> None:
        look = self._replanner.poll()
        if look is None or (look.only_log and not look.failure):
            return
        self._changed = True
        self.stats.state = "idle"
        if look.failure:
            self._look_failed(look)
            return
        decision = look.decision
        if self.stats.degraded.startswith(_LOOK_FAILED):
            self.stats.degraded = ""
        self.stats.gain, self.stats.balancedness = decision.gain, decision.balancedness
        if decision.target is None or self._dry_run:
            dry = "" if decision.target is None else "dry run, "
            self.stats.decision = f"{dry}nothing is moved: {decision.reason}"
            self.stats.skipped += 1
            self._answer(look.request, "skipped", self.stats.decision)
        else:
            self.stats.decision = f"moving: {decision.reason}"
            self._proposal, self._proposal_request = decision.target, look.request
            # A peer may still ask for the one before.
            self._plans = dict(list(self._plans.items())[-1:])
            self._plans[self._last_number + 1] = msgspec.msgpack.encode(decision.target.slots)
        logger.info("experts: %s", self.stats.decision)

    def _look_failed(self, look: Look) -> None:
        self.stats.failed += 1
        self.stats.decision = f"failed: {look.failure}"
        if look.wanted is None:
            self._backoff = min(MOST_BACKOFF, 2 * self._backoff)
            self.stats.degraded = f"{_LOOK_FAILED}: {look.failure}"
        self._answer(look.request, "failed", look.failure)
        logger.warning("experts: %s", self.stats.decision)

    def _tell_placement(self) -> None:
        self.stats.version = self._in_force.placement.version
        self._news = PlacementNews(self.rank, self.stats.version, self.slots)
