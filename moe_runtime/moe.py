"""One MoE layer across ranks: dispatch, experts, combine. The only place where the three meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_runtime.dispatch.base import Dispatcher, plan_dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from moe_runtime.core import LayerPlacement, Routing
    from moe_runtime.experts.base import ExpertKernel, ExpertWeights


@dataclass(frozen=True)
class ExpertParallelMoe:
    """Runs the routed experts of any MoE layer. Holds what knows of ranks, so that models need not."""

    dispatcher: Dispatcher
    kernel: ExpertKernel
    placements: Sequence[LayerPlacement]
    """One per MoE layer, in model order."""
    rank: int

    def __call__(
        self,
        moe_layer: int,
        x_TD: torch.Tensor,
        routing: Routing,
        weights: ExpertWeights,
        max_num_tokens: int,
        meanwhile: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Returns (T, D): the weighted sum of the routed experts, plus `meanwhile()` where given.

        `meanwhile` (a shared expert) is computed while tokens travel.
        """
        plan = plan_dispatch(routing, self.placements[moe_layer], self.rank, max_num_tokens)
        sent = self.dispatcher.dispatch(x_TD, plan)
        beside = meanwhile() if meanwhile is not None else None
        batch = sent.wait()
        out = self.dispatcher.combine(self.kernel(batch, weights), batch, plan).wait()
        return out if beside is None else out + beside
