"""The background half of a move: a thread of each rank that fetches what arrives on it, round after round.

All ranks work out the same rounds from the same two placements. The thread only writes slots that the map in force leaves
empty; that the map changes is the step thread's business (`engine.rebalancing`).
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from moe_runtime.core import ExpertPlacement, LayerPlacement
from moe_runtime.errors import MoeRuntimeError
from moe_runtime.experts.migration import CorruptCopyError, DigestSlot, ReadSlot, SlotStore
from moe_runtime.peer_link import PeerClient, PeerError
from moe_runtime.placement.transition import (
    ExpertCopy,
    LayerChange,
    apply_changes,
    check_reachable,
    next_round,
)

logger = logging.getLogger(__name__)

Slots = list[list[list[int]]]


class MoveFailure(enum.IntEnum):
    """Why a rank gives a move up; told in the lockstep header."""

    NONE = 0
    DEADLINE = 1
    CORRUPT = 2
    PEER = 3
    MOVER_DIED = 4
    OTHER = 5

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    MoveFailure.NONE: "nothing",
    MoveFailure.DEADLINE: "the deadline has passed",
    MoveFailure.CORRUPT: "a copy differed from its source",
    MoveFailure.PEER: "another rank did not answer",
    MoveFailure.MOVER_DIED: "the thread that moves weights has died",
    MoveFailure.OTHER: "an error, see the log of that rank",
}


class ReadPlan(msgspec.Struct, tag="read_plan"):
    """Ask rank 0 where the experts of a move are to go; the answer is Slots in msgpack."""

    move: int


@dataclass(frozen=True)
class Staged:
    """A layer's change whose copies have arrived here."""

    change: LayerChange
    placement: LayerPlacement
    """The layer's, as this rank uses it afterwards."""
    ends_round: bool
    ends_move: bool


class Pace:
    """Lets so many bytes pass during each step."""

    def __init__(self, max_bytes_per_step: int) -> None:
        self._limit = self._left = max_bytes_per_step
        self._changed = threading.Condition()

    def step_done(self) -> None:
        """Unused bytes are lost; what was taken too much counts against the new step."""
        with self._changed:
            self._left = min(self._limit, self._left + self._limit)
            self._changed.notify_all()

    def take(self, num_bytes: int, cancelled: Callable[[], bool]) -> None:
        """Wait until there is something left. Raises PeerError once cancelled."""
        with self._changed:
            while self._left <= 0 and not cancelled():
                self._changed.wait(0.1)
            self._left -= num_bytes
        if cancelled():
            raise PeerError("cancelled")


