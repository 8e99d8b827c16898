"""The support matrix: what every kernel may take on every target. One file, reviewed like code."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.errors import ConfigError
from moe_runtime.tools.kernel_report import INSTRUCTIONS, Report

if TYPE_CHECKING:
    from moe_runtime.tools.compile_worker import Row

FILE = Path(__file__).with_name("kernel_budgets.toml")
HEADER = """\
# The support matrix of the Triton kernels: for every case of compile_cases.py and every target, the budget of each kernel
# that it launches, or why it is excluded and what is used instead ("<reason>; fallback = <what>").
#   registers: most per thread (vector registers on AMD)   spills: most instructions to and from local memory (spilt vector
#   registers on AMD)   shared: most bytes of shared memory   needs: instructions that must be there (kernel_report.py)
# `python -m moe_runtime.tools.compile_check --update` adds what is missing and removes what is gone; it never changes a budget,
# lowers the count, or writes `needs` or `excluded`: those are for a person to change, and another to review.
"""
SLACK = 4
"""Registers that another Triton version may take more; budgets are rounded up to a multiple of 8 besides."""


@dataclass(frozen=True)
class Budget:
    """Limits of one kernel of one case on one target."""

    registers: int
    spills: int
    shared: int
    needs: tuple[str, ...] = ()

    @classmethod
    def of(cls, report: Report) -> Budget:
        """What a kernel as it is now keeps to."""
        registers = -(-(report.registers + SLACK) // 8) * 8
        # NVIDIA's largest number; AMD has 512.
        most = 255 if report.registers <= 255 else 512
        return cls(min(most, registers), report.spills, report.shared_bytes)

    def widened(self, other: Budget) -> Budget:
        """The larger limits of both."""
        return Budget(
            max(self.registers, other.registers),
            max(self.spills, other.spills),
            max(self.shared, other.shared),
            self.needs,
        )

    def violations(self, report: Report) -> list[str]:
        """What the kernel takes too much of, or lacks."""
        limits = (
            ("registers", report.registers, self.registers),
            ("spills", report.spills, self.spills),
            ("bytes of shared memory", report.shared_bytes, self.shared),
        )
        found = [f"{used} {what}, budget {limit}" for what, used, limit in limits if used > limit]
        found += [f"calls {name}, which is not linked" for name in report.unresolved]
        found += [f"no {name} instruction" for name in self.needs if name not in report.instructions]
        return found

    def dump(self) -> str:
        """As an inline table."""
        needs = ", ".join(f'"{name}"' for name in self.needs)
        text = f"registers = {self.registers}, spills = {self.spills}, shared = {self.shared}"
        return f"{{ {text}, needs = [{needs}] }}" if needs else f"{{ {text} }}"


@dataclass
class Matrix:
    """The file's contents."""

    supported: int
    """(case, kernel, target) that must be within budget; may only rise."""
    budgets: dict[tuple[str, str, str], Budget]
    """By (case, target, kernel)."""
    excluded: dict[tuple[str, str], str]
    """By (case, target): reason and fallback."""

    def check(self, rows: Iterable[Row], left_out: Collection[str] | None) -> list[str]:
        """What is against the matrix, a line each. `left_out`: the only cases without rows, taken as good; None: do not
        look for missing rows.
        """
        found, met = [], set()
        for row in rows:
            where = (
                f"{row.case} / {row.kernel} on {row.target}" if row.kernel else f"{row.case} on {row.target}"
            )
            key = (row.case, row.target, row.kernel)
            if row.report is None:
                found.append(f"{where}: does not compile: {row.error}")
            elif key not in self.budgets:
                found.append(f"{where}: has no budget in {FILE.name}; see --update")
            else:
                found += [f"{where}: {text}" for text in self.budgets[key].violations(row.report)]
                met.add(key)
        if left_out is not None:
            met |= {key for key in self.budgets if key[0] in left_out}
            gone = [key for key in self.budgets if key not in met]
            found += [
                f"{case} / {kernel} on {t}: has a budget, but was not launched" for case, t, kernel in gone
            ]
            if len(met) < self.supported:
                found.append(
                    f"{len(met)} kernels are supported, but {FILE.name} promises {self.supported}: that count may not fall"
                )
        return found

    def update(self, rows: Iterable[Row], others: Iterable[Row]) -> None:
        """Adds budgets for what has none and drops those of what is no longer launched.

        rows: complete, of the Triton in use. others: of another version; new budgets allow for them too.
        """
        present = {(row.case, row.target, row.kernel): row.report for row in rows if row.report is not None}
        kept = {key: budget for key, budget in self.budgets.items() if key in present}
        self.budgets = {key: kept.get(key) or Budget.of(report) for key, report in present.items()}
        for row in others:
            key = row.case, row.target, row.kernel
            if row.report is not None and key in self.budgets and key not in kept:
                self.budgets[key] = self.budgets[key].widened(Budget.of(row.report))
        self.supported = max(self.supported, len(self.budgets))

    def dump(self) -> str:
        """The file's text."""
        lines = [HEADER, f"supported = {self.supported}"]
        for case in dict.fromkeys(
            [case for case, _, _ in self.budgets] + [case for case, _ in self.excluded]
        ):
            lines.append(f'\n["{case}"]')
            lines += [
                f"{target}.{kernel} = {budget.dump()}"
                for (name, target, kernel), budget in self.budgets.items()
                if name == case
            ]
            lines += [
                f'{target}.excluded = "{why}"'
                for (name, target), why in self.excluded.items()
                if name == case
            ]
        return "\n".join(lines) + "\n"


def load(targets: Iterable[str], path: Path = FILE) -> Matrix:
    """Reads the file. Raises ConfigError naming the entry that is wrong."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    known = set(targets)
    matrix = Matrix(data.pop("supported", 0), {}, {})
    for case, by_target in data.items():
        for target, kernels in by_target.items():
            if target not in known:
                raise ConfigError(f"{path.name}: {case}: {target!r} is not one of {', '.join(sorted(known))}")
            for kernel, entry in kernels.items():
                where = f"{path.name}: {case}: {target}.{kernel}"
                if kernel == "excluded":
                    matrix.excluded[case, target] = _reason(entry, where)
                else:
                    matrix.budgets[case, target, kernel] = _budget(entry, where)
    return matrix


def _reason(text: Any, where: str) -> str:
    if not isinstance(text, str) or "; fallback = " not in text:
        raise ConfigError(f'{where}: must be text of the form "<reason>; fallback = <what>"')
    return text


def _budget(entry: Any, where: str) -> Budget:
    try:
        budget = Budget(**{**entry, "needs": tuple(entry.get("needs", ()))})
    except (TypeError, AttributeError) as e:
        raise ConfigError(
            f"{where}: {entry!r}: must have registers, spills, shared, and may have needs"
        ) from e
    unknown = set(budget.needs) - set(INSTRUCTIONS)
    if unknown:
        raise ConfigError(
            f"{where}: needs {sorted(unknown)}: known instructions are {', '.join(INSTRUCTIONS)}"
        )
    return budget
