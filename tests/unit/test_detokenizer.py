"""Incremental decoding equals decoding at once, and stop strings are found however the text is cut."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from moe_runtime.config import EngineConfig
from moe_runtime.engine.detokenizer import IncrementalDecoder, StopStrings
from moe_runtime.engine.tokenizer import Tokenizer, load_tokenizer
from tests.helpers import tiny_tokenizer

TEXTS = [
    "hello world, the quick brown fox",
    "  two  spaces\n\nand lines\n",
    "na\u00efve caf\u00e9 \u2014 \u4f60\u597d\u4e16\u754c",
    "\U0001f44d\U0001f3fd family: \U0001f468\u200d\U0001f469\u200d\U0001f467, flag \U0001f1eb\U0001f1f7",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 a\u0301e\u0301",
    " ",
    "x",
]


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = getattr(tiny_tokenizer, request.param)(tmp_path_factory.mktemp(request.param))
    loaded = load_tokenizer(EngineConfig(model=str(folder)))
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("text", TEXTS)
def test_same_ids_and_text_as_auto_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    auto = AutoTokenizer.from_pretrained(tokenizer.hf.name_or_path, local_files_only=True)
    for special in (True, False):
        assert tokenizer.encode(text, special) == auto.encode(text, add_special_tokens=special)
    ids = tokenizer.encode(text)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == auto.decode(ids, skip_special_tokens=skip)
    talk = [{"role": "user", "content": text}]
    rendered = auto.apply_chat_template(talk, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.apply_chat_template(talk) == rendered


def stream(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
    return [decoder.push(i) for i in ids] + [decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert pieces[-1] == "", "complete characters are given at once"
    for i in range(len(ids)):
        assert text.startswith("".join(pieces[: i + 1]))


def test_a_completion_continues_its_prompt(tokenizer: Tokenizer) -> None:
    prompt, added = tokenizer.encode("the cat"), tokenizer.encode("the\nthe", add_special_tokens=False)
    for skip in (True, False):
        decoder = IncrementalDecoder(tokenizer, skip, prompt)
        pieces = [decoder.push(i) for i in added] + [decoder.flush()]
        assert tokenizer.decode(prompt, skip) + "".join(pieces) == tokenizer.decode(prompt + added, skip)


def test_text_is_given_with_its_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the the\nthe", add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    assert all(pieces[1:-1])


@pytest.mark.parametrize("skip", [True, False])
def test_special_and_unknown_tokens(tokenizer: Tokenizer, skip: bool) -> None:
    start, end = (tokenizer.hf.convert_tokens_to_ids(t) for t in ("<|start|>", "<|end|>"))
    middle = tokenizer.encode("caf\u00e9 \u4f60", add_special_tokens=False)
    unknown = len(tokenizer.hf) + 7
    ids = [start, *middle[:-1], unknown, middle[-1], end, *middle, unknown, end]
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_special_token_inside_a_character(tokenizer: Tokenizer) -> None:
    start = tokenizer.hf.convert_tokens_to_ids("<|start|>")
    ids = tokenizer.encode("\U0001f44d", add_special_tokens=False)
    ids = [*ids[:-2], start, *ids[-2:]]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_random_ids_of_a_byte_level_vocabulary(seed: int, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(EngineConfig(model=str(tiny_tokenizer.byte_level(tmp_path))))
    assert tokenizer is not None
    rng = random.Random(seed)
    for _ in range(200):
        # Mostly bytes above 0x7f, so that broken, cut and whole characters alternate.
        high = [i for i in range(3, 259) if "\ufffd" in tokenizer.token_text(i)]
        ids = [
            rng.choice(high) if rng.random() < 0.8 else rng.randrange(300) for _ in range(rng.randrange(60))
        ]
        for skip in (True, False):
            assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_broken_byte_pieces_spoil_nothing_else(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(EngineConfig(model=str(tiny_tokenizer.byte_fallback(tmp_path))))
    assert tokenizer is not None

    def piece(value: int) -> int:
        return tokenizer.hf.convert_tokens_to_ids(f"<0x{value:02X}>")

    the = tokenizer.hf.convert_tokens_to_ids("\u2581the")
    cut = [the, piece(0x0A), piece(0xE4), piece(0xBD)]
    assert "".join(stream(tokenizer, cut)) == "the\n\ufffd\ufffd"
    assert "".join(stream(tokenizer, [*cut, the, the])) == "the\n\ufffd\ufffd the the"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_cost_per_token_does_not_grow(kind: str, tmp_path: Path, seed: int) -> None:
    """Counts ids given to the decoder: also for endless broken bytes it is a constant per token."""
    tokenizer = load_tokenizer(EngineConfig(model=str(getattr(tiny_tokenizer, kind)(tmp_path))))
    assert tokenizer is not None
    num_decoded = 0

    class Counting:
        is_special, is_known = tokenizer.is_special, tokenizer.is_known

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            nonlocal num_decoded
            num_decoded += len(ids)
            return tokenizer.decode(ids, skip_special_tokens)

    rng = random.Random(seed)
    broken = [i for i in range(len(tokenizer.hf)) if tokenizer.token_text(i) == "\ufffd"]
    for choices in (list(range(len(tokenizer.hf))), broken, broken[:1], [broken[0], 5, 270]):
        decoder = IncrementalDecoder(Counting())  # type: ignore[arg-type]
        num_decoded = 0
        for _ in range(2000):
            decoder.push(rng.choice(choices))
        assert num_decoded < 2000 * 120


def cut_up(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("include", [True, False])
def test_stop_strings_do_not_depend_on_the_cuts(seed: int, include: bool) -> None:
    rng = random.Random(seed)
    for _ in range(2000):
        text = "".join(rng.choices("ab", k=rng.randrange(1, 15)))
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 3))]
        matcher = StopStrings(stops, include)
        shown = ""
        for piece in cut_up(text, rng):
            shown += matcher.push(piece)
            if matcher.matched is not None:
                break
        ends = [text.find(s) + len(s) for s in stops if s in text]
        if not ends:
            assert matcher.matched is None
            assert shown + matcher.flush() == text
            continue
        end = min(ends)
        found = matcher.matched
        assert found in stops
        assert text[:end].endswith(found)
        assert shown == text[: end if include else end - len(found)]
        assert matcher.flush() == ""


def test_of_stops_complete_at_once_the_longest_is_cut_off() -> None:
    matcher = StopStrings(["c", "abc"])
    assert matcher.push("xabcd") == "x"
    assert matcher.matched == "abc"


def test_nothing_is_held_back_without_need() -> None:
    matcher = StopStrings(["</s>"])
    assert matcher.push("a < b") == "a < b"
    assert matcher.push("<") == ""
    assert matcher.push("/") == ""
    assert matcher.push("p") == "</p"
    assert matcher.push("</s") == ""
    assert matcher.flush() == "</s"


def test_matches_before_min_tokens_are_ignored() -> None:
    matcher = StopStrings(["ab"])
    assert matcher.push("abxa", may_stop=False) == "abx"
    assert matcher.push("b") == ""
    assert matcher.matched == "ab"
