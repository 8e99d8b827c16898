"""Requests as the server reads them: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from moe_runtime.engine.outputs import Logprob
from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.errors import RequestError
from moe_runtime.server.errors import ApiError, as_api_error
from moe_runtime.server.fields import HARMLESS, REFUSED
from moe_runtime.server.parsing import parse
from moe_runtime.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from moe_runtime.server.token_text import CompletionLogprobsWriter, TokenTexts
from tests.helpers.tiny_tokenizer import build_tokenizer, byte_fallback

USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"messages": [USER]}


def refused(model: Any, data: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(model, data)
    return caught.value


def test_defaults_of_the_model_apply_only_where_the_client_says_nothing() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_tokens": 5}
    params = parse(ChatRequest, CHAT | {"top_k": 3, "top_p": None}).to_sampling_params(defaults)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 3, 0.9)
    assert params.max_tokens is None, "a chat may use the whole context"
    plain = parse(CompletionRequest, {"prompt": "x"}).to_sampling_params({})
    assert (plain.temperature, plain.max_tokens, plain.logprobs) == (1.0, 16, None)


def test_every_sampling_field_reaches_the_params(seed: int) -> None:
    draw = random.Random(seed)
    fields = {
        "temperature": draw.uniform(0, 2), "top_p": draw.uniform(0.1, 1), "top_k": draw.randint(1, 50), "min_p": draw.random(),
        "repetition_penalty": draw.uniform(0.5, 2), "presence_penalty": draw.uniform(-2, 2), "seed": draw.getrandbits(40),
        "frequency_penalty": draw.uniform(-2, 2), "n": draw.randint(1, 9), "max_tokens": draw.randint(50, 99),
        "min_tokens": draw.randint(0, 50), "stop": ["a", "b"], "stop_token_ids": [3, 4], "ignore_eos": True,
        "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    for model, data in ((ChatRequest, CHAT), (CompletionRequest, {"prompt": [1, 2]})):
        params = parse(model, data | fields).to_sampling_params({"temperature": 9.0})
        assert {name: getattr(params, name) for name in fields} == fields


def test_logit_bias_has_string_keys_in_json() -> None:
    params = parse(ChatRequest, CHAT | {"logit_bias": {"17": -100, "0": 1.5}}).to_sampling_params({})
    assert params.logit_bias == {17: -100.0, 0: 1.5}
    for wrong in ({"x": 1}, {"-1": 1}, {"3": "1"}, {"3": True}, [1], {"²": 1}):
        assert refused(ChatRequest, CHAT | {"logit_bias": wrong}).param == "logit_bias"


def test_limits_of_a_chat_have_two_names() -> None:
    assert parse(ChatRequest, CHAT | {"max_completion_tokens": 7}).to_sampling_params({}).max_tokens == 7
    both = {"max_completion_tokens": 7, "max_tokens": 8}
    assert refused(ChatRequest, CHAT | both).param == "max_tokens"
    assert "max_completion_tokens" in refused(CompletionRequest, {"prompt": "x"} | both).message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
    ],
)
def test_logprobs_of_chats(fields: dict[str, Any], expected: int | None) -> None:
    assert parse(ChatRequest, CHAT | fields).to_sampling_params({}).logprobs == expected


def test_top_logprobs_need_logprobs() -> None:
    assert refused(ChatRequest, CHAT | {"top_logprobs": 4}).param == "top_logprobs"
    nothing = parse(ChatRequest, CHAT | {"logprobs": False, "top_logprobs": 0})
    assert nothing.to_sampling_params({}).logprobs is None


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 21, "logprobs": True},
        {"top_logprobs": -1, "logprobs": True},
        {"max_completion_tokens": 0},
    ],
)
def test_errors_name_the_field_as_the_client_does(fields: dict[str, Any]) -> None:
    name = next(iter(fields))
    with pytest.raises(RequestError, match=f"^{name}={fields[name]}: ") as caught:
        parse(ChatRequest, CHAT | fields).to_sampling_params({})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"temperature": 2.0}, True), ({"temperature": -0.1}, False), ({"top_p": 1.0}, True), ({"top_p": 0.0}, False),
        ({"top_p": 1.01}, False), ({"top_k": -1}, True), ({"top_k": 0}, True), ({"top_k": -2}, False), ({"min_p": 1.0}, True),
        ({"min_p": 1.1}, False), ({"repetition_penalty": 0.0}, False), ({"presence_penalty": -2.0}, True),
        ({"presence_penalty": 2.1}, False), ({"frequency_penalty": -2.1}, False), ({"logit_bias": {"5": 100}}, True),
        ({"logit_bias": {"5": 100.5}}, False), ({"seed": -(2**63)}, True), ({"seed": 2**63}, False), ({"n": 0}, False),
        ({"n": 129}, False), ({"stop": list("abcde")}, True), ({"stop": []}, True), ({"stop": ""}, False),
        ({"stop": ["a", ""]}, False), ({"max_tokens": 0}, False), ({"min_tokens": 3, "max_tokens": 2}, False),
        ({"stop_token_ids": [-1]}, False), ({"temperature": None, "n": None, "stop": None, "seed": None}, True),
    ],
)  # fmt: skip
def test_ranges_are_those_of_openai_and_vllm(fields: dict[str, Any], allowed: bool) -> None:
    for model, data in ((ChatRequest, CHAT), (CompletionRequest, {"prompt": [1]})):
        request = parse(model, data | fields)
        if allowed:
            request.to_sampling_params({})
            continue
        with pytest.raises(RequestError) as caught:
            request.to_sampling_params({})
        assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_harmless_fields_pass(name: str) -> None:
    parse(ChatRequest, CHAT | {name: "anything"})
    parse(CompletionRequest, {"prompt": "x", name: {"a": 1}})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_known_fields_without_support_are_refused_by_name_but_may_be_neutral(name: str) -> None:
    for neutral in (None, [], {}, *REFUSED[name].neutral):
        parse(ChatRequest, CHAT | {name: neutral})
    error = refused(ChatRequest, CHAT | {name: {"surely": "asked for"}})
    assert (error.param, error.status) == (name, REFUSED[name].status)
    assert name in error.message
    assert REFUSED[name].why in error.message


def test_neutral_values_are_compared_with_their_type() -> None:
    assert refused(ChatRequest, CHAT | {"best_of": True}).param == "best_of"
    assert refused(ChatRequest, CHAT | {"use_beam_search": 0}).status == 501
    parse(CompletionRequest, {"prompt": "x", "n": 3, "best_of": 3})
    assert refused(CompletionRequest, {"prompt": "x", "n": 3, "best_of": 4}).param == "best_of"


def test_unknown_fields_name_the_nearest() -> None:
    error = refused(ChatRequest, CHAT | {"temprature": 0})
    assert error.status == 400
    assert error.param == "temprature"
    assert "`temperature`" in error.message
    nested = refused(ChatRequest, CHAT | {"stream": True, "stream_options": {"include_usge": True}})
    assert nested.param == "stream_options.include_usge"
    assert "`include_usage`" in nested.message
    message = refused(ChatRequest, {"messages": [USER, USER | {"contnt": "x"}]})
    assert message.param == "messages[1].contnt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"temperature": True}, "temperature"),
        ({"stream": 1}, "stream"),
        ({"stop": [1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids[0]"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
        ({"messages": [USER | {"content": 3}]}, "messages[0].content"),
        ({"messages": [USER | {"content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [USER | {"content": [{"type": "text", "text": "a", "b": 1}]}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": 1}]}]}, "messages[1].tool_calls"),
        ({"continue_final_message": True}, "messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_wrong_chats_name_the_field(fields: dict[str, Any], param: str) -> None:
    error = refused(ChatRequest, CHAT | fields)
    assert error.param == param
    assert error.status in (400, 501)


def test_missing_fields_are_named() -> None:
    assert refused(ChatRequest, {}).message == "missing field `messages`"
    assert refused(CompletionRequest, {"model": "m"}).param == "prompt"
    assert "object" in refused(CompletionRequest, [1]).message


def test_answers_can_be_sent_back_as_they_came() -> None:
    empty = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None}
    assistant = {"role": "assistant", "content": "hello"} | empty
    messages = parse(ChatRequest, {"messages": [USER, assistant, USER]}).messages
    assert messages[1].for_template() == {"role": "assistant", "content": "hello"}


def test_messages_for_templates() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    data = [{"role": "developer", "content": "rules"}, {"role": "user", "content": parts, "name": "ada"}]
    rules, user = parse(ChatRequest, {"messages": data}).messages
    assert rules.for_template() == {"role": "system", "content": "rules"}
    assert user.for_template() == {"role": "user", "content": "one\ntwo", "name": "ada"}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", ""], ["a", ""]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_shapes_of_prompts(prompt: Any, expected: list[Any]) -> None:
    assert parse(CompletionRequest, {"prompt": prompt}).prompt == expected


@pytest.mark.parametrize(
    "prompt", [None, [], 3, ["a", 1], [[1], []], [[1], ["a"]], [True], [1.5], {"a": 1}, [["a"]]]
)
def test_wrong_prompts(prompt: Any) -> None:
    assert refused(CompletionRequest, {"prompt": prompt}).param == "prompt"


def test_echo_with_logprobs_is_refused_by_name() -> None:
    error = refused(CompletionRequest, {"prompt": "x", "echo": True, "logprobs": 0})
    assert error.param == "echo"
    assert "logprobs" in error.message


def test_tokenize_takes_a_prompt_or_messages() -> None:
    assert parse(TokenizeRequest, {"prompt": "x"}).prompt == "x"
    assert parse(TokenizeRequest, {"messages": [USER]}).opens_turn
    for wrong in ({}, {"prompt": "x", "messages": [USER]}, {"messages": []}):
        assert refused(TokenizeRequest, wrong).status == 400
    assert parse(DetokenizeRequest, {"tokens": []}).tokens == []


def test_values_out_of_range_become_400_with_the_field() -> None:
    with pytest.raises(RequestError) as caught:
        parse(ChatRequest, CHAT | {"top_p": 1.5}).to_sampling_params({})
    error = as_api_error(caught.value)
    assert (error.status, error.param) == (400, "top_p")


def test_unexpected_errors_tell_nothing_of_the_inside() -> None:
    error = as_api_error(KeyError("secret path"))
    assert error.status == 500
    assert "secret" not in str(error.body)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(build_tokenizer())


def test_token_bytes_joined_are_the_text(tokenizer: Tokenizer, seed: int) -> None:
    draw = random.Random(seed)
    texts = TokenTexts(tokenizer)
    text = "".join(draw.choice("abé日🙂 \n\x07expert") for _ in range(50))
    ids = tokenizer.encode(text)
    assert b"".join(texts.bytes_of(i) for i in ids) == text.encode()
    end = tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    assert texts.bytes_of(end) == b"<|im_end|>"
    assert texts.is_special(end)
    assert TokenTexts(None).text_of(41) == "token_id:41"


def test_text_offsets_point_into_the_text(tokenizer: Tokenizer, seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice("abé日🙂 ") for _ in range(30))
    ids = tokenizer.encode(text)
    rows = [{i: Logprob(-draw.random(), 2), (i + 1) % 320: Logprob(-0.1, 1)} for i in ids]
    writer = CompletionLogprobsWriter(TokenTexts(tokenizer), 1, skip_special_tokens=True)
    cut = draw.randrange(len(ids))
    first, second = writer.write(ids[:cut], rows[:cut]), writer.write(ids[cut:], rows[cut:])
    assert first is not None
    assert second is not None
    offsets = first.text_offset + second.text_offset
    # A token starts where the text decoded so far ends, whole characters counted.
    for position, offset in enumerate(offsets):
        before = b"".join(TokenTexts(tokenizer).bytes_of(i) for i in ids[:position])
        assert offset == len(before.decode(errors="ignore"))
    tops = (first.top_logprobs or []) + (second.top_logprobs or [])
    for token_id, top in zip(ids, tops, strict=True):
        texts = TokenTexts(tokenizer)
        assert top.keys() == {texts.text_of(token_id), texts.text_of((token_id + 1) % 320)}, (
            "the chosen one as well"
        )


def test_token_bytes_of_byte_fallback_vocabularies(tmp_path: Path) -> None:
    folder = byte_fallback(tmp_path / "model")
    texts = TokenTexts(Tokenizer(PreTrainedTokenizerFast.from_pretrained(folder)))
    ids = Tokenizer(PreTrainedTokenizerFast.from_pretrained(folder)).encode("the é 日")[1:]
    assert b"".join(texts.bytes_of(i) for i in ids) == " the é 日".encode()
    assert len(ids) > 4
