"""From what a caller asks to what a rank can run: prompts to ids, checks against the model, seeds, defaults."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from moe_runtime.core import SamplingParams
from moe_runtime.engine.messages import Submit
from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.errors import CheckpointError, PromptTooLongError, RequestError


class PromptDict(TypedDict, total=False):
    """A prompt as text or as ids. With both, the ids count and the text is only handed back."""

    prompt: str
    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | PromptDict


@dataclass(frozen=True)
class ModelLimits:
    """What requests are checked against."""

    max_model_len: int
    vocab_size: int


@dataclass(frozen=True)
class CheckedRequest:
    """A request that the ranks will take."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    """`seed` is set. `max_tokens` may be None: the rank knows how much its cache can hold."""
    max_output_tokens: int
    """Of one completion."""

    def submission(self, index: int, request_id: str, eos_token_ids: list[int]) -> Submit:
        """The message that starts completion `index`. Stop strings stay here: ranks know no text."""
        assert self.params.seed is not None
        sampling = msgspec.structs.replace(
            self.params, n=1, seed=completion_seed(self.params.seed, index), stop=None
        )
        return Submit(request_id, self.prompt_token_ids, sampling, eos_token_ids)


def check_request(
    prompt: Prompt, params: SamplingParams, limits: ModelLimits, tokenizer: Tokenizer | None, seed: int
) -> CheckedRequest:
    """Tokenize and check. `seed` is used if the params have none. Raises RequestError with what is allowed.

    `max_tokens` larger than the room behind the prompt is cut to it; such a completion ends with `length`.
    """
    text, ids = _prompt_ids(prompt, tokenizer, limits.max_model_len)
    _check_ids(ids, limits.vocab_size, "prompt")
    if not ids:
        raise RequestError("the prompt is empty: at least one token is needed", "prompt")
    room = limits.max_model_len - len(ids)
    if room < 1:
        raise PromptTooLongError(
            f"the prompt has {len(ids)} tokens, but prompt and output together may have at most "
            f"{limits.max_model_len} (max_model_len), at least one of them output",
            "prompt",
        )
    _check_ids(sorted(params.logit_bias or {}), limits.vocab_size, "logit_bias")
    _check_ids(params.stop_token_ids or [], limits.vocab_size, "stop_token_ids")
    if params.min_tokens > room:
        raise RequestError(
            f"min_tokens={params.min_tokens}: after a prompt of {len(ids)} tokens there is room for {room}",
            "min_tokens",
        )
    if tokenizer is None and params.stop_strings:
        raise RequestError(
            "stop strings need a tokenizer; this engine runs without (skip_tokenizer_init)", "stop"
        )
    max_tokens = None if params.max_tokens is None else min(params.max_tokens, room)
    params = msgspec.structs.replace(
        params, max_tokens=max_tokens, seed=seed if params.seed is None else params.seed
    )
    return CheckedRequest(text, ids, params, room if max_tokens is None else max_tokens)


def completion_seed(seed: int, index: int) -> int:
    """Seed of completion `index` of a request: its own for each, that of the request for the first."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _prompt_ids(
    prompt: Prompt, tokenizer: Tokenizer | None, max_model_len: int
) -> tuple[str | None, list[int]]:
    if isinstance(prompt, str):
        prompt = PromptDict(prompt=prompt)
    if not isinstance(prompt, Mapping):
        return None, _as_ids(prompt)
    unknown = sorted(prompt.keys() - {"prompt", "prompt_token_ids"})
    if unknown or not prompt:
        raise RequestError(
            f"a prompt has the keys `prompt` or `prompt_token_ids`, not {unknown or 'none'}", "prompt"
        )
    text = prompt.get("prompt")
    if not isinstance(text, str | None):
        raise RequestError(f"a prompt's text must be a string, not {type(text).__name__}", "prompt")
    if "prompt_token_ids" in prompt:
        return text, _as_ids(prompt["prompt_token_ids"])
    if tokenizer is None:
        raise RequestError(
            "a text prompt needs a tokenizer, and this engine runs without (skip_tokenizer_init): send token ids",
            "prompt",
        )
    return text, tokenizer.encode(text or "", at_most=max_model_len)


def _as_ids(ids: Any) -> list[int]:
    try:
        if isinstance(ids, str | bytes) or any(isinstance(i, bool) for i in ids):
            raise TypeError
        return [operator.index(i) for i in ids]
    except TypeError:
        raise RequestError(
            "a prompt must be text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`",
            "prompt",
        ) from None


def _check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise RequestError(
            f"{param}: token id {wrong} is not in the vocabulary: 0 to {vocab_size - 1}", param
        )


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint says about how it wants to be used."""

    eos_token_ids: list[int]
    sampling: dict[str, Any]
    """Arguments for SamplingParams; only those the checkpoint gives."""


_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_generation_defaults(folder: str, tokenizer: Tokenizer | None) -> GenerationDefaults:
    """From generation_config.json, with the end-of-sequence ids of config.json and the tokenizer to fall back on.

    `do_sample: false` means temperature 0. Raises CheckpointError if a file is damaged.
    """
    generation = _read_json(Path(folder) / "generation_config.json")
    model = _read_json(Path(folder) / "config.json")
    sampling = {name: generation[name] for name in _SAMPLING_FIELDS if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        sampling["temperature"] = 0.0
    if generation.get("max_new_tokens") is not None:
        sampling["max_tokens"] = generation["max_new_tokens"]
    try:
        SamplingParams(**sampling)
    except RequestError as exc:
        raise CheckpointError(f"{folder}/generation_config.json: {exc}") from exc
    eos: Any = generation.get("eos_token_id", model.get("eos_token_id"))
    if eos is None and tokenizer is not None:
        eos = tokenizer.hf.eos_token_id
    ids = [] if eos is None else list(eos) if isinstance(eos, list) else [eos]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(f"{folder}: eos_token_id={eos!r} must be a token id or a list of them")
    return GenerationDefaults(ids, sampling)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{path}: not readable as JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return content
