"""Small tokenizers made on the spot, in the folder layout of a checkpoint."""

from __future__ import annotations

import json
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

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIALS = ["<|pad|>", "<|start|>", "<|end|>"]
TEXT = ["hello world, the quick brown fox jumps over the lazy dog. stop here\n"] * 3


def byte_level(folder: Path, vocab_size: int = 300) -> Path:
    """GPT-2's kind: every token is some bytes, merges of common pairs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return _save(tokenizer, folder)


def byte_fallback(folder: Path) -> Path:
    """Llama's kind: words with U+2581 for space, bytes as <0x..> for the rest, a BOS token in front."""
    pieces = ["<unk>", *SPECIALS, *(f"<0x{b:02X}>" for b in range(256))]
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
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", vocab["<|start|>"])]
    )
    return _save(tokenizer, folder)


def _save(tokenizer: Tokenizer, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "mixtral", "eos_token_id": 2}))
    return folder
