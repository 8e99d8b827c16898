"""moe-runtime: serving of Mixture-of-Experts language models with expert parallelism.

The public names are loaded on first use, so that `import moe_runtime` costs nothing and a launcher
can run before torch is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "LLM": "moe_runtime.engine.llm",
    "AsyncLLM": "moe_runtime.engine.async_llm",
    "SamplingParams": "moe_runtime.core",
    "EngineConfig": "moe_runtime.config",
    "RequestOutput": "moe_runtime.engine.outputs",
    "CompletionOutput": "moe_runtime.engine.outputs",
}

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams"]

if TYPE_CHECKING:
    from moe_runtime.config import EngineConfig
    from moe_runtime.core import SamplingParams
    from moe_runtime.engine.async_llm import AsyncLLM
    from moe_runtime.engine.llm import LLM
    from moe_runtime.engine.outputs import CompletionOutput, RequestOutput


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'moe_runtime' has no attribute {name!r}")
