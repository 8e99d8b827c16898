"""The C++ library for every instruction set that this CPU has: all cases on the fastest, on the others those a test names.

`@pytest.mark.other_sets(rows=[0, 7])` keeps, on the others, only the cases whose `rows` is 0 or 7; without it all cases run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from moe_runtime.native.build import INSTRUCTION_SETS, Native, cpu_flags, load_native, usable_instruction_sets

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def native(request: pytest.FixtureRequest) -> Native:
    if request.param not in usable_instruction_sets(cpu_flags()):
        pytest.skip(f"this CPU has no {request.param}")
    found = load_native(request.param)
    if found.library is None:
        pytest.skip(str(found.problem))
    assert found.instructions == request.param
    return found


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    fastest = usable_instruction_sets(cpu_flags())[0]
    left_out = [item for item in items if not is_chosen(item, fastest)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def is_chosen(item: pytest.Item, fastest: str) -> bool:
    """An axis that the test does not have is an error; a value that it does not have only drops cases."""
    mark = item.get_closest_marker("other_sets")
    if mark is None:
        return True
    params = item.callspec.params  # type: ignore[attr-defined]
    unknown = mark.kwargs.keys() - params.keys()
    if unknown or mark.args:
        raise pytest.UsageError(f"{item.nodeid}: other_sets names no parameter of it: {sorted(unknown)}")
    return params["native"] == fastest or all(params[name] in kept for name, kept in mark.kwargs.items())
