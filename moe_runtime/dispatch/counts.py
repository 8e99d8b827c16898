"""All ranks' numbers of pairs per expert, told to all ranks: what a choice among an expert's copies starts from.

Legend: N ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from moe_runtime.dispatch.waiting import lockstep_errors, wait_work


class ShareCounts(Protocol):
    """Collective: every rank calls it in the same order, with equally many counts."""

    def __call__(self, counts_E: torch.Tensor) -> torch.Tensor:
        """counts_E: int32, this rank's. Returns int32 (N, E), one row per rank. Raises LockstepError."""
        ...


def keep_counts(counts_E: torch.Tensor) -> torch.Tensor:
    """ShareCounts of a single rank."""
    return counts_E[None]


@dataclass(frozen=True)
class GatherCounts:
    """ShareCounts by an all-gather. A one-sided dispatcher has its own, `share`."""

    group: dist.ProcessGroup
    step_timeout: float
    """Seconds that a peer may be late."""

    def __call__(self, counts_E: torch.Tensor) -> torch.Tensor:
        """See ShareCounts."""
        rows = counts_E.new_empty(dist.get_world_size(self.group), counts_E.shape[0])
        with lockstep_errors("exchange of counts"):
            work = dist.all_gather(list(rows.unbind()), counts_E, group=self.group, async_op=True)
        wait_work(work, "exchange of counts", self.step_timeout, counts_E.device.type)
        return rows
