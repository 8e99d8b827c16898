"""Reports on made records, for hardware with round numbers."""

from __future__ import annotations

from typing import Any

from moe_runtime.placement.cost import Cluster, Hardware
from moe_runtime.placement.record import LoadRecord
from moe_runtime.placement.report import analyse
from moe_runtime.placement.report_data import Report
from moe_runtime.placement.report_setup import Options

HARDWARE = Hardware("made", 1e12, 2e11, 5e9, 1e9, 5.0, 16)


def report_on(record: LoadRecord, **changes: Any) -> Report:
    return analyse(record, Options(HARDWARE, Cluster.single(record.meta.num_ranks), **changes)).report
