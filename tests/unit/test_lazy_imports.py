"""What a process imports is what a start costs: each imports only what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = {"sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.onnx", "triton"}
HTTP = {"fastapi", "uvicorn", "httpx"}
ADAPTERS = ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        pytest.param(
            ["moe_runtime.engine.worker"], {"torch", "numpy", "transformers"}, id="before the watchdog"
        ),
        pytest.param(
            ["moe_runtime.engine.builder", "moe_runtime.engine.rank_link"]
            + [f"moe_runtime.models.{name}" for name in ADAPTERS],
            COMPILER | HTTP | {"transformers", "huggingface_hub", "tokenizers", "PIL", "rich"},
            id="a rank that is told the model's shape",
        ),
        pytest.param(["moe_runtime.server.main"], {"torch", "transformers", "numpy"}, id="the front-end"),
        pytest.param(["moe_runtime", "moe_runtime.cli"], {"torch", "transformers"}, id="a user's program"),
    ],
)
def test_imports_only_what_it_needs(modules: list[str], unwanted: set[str]) -> None:
    code = f"import sys, {', '.join(modules)}; print(*(m for m in {sorted(unwanted)} if m in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.split() == []
