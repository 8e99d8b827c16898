"""A whole MoE layer whose rows travel as FP8 to FP8 experts, in the interpreter."""

from __future__ import annotations

import random

import pytest
import torch

from moe_runtime.core import LayerPlacement, Routing
from moe_runtime.dispatch.fp8_payload import Fp8Payload
from moe_runtime.dispatch.local import LocalDispatcher
from moe_runtime.experts.triton_grouped import TritonExperts
from moe_runtime.moe import ExpertParallelMoe, MoeInput
from moe_runtime.quantization import pack_rows, row_bytes
from moe_runtime.tools.tune import Job, make_weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("hidden", [200, 512])
def test_the_layer_gives_the_same_bits_with_half_the_bytes(seed: int, hidden: int) -> None:
    """Rows that the experts would round to FP8 anyway are rounded once, before they leave, by the norm or the dispatcher."""
    weights = make_weights(Job(5, hidden, 96, "fp8_w8a8", block=True), CPU)
    x_TD = torch.randn(23, hidden).bfloat16()
    ids_TK = torch.rand(23, 5).argsort(dim=1)[:, :3]
    ids_TK[torch.rand(23, 3) < 0.2] = -1
    routing = Routing(ids_TK, torch.rand(23, 3))
    placement = LayerPlacement(torch.arange(5).view(1, 5), torch.arange(5), torch.arange(5).view(5, 1))
    sent: list[torch.Tensor] = []

    class Spy(LocalDispatcher):
        def dispatch(self, x_TD, plan):  # type: ignore[no-untyped-def]
            sent.append(x_TD)
            return super().dispatch(x_TD, plan)

    outs = []
    packed_TB = pack_rows(x_TD)
    ways = (
        (Spy(), None),
        (Fp8Payload(Spy()), None),
        (Fp8Payload(Spy(), (hidden, torch.bfloat16)), packed_TB),
    )
    for dispatcher, rows in ways:
        chunks = random.choice([1, 2])
        moe = ExpertParallelMoe(dispatcher, TritonExperts(CPU), [placement], 0, chunks=chunks)
        layer = moe.begin(MoeInput(0, x_TD, lambda: routing, weights, 23, packed_TB=rows))
        layer.compute()
        outs.append(layer.finish())
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert not outs[0].isnan().any()
    plain, packed = [[x for x in sent if x.dtype == t] for t in (torch.bfloat16, torch.uint8)]
    assert sum(x.nbytes for x in plain) == 23 * 2 * hidden
    assert sum(x.nbytes for x in packed) == 2 * 23 * row_bytes(hidden)
    assert row_bytes(hidden) <= 0.53 * 2 * hidden
