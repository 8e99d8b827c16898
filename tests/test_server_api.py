"""The HTTP API as clients meet it: the real front-end over a socket, the `openai` package, scripted ranks behind it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.live_server import MODEL, LiveServer, make_folder
from tests.helpers.tiny_tokenizer import build_tokenizer

USER = {"role": "user", "content": "who runs the naïve router?"}
PROMPT = "日本 runs the router"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = make_folder(
        tmp_path_factory.mktemp("model"), {"eos_token_id": [2, 4], "temperature": 0.5, "top_k": 7}
    )
    with LiveServer(folder) as live:
        yield live


def ids_of(text: str) -> list[int]:
    ids: list[int] = build_tokenizer().encode(text, add_special_tokens=False)
    return ids


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON of each server-sent event; checks the framing and the closing [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert done == "data: [DONE]"
    assert rest == ""
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_chat(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=4)
    sent = server.submitted()[-1]
    text = "<|im_start|>user\n" + USER["content"] + "<|im_end|>\n<|im_start|>assistant\n"
    assert sent.prompt_token_ids == ids_of(text)
    assert (sent.sampling.temperature, sent.sampling.top_k) == (0.5, 7), "from generation_config.json"
    choice = answer.choices[0]
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "user",
        "length",
    )
    assert choice.logprobs is None
    assert answer.usage is not None
    num = len(sent.prompt_token_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        num,
        4,
        num + 4,
    )
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == num // 2


def test_chat_without_a_limit_may_fill_the_context(client: openai.OpenAI, server: LiveServer) -> None:
    # The scripted rank repeats the prompt, so it comes to the end-of-turn token.
    answer = client.chat.completions.create(model=MODEL, messages=[USER])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == "user\n" + USER["content"]
    sent = server.submitted()[-1]
    assert sent.sampling.max_tokens in (None, 256 - len(sent.prompt_token_ids))


def test_streamed_chat_says_the_same(http: httpx.Client, client: openai.OpenAI) -> None:
    request = {
        "model": MODEL,
        "messages": [USER],
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "max_tokens": 14,
    }
    whole = http.post("/v1/chat/completions", json=request).json()
    request |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events_of(http.post("/v1/chat/completions", json=request))
    assert len({c["id"] for c in chunks}) == 1
    assert all(c["object"] == "chat.completion.chunk" for c in chunks)
    *chunks, last = chunks
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(c["usage"] is None for c in chunks)
    for index, expected in enumerate(whole["choices"]):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in c["delta"] for c in mine[1:])
        assert "".join(c["delta"].get("content", "") for c in mine) == expected["message"]["content"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [expected["finish_reason"]]
        logprobs = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert logprobs == expected["logprobs"]["content"]


def test_openai_client_reads_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=[USER], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "user\n" + USER["content"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids_of(text)) + 2, "and the two special tokens"


def test_usage_in_every_chunk_if_asked_for(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = {"prompt": PROMPT, "stream": True, "stream_options": options}
    counts = [c["usage"]["completion_tokens"] for c in events_of(http.post("/v1/completions", json=request))]
    assert counts == sorted(counts)
    assert counts[-1] == 16
    del request["stream_options"]
    assert all("usage" not in c for c in events_of(http.post("/v1/completions", json=request)))


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[USER], max_tokens=20, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    entries = logprobs.content
    assert entries is not None
    joined = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert joined.decode().startswith("<|im_start|>user\nwho runs the naïve")
    for entry in entries:
        assert entry.logprob == -0.5
        assert [top.logprob for top in entry.top_logprobs] == [-0.25, -0.5]
        assert entry.top_logprobs[1].token == entry.token, "the chosen one is second"
    without_top = client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=3, logprobs=True)
    assert without_top.choices[0].logprobs is not None
    assert all(entry.top_logprobs == [] for entry in without_top.choices[0].logprobs.content or [])


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=9, logprobs=2)
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.token_logprobs == [-0.5] * 9
    assert logprobs.top_logprobs is not None
    # The scripted ranks choose the second most likely token: with 1 wanted it comes in addition, as at OpenAI.
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    one = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=9, logprobs=1).choices[0].logprobs
    assert one is not None
    assert one.top_logprobs == logprobs.top_logprobs
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token or "\ufffd" in token


def test_prompts_of_all_shapes(client: openai.OpenAI, seed: int) -> None:
    draw = random.Random(seed)
    texts = ["".join(draw.choices("expert日 ", k=draw.randint(3, 9))) for _ in range(5)]
    answer = client.completions.create(model=MODEL, prompt=texts, max_tokens=40, n=2)
    assert [c.index for c in answer.choices] == list(range(10))
    for index, choice in enumerate(answer.choices):
        assert choice.text.startswith(texts[index // 2])
    ids = [ids_of(text) for text in texts]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, ids)), "a prompt counts once"
    assert answer.usage.completion_tokens == 400
    again = client.completions.create(model=MODEL, prompt=ids, max_tokens=40, n=2)
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]
    single = client.completions.create(model=MODEL, prompt=ids[0], max_tokens=40)
    assert single.choices[0].text == answer.choices[0].text


def test_streams_of_several_prompts_are_interleaved_by_index(http: httpx.Client) -> None:
    prompts = ["one two", "the router", "who"]
    request = {"prompt": prompts, "stream": True, "max_tokens": 30, "echo": True}
    texts = ["", "", ""]
    for chunk in events_of(http.post("/v1/completions", json=request)):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    for prompt, text in zip(prompts, texts, strict=True):
        assert text.startswith(prompt + prompt)


def test_echo(client: openai.OpenAI) -> None:
    plain = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5).choices[0].text
    echoed = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, echo=True).choices[0].text
    assert echoed == PROMPT + plain
    from_ids = client.completions.create(model=MODEL, prompt=ids_of(PROMPT), max_tokens=5, echo=True)
    assert from_ids.choices[0].text == echoed


def test_stop_strings(http: httpx.Client) -> None:
    request = {"prompt": "who runs the router", "stop": ["zzz", "the r"], "max_tokens": 30}
    choice = http.post("/v1/completions", json=request).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("who runs ", "stop", "the r")
    kept = http.post("/v1/completions", json=request | {"include_stop_str_in_output": True}).json()
    assert kept["choices"][0]["text"] == "who runs the r"
    chunks = events_of(http.post("/v1/completions", json=request | {"stream": True}))
    assert "".join(c["choices"][0]["text"] for c in chunks) == "who runs "
    assert chunks[-1]["choices"][0]["stop_reason"] == "the r"


def test_token_ids_on_request(http: httpx.Client) -> None:
    ids = ids_of(PROMPT)
    request = {"prompt": PROMPT, "max_tokens": len(ids), "return_token_ids": True}
    choice = http.post("/v1/completions", json=request).json()["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (ids, ids)
    chunks = events_of(http.post("/v1/completions", json=request | {"stream": True}))
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == ids
    chat = {"messages": [USER], "max_tokens": 3, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=chat).json()
    assert answer["choices"][0]["token_ids"] == answer["prompt_token_ids"][:3]
    streamed = events_of(http.post("/v1/chat/completions", json=chat | {"stream": True}))
    assert streamed[0]["prompt_token_ids"] == answer["prompt_token_ids"]


def test_templates_can_be_steered(http: httpx.Client, server: LiveServer) -> None:
    request = {"messages": [USER], "max_tokens": 1, "chat_template_kwargs": {"shout": True}}
    http.post("/v1/chat/completions", json=request).raise_for_status()
    assert server.submitted()[-1].prompt_token_ids[-1:] == ids_of("!")
    partial = [USER, {"role": "assistant", "content": "the expert"}]
    request = {"messages": partial, "max_tokens": 1, "continue_final_message": True}
    http.post("/v1/chat/completions", json=request).raise_for_status()
    assert server.submitted()[-1].prompt_token_ids[-2:] == ids_of("the expert")[-2:]
    reserved = {"messages": [USER], "chat_template_kwargs": {"tokenize": True}}
    assert http.post("/v1/chat/completions", json=reserved).json()["error"]["param"] == "chat_template_kwargs"


def test_requests_can_be_pinned_to_a_rank(http: httpx.Client, server: LiveServer) -> None:
    def counts() -> list[int]:
        return server.call(lambda: [len(rank.submitted) for rank in server.ranks])

    request = {"prompt": "who", "max_tokens": 1}
    for rank in (0, 1, 1, 0):
        before = counts()
        http.post("/v1/completions", json=request | {"routed_dp_rank": rank}).raise_for_status()
        header = {"X-data-parallel-rank": str(rank)}
        http.post("/v1/completions", json=request, headers=header).raise_for_status()
        assert [b - a for a, b in zip(before, counts(), strict=True)] == [2 * (rank == 0), 2 * (rank == 1)]
    for wrong in ("2", "-1", "one", "²"):
        answer = http.post("/v1/completions", json=request, headers={"X-data-parallel-rank": wrong.encode()})
        assert answer.status_code == 400
    both = http.post(
        "/v1/completions", json=request | {"routed_dp_rank": 0}, headers={"X-data-parallel-rank": "1"}
    )
    assert both.json()["error"]["param"] == "routed_dp_rank"


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.object) == (MODEL, "model")
    assert card.model_dump()["max_model_len"] == 256
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=[USER])


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_back(http: httpx.Client, prefix: str) -> None:
    found = http.post(prefix + "/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert found["tokens"] == ids_of(PROMPT)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 256
    assert http.post(prefix + "/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": PROMPT}
    chat = http.post(prefix + "/tokenize", json={"messages": [USER]}).json()
    text = http.post(prefix + "/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\n")
    assert http.post(prefix + "/detokenize", json={"tokens": [320]}).json()["error"]["param"] == "tokens"


def test_information(http: httpx.Client) -> None:
    assert http.get("/health").status_code == http.get("/ping").status_code == 200
    assert http.get("/health_generate").status_code == 200
    assert http.get("/version").json().keys() == {"version"}
    info = http.get("/server_info").json()
    assert info == http.get("/get_server_info").json()
    assert [rank["chosen"] for rank in info["ranks"]] == [{"dispatcher": "scripted"}] * 2
    load = http.get("/load").json()
    assert load["server_load"] == 0
    assert [rank["rank"] for rank in load["ranks"]] == [0, 1]
    schema = http.get("/openapi.json").json()
    assert {"ChatRequest", "ChatMessage", "CompletionRequest"} <= schema["components"]["schemas"].keys()


def test_prefix_cache_reset(http: httpx.Client, server: LiveServer) -> None:
    before = server.call(lambda: [rank.num_resets for rank in server.ranks])
    assert http.post("/reset_prefix_cache").json() == {"success": True}
    assert http.post("/flush_cache").status_code == 200
    server.wait_for(lambda: [rank.num_resets for rank in server.ranks] == [n + 2 for n in before])


def test_without_tokenizer_ids_go_in_and_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_folder(tmp_path_factory.mktemp("no_tokenizer"))
    options: dict[str, Any] = {"engine": {"skip_tokenizer_init": True}, "generation_config": "none"}
    with LiveServer(folder, num_ranks=1, **options) as live, httpx.Client(base_url=live.base_url) as http:
        request = {"prompt": [9, 8, 10], "return_token_ids": True, "max_tokens": 3, "logprobs": 1}
        choice = http.post("/v1/completions", json=request).json()["choices"][0]
        assert choice["token_ids"] == [9, 8, 10]
        assert choice["logprobs"]["tokens"] == ["token_id:9", "token_id:8", "token_id:10"]
        for path, body in (
            ("/v1/chat/completions", {"messages": [USER]}),
            ("/v1/completions", {"prompt": "text"}),
            ("/tokenize", {"prompt": "text"}),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code == 400
            assert "tokenizer" in answer.json()["error"]["message"]
