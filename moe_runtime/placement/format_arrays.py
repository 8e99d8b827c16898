"""Placement formats that hold arrays: SGLang's .pt and EPLB's arrays as npz.

Neither executes anything: torch.load with weights_only, numpy.load without pickles; and sizes are looked at before
anything is unpacked.

Legend: L layers of the file, P slots of all ranks, E logical experts, X most replicas of an expert.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement.format_text import flat_rows, read_sglang, sglang_map
from moe_runtime.placement.stored import (
    MAX_ENTRIES,
    Array,
    Model,
    StoredLoads,
    StoredPlacement,
    loads,
    refuse,
)

MAX_UNPACKED_BYTES = 2**30
ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGIC = b"\x80"
EPLB_ARRAYS = ("phy2log", "log2phy", "logcnt")


def zip_names(data: bytes) -> list[str]:
    """What a zip file holds. Raises ConfigError if it is damaged, or would be too large unpacked."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise ConfigError(f"is a damaged zip file: {error}") from error
    size = sum(info.file_size for info in infos)
    if size > MAX_UNPACKED_BYTES:
        raise ConfigError(f"would take {size} bytes unpacked; at most {MAX_UNPACKED_BYTES} are read")
    return [info.filename for info in infos]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


# --- SGLang .pt -------------------------------------------------------------------------------------------------------


def read_sglang_pt(data: bytes) -> StoredPlacement | StoredLoads:
    """A dict as in `read_sglang`, of tensors, written by torch.save."""
    import torch  # a front-end reads files too, and has no other use for it

    name = "sglang_pt"
    if data.startswith(ZIP_MAGIC):
        zip_names(data)
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    # Whatever a damaged or hostile file makes the unpickler raise; with weights_only it calls nothing of the file's.
    except Exception as error:  # noqa: BLE001
        refuse(name, f"torch.load(weights_only=True) refuses it: {_first_line(error)}")
    if not isinstance(found, dict):
        refuse(name, f"must hold a dict, not {type(found).__name__}")
    plain = {
        key: _plain(key, found[key], name)
        for key in ("physical_to_logical_map", "logical_count")
        if key in found
    }
    return read_sglang(plain or {str(key): None for key in found}, name)


