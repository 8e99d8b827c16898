"""From a checkpoint's config.json to its ModelSpec and adapter. Adapters are imported when first needed.

Only reading a configuration imports transformers, which takes a second: the ranks that are told the spec by another
never do.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.errors import CheckpointError, ConfigError
from moe_runtime.models.base import refuse_unsupported
from moe_runtime.models.quantized import stored_quantization, with_weight_schemes

if TYPE_CHECKING:
    from moe_runtime.models.base import ModelAdapter
    from moe_runtime.models.spec import ModelSpec

ADAPTER_MODULES = {
    "MixtralForCausalLM": "moe_runtime.models.mixtral",
    "OlmoeForCausalLM": "moe_runtime.models.olmoe",
    "Qwen2MoeForCausalLM": "moe_runtime.models.qwen2_moe",
    "Qwen3MoeForCausalLM": "moe_runtime.models.qwen3_moe",
}
MODELOPT_FILE = "hf_quant_config.json"


def load_adapter(architecture: str) -> ModelAdapter:
    """The adapter of one of ADAPTER_MODULES. Raises ConfigError listing the architectures supported."""
    if architecture not in ADAPTER_MODULES:
        raise ConfigError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(ADAPTER_MODULES)}"
        )
    adapter: ModelAdapter = importlib.import_module(ADAPTER_MODULES[architecture]).ADAPTER
    return adapter


def load_spec(model_dir: str | Path) -> tuple[ModelSpec, ModelAdapter]:
    """Read `model_dir`/config.json.

    Raises CheckpointError if it is missing or broken, ConfigError if it asks for something that cannot be honoured.
    """
    from huggingface_hub.errors import StrictDataclassError

    path = Path(model_dir) / "config.json"
    values = _read_json(path)
    adapter = load_adapter(_architecture(values, path))
    # An older name that files on the hub still have.
    quantization = values.pop("quantization_config", None) or values.pop("compression_config", None)
    if quantization is None and (path.parent / MODELOPT_FILE).is_file():
        raise ConfigError(
            f"{path.parent / MODELOPT_FILE}: checkpoints quantised by ModelOpt are not supported"
        )
    try:
        config = adapter.config(values)
        refuse_unsupported(config, adapter.fields, adapter.architectures[0])
        spec = adapter.spec(config)
        if quantization is not None:
            stored = stored_quantization(quantization, adapter.rules(spec), spec)
            spec = with_weight_schemes(dataclasses.replace(spec, stored=stored), "auto")
        return spec, adapter
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    # What transformers' classes raise for values of the wrong type or missing keys.
    except (StrictDataclassError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise CheckpointError(f"no model folder at {path.parent}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is not a checkpoint: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return values


def _architecture(values: dict[str, Any], path: Path) -> str:
    named = values.get("architectures")
    if not isinstance(named, list) or not named:
        raise ConfigError(f"{path} names no architectures; supported are {', '.join(ADAPTER_MODULES)}")
    return str(next((name for name in named if name in ADAPTER_MODULES), named[0]))
