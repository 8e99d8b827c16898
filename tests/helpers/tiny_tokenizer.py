"""Small tokenizers made on the spot, in the folder layout of a checkpoint: byte-level BPE, and byte-fallback BPE."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
"""Of `build_tokenizer`, ids 0 to 4; 1 and 2 are what tiny configurations name as beginning and end."""
VOCAB_SIZE = 320
"""Of `build_tokenizer`."""
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}{% if not loop.last or not continue_final_message|default(false) %}<|im_end|>
{% endif %}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
{%- if shout is defined and shout %}!{% endif -%}
"""
_WORDS = [
    "expert",
    "router",
    "token",
    "the",
    "a",
    "of",
    "who",
    "where",
    "naïve",
    "日本",
    "runs",
    "is",
    "one",
    "two",
]

PLAIN_SPECIAL = ("<|pad|>", "<|start|>", "<|end|>")
"""Of `byte_level` and `byte_fallback`."""
PLAIN_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_PLAIN_TEXT = ["hello world, the quick brown fox jumps over the lazy dog. stop here\n"] * 3


def build_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """Byte-level, trained on random sentences: all 256 bytes, and merges up to VOCAB_SIZE ids."""
    draw = random.Random(seed)
    text = [" ".join(draw.choices(_WORDS, k=12)) for _ in range(200)]
    return PreTrainedTokenizerFast(
        tokenizer_object=_train_byte_level(text, VOCAB_SIZE, SPECIAL),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(folder: Path, seed: int = 0) -> PreTrainedTokenizerFast:
    """Write `build_tokenizer`'s files into a checkpoint's folder."""
    tokenizer = build_tokenizer(seed)
    tokenizer.save_pretrained(folder)
    return tokenizer


def byte_level(folder: Path, vocab_size: int = 300) -> Path:
    """A folder with GPT-2's kind: every token is some bytes, merges of common pairs."""
    return _save(_train_byte_level(_PLAIN_TEXT, vocab_size, PLAIN_SPECIAL), folder)


def byte_fallback(folder: Path) -> Path:
    """A folder with Llama's kind: words with U+2581 for space, bytes as <0x..> for the rest, a BOS token in front."""
    pieces = ["<unk>", *PLAIN_SPECIAL, *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["\u2581", *"abcdefghijklmnopqrstuvwxyz.,", "\u2581t", "he", "\u2581the", "\u00e9"]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in PLAIN_SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", vocab["<|start|>"])]
    )
    return _save(tokenizer, folder)


def _train_byte_level(text: Iterable[str], vocab_size: int, special: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def _save(tokenizer: Tokenizer, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "chat_template": PLAIN_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "mixtral", "eos_token_id": 2}))
    return folder
