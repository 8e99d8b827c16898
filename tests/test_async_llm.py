"""AsyncLLM against scripted ranks: real processes on the real wire, with a model that is a hash."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.core import SamplingParams
from moe_runtime.engine.requests import completion_seed
from moe_runtime.errors import (
    CheckpointError,
    EngineDeadError,
    LockstepError,
    OverloadedError,
    RequestError,
)
from tests.helpers.scripted_model import VOCAB, engine, make_model, nothing_left, told, write_script
from tests.helpers.scripted_rank import expected_tokens


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nothing_left(tmp_path / "tmp", monkeypatch):
        yield


def test_tokens_text_and_metadata(model: Path, seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        async with engine(model, ep=2) as client:
            requests = []
            for length in range(1, 20):
                # Not ending within a character: the completion would go on with it.
                prompt = [*rng.choices(range(VOCAB), k=length - 1), *client.tokenizer.encode("a")]
                params = SamplingParams(
                    n=rng.randrange(1, 4),
                    seed=rng.randrange(99),
                    max_tokens=rng.randrange(1, 9),
                    logprobs=2,
                    ignore_eos=True,
                )
                requests.append((prompt, params))
            outputs = await asyncio.gather(*(client.complete(p, s) for p, s in requests))
            for (prompt, params), output in zip(requests, outputs, strict=True):
                assert output.finished
                assert output.prompt_token_ids == prompt
                assert output.num_cached_tokens == 1
                for index, completion in enumerate(output.outputs):
                    sampling = SamplingParams(seed=completion_seed(params.seed or 0, index))
                    ids = expected_tokens(prompt, sampling, params.max_tokens or 0, VOCAB)
                    assert completion.index == index
                    assert completion.token_ids == ids
                    assert completion.text == client.tokenizer.decode(ids)
                    assert completion.finish_reason == "length"
                    assert completion.cumulative_logprob == pytest.approx(-len(ids))
                    assert [next(iter(entry)) for entry in completion.logprobs] == ids
                    assert all(len(entry) == 2 for entry in completion.logprobs)
                    assert completion.logprobs[0][ids[0]].decoded_token == client.tokenizer.token_text(ids[0])
            assert client.num_unfinished == 0
            assert [load.num_tokens for load in client._chooser.loads] == [0, 0]

    asyncio.run(main())


def test_stream_equals_complete_and_generate_grows(model: Path) -> None:
    async def main() -> None:
        async with engine(model) as client:
            params = SamplingParams(n=2, seed=5, max_tokens=12, ignore_eos=True)
            whole = await client.complete("hello world", params)
            texts, ids = ["", ""], [[], []]
            async for delta in client.stream("hello world", params):
                texts[delta.index] += delta.text
                ids[delta.index] += delta.token_ids
                assert delta.num_prompt_tokens == len(whole.prompt_token_ids)
            assert texts == [c.text for c in whole.outputs]
            assert ids == [c.token_ids for c in whole.outputs]
            snapshots = [o async for o in client.generate("hello world", params)]
            assert [o.finished for o in snapshots][-1]
            assert snapshots[-1].outputs == whole.outputs
            lengths = [sum(len(c.token_ids) for c in o.outputs) for o in snapshots]
            assert lengths == sorted(lengths)
            assert lengths[0] < lengths[-1]

    asyncio.run(main())


def test_seeds_are_drawn_from_the_engines(model: Path) -> None:
    async def tokens(seed: int) -> list[list[int]]:
        async with engine(model, seed=seed) as client:
            params = SamplingParams(max_tokens=6, ignore_eos=True)
            return [(await client.complete([1, 2], params)).outputs[0].token_ids for _ in range(2)]

    first, again, other = (asyncio.run(tokens(s)) for s in (0, 0, 1))
    assert first == again != other
    assert first[0] != first[1]


def test_stop_string_ends_the_sequence_on_the_rank(model: Path) -> None:
    async def main() -> None:
        async with engine(model) as client:
            ids = client.tokenizer.encode("hello. stop here and more text")
            write_script(model, emit=ids)
        async with engine(model) as client:
            params = SamplingParams(stop=["stop", "zzz"], max_tokens=None)
            out = (await client.complete("x", params)).outputs[0]
            assert (out.text, out.finish_reason, out.stop_reason) == ("hello. ", "stop", "stop")
            assert client.tokenizer.decode(out.token_ids).endswith("stop")
            params = SamplingParams(stop="stop", include_stop_str_in_output=True, max_tokens=None)
            out = (await client.complete("x", params)).outputs[0]
            assert out.text == "hello. stop"
            first_end = len(client.tokenizer.encode("hello. stop"))
            params = SamplingParams(stop="stop", min_tokens=first_end + 1, max_tokens=None)
            out = (await client.complete("x", params)).outputs[0]
            assert out.text.startswith("hello. stop here and more text")
            assert len(out.token_ids) >= len(ids)
            out = (await client.complete("x", SamplingParams(stop="never", max_tokens=first_end))).outputs[0]
            assert (out.text, out.finish_reason) == ("hello. stop", "length")
        assert len([t for t in told(model, 0, "tick") if t[1] == "Abort"]) == 3
        assert all(s["sampling"]["stop"] is None for s in told(model, 0, "submit"))

    asyncio.run(main())


def test_eos_and_stop_ids(model: Path) -> None:
    end, word = 2, 40
    (model / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [end, 7], "top_k": 5, "max_new_tokens": 9})
    )

    async def main() -> None:
        write_script(model, emit=[10, 11, end, 12, word, 13])
        async with engine(model) as client:
            assert client.default_sampling == {"top_k": 5, "max_tokens": 9}
            text = client.tokenizer.decode
            out = (await client.complete([1], SamplingParams(max_tokens=6))).outputs[0]
            assert (out.token_ids, out.text, out.finish_reason, out.stop_reason) == (
                [10, 11, end],
                text([10, 11]),
                "stop",
                None,
            )
            params = SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=[word])
            out = (await client.complete([1], params)).outputs[0]
            assert (out.finish_reason, out.stop_reason) == ("stop", word)
            assert out.text == text([10, 11, 12])
            params = SamplingParams(
                max_tokens=6, ignore_eos=True, stop_token_ids=[word], include_stop_str_in_output=True
            )
            assert (await client.complete([1], params)).outputs[0].text == text([10, 11, 12, word])
            out = (await client.complete([1], SamplingParams(max_tokens=6, min_tokens=4))).outputs[0]
            assert (len(out.token_ids), out.finish_reason) == (6, "length")

    asyncio.run(main())
    assert {tuple(s["eos_token_ids"]) for s in told(model, 0, "submit")} == {(end, 7), ()}


BAD_REQUESTS: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "empty"),
    ("", {}, "empty"),
    ([1] * 64, {}, "64 tokens.*at most 64"),
    ([1] * 63, {"min_tokens": 2, "max_tokens": 5}, "room for 1"),
    ([5, VOCAB], {}, f"token id {VOCAB} .*0 to {VOCAB - 1}"),
    ([-1], {}, "-1"),
    ([1, True], {}, "must be text"),
    ([1.5], {}, "must be text"),
    (None, {}, "must be text"),
    ({}, {}, "keys"),
    ({"prompt": "x", "multi_modal_data": 1}, {}, "multi_modal_data"),
    ({"prompt": 3}, {}, "string"),
    ({"prompt_token_ids": None}, {}, "must be text"),
    ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    ([1], {"stop_token_ids": [VOCAB + 3]}, "stop_token_ids"),
]


def test_bad_requests_never_reach_a_rank(model: Path) -> None:
    async def main() -> None:
        async with engine(model) as client:
            for prompt, params, message in BAD_REQUESTS:
                with pytest.raises(RequestError, match=message):
                    await client.complete(prompt, SamplingParams(**params))

    asyncio.run(main())
    assert told(model, 0, "submit") == []


def test_max_tokens_is_cut_to_the_context(model: Path) -> None:
    async def main() -> None:
        async with engine(model) as client:
            for max_tokens in (None, 1000, 60):
                out = await client.complete([3] * 10, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
                assert len(out.outputs[0].token_ids) == min(54, max_tokens or 54)
                assert out.outputs[0].finish_reason == "length"

    asyncio.run(main())


def test_a_request_refused_by_the_rank(model: Path) -> None:
    async def main() -> None:
        write_script(model, refuse_length=13)
        async with engine(model) as client:
            with pytest.raises(RequestError, match="too big") as caught:
                await client.complete([1] * 13, SamplingParams(n=3))
            assert caught.value.param == "prompt"
            assert client.num_unfinished == 0
            assert (await client.complete([1] * 12, SamplingParams())).finished

    asyncio.run(main())


def test_leaving_a_stream_frees_the_request(model: Path) -> None:
    async def main() -> None:
        write_script(model, step_s=0.02)
        async with engine(model) as client:
            stream = client.stream([1], SamplingParams(n=2, max_tokens=None, ignore_eos=True))
            await anext(stream)
            await stream.aclose()
            task = asyncio.create_task(client.complete([1, 2], SamplingParams(max_tokens=None)))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert client.num_unfinished == 0
            assert client._chooser.loads[0].num_tokens == 0
            assert (await client.complete([3], SamplingParams(max_tokens=2))).finished
        assert len([t for t in told(model, 0, "tick") if t[1] == "Abort"]) == 3

    asyncio.run(main())


def test_abort_by_id_ends_the_stream(model: Path) -> None:
    async def main() -> None:
        write_script(model, step_s=0.01)
        async with engine(model) as client:
            params = SamplingParams(n=2, max_tokens=None, ignore_eos=True)
            task = asyncio.create_task(client.complete([1], params, request_id="mine"))
            await asyncio.sleep(0.1)
            with pytest.raises(RequestError, match="in use"):
                await client.complete([1], params, request_id="mine")
            await client.abort("mine")
            await client.abort("unknown")
            output = await task
            assert [c.finish_reason for c in output.outputs] == ["abort", "abort"]

    asyncio.run(main())


def test_ranks_are_chosen_by_load(model: Path) -> None:
    async def main() -> None:
        write_script(model, step_s=0.05)
        async with engine(model, ep=3) as client:
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            tasks = [asyncio.create_task(client.complete([9] * 30, params, routed_dp_rank=1))]
            tasks += [
                asyncio.create_task(client.complete([i], SamplingParams(max_tokens=5, n=2))) for i in range(4)
            ]
            await asyncio.gather(*tasks)
            for bad in (-1, 3, True):
                with pytest.raises(RequestError, match="0 to 2"):
                    await client.complete([1], params, routed_dp_rank=bad)
        counts = [[len(s["prompt_token_ids"]) for s in told(model, r, "submit")] for r in range(3)]
        assert counts == [[1] * 4, [30], [1] * 4], "completions of one prompt share a rank"

    asyncio.run(main())


def test_every_rank_sees_every_tick_and_a_turn_is_one_tick(model: Path) -> None:
    async def main() -> None:
        async with engine(model, ep=2) as client:
            await asyncio.gather(*(client.complete([i], SamplingParams(max_tokens=1)) for i in range(6)))
            await client.reset_prefix_cache()
            for rank in (0, 1, 1, 0):  # a rank asserts that no number is left out
                await client.complete([7], SamplingParams(max_tokens=1), routed_dp_rank=rank)
            await client.reset_prefix_cache()
        ticks = [told(model, rank, "tick") for rank in range(2)]
        for told_rank in ticks:
            assert [number for number, kind in told_rank if kind == "Submit"][:3] == [1, 1, 1]
        assert [t[1] for t in ticks[0]][-2:] == ["ResetPrefixCache", "Stop"]

    asyncio.run(main())


def test_overload_and_drain(model: Path) -> None:
    async def main() -> None:
        write_script(model, step_s=0.02)
        async with engine(model, max_num_seqs=2, max_queued_requests=3) as client:
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            results = await asyncio.gather(
                *(client.complete([1], params) for _ in range(9)), return_exceptions=True
            )
            assert sum(isinstance(r, OverloadedError) for r in results) == 4
            assert sum(not isinstance(r, Exception) for r in results) == 5
            running = asyncio.create_task(client.complete([1], params))
            await asyncio.sleep(0)
            assert await client.drain(10) is True
            assert (await running).outputs[0].finish_reason == "length"
            with pytest.raises(OverloadedError, match="shutting down"):
                await client.complete([1], params)

    asyncio.run(main())


def test_drain_aborts_what_takes_too_long(model: Path) -> None:
    async def main() -> None:
        write_script(model, step_s=0.1)
        async with engine(model) as client:
            params = SamplingParams(max_tokens=None, ignore_eos=True)
            running = asyncio.create_task(client.complete([1], params))
            await asyncio.sleep(0.3)
            assert await client.drain(0.1) is False
            assert (await running).outputs[0].finish_reason == "abort"

    asyncio.run(main())


def test_death_of_a_rank_reaches_every_stream(model: Path) -> None:
    async def main() -> None:
        write_script(model, step_s=0.01, die_after_steps=[1, 5])
        async with engine(model, ep=2) as client:
            params = SamplingParams(max_tokens=60, ignore_eos=True)
            results = await asyncio.gather(
                *(client.complete([i], params) for i in range(4)), return_exceptions=True
            )
            pid = client.ready[1].pid
            assert all(isinstance(r, EngineDeadError) for r in results[1::2])
            assert f"rank 1 (process {pid})" in str(results[1])
            assert client.dead is await client.wait_dead()
            with pytest.raises(EngineDeadError):
                await client.complete([1], params)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ({"fail": [1, "CheckpointError", "no such tensor: x"]}, CheckpointError, "^no such tensor: x$"),
        (
            {"fail": [0, "ZeroDivisionError", "oops"]},
            EngineDeadError,
            "rank 0 failed: ZeroDivisionError: oops",
        ),
        ({"fail": [0, "LockstepError", "peer gone"]}, LockstepError, "peer gone"),
        ({"die_at_start": 1}, EngineDeadError, "rank 1 .* exit code 3"),
    ],
)
def test_failures_while_starting(
    model: Path, script: dict[str, Any], error: type[Exception], message: str
) -> None:
    write_script(model, **script)
    with pytest.raises(error, match=message):
        asyncio.run(engine(model, ep=2).__aenter__())


def test_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="skip_tokenizer_init"):
        asyncio.run(engine(model).__aenter__())

    async def main() -> None:
        async with engine(model, skip_tokenizer_init=True) as client:
            output = await client.complete([1, 2], SamplingParams(max_tokens=3, logprobs=0, ignore_eos=True))
            assert output.outputs[0].text == ""
            assert len(output.outputs[0].token_ids) == 3
            for prompt, stop in (("text", None), ([1], "x")):
                with pytest.raises(RequestError, match="skip_tokenizer_init"):
                    await client.complete(prompt, SamplingParams(stop=stop))

    asyncio.run(main())


def test_close_fails_open_streams_and_can_be_repeated(model: Path) -> None:
    async def main() -> None:
        async with engine(model) as client:
            params = SamplingParams(max_tokens=None, ignore_eos=True)
            open_request = asyncio.create_task(client.complete([1], params))
            await asyncio.sleep(0)
            await asyncio.gather(client.close(), client.close())
            with pytest.raises(EngineDeadError, match="closed"):
                await open_request

    asyncio.run(main())