class Mover:
    """Carries out one move on this rank. `staged` and `failure` are read by the step thread, which calls `flipped` and `cancel`."""

    def __init__(
        self,
        number: int,
        rank: int,
        current: ExpertPlacement,
        store: SlotStore,
        client: PeerClient,
        prepare: Callable[[ExpertPlacement, int], LayerPlacement],
        pace: Pace,
        deadline: float,
        before: Mover | None,
    ) -> None:
        """`prepare`: a layer of a placement as this rank uses it. `before`: the last move's, which may still be ending."""
        self.number, self.deadline = number, deadline
        self.staged: list[Staged] = []
        self.failure = MoveFailure.NONE
        self._moved_bytes = self._told_bytes = 0
        self._rank, self._current, self._store, self._client = rank, current, store, client
        self._prepare, self._pace, self._before = prepare, pace, before
        self._num_flipped = 0
        self._cancelled = False
        self._finished = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="expert-mover", daemon=True)
        self._thread.start()

    def check(self) -> MoveFailure:
        """What is wrong, if anything: also that the thread has died without a word, or is late."""
        # In this order: a thread that ends says so before.
        alive = self._thread.is_alive()
        if self.failure:
            return self.failure
        if not alive and not self._finished:
            return MoveFailure.MOVER_DIED
        return MoveFailure.DEADLINE if time.monotonic() > self.deadline else MoveFailure.NONE

    def take_moved_bytes(self) -> int:
        """Fetched since the last call."""
        total = self._moved_bytes
        new, self._told_bytes = total - self._told_bytes, total
        return new

    def flipped(self, num: int) -> None:
        """So many of the staged changes are in force on all ranks."""
        with self._changed:
            self._num_flipped = num
            self._changed.notify_all()

    def cancel(self) -> None:
        """The move is given up. The thread writes nothing more after the piece it is at; `join` to be sure."""
        self._cancelled = True
        self._client.cancel()
        with self._changed:
            self._changed.notify_all()

    def join(self, timeout: float) -> bool:
        """Whether the thread has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            # It may be in the middle of a piece, and would write it into a slot that is wanted for something else now.
            if self._before is not None and not self._before.join(max(0.0, self.deadline - time.monotonic())):
                raise PeerError("the thread of the move before has not ended")
            self._before = None
            self._move()
            self._finished = True
        except CorruptCopyError as error:
            self._fail(MoveFailure.CORRUPT, error)
        except PeerError as error:
            late = time.monotonic() > self.deadline
            self._fail(MoveFailure.DEADLINE if late else MoveFailure.PEER, error)
        except MoeRuntimeError as error:
            self._fail(MoveFailure.OTHER, error)
        except Exception as error:
            logger.exception("move %d of experts: the mover failed", self.number)
            self._fail(MoveFailure.OTHER, error)
        finally:
            self._client.close()

    def _fail(self, failure: MoveFailure, error: Exception) -> None:
        if not self._cancelled:
            logger.warning("move %d of experts: %s", self.number, error)
        self.failure = failure

    def _move(self) -> None:
        question = msgspec.msgpack.encode(ReadPlan(self.number))
        slots = msgspec.msgpack.decode(self._client.ask(0, question, self.deadline), type=Slots)
        target = placement_of(slots, self._current)
        check_reachable(self._current, target)
        changes = next_round(self._current, target)
        while changes:
            after = apply_changes(self._current, changes)
            following = next_round(after, target)
            for i, change in enumerate(changes):
                for copy in change.copies:
                    if copy.to_rank == self._rank:
                        self._fetch(change.layer, copy)
                ends_round = i == len(changes) - 1
                prepared = self._prepare(after, change.layer)
                self.staged.append(Staged(change, prepared, ends_round, ends_round and not following))
            # Only then are the slots empty that the next round writes to.
            self._wait_for_flips()
            self._current, changes = after, following

    def _wait_for_flips(self) -> None:
        with self._changed:
            while self._num_flipped < len(self.staged) and not self._cancelled:
                self._changed.wait(0.5)
        if self._cancelled:
            raise PeerError("cancelled")

    def _fetch(self, layer: int, copy: ExpertCopy) -> None:
        def read(piece: ReadSlot, target: memoryview) -> None:
            self._pace.take(len(target), lambda: self._cancelled)
            self._client.ask_into(copy.from_rank, msgspec.msgpack.encode(piece), target, self.deadline)
            self._moved_bytes += len(target)

        self._store.copy_into(layer, copy.to_slot, read, copy.from_slot)
        question = msgspec.msgpack.encode(DigestSlot(layer, copy.from_slot))
        digest = self._client.ask(copy.from_rank, question, self.deadline)
        # Of what lies in the slot, not of what came in.
        if self._store.digest(layer, copy.to_slot) != digest:
            raise CorruptCopyError(
                f"expert {copy.expert} of MoE layer {layer}, copied from rank {copy.from_rank}, differs from its source"
            )


def placement_of(slots: Slots, like: ExpertPlacement) -> ExpertPlacement:
    """Slots that came over the wire: on every rank as many as `like` has, or as the longest rank if that has more."""
    width = max([len(like.slots[0][0]), *(len(rank) for layer in slots for rank in layer)])
    rows = tuple(tuple(tuple(rank) + (-1,) * (width - len(rank)) for rank in layer) for layer in slots)
    return ExpertPlacement(rows, like.num_experts)
