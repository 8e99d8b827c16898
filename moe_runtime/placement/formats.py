"""Reading and writing placements in this project's format and in its peers'.

| name | whose | content | its layers |
|---|---|---|---|
| `moe_runtime` | this project | JSON: version, checkpoint identity, slots [layer][rank][slot], reasons | with experts |
| `sglang_pt`, `sglang_json` | SGLang --init-expert-location | `physical_to_logical_map` [layer][slot], or `logical_count` | all |
| `trtllm` | TensorRT-LLM moe_config.load_balancer | YAML: num_slots, initial_global_assignments {layer: [slot]} | with experts, by decoder number |
| `vllm` | vLLM | JSON: [slot] for all layers, or [layer][slot] | with experts |
| `vllm_ascend` | vllm-ascend expert_map_path | JSON: layer_list[].device_list[].device_expert | with experts |
| `eplb` | DeepSeek EPLB's results | npz: phy2log [layer][slot], log2phy, logcnt; or `weight` alone | as given |

The last column says what is written. What is read may count all decoder layers or those with experts, in any format:
their number, or the numbers they bear, tell which. All but the first and vllm-ascend's say nothing of ranks: each rank
has an equal share of the slots, in order. Only `moe_runtime` has empty slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement import format_arrays, format_text
from moe_runtime.placement.stored import Model, StoredLoads, StoredPlacement
from moe_runtime.placement.validate import check_slots, to_placement

MAX_FILE_BYTES = 2**28
_ARRAYS: dict[str, Callable[[bytes], StoredPlacement | StoredLoads]] = {
    "sglang_pt": format_arrays.read_sglang_pt,
    "eplb": format_arrays.read_eplb,
}
_WRITERS: dict[str, Callable[[ExpertPlacement, Model, Sequence[str]], bytes]] = {
    "moe_runtime": format_text.write_ours,
    "sglang_pt": format_arrays.write_sglang_pt,
    "sglang_json": format_text.write_sglang,
    "trtllm": format_text.write_trtllm,
    "vllm": format_text.write_vllm,
    "vllm_ascend": format_text.write_ascend,
    "eplb": format_arrays.write_eplb,
}
FORMATS = tuple(_WRITERS)
_BY_SUFFIX = {".json": "moe_runtime", ".pt": "sglang_pt", ".npz": "eplb", ".yaml": "trtllm", ".yml": "trtllm"}


def read_placement(path: str | Path, model: Model, format_name: str | None = None) -> ExpertPlacement:
    """The placement in a file of any format; `format_name` says which, its content otherwise.

    Raises ConfigError that names the file, and the layer and slot where something is wrong; also if it holds loads only.
    """
    stored = read_file(path, format_name)
    if isinstance(stored, StoredLoads):
        raise ConfigError(
            f"{path}: holds loads of experts, not a placement; `launch/plan.py plan` makes one from them"
        )
    return to_placement(stored, model, str(path))


def read_file(path: str | Path, format_name: str | None = None) -> StoredPlacement | StoredLoads:
    """What a file says, not yet held against a model. Raises ConfigError that names the file."""
    data = read_bytes(Path(path))
    try:
        return parse(data, format_name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse(data: bytes, format_name: str | None = None) -> StoredPlacement | StoredLoads:
    """What the content of a file says. Raises ConfigError, of one line."""
    try:
        return _parse(data, format_name)
    except ConfigError as error:
        raise _one_line(error) from error


def parse_value(value: Any) -> StoredPlacement | StoredLoads:
    """As `parse`, from the decoded content of a JSON file."""
    try:
        return _read_value(value, None)
    except ConfigError as error:
        raise _one_line(error) from error


def _parse(data: bytes, format_name: str | None) -> StoredPlacement | StoredLoads:
    if format_name is not None and format_name not in FORMATS:
        raise ConfigError(f"format {format_name!r} is unknown; allowed are {', '.join(FORMATS)}")
    binary = _binary_format(data)
    if format_name in _ARRAYS or (binary and format_name is None):
        name = format_name or binary
        if not binary:
            raise ConfigError(f"is not a file of format {name}: it begins with {data[:8]!r}")
        return _ARRAYS[name](data)
    if binary:
        raise ConfigError(f"is not a file of format {format_name}, but looks like {binary}")
    return _read_value(_parse_json_or_yaml(data), format_name)


def write_placement(
    path: str | Path,
    placement: ExpertPlacement,
    model: Model,
    format_name: str | None = None,
    why: Sequence[str] = (),
) -> str:
    """Write a file whole or not at all; the format follows from the file's suffix if it is not given. Returns the format.

    why: sentences that say how the placement came about; only `moe_runtime` keeps them. Raises ConfigError if the placement
    does not fit the model, or the format cannot express it.
    """
    path = Path(path)
    name = format_name or _BY_SUFFIX.get(path.suffix)
    if name not in _WRITERS:
        problem = f"format {name!r} is unknown" if name else f"the suffix {path.suffix!r} tells no format"
        raise ConfigError(f"{path}: {problem}; allowed formats are {', '.join(FORMATS)}")
    check_slots(placement.slots, model, str(path))
    if name != "moe_runtime":
        _refuse_empty(placement, model, f"{path}: {name}")
    draft = path.with_name(path.name + ".draft")
    try:
        draft.write_bytes(_WRITERS[name](placement, model, why))
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    return name


def read_bytes(path: Path) -> bytes:
    """The content of a placement file. Raises ConfigError that names it."""
    try:
        if not path.is_file():
            raise ConfigError(f"{path}: is not a file" if path.exists() else f"{path}: there is no such file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: has {path.stat().st_size} bytes; at most {MAX_FILE_BYTES} are read")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _one_line(error: ConfigError) -> ConfigError:
    """It may quote the file, which may hold anything."""
    return ConfigError("".join(c if c.isprintable() else "?" for c in str(error)))


def _binary_format(data: bytes) -> str:
    """The format of a file with arrays, told from its first bytes and, in a zip file, from what is in it; else nothing."""
    if data.startswith(format_arrays.ZIP_MAGIC):
        names = format_arrays.zip_names(data)
        return "eplb" if any(name.endswith(".npy") for name in names) else "sglang_pt"
    return "sglang_pt" if data.startswith(format_arrays.PICKLE_MAGIC) else ""


def _read_value(value: Any, format_name: str | None) -> StoredPlacement | StoredLoads:
    name = format_name or _text_format(value)
    if name == "sglang_json":
        if not isinstance(value, dict):
            raise ConfigError(f"as a file of format {name}: must be a mapping")
        return format_text.read_sglang(value, name)
    readers: dict[str, Callable[[Any], StoredPlacement]] = {
        "moe_runtime": format_text.read_ours,
        "trtllm": format_text.read_trtllm,
        "vllm": format_text.read_vllm,
        "vllm_ascend": format_text.read_ascend,
    }
    return readers[name](value)


def _parse_json_or_yaml(data: bytes) -> Any:
    if data.lstrip()[:1] not in (b"{", b"["):
        try:
            return format_text.parse_yaml(data)
        except ValueError as error:
            raise ConfigError(f"is neither one of the binary formats nor valid YAML: {error}") from error
    try:
        return format_text.parse_json(data)
    except ValueError as error:
        try:
            # YAML may begin like JSON.
            return format_text.parse_yaml(data)
        except ValueError:
            raise ConfigError(f"is not valid JSON: {error}") from error


def _text_format(value: Any) -> str:
    if isinstance(value, list):
        return "vllm"
    marks = {
        "format": "moe_runtime",
        "physical_to_logical_map": "sglang_json",
        "logical_count": "sglang_json",
        "layer_list": "vllm_ascend",
        "initial_global_assignments": "trtllm",
    }
    for key, name in marks.items():
        if isinstance(value, dict) and key in value:
            return name
    what = (
        f"a mapping with {', '.join(str(k)[:40] for k in list(value)[:5])}"
        if isinstance(value, dict)
        else "no mapping"
    )
    raise ConfigError(
        f"its format is not known: it is {what}; a placement has one of {', '.join(marks)}, or is a list"
    )


def _refuse_empty(placement: ExpertPlacement, model: Model, what: str) -> None:
    for index, ranks in enumerate(placement.slots):
        for rank, experts in enumerate(ranks):
            if -1 in experts:
                raise ConfigError(
                    f"{what} has no empty slots, but {model.layer_name(index)}, rank {rank}, slot {experts.index(-1)} is"
                    " empty; plan with a number of redundant experts that fills all ranks"
                )
