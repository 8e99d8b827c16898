"""The dispatcher seam: tokens travel to the ranks that hold their experts, and results travel back.

Legend: T tokens here, K experts per token, D hidden, R token rows received, S expert rows, p slots per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from moe_runtime.core import DispatchPlan, ExpertBatch, LayerPlacement, Routing
from moe_runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_runtime.dispatch.rows import Traffic

T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A result under way; `wait()` blocks the host (CPU) or the stream (GPU) and may be called once."""

    def wait(self) -> T_co:
        """The result. Raises LockstepError if a peer is dead or late."""
        ...


V = TypeVar("V")


@dataclass(frozen=True)
class Done(Generic[V]):
    """A Pending that is already there."""

    value: V

    def wait(self) -> V:
        """The value, at once."""
        return self.value


@dataclass(frozen=True)
class Deferred(Generic[V]):
    """A Pending finished by `finish`, which is called by wait()."""

    finish: Callable[[], V]

    def wait(self) -> V:
        """What `finish` returns; raises what it raises."""
        return self.finish()


class Dispatcher(Protocol):
    """Contract; each line is a test of the conformance suite.

    1. Every rank makes the same calls in the same order, also with T = 0.
    2. A token crosses to a destination rank once, however many of its experts live there.
    3. Rows of a slot are contiguous and ordered by (source rank, token).
    4. combine multiplies by the routing weights in float32 and returns the dtype of y_rows. `exact`: every expert row
       returns, and the owner sums in k order. `per_rank`: the rank that computed sums its own in k order, one row per
       (token, rank) returns in the dtype of y_rows, and the owner adds those in float32 in the order of the ranks.
    5. Slot -1 yields zero and costs no traffic; a token with only -1 yields a zero row.
    6. More tokens than a buffer holds are sent in rounds, equally many on all ranks.
    7. Payload rows are bytes: of float32, bfloat16, float16, or uint8 (packed by `fp8_payload`, whose batches then have FP8 tokens
       and scales). Results may have another dtype.
    8. A dead or late peer raises LockstepError; nothing hangs.
    9. Any number of experts and ranks: E not divisible by N, N larger than E, replicas, ranks with no expert.
    10. close() is idempotent and leaves no file behind.
    11. A call may be made before results of earlier ones have been waited for, and these may be waited for in any order.
        How many calls travel at the same time is up to the dispatcher; one too many finishes the oldest first.
    """

    name: str

    @property
    def traffic(self) -> Traffic:
        """What has been moved since it was made; how much of it is counted where the host reads nothing, it says itself."""
        ...

    def dispatch(self, x_TD: torch.Tensor, plan: DispatchPlan) -> Pending[ExpertBatch]:
        """Send the rows of x_TD (contiguous) to the ranks named in the plan."""
        ...

    def combine(self, y_SD: torch.Tensor, batch: ExpertBatch, plan: DispatchPlan) -> Pending[torch.Tensor]:
        """Return y's expert rows to their tokens: out_TD = sum over k of weight * row. See contract 4 for the order."""
        ...

    def close(self) -> None:
        """Let go of memory, files and connections. See contract 10."""
        ...


def sums_per_rank(combine: str) -> bool:
    """Whether a way of combining, `exact` or `per_rank`, is the latter. Raises ConfigError on any other."""
    if combine not in ("exact", "per_rank"):
        raise ConfigError(f"combine={combine!r}: allowed are exact, per_rank")
    return combine == "per_rank"


def plan_dispatch(
    routing: Routing, placement: LayerPlacement, rank: int, max_num_tokens: int
) -> DispatchPlan:
    """Translate logical experts to global slots. No host synchronisation.

    routing.topk_ids_TK: (T, K) int64, -1 stays -1.
    """
    ids = routing.topk_ids_TK
    slots = placement.expert_to_slot_E[ids.clamp(min=0)]
    return DispatchPlan(
        global_slot_TK=torch.where(ids >= 0, slots, ids),
        topk_weights_TK=routing.topk_weights_TK,
        slots_per_rank=placement.slots_per_rank,
        num_ranks=placement.num_ranks,
        rank=rank,
        max_num_tokens=max_num_tokens,
    )
