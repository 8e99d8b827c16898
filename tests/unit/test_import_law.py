"""The import law of the design: layers, siblings and fences, read from the source with `ast`.

A new module belongs into `LAYERS` below, at the lowest number above everything that it imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LAYERS: list[tuple[int, str]] = [
    (0, "moe_runtime.errors"),
    (0, "moe_runtime.core"),
    (0, "moe_runtime.config"),
    (0, "moe_runtime.config_eplb"),
    (0, "moe_runtime.cli"),
    (0, "moe_runtime.cli_flags"),
    (0, "moe_runtime.cli_peers"),
    (0, "moe_runtime.int4"),
    (0, "moe_runtime.quantization"),
    (0, "moe_runtime.whole_file"),
    (0, "moe_runtime.triton_support.*"),
    (0, "moe_runtime.native.*"),
    (0, "moe_runtime.profiling.*"),
    (1, "moe_runtime.watchdog"),
    (1, "moe_runtime.topology"),
    (2, "moe_runtime.peer_link"),
    (1, "moe_runtime.layers.*"),
    (1, "moe_runtime.attention.*"),
    (1, "moe_runtime.experts.*"),
    (1, "moe_runtime.dispatch.*"),
    (1, "moe_runtime.placement.*"),
    (1, "moe_runtime.sampling.*"),
    (2, "moe_runtime.moe"),
    (2, "moe_runtime.engine.messages"),
    (2, "moe_runtime.engine.outputs"),
    (2, "moe_runtime.engine.scheduler"),
    (2, "moe_runtime.engine.block_manager"),
    (2, "moe_runtime.engine.radix_tree"),
    (2, "moe_runtime.engine.control"),
    (2, "moe_runtime.engine.overlap"),
    (2, "moe_runtime.engine.graph_sizes"),
    (3, "moe_runtime.replicas"),
    (3, "moe_runtime.models.*"),
    (3, "moe_runtime.weights.*"),
    (4, "moe_runtime.engine.graphs"),
    (4, "moe_runtime.engine.model_runner"),
    (4, "moe_runtime.backends"),
    (4, "moe_runtime.backends_dispatch"),
    (5, "moe_runtime.engine.*"),
    (5, "moe_runtime"),  # the public front door, which loads the engine's classes on demand
    (6, "moe_runtime.server.*"),
    (7, "moe_runtime.tools.*"),
    (7, "launch.*"),
    (7, "benchmarks.*"),
    (7, "tests.*"),
]
"""(layer, module or `package.*`); the first match counts. An import must go to a lower layer, or stay in its own package."""

ABOVE: dict[str, tuple[str, ...]] = {
    "moe_runtime.weights": ("moe_runtime.models",),  # weights fill what models declare
    "moe_runtime.attention": (
        "moe_runtime.layers",
    ),  # rotation belongs to attention, its angles to the layers
    "moe_runtime.experts": ("moe_runtime.layers",),  # an expert is an MLP: the same activation functions
    "moe_runtime.backends_dispatch": ("moe_runtime.backends",),
    "moe_runtime": ("moe_runtime.engine",),
}
"""Packages that may import others of their own layer, which may not import them."""

SEAMS = ("attention", "experts", "dispatch")
"""Packages of implementations behind a base.py: one implementation never imports another."""

HELPERS: dict[str, tuple[str, ...]] = {
    "attention": ("base", "kv_cache"),
    "experts": ("base", "router", "triton_config"),
    "dispatch": (
        "base",
        "grouping",
        "triton_grouping",
        "rows",
        "row_bytes",
        "peer_store",
        "combining",
        "waiting",
        "mailbox",
        "transfer",
        "heap",
        "heap_shm",
        "heap_delay",
        "nvshmem_device",
        "all_to_all",
        "collective_fixed",
    ),
}
"""Modules of those packages that any implementation there may import."""

SPLIT: dict[str, tuple[str, ...]] = {"dispatch": ("triton_one_sided",)}
"""Implementations whose files, which carry its name, also import one another."""

FENCES: dict[str, tuple[str, ...]] = {
    "torch.distributed": (
        "moe_runtime.topology", "moe_runtime.engine.control", "moe_runtime.dispatch.", "launch.quiet_torchrun", "tests.",
        "benchmarks.",
    ),
    "transformers": (
        "moe_runtime.models.", "moe_runtime.weights.", "moe_runtime.engine.tokenizer", "moe_runtime.engine.worker",
        "moe_runtime.engine.async_llm", "moe_runtime.server.", "moe_runtime.tools.", "tests.", "benchmarks.",
    ),
    "fastapi": ("moe_runtime.server.", "tests."),
    "uvicorn": ("moe_runtime.server.", "tests."),
    "nvshmem": ("moe_runtime.dispatch.heap_nvshmem",),
    "zmq": ("moe_runtime.engine.rank_link", "moe_runtime.engine.frontend_link", "tests."),
    "gguf": ("moe_runtime.weights.demo_source", "tests."),
    "pickle": (),
    "torch.load": (
        "moe_runtime.weights.deepspeed_files", "moe_runtime.placement.format_arrays",
        "tests.unit.test_placement_formats", "tests.unit.test_placement_hostile_files",
    ),
    "marshal": (),
    "shelve": (),
    "dill": (),
}  # fmt: skip
"""Third-party or dangerous names, and the only modules (or packages, with a dot at the end) that may use them."""


@dataclass(frozen=True)
class Use:
    """A dotted name that a module imports or, for `torch.x`, reads."""

    name: str
    line: int
    type_checking_only: bool


def layer_of(module: str) -> int | None:
    for layer, pattern in LAYERS:
        package = pattern.removesuffix(".*")
        if module == package or (pattern.endswith(".*") and module.startswith(package + ".")):
            return layer
    return None


def uses(source: str) -> Iterator[Use]:
    """Everything imported, also inside functions and `if TYPE_CHECKING:`; relative imports start with a dot."""
    tree = ast.parse(source)
    for node, guarded in _walk(tree, guarded=False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Use(alias.name, node.lineno, guarded)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                yield Use(f"{base}.{alias.name}", node.lineno, guarded)
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
        ):
            yield Use(f"torch.{node.attr}", node.lineno, guarded)


def _walk(node: ast.AST, guarded: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, guarded
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _walk(child, True)
        for child in node.orelse:
            yield from _walk(child, guarded)
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, guarded)


def violations(module: str, source: str, modules: set[str]) -> list[str]:
    """What `module` does against the law. `modules`: every module there is, to tell a module from a name in it."""
    own_layer = layer_of(module)
    if own_layer is None:
        return [f"{module}: in no layer; add it to LAYERS in {Path(__file__).name}"]
    found = []
    for use in uses(source):
        problem = _relative(use) or _fenced(module, use)
        target = _module_of(use.name, modules)
        if target is not None and target != module:
            problem = problem or _layering(module, own_layer, target, use)
        if problem:
            found.append(f"{module}:{use.line}: {problem}")
    return list(dict.fromkeys(found))


def _module_of(name: str, modules: set[str]) -> str | None:
    """The project's own module that an imported name is or lies in."""
    if name.partition(".")[0] not in {m.partition(".")[0] for m in modules}:
        return None
    while name not in modules:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def _relative(use: Use) -> str | None:
    return f"relative import {use.name}" if use.name.startswith(".") else None


