"""Fields that clients are known to send and this server does not act on, each with the reason.

A request may contain fields of its model (protocol.py), fields of `HARMLESS`, and fields of `REFUSED` as long as
they hold a value that asks for nothing. Everything else is an error that names the field: nothing is ignored silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_runtime.server.errors import ApiError, invalid

HARMLESS: dict[str, str] = {
    "user": "a label for abuse monitoring; it does not change the answer",
    "metadata": "labels for stored completions; nothing is stored",
    "store": "nothing is stored, whichever value",
    "service_tier": "there is one tier",
    "safety_identifier": "a label for abuse monitoring; it does not change the answer",
    "prompt_cache_key": "a routing hint; equal prompts share their cache without it",
    "prompt_cache_retention": "a hint; cached prompts stay until the room is needed",
    "parallel_tool_calls": "says how tools are called, and requests with tools are refused",
}


@dataclass(frozen=True)
class Refusal:
    """Why a known field cannot be honoured."""

    why: str
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing, beside null, [] and {}."""
    status: int = 400
    """501 where a whole feature is missing, 400 where this one field is."""


def _feature(why: str, *neutral: Any) -> Refusal:
    return Refusal(why, neutral, status=501)


_GRAMMAR = _feature("output constrained by a schema, regular expression or grammar is not supported")
_NO_TOOLS = _feature("tool calling is not supported", "none", "auto")
_NO_AUDIO = _feature("only text is supported")

REFUSED: dict[str, Refusal] = {
    "tools": _NO_TOOLS,
    "tool_choice": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "function_call": _NO_TOOLS,
    "response_format": _feature("only {'type': 'text'} is supported", {"type": "text"}),
    "structured_outputs": _GRAMMAR,
    "guided_json": _GRAMMAR,
    "guided_regex": _GRAMMAR,
    "guided_choice": _GRAMMAR,
    "guided_grammar": _GRAMMAR,
    "json_schema": _GRAMMAR,
    "regex": _GRAMMAR,
    "ebnf": _GRAMMAR,
    "audio": _NO_AUDIO,
    "modalities": _feature("only text is supported", ["text"]),
    "mm_processor_kwargs": _NO_AUDIO,
    "lora_path": _feature("LoRA adapters are not supported"),
    "web_search_options": _feature("web search is not supported"),
    "documents": _feature("retrieval templates are not supported"),
    "prediction": _feature("predicted outputs are not supported"),
    "kv_transfer_params": _feature("disaggregated prefill is not supported"),
    "logits_processors": _feature("custom logit processors are not supported"),
    "custom_logit_processor": _feature("custom logit processors are not supported"),
    "use_beam_search": _feature("beam search is not supported", False),
    "reasoning_effort": Refusal("give the model's own switch in chat_template_kwargs"),
    "thinking_token_budget": Refusal("there is no budget for reasoning; use max_tokens"),
    "include_reasoning": Refusal("reasoning is not split from the answer", (True,)),
    "separate_reasoning": Refusal("reasoning is not split from the answer", (False,)),
    "verbosity": Refusal("models served here have no such switch"),
    "chat_template": Refusal("templates are set when the server starts (--chat-template)"),
    "best_of": Refusal("only best_of equal to n is possible: all n completions are returned", (1,)),
    "suffix": Refusal("insertion is not supported", ("",)),
    "prompt_logprobs": Refusal("logprobs are given for generated tokens only", (False,)),
    "logprob_token_ids": Refusal("use top_logprobs"),
    "return_tokens_as_token_ids": Refusal("use return_token_ids", (False,)),
    "return_hidden_states": Refusal("hidden states are not returned", (False,)),
    "return_routed_experts": Refusal("routes are not returned", (False,)),
    "return_meta_info": Refusal("use stream_options.include_usage and return_token_ids", (False,)),
    "allowed_token_ids": Refusal("use logit_bias"),
    "bad_words": Refusal("use logit_bias with -100"),
    "length_penalty": Refusal("it belongs to beam search, which is not supported", (1, 1.0)),
    "early_stopping": Refusal("it belongs to beam search, which is not supported", (False,)),
    "spaces_between_special_tokens": Refusal("text is decoded as the tokenizer defines", (True,)),
    "truncate_prompt_tokens": Refusal("prompts are never cut; one too long is an error"),
    "stop_regex": Refusal("use stop"),
    "no_stop_trim": Refusal("use include_stop_str_in_output", (False,)),
    "priority": Refusal("requests are served in order of arrival", (0,)),
    "cache_salt": Refusal("the prefix cache is shared by all clients; start the server without it"),
    "extra_key": Refusal("the prefix cache is shared by all clients; start the server without it"),
    "input_ids": Refusal("send token ids as `prompt` to /v1/completions"),
    "prompt_embeds": Refusal("prompts are text or token ids"),
    "data_parallel_rank": Refusal("use routed_dp_rank"),
    "request_id": Refusal("use the header X-Request-Id"),
    "rid": Refusal("use the header X-Request-Id"),
    "session_params": Refusal("sessions are not supported; equal prefixes are reused without them"),
    "session_id": Refusal("sessions are not supported; equal prefixes are reused without them"),
    "stream_interval": Refusal("every token is sent at once", (1,)),
    "vllm_xargs": Refusal("there is nothing that would read it"),
    "custom_params": Refusal("there is nothing that would read it"),
}


def check_fields(data: Mapping[str, Any], known: Iterable[str], where: str = "") -> None:
    """Raise ApiError for the first field of `data` that is neither known, harmless, nor refused-but-neutral.

    `where` is the path of `data` in the request, ending in a dot, for nested objects.
    """
    names = set(known)
    for name, value in data.items():
        if name in names or (not where and name in HARMLESS):
            continue
        refusal = REFUSED.get(name) if not where else None
        if refusal is None:
            near = difflib.get_close_matches(name, sorted(names), n=1)
            hint = f"; did you mean `{near[0]}`?" if near else f"; allowed are {', '.join(sorted(names))}"
            raise invalid(f"unknown field `{where}{name}`{hint}", where + name, "unknown_parameter")
        if not _asks_nothing(name, value, data, refusal):
            raise ApiError(
                refusal.status,
                f"`{name}` is not supported: {refusal.why}",
                param=name,
                code="unsupported_parameter",
            )


def drop_unread(data: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """`data` without the fields that `check_fields` let pass and that no model has."""
    names = set(known)
    return {name: value for name, value in data.items() if name in names}


def _asks_nothing(name: str, value: Any, data: Mapping[str, Any], refusal: Refusal) -> bool:
    if value is None or value == [] or value == {}:
        return True
    if name == "best_of" and value == data.get("n"):
        return True
    # 1 == True in Python, so the types are compared as well.
    return any(value == ok and type(value) is type(ok) for ok in refusal.neutral)
