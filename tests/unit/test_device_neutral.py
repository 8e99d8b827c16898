"""Model code reads no tensor's value on the host: it runs on torch's meta device, where there are no values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from moe_runtime.core import ForwardBatch, LayerPlacement
from moe_runtime.dispatch.base import plan_dispatch
from moe_runtime.layers.ops import TORCH_OPS
from moe_runtime.models.decoder import Decoder
from moe_runtime.models.registry import load_spec
from tests.helpers.tiny_models import FAMILIES, tiny_config

if TYPE_CHECKING:
    from pathlib import Path

    from moe_runtime.layers.rope import Rotation
    from moe_runtime.moe import MoeInput

META = torch.device("meta")


class ShapesOnly:
    """Attention and experts reduced to their shapes, planning the dispatch on the way."""

    def __init__(self, num_experts: int) -> None:
        self.placement = LayerPlacement(
            slot_to_expert_Np=torch.arange(num_experts).view(1, -1),
            expert_to_slot_E=torch.arange(num_experts, device=META),
            copies_EX=torch.arange(num_experts, device=META).view(-1, 1),
        )
        self.moe_calls = 0
        self.takes_packed = False

    def run(
        self,
        q_THd: torch.Tensor,
        k_TGd: torch.Tensor,
        v_TGd: torch.Tensor,
        rotation: Rotation,
        layer: int,
        plan: Any,
    ) -> torch.Tensor:
        return torch.empty_like(q_THd)

    def begin(self, work: MoeInput) -> ShapesOnlyPass:
        plan = plan_dispatch(work.route(), self.placement, 0, work.max_num_tokens)
        assert plan.global_slot_TK.device == META
        self.moe_calls += 1
        return ShapesOnlyPass(work)


@dataclass
class ShapesOnlyPass:
    work: MoeInput

    def compute(self) -> None:
        pass

    def finish(self) -> torch.Tensor:
        x_TD, meanwhile = self.work.x_TD, self.work.meanwhile
        return torch.empty_like(x_TD) if meanwhile is None else meanwhile()


@pytest.mark.parametrize("num_tokens", [0, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_runs_without_values(family: str, num_tokens: int, tmp_path: Path, seed: int) -> None:
    tiny_config(family, seed, architectures=[FAMILIES[family][1]]).save_pretrained(tmp_path)
    spec, _ = load_spec(tmp_path)
    decoder = Decoder(spec, [spec.num_experts] * spec.num_moe_layers, torch.bfloat16, META, TORCH_OPS)
    whole = torch.empty(num_tokens, dtype=torch.int64, device=META)
    batch = ForwardBatch(
        input_ids_T=whole,
        positions_T=whole,
        slot_mapping_T=whole,
        block_tables_BM=torch.empty(1, 1, dtype=torch.int32, device=META),
        query_starts_B1=torch.empty(2, dtype=torch.int32, device=META),
        seq_lens_B=torch.empty(1, dtype=torch.int32, device=META),
        query_lens=[num_tokens],
        seq_lens=[num_tokens],
        logit_rows=whole[:1],
        max_num_tokens=num_tokens,
    )
    shapes = ShapesOnly(spec.num_experts)
    with torch.inference_mode():
        logits = decoder([(batch, None)], shapes, shapes)
    assert logits.device == META
    assert logits.shape == (min(1, num_tokens), spec.vocab_size)
    assert logits.dtype == torch.float32
    assert shapes.moe_calls == spec.num_moe_layers
