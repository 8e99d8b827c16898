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
from typing import TYPE_CHECKING

import msgspec

from moe_runtime.core import ExpertPlacement, LayerPlacement
from moe_runtime.engine.control import MoveVote
from moe_runtime.engine.looking import Looker, ReadLoads, Windows
from moe_runtime.engine.messages import STALL_BOUNDS, EplbStats, PlacementNews, Rebalance
from moe_runtime.engine.mover import MoveFailure, Mover, Pace, ReadPlan, Slots, Staged
from moe_runtime.engine.replanning import Proposal, Replanner
from moe_runtime.experts.migration import DigestSlot, ReadSlot, SlotStore
from moe_runtime.peer_link import PeerError, PeerLink
from moe_runtime.placement.balancer import Plan, Policy, StepModel
from moe_runtime.placement.layout import layer_placement
from moe_runtime.placement.transition import apply_changes

if TYPE_CHECKING:
    from moe_runtime.config import EplbConfig
    from moe_runtime.engine.control import Agreement, StepTimes
    from moe_runtime.placement.live_loads import LiveLoads
    from moe_runtime.placement.recorder import LoadRecorder
    from moe_runtime.topology import Topology

logger = logging.getLogger(__name__)

_DECODER = msgspec.msgpack.Decoder(ReadSlot | DigestSlot | ReadPlan | ReadLoads)


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

    @property
    def changing(self) -> bool:
        """A round has begun and is not complete."""
        return bool(self._undo)

    def take_back(self) -> int:
        """Undo the unfinished round; how many layers that were."""
        for layer, old in reversed(self._undo):
            self._layers[layer] = old
        num = len(self._undo)
        self._undo, self._changes = [], []
        return num


