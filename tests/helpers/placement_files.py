"""The bytes of files that hold placements."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch


def torch_file(value: Any, **options: Any) -> bytes:
    """What torch.save writes; options are its own."""
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def npz_file(**arrays: Any) -> bytes:
    """What numpy.savez writes."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()