def _fenced(module: str, use: Use) -> str | None:
    for name, allowed in FENCES.items():
        hit = use.name == name or use.name.startswith(name + ".")
        inside = any(module == a or (a.endswith(".") and module.startswith(a)) for a in allowed)
        if hit and not inside and not use.type_checking_only:
            return f"uses {name}, which is allowed only in {', '.join(allowed) or 'no module'}"
    return None


def _package(module: str) -> str:
    """`moe_runtime.dispatch` for its modules; a module that lies in no package is its own."""
    parts = module.split(".")
    return ".".join(parts[:2]) if len(parts) > 2 else module


def _layering(module: str, own_layer: int, target: str, use: Use) -> str | None:
    if use.name == "moe_runtime.__version__":
        return None
    layer = layer_of(target)
    if layer is None:
        return f"imports {target}, which is in no layer; add it to LAYERS in {Path(__file__).name}"
    if _package(module) == _package(target) and layer <= own_layer:
        return _sibling_implementation(module, target)
    if layer == own_layer and (own_layer in (0, 7) or _package(target) in ABOVE.get(_package(module), ())):
        return None
    if layer >= own_layer:
        return f"layer {own_layer} imports {target} of layer {layer}"
    return None


def _sibling_implementation(module: str, target: str) -> str | None:
    package = _package(module).removeprefix("moe_runtime.")
    name = target.rpartition(".")[2]
    own = module.rpartition(".")[2]
    if package not in SEAMS or target.count(".") < 2 or name in HELPERS[package]:
        return None
    # An implementation may be split over files that carry its name: one_sided, one_sided_kernels.
    if name.startswith(own) or own.startswith(name):
        return None
    if any(own.startswith(stem) and name.startswith(stem) for stem in SPLIT.get(package, ())):
        return None
    return (
        f"imports {target}, a sibling implementation; what they share belongs into a helper listed in HELPERS"
    )