class Rebalancer:
    """One rank's part. The step thread calls all of it, other threads only answer()."""

    def __init__(
        self,
        topology: Topology,
        in_force: PlacementInForce,
        store: SlotStore,
        recorder: LoadRecorder,
        loads: LiveLoads,
        plan: Plan,
        model: StepModel,
        settings: EplbConfig,
        dry_run: bool,
    ) -> None:
        """Collective. `recorder` is told which placement is in force; `plan` and `model` are used on rank 0 only."""
        self.rank, self._device = topology.rank, topology.device
        self.stats = EplbStats()
        self._in_force, self._store = in_force, store
        self._recorder, self._loads = recorder, loads
        self._deadline_s = settings.deadline_seconds
        self._news: PlacementNews | None = None
        self._told: tuple[object, ...] = ()
        self._pace = Pace(settings.max_bytes_per_step)
        self._mover: Mover | None = None
        self._last_mover: Mover | None = None
        self._last_number = 0
        self._num_flipped = 0
        self._proposal: Proposal | None = None
        """Rank 0: what is proposed, or under way."""
        self._plans: dict[int, bytes] = {}
        """Rank 0: its last proposals, by number."""
        self._link = PeerLink(topology, self.answer)
        looker = Looker(self._link.client, topology.world_size, plan, Policy.of(settings), model)
        self._replanner = Replanner(
            looker, self.stats, settings, dry_run=dry_run, expert_bytes=store.largest_slot_bytes
        )

    @property
    def slots(self) -> Slots:
        """[layer][rank][slot] -> expert, -1 for an empty slot: the placement in force."""
        return [[list(rank) for rank in layer] for layer in self._in_force.placement.slots]

    @property
    def busy(self) -> bool:
        """Something is under way that needs further headers, even if no rank has tokens."""
        return self._mover is not None or self._proposal is not None or self._replanner.busy

    def vote(self) -> MoveVote:
        """Before each header."""
        if self._mover is not None:
            # How far it is before how it is: what has been staged stays staged.
            return MoveVote(self._mover.number, len(self._mover.staged), self._mover.check())
        if self._proposal is None:
            self._propose(self._replanner.poll(self._in_force.placement))
        return MoveVote(0 if self._proposal is None else self._last_number + 1)

    def settle(self, agreed: Agreement) -> None:
        """After each header, before the step: what all ranks do alike."""
        if agreed.move > self._last_number:
            self._begin(agreed.move)
        elif self._mover is not None:
            if agreed.move_failure is not None:
                self._give_up(self._mover, *agreed.move_failure)
            else:
                self._go_on(self._mover, agreed.staged)

    def step_done(self, times: StepTimes, prefill: bool) -> None:
        """After each step with tokens; `prefill`: whether any rank had one of a prompt."""
        self._loads.step_done(prefill)
        if self.rank == 0:
            moving = self._proposal is not None
            self._replanner.step_done(times, self._in_force.placement, moving=moving)

    def request(self, command: Rebalance) -> None:
        """Rank 0: an operator's."""
        self._replanner.request(command)

    def answer(self, question: bytes) -> bytes | memoryview:
        """What another rank asks; called on threads of the link."""
        asked = _DECODER.decode(question)
        if isinstance(asked, ReadPlan):
            if asked.move not in self._plans:
                raise PeerError(f"there is no plan for move {asked.move}")
            return self._plans[asked.move]
        if isinstance(asked, ReadLoads):
            placement = self._in_force.placement
            windows = Windows.of(self._loads.snapshot(), len(placement.slots), placement.num_experts)
            return msgspec.msgpack.encode(windows)
        return self._store.answer(asked)

    def take_placement(self) -> PlacementNews | None:
        """The placement, if the front-end has not been told it yet."""
        news, self._news = self._news, None
        return news

    def take_changed(self) -> bool:
        """Whether `stats` says something new since the last call, beside measurements."""
        s = self.stats
        state = (s.state, s.decision, s.answered, s.degraded, s.applied, s.skipped, s.failed, s.rolled_back)
        changed, self._told = state != self._told, state
        return changed

    def close(self) -> None:
        """End what is under way; the ranks leave."""
        if self._mover is not None:
            self._mover.cancel()
        self._link.close()

    def _propose(self, proposal: Proposal | None) -> None:
        if proposal is not None:
            self._proposal = proposal
            # A peer may still ask for the one before.
            self._plans = dict(list(self._plans.items())[-1:])
            self._plans[self._last_number + 1] = msgspec.msgpack.encode(proposal.target.slots)

    def _begin(self, number: int) -> None:
        self._last_number = number
        self._num_flipped = 0
        self.stats.state = "moving"
        self._mover = Mover(
            number,
            self.rank,
            self._in_force.placement,
            self._store,
            self._link.client(),
            lambda placement, layer: layer_placement(placement, layer, self.rank, self._device),
            self._pace,
            time.monotonic() + self._deadline_s,
            self._last_mover,
        )

    def _go_on(self, mover: Mover, num_staged: int) -> None:
        began = time.perf_counter()
        self.stats.moved_bytes += mover.take_moved_bytes()
        ends_move = False
        first = self._num_flipped
        for staged in mover.staged[first:num_staged]:
            self._in_force.flip(staged)
            self._num_flipped += 1
            ends_move = staged.ends_move
            if staged.ends_round:
                self._tell_placement()
        if self._in_force.changing:
            self._recorder.unset_placement()
        if self._num_flipped > first:
            mover.flipped(self._num_flipped)
            self.stats.stalls_s.add(time.perf_counter() - began, STALL_BOUNDS)
        if ends_move:
            self._applied(mover)
        self._pace.step_done()

    def _applied(self, mover: Mover) -> None:
        self._mover, self._last_mover = None, mover
        self.stats.state, self.stats.degraded = "idle", ""
        self.stats.applied += 1
        self.stats.last_applied_at = time.time()
        if self._proposal is not None:
            self._replanner.applied(self._proposal)
            self._proposal = None
            logger.info("move %d of experts: applied, placement version %d", mover.number, self.stats.version)

    def _give_up(self, mover: Mover, rank: int, failure: int) -> None:
        mover.cancel()
        self._mover, self._last_mover = None, mover
        self.stats.moved_bytes += mover.take_moved_bytes()
        undone = self._in_force.take_back()
        if undone:
            self._recorder.set_placement(self.slots)
        self.stats.state = "idle"
        self.stats.rolled_back += 1
        reason = f"rank {rank}: {MoveFailure(failure).words}"
        self.stats.degraded = f"move {mover.number} of experts was given up ({reason}); the map is as before"
        if self._proposal is not None:
            self._replanner.rolled_back(self._proposal)
            self._proposal = None
            logger.error("%s; %d layers were taken back", self.stats.degraded, undone)

    def _tell_placement(self) -> None:
        self.stats.version = self._in_force.placement.version
        self._news = PlacementNews(self.rank, self.stats.version, self.slots)
        self._recorder.set_placement(self._news.slots)
