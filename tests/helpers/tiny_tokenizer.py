"""A tiny byte-level BPE tokenizer with a chat template, to go with a tiny checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
"""Ids 0 to 4; 1 and 2 are what tiny configurations name as beginning and end."""
VOCAB_SIZE = 320
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
_WORDS = (
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
)


def build_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """Trained on random sentences: all 256 bytes, and merges up to VOCAB_SIZE ids."""
    draw = random.Random(seed)
    text = [" ".join(draw.choices(_WORDS, k=12)) for _ in range(200)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(folder: Path, seed: int = 0) -> PreTrainedTokenizerFast:
    """Write tokenizer.json and its companions into a checkpoint's folder."""
    tokenizer = build_tokenizer(seed)
    tokenizer.save_pretrained(folder)
    return tokenizer
