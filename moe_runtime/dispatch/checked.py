"""For debugging and tests: verify before every call that all ranks are about to make the same one."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from moe_runtime.core import DispatchPlan, ExpertBatch
from moe_runtime.dispatch.base import Dispatcher, Pending
from moe_runtime.dispatch.rows import Traffic
from moe_runtime.dispatch.waiting import lockstep_errors, wait_work
from moe_runtime.errors import LockstepError

_KINDS = ("dispatch", "combine")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


class _Step(NamedTuple):
    """What must be equal on all ranks."""

    number: int
    kind: int
    max_num_tokens: int
    hidden_size: int
    dtype: int
    topk: int
    slots_per_rank: int
    num_ranks: int

    def __str__(self) -> str:
        return (
            f"call {self.number} ({_KINDS[self.kind]}), max_num_tokens={self.max_num_tokens},"
            f" hidden_size={self.hidden_size}, dtype={_DTYPES[self.dtype]}, topk={self.topk},"
            f" slots_per_rank={self.slots_per_rank}, num_ranks={self.num_ranks}"
        )


class CheckedDispatcher:
    """Wraps a dispatcher; a small all-gather before each call, and checks of the arguments.

    Raises LockstepError on all ranks if they differ, and AssertionError for arguments outside the contract.
    """

    def __init__(self, inner: Dispatcher, group: dist.ProcessGroup, step_timeout: float) -> None:
        self.name = f"checked({inner.name})"
        self.inner = inner
        self._group = group
        self._timeout = step_timeout
        self._calls = 0

    @property
    def traffic(self) -> Traffic:
        """The wrapped dispatcher's."""
        return self.inner.traffic

    def dispatch(self, x_TD: torch.Tensor, plan: DispatchPlan) -> Pending[ExpertBatch]:
        """As the wrapped dispatcher's, once the arguments are known to be equal where they must."""
        slot_TK = plan.global_slot_TK
        assert x_TD.dim() == 2, f"x_TD has shape {tuple(x_TD.shape)}"
        assert x_TD.is_contiguous(), f"x_TD has strides {x_TD.stride()}"
        assert slot_TK.dtype == torch.int64, f"slots are {slot_TK.dtype}"
        weights_TK = plan.topk_weights_TK
        assert weights_TK.shape == slot_TK.shape, f"weights: {tuple(weights_TK.shape)}"
        num_tokens = x_TD.shape[0]
        assert slot_TK.shape[0] == num_tokens, f"{slot_TK.shape[0]} rows of slots for {num_tokens} tokens"
        assert num_tokens <= plan.max_num_tokens, f"{num_tokens} tokens, max_num_tokens={plan.max_num_tokens}"
        assert plan.rank == dist.get_rank(self._group), f"plan of rank {plan.rank}"
        if slot_TK.numel():
            lowest, highest = int(slot_TK.min()), int(slot_TK.max())
            assert lowest >= -1, f"slot {lowest}"
            assert highest < plan.num_ranks * plan.slots_per_rank, f"slot {highest}"
        self._compare("dispatch", x_TD, plan)
        return self.inner.dispatch(x_TD, plan)

    def combine(self, y_SD: torch.Tensor, batch: ExpertBatch, plan: DispatchPlan) -> Pending[torch.Tensor]:
        """As the wrapped dispatcher's, once the arguments are known to be equal where they must."""
        assert y_SD.shape[0] == batch.row_index_S.shape[0], (
            f"{y_SD.shape[0]} of {batch.row_index_S.shape[0]} rows"
        )
        self._compare("combine", y_SD, plan)
        return self.inner.combine(y_SD, batch, plan)

    def close(self) -> None:
        """Close the wrapped dispatcher."""
        self.inner.close()

    def _compare(self, kind: str, rows: torch.Tensor, plan: DispatchPlan) -> None:
        self._calls += 1
        mine = _Step(
            number=self._calls,
            kind=_KINDS.index(kind),
            max_num_tokens=plan.max_num_tokens,
            hidden_size=rows.shape[1],
            dtype=_DTYPES.index(rows.dtype),
            topk=plan.global_slot_TK.shape[1],
            slots_per_rank=plan.slots_per_rank,
            num_ranks=plan.num_ranks,
        )
        sent = torch.tensor(mine, dtype=torch.int64, device=rows.device)
        all_N = [torch.empty_like(sent) for _ in range(dist.get_world_size(self._group))]
        with lockstep_errors("comparison of calls"):
            work = dist.all_gather(all_N, sent, group=self._group, async_op=True)
        wait_work(work, "comparison of calls", self._timeout, rows.device.type)
        steps = [_Step(*row.tolist()) for row in all_N]
        if any(step != steps[0] for step in steps):
            lines = [f"rank {rank}: {step}" for rank, step in enumerate(steps)]
            raise LockstepError("the ranks make different calls\n" + "\n".join(lines))
