"""What ranks do with DeepSpeed: its AutoEP as an oracle, and a model of its MoE layers that it saves.

Each function runs on one rank of `run_ranks`, whose process group DeepSpeed then uses. DeepSpeed is imported from the folder
`packages`, in these processes only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def join(packages: str, rank: int, num_ranks: int) -> Any:
    """The module `deepspeed`, joined to the process group that there is."""
    sys.path.append(packages)
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
    }
    import deepspeed

    # Its all-reduce over shared memory, a C++ extension, would be compiled now, for a minute, and is not used here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    return deepspeed


def autoep_logprobs(
    rank: int, num_ranks: int, packages: str, model: str, texts: list[list[int]]
) -> dict[int, torch.Tensor]:
    """Index of a text -> (its length, V) float32: log-probabilities after each token, experts over all ranks.

    Rank r computes the texts r, r + num_ranks, ...; `texts` must be a multiple of the ranks.
    """
    join(packages, rank, num_ranks)
    import transformers
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    network = transformers.Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    # torch._grouped_mm takes only rows of a multiple of 16 bytes.
    settings = {
        "enabled": True,
        "autoep_size": num_ranks,
        "preset_model": "qwen3_moe",
        "use_grouped_mm": False,
    }
    auto = AutoEP(network, parse_autoep_config(settings))
    # Only collects router logits for a training loss, and 0.19.8 trips over transformers 5.24's registry there.
    auto._retarget_transformers_output_recorders = lambda *args, **kwargs: None
    auto.replace_moe_layers(auto.ep_parser(), num_ranks, rank)
    layers = [module for module in network.modules() if isinstance(module, AutoEPMoELayer)]
    assert len(layers) == network.config.num_hidden_layers
    for layer in layers:
        layer.set_deepspeed_parallelism()
        assert len(layer.experts.w1) == network.config.num_experts // num_ranks
    network.eval()
    with torch.no_grad():
        return {
            i: F.log_softmax(network(torch.tensor([texts[i]]), use_cache=False).logits[0].float(), dim=-1)
            for i in range(rank, len(texts), num_ranks)
        }


class Expert(nn.Module):
    """A user's expert, its matrices called as in `names`: gate, up, down."""

    def __init__(self, hidden: int, inner: int, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.names = names
        for name, (rows, columns) in zip(
            names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True
        ):
            setattr(self, name, nn.Linear(columns, rows, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(F.silu(gate(x)) * up(x))


class MoeBlock(nn.Module):
    """DeepSpeed's layer in the place of transformers' block."""

    def __init__(self, config: Any, num_ranks: int, names: tuple[str, str, str]) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        mixtral = config.model_type == "mixtral"
        inner = config.intermediate_size if mixtral else config.moe_intermediate_size
        self.moe = MoE(
            config.hidden_size,
            Expert(config.hidden_size, inner, names),
            num_experts=config.num_local_experts if mixtral else config.num_experts,
            ep_size=num_ranks,
            k=config.num_experts_per_tok,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x)[0]


def train_and_save(
    rank: int,
    num_ranks: int,
    packages: str,
    config: Any,
    names: tuple[str, str, str],
    seed: int,
    out: str,
    texts: list[list[int]],
) -> list[torch.Tensor]:
    """Train a random model of DeepSpeed-MoE layers for a step, save it to `out`, return its log-probabilities for `texts`."""  # fmt: skip
    deepspeed = join(packages, rank, num_ranks)
    import transformers

    # Other experts on each rank; what all ranks have, DeepSpeed copies from the first.
    torch.manual_seed(seed + rank)
    network = getattr(transformers, config.architectures[0])(config)
    for layer in network.model.layers:
        layer.mlp = MoeBlock(config, num_ranks, names)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() == 2:
                scale = (4.0 if ".wg." in name else 1.5) / parameter.shape[-1] ** 0.5
                parameter.normal_(0, scale)
    engine, *_ = deepspeed.initialize(
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.01),
        config={"train_micro_batch_size_per_gpu": 1},
    )
    # As many tokens on every rank: DeepSpeed's top-1 gate cuts its capacity to the rank's own number.
    ids = torch.tensor([texts[rank][: min(map(len, texts))]])
    before = [p.detach().clone() for p in network.parameters()]
    engine.backward(engine(ids, labels=ids, use_cache=False).loss)
    engine.step()
    changed = sum(not torch.equal(old, new) for old, new in zip(before, network.parameters(), strict=True))
    assert changed > len(before) // 2, "the step trained next to nothing"
    engine.eval()
    with torch.no_grad():
        logprobs = [
            F.log_softmax(engine(torch.tensor([text]), use_cache=False).logits[0].float(), dim=-1)
            for text in texts
        ]
    engine.save_checkpoint(out, tag="global_step1")
    if rank == 0:
        config.save_pretrained(Path(out) / "hub")
    return logprobs
