"""Which batch sizes decode steps are recorded for as CUDA graphs, or why none."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from moe_runtime.errors import ConfigError

if TYPE_CHECKING:
    from moe_runtime.config import EngineConfig

LARGEST = 512
"""Largest size recorded unless asked for: beyond it launching from Python is no longer what a step waits for."""


class GraphSizes(NamedTuple):
    """Sizes in tokens a rank, ascending; empty: every step is launched from Python."""

    sizes: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        if not self.sizes:
            return "off"
        return (
            f"{len(self.sizes)} sizes up to {self.sizes[-1]}" if len(self.sizes) > 1 else f"{self.sizes[0]}"
        )


class Parts(NamedTuple):
    """What was chosen for the parts of a step; names as in backends.py."""

    device_type: str
    attention: str
    experts: str
    overlap: str
    dispatch_tokens: int
    """Most tokens a rank that the dispatcher sends without the host's help."""


def default_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, multiples of 8 up to 256, then of 16, as vLLM has them; the last is `largest`."""
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, largest, 16)]
    return (*takewhile(lambda size: size < largest, steps), largest)


def choose_sizes(config: EngineConfig, parts: Parts) -> GraphSizes:
    """The same on all ranks, since it depends on what all know alike.

    Raises ConfigError if sizes are asked for where none can be recorded, with the reason.
    """
    asked = parse_sizes(config)
    limit = config.cuda_graph_max_size
    name = "cuda_graph_sizes" if asked is not None else "cuda_graph_max_size"
    wanted = asked is not None or limit is not None
    if config.enforce_eager:
        if wanted:
            raise ConfigError(f"{name} asks for CUDA graphs, enforce_eager for none: give one of them")
        return GraphSizes((), "enforce_eager")
    problem = _problem(config, parts)
    if problem is not None:
        if wanted:
            raise ConfigError(f"{name}: no CUDA graph can be recorded: {problem}")
        return GraphSizes((), problem)
    most = min(LARGEST, parts.dispatch_tokens) if limit is None else limit
    if asked is None:
        asked = default_sizes(min(most, config.max_num_seqs, config.max_num_batched_tokens))
    elif limit is not None:
        asked = tuple(size for size in asked if size <= limit)
    if not asked or asked[-1] > parts.dispatch_tokens:
        raise ConfigError(
            f"{name}: sizes {', '.join(map(str, asked)) or 'none'}; the dispatcher works without the host for at most"
            f" {parts.dispatch_tokens} tokens a rank, and at least one size must be left"
        )
    return GraphSizes(asked, "asked for" if wanted else "auto")


def parse_sizes(config: EngineConfig) -> tuple[int, ...] | None:
    """`cuda_graph_sizes` in ascending order. Raises ConfigError unless they are numbers from 1 to 65536."""
    text = config.cuda_graph_sizes
    if text is None:
        return None
    words = text.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() and 1 <= int(word) <= 65536 for word in words):
        raise ConfigError(
            f"cuda_graph_sizes={text!r}: must be numbers of tokens from 1 to 65536, as in 1,2,4,8"
        )
    return tuple(sorted({int(word) for word in words}))


def _problem(config: EngineConfig, parts: Parts) -> str | None:
    if parts.device_type != "cuda":
        return f"CUDA graphs need a GPU, the ranks run on {parts.device_type}"
    for what, name in (("attention_backend", parts.attention), ("moe_backend", parts.experts)):
        if name != "triton":
            return f"{what} {name} reads sizes on the host"
    if config.deterministic:
        return "--deterministic cuts attention by the sequences' lengths on the host"
    if config.enable_eplb:
        return "--enable-eplb changes where experts are, which a graph would not notice"
    if parts.overlap not in ("off", "auto"):
        return f"overlap {parts.overlap} cuts steps on the host"
    return None
