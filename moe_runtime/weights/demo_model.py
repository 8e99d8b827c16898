"""The demo model: a real instruct language model as a real MoE checkpoint, built once into the user's cache.

    python -m moe_runtime.weights.demo_model [--force] [--stats]

A SmolLM2-135M-Instruct (Apache-2.0) is upcycled to the Mixtral architecture; see `demo_upcycle`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.config import user_cache_folder
from moe_runtime.errors import CapacityError, CheckpointError, MoeRuntimeError
from moe_runtime.weights.writing import build_folder, write_json, write_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moe_runtime.weights.demo_source import DenseModel
    from moe_runtime.weights.demo_upcycle import UpcycleConfig

NAME = "SmolLM2-MoE-8x135M-Instruct-v2"
"""A change of how the model is made changes the version in the name, so that nobody gets an old one."""
MANIFEST = "demo_model.json"
FREE_BYTES_NEEDED = 2 * 10**9


def models_folder() -> Path:
    """Where built models live."""
    return user_cache_folder() / "models"


def demo_model_path(progress: bool = True, force: bool = False) -> Path:
    """The demo model's folder, built first if it is absent, damaged or `force` is set.

    Takes about a minute the first time. Several processes may call it at once: one builds, the others wait.
    progress: show stages on standard error. Raises CheckpointError if it cannot be built, CapacityError if the disk is full.
    """
    target = models_folder() / NAME
    if not force and is_complete(target):
        return target
    with _progress_report(progress) as report:
        return build_once(target, lambda folder: _build_demo(folder, report), force)


def resolve_model(model: str) -> Path:
    """The folder meant by the `model` setting: the demo model's, built if need be, or the one named.

    Raises CheckpointError if there is no such folder or it has no config.json.
    """
    if model == "demo":
        return demo_model_path()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"model {model!r}: no such folder (give the folder of a checkpoint, or `demo`)")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"model {model!r}: {folder} is not a checkpoint, it has no config.json")
    return folder


def is_complete(folder: Path) -> bool:
    """Whether the folder holds every file its manifest names, each at its full size."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def build_once(target: Path, build: Callable[[Path], None], force: bool = False) -> Path:
    """Have `build` fill a folder beside `target`, then put it in place in one step.

    Under a lock that ends with the process, so a second builder waits and then finds the work done. `target` never exists
    in part: a build that died is swept away by the next one.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / f".{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for leftover in target.parent.glob(f".{target.name}.building-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            if not force and is_complete(target):
                return target
            free = shutil.disk_usage(target.parent).free
            if free < FREE_BYTES_NEEDED:
                raise CapacityError(
                    f"demo model: {target.parent} has {free / 1e9:.1f} GB free; {FREE_BYTES_NEEDED / 1e9:.0f} GB are"
                    " needed (set XDG_CACHE_HOME to a folder on a larger disk)"
                )
            build_folder(target, build)
    except OSError as error:
        raise CheckpointError(f"demo model: cannot build it in {target.parent}: {error}") from error
    return target


def _build_demo(folder: Path, report: Callable[[str, float], None]) -> None:
    from moe_runtime.weights import demo_source, demo_upcycle

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        report("Fetching SmolLM2-135M-Instruct", 0.0)
        gguf = demo_source.fetch_gguf(Path(scratch))
        report("Fetching SmolLM2-135M-Instruct", 1.0)
        report("Reading weights and tokenizer", 0.0)
        dense = demo_source.read_gguf(gguf)
        report("Reading weights and tokenizer", 1.0)
    build_from_dense(folder, dense, demo_upcycle.UpcycleConfig(), report)


def build_from_dense(
    folder: Path, dense: DenseModel, config: UpcycleConfig, report: Callable[[str, float], None]
) -> None:
    """Upcycle `dense` into an empty folder, manifest last."""
    from moe_runtime.weights import demo_upcycle
    from moe_runtime.weights.demo_text import SAMPLES

    report("Fitting routers", 0.0)
    states = demo_upcycle.moe_input_states(dense, SAMPLES)
    routers, load = [], []
    for layer, by_kind in enumerate(states):
        routers.append(demo_upcycle.router_rows(by_kind, config, layer))
        load.append(demo_upcycle.expert_load(by_kind, routers[-1], config.top_k))
        report("Fitting routers", (layer + 1) / len(states))
    states.clear()

    total = demo_upcycle.num_parameters(dense, config) * 2
    tensors = demo_upcycle.mixtral_tensors(dense, routers, config)
    for done in write_shards(folder, tensors, config.shard_bytes):
        report("Writing experts", done / total)
    write_json(folder / "config.json", demo_upcycle.mixtral_config(dense, config))
    demo_upcycle.write_tokenizer(folder, dense)
    (folder / "README.md").write_text(_MODEL_CARD, encoding="utf-8")
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    write_json(folder / MANIFEST, {"files": files, "load": load})


_MODEL_CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
SmolLM2-135M-Instruct (Apache-2.0), taken from its 4-bit GGUF form and upcycled to a mixture of 8 experts of which 2 compute each
token. Every expert is the original FFN plus random noise, and the routers follow clusters of the original's hidden states:
good for showing and testing expert parallelism, no better at answering than the model it was made from.
"""


@contextmanager
def _progress_report(show: bool) -> Iterator[Callable[[str, float], None]]:
    """A report function that draws one bar per stage on standard error."""
    if not show:
        yield lambda stage, fraction: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bars:

        def report(stage: str, fraction: float) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=1.0)
            bars.update(tasks[stage], completed=fraction)

        yield report


def load_table(folder: Path) -> Any:
    """A rich table of the experts' load per layer, and per kind of text in the middle layer.

    Measured on the built-in sample with the dense model's hidden states; percent of (token, expert) pairs.
    """
    from rich.table import Table

    load = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["load"]
    middle = len(load) // 2
    rows = [(f"layer {i}", by_kind["all"]) for i, by_kind in enumerate(load)]
    rows += [(f"layer {middle}, {kind}", shares) for kind, shares in load[middle].items() if kind != "all"]
    table = Table(title="Expert load, percent", box=None)
    for heading in ["", *(f"expert {e}" for e in range(len(rows[0][1]))), "max/mean"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, shares in rows:
        skew = max(shares) * len(shares)
        table.add_row(name, *(f"{100 * share:.1f}" for share in shares), f"{skew:.2f}")
    return table


def main(argv: list[str] | None = None) -> int:
    """Command line; prints the folder. Returns the exit status."""
    from rich.console import Console

    parser = argparse.ArgumentParser(prog="python -m moe_runtime.weights.demo_model", description=__doc__)
    parser.add_argument("--force", action="store_true", help="build it again even if it is there")
    parser.add_argument("--stats", action="store_true", help="print how the text sample loads the experts")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    args = parser.parse_args(argv)
    try:
        path = demo_model_path(progress=not args.quiet, force=args.force)
    except MoeRuntimeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if args.stats:
        Console(width=None if sys.stdout.isatty() else 120).print(load_table(path))
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