def _plain(key: str, value: Any, name: str) -> Any:
    """A tensor as lists (the map) or as an array (the counts)."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    # A tensor may be larger than its storage.
    if (
        value.numel() > MAX_ENTRIES
        or value.layout != torch.strided
        or value.is_quantized
        or value.device.type != "cpu"
    ):
        refuse(
            name, f"`{key}` must be a plain tensor of at most {MAX_ENTRIES} numbers, not {list(value.shape)}"
        )
    if key == "logical_count":
        return value.detach().to(torch.float64).numpy() if not value.is_complex() else None
    if value.dim() != 2 or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        refuse(name, f"`{key}` must be integers [layers, slots], not {value.dtype} {list(value.shape)}")
    return value.tolist()


def write_sglang_pt(placement: ExpertPlacement, model: Model, _why: Sequence[str]) -> bytes:
    """For --init-expert-location: {"physical_to_logical_map": int64 [decoder layers, P]}."""
    import torch

    file = io.BytesIO()
    torch.save(
        {"physical_to_logical_map": torch.tensor(sglang_map(placement, model), dtype=torch.int64)}, file
    )
    return file.getvalue()


# --- EPLB -------------------------------------------------------------------------------------------------------------


def read_eplb(data: bytes) -> StoredPlacement | StoredLoads:
    """An npz file: phy2log [L, P]; log2phy [L, E, X] and logcnt [L, E], if there, must agree. Or weight [L, E]: loads."""
    name = "eplb"
    names = [entry.removesuffix(".npy") for entry in zip_names(data)]
    wanted = [array for array in (*EPLB_ARRAYS, "weight") if array in names]
    if "phy2log" not in wanted and wanted != ["weight"]:
        refuse(name, f"needs the array phy2log (or weight alone); has {', '.join(names)[:200] or 'nothing'}")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for array in wanted:
                _check_header(archive, array, name)
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {array: file[array] for array in wanted}
    except ConfigError:
        raise
    # Whatever zipfile, zlib and numpy raise for damaged files.
    except Exception as error:  # noqa: BLE001
        refuse(name, f"cannot be read without pickles: {_first_line(error)}")
    if "phy2log" not in arrays:
        return StoredLoads(name, loads(arrays["weight"], name, "`weight`"))
    phy2log_LP = arrays["phy2log"]
    if phy2log_LP.ndim != 2 or 0 in phy2log_LP.shape or phy2log_LP.dtype.kind not in "iu":
        refuse(
            name, f"phy2log must be integers [layers, slots], not {phy2log_LP.dtype} {list(phy2log_LP.shape)}"
        )
    _check_agreement(phy2log_LP, arrays, name)
    slots = tuple((tuple(row),) for row in phy2log_LP.astype(np.int64).tolist())
    num_experts = next((arrays[a].shape[1] for a in ("logcnt", "log2phy") if a in arrays), None)
    return StoredPlacement(name, slots, ranks_known=False, num_experts=num_experts)


def _check_header(archive: zipfile.ZipFile, array: str, name: str) -> None:
    """numpy allocates what the header claims before it reads."""
    with archive.open(f"{array}.npy") as file:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(file)
    count = 1
    for length in shape:
        count *= length
    if (
        dtype.hasobject
        or count > MAX_ENTRIES
        or count * dtype.itemsize > archive.getinfo(f"{array}.npy").file_size
    ):
        refuse(
            name, f"{array} claims to be {dtype} {list(shape)}, which the file does not hold or is too large"
        )


def _check_agreement(phy2log_LP: Array, arrays: dict[str, Array], name: str) -> None:
    """What log2phy and logcnt say of the slots must be what phy2log says."""
    for array in ("log2phy", "logcnt"):
        if array not in arrays:
            continue
        given = arrays[array]
        num_experts = given.shape[1] if given.ndim >= 2 else 0
        if given.shape[0] != len(phy2log_LP) or given.ndim != (3 if array == "log2phy" else 2):
            refuse(
                name,
                f"{array} has shape {list(given.shape)}, which does not fit phy2log's {list(phy2log_LP.shape)}",
            )
        for layer, row in enumerate(phy2log_LP):
            for expert in range(num_experts):
                where = np.flatnonzero(row == expert)
                if array == "logcnt":
                    same = int(given[layer, expert]) == len(where)
                else:
                    same = sorted(int(p) for p in given[layer, expert] if p >= 0) == where.tolist()
                if not same:
                    refuse(
                        name,
                        f"layer {layer}: {array} and phy2log differ about expert {expert}, which phy2log has in slots"
                        f" {where.tolist()}",
                    )


def write_eplb(placement: ExpertPlacement, _model: Model, _why: Sequence[str]) -> bytes:
    """All three arrays as rebalance_experts returns them, int64, over MoE layers."""
    phy2log_LP = np.array(flat_rows(placement), dtype=np.int64)
    experts = range(placement.num_experts)
    where = [[np.flatnonzero(row == expert).tolist() for expert in experts] for row in phy2log_LP]
    logcnt_LE = np.array([[len(slots) for slots in layer] for layer in where], dtype=np.int64)
    log2phy_LEX = np.full((*logcnt_LE.shape, int(logcnt_LE.max())), -1, dtype=np.int64)
    for layer, by_expert in enumerate(where):
        for expert, slots in enumerate(by_expert):
            log2phy_LEX[layer, expert, : len(slots)] = slots
    file = io.BytesIO()
    np.savez_compressed(file, phy2log=phy2log_LP, log2phy=log2phy_LEX, logcnt=logcnt_LE)
    return file.getvalue()
