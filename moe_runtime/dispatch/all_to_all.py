"""One exchange of byte rows over a process group, for the dispatchers that use collectives.

Bytes are what moves because gloo refuses some element types (bfloat16 in part, fp8 wholly).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from moe_runtime.dispatch.waiting import lockstep_errors

if TYPE_CHECKING:
    from collections.abc import Sequence


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """(rows, bytes of a row) uint8: the same memory where the rows are contiguous."""
    rows = rows.contiguous()
    # A tensor with a size of 0 or 1 may have any stride there, and view() insists on 1 in the last dimension.
    return rows.as_strided(rows.shape, (rows.shape[1], 1)).view(torch.uint8)


def all_to_all(
    group: dist.ProcessGroup,
    rows: torch.Tensor,
    sent_N: Sequence[int] | None = None,
    received_N: Sequence[int] | None = None,
) -> tuple[torch.Tensor, dist.Work]:
    """Send rows, grouped by destination, sent_N[n] to rank n; without numbers, equally many to each.

    Returns what will have arrived, by source, once the work is waited for (`waiting.wait_work`). Raises LockstepError.
    """
    sent = None if sent_N is None else list(sent_N)
    expected = None if received_N is None else list(received_N)
    received = rows.new_empty(rows.shape[0] if expected is None else sum(expected), rows.shape[1])
    with lockstep_errors("all-to-all"):
        work = dist.all_to_all_single(received, rows, expected, sent, group=group, async_op=True)
    return received, work