def source_files() -> dict[str, Path]:
    """Module name -> file, of everything the law covers."""
    files = {}
    for top in ("moe_runtime", "launch", "benchmarks", "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def test_the_law_holds() -> None:
    files = source_files()
    assert len(files) > 10, "the sources are not where this test looks"
    found = [
        problem
        for module, path in files.items()
        for problem in violations(module, path.read_text(encoding="utf-8"), set(files))
    ]
    assert not found, "\n".join(found)


def test_the_tables_name_no_module_that_is_gone() -> None:
    files = set(source_files())
    listed = [pattern for _, pattern in LAYERS if not pattern.endswith(".*")]
    listed += [f"moe_runtime.{package}.{helper}" for package, names in HELPERS.items() for helper in names]
    listed += [a for allowed in FENCES.values() for a in allowed if not a.endswith(".")]
    assert [name for name in listed if name not in files] == []


MODULES = {
    "moe_runtime", "moe_runtime.core", "moe_runtime.config", "moe_runtime.topology", "moe_runtime.dispatch", "moe_runtime.dispatch.base",
    "moe_runtime.dispatch.local", "moe_runtime.dispatch.collective", "moe_runtime.dispatch.collective_wire", "moe_runtime.experts",
    "moe_runtime.experts.base", "moe_runtime.layers.norm", "moe_runtime.moe", "moe_runtime.models.decoder", "moe_runtime.engine.engine",
    "moe_runtime.weights.loader", "moe_runtime.engine.scheduler", "moe_runtime.server.app", "moe_runtime.tools.demo_model", "moe_runtime.tools.demo_text", "launch.serve",
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "source", "part"),
    [
        ("moe_runtime.core", "from moe_runtime.topology import x", "layer 0 imports"),
        ("moe_runtime.dispatch.local", "import moe_runtime.experts.base", "layer 1 imports"),
        (
            "moe_runtime.dispatch.local",
            "from moe_runtime.experts import base",
            "moe_runtime.experts.base of layer 1",
        ),
        (
            "moe_runtime.dispatch.local",
            "from moe_runtime.dispatch import collective",
            "sibling implementation",
        ),
        (
            "moe_runtime.dispatch.local",
            "from moe_runtime.dispatch.collective import A",
            "sibling implementation",
        ),
        ("moe_runtime.topology", "from moe_runtime.layers.norm import f", "layer 1 imports"),
        (
            "moe_runtime.models.decoder",
            "def f():\n    from moe_runtime.engine.engine import E",
            "decoder:2: layer 3",
        ),
        ("moe_runtime.engine.scheduler", "from moe_runtime.engine.engine import E", "layer 2 imports"),
        ("moe_runtime.engine.engine", "from moe_runtime.server.app import make", "layer 5 imports"),
        ("moe_runtime.server.app", "from launch.serve import main", "layer 6 imports"),
        ("moe_runtime.models.decoder", "from moe_runtime.weights.loader import load", "layer 3 imports"),
        ("moe_runtime.server.app", "import moe_runtime.tools.demo_model", "layer 6 imports"),
        ("moe_runtime.engine.engine", "from moe_runtime import LLM", "imports moe_runtime of layer 5"),
        ("moe_runtime.core", "import moe_runtime", "imports moe_runtime of layer 5"),
        ("moe_runtime.core", "from .config import x", "relative"),
        ("moe_runtime.core", "from . import config", "relative"),
        ("moe_runtime.models.decoder", "import torch.distributed as dist", "uses torch.distributed"),
        ("moe_runtime.models.decoder", "from torch import distributed", "uses torch.distributed"),
        (
            "moe_runtime.models.decoder",
            "import torch\nx = torch.distributed.get_rank()",
            "uses torch.distributed",
        ),
        ("moe_runtime.experts.base", "from transformers import AutoConfig", "uses transformers"),
        ("moe_runtime.tools.demo_model", "import pickle", "uses pickle"),
        ("moe_runtime.tools.demo_model", "import torch\ntorch.load('x')", "uses torch.load"),
        ("moe_runtime.tools.demo_model", "from torch import load", "uses torch.load"),
        ("moe_runtime.novelty", "", "add it to LAYERS"),
        (
            "moe_runtime.dispatch.local",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from moe_runtime.experts.base import K",
            "layer 1 imports",
        ),
    ],
)
def test_the_law_can_be_broken(module: str, source: str, part: str) -> None:
    found = violations(module, source, MODULES)
    assert len(found) == 1
    assert part in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "moe_runtime.dispatch.local",
            "from moe_runtime.dispatch.base import A\nfrom moe_runtime.core import B",
        ),
        ("moe_runtime.dispatch.collective", "from moe_runtime.dispatch.collective_wire import A"),
        ("moe_runtime.dispatch.collective", "import torch\nimport torch.distributed as dist\ndist.barrier()"),
        (
            "moe_runtime.moe",
            "from moe_runtime.dispatch.base import A\nfrom moe_runtime.experts.base import B",
        ),
        ("moe_runtime.engine.engine", "from moe_runtime.engine.scheduler import S"),
        (
            "moe_runtime.tools.demo_model",
            "from moe_runtime.tools.demo_text import T\nfrom moe_runtime import __version__",
        ),
        ("moe_runtime.server.app", "import moe_runtime\nfrom moe_runtime.engine.engine import E"),
        ("moe_runtime.weights.loader", "from moe_runtime.models.decoder import D"),
        ("launch.serve", "from moe_runtime import LLM\nfrom moe_runtime.server.app import make"),
        (
            "moe_runtime.models.decoder",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch.distributed",
        ),
        ("moe_runtime.core", "import torch\ntorch.loads = 1\nimport transformersx"),
    ],
)
def test_what_the_law_allows(module: str, source: str) -> None:
    assert violations(module, source, MODULES) == []
