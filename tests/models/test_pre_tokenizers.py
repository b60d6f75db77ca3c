"""The pre-tokenizers of GGUF files beside those of llama.cpp, on a thousand strings each."""

from __future__ import annotations

import json
import random
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from anydecode.models.gguf_tokenizer import PATTERNS
from anydecode.models.tokenizers import HFTokenizer
from llama_cpp_logits import llama_cpp_tokens
from plain_families import as_gguf

pytestmark = pytest.mark.slow

ASCII = "abCD1234567890 '/.,!?-+$_\t\r\n" + "abcAB   '\n"
ALPHABET = ASCII + "Ééßǅ日本ع́²Ⅷ’🎉\u00a0"
#: Their tokenizers normalise texts; llama.cpp does not, unless the file says so.
NORMALISED = ("command-r", "qwen2", "qwen35", "deepseek-r1-qwen", "megrez", "stablelm2")
#: llama.cpp tells upper- from lower-case letters of ASCII alone.
CASES_OF_ASCII = (
    *("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "granite-embed-multi-97m"),
)
#: llama.cpp takes the letters of these for one class, or joins groups of digits with what is before
#: them: other splits than by the patterns of the tokenizers' repositories, which are used here.
NOT_OF_LLAMA_CPP = ("kimi-k2", "youtu", "tiny_aya", "cohere2moe", "afmoe")


def texts(seed: int, alphabet: str, count: int = 1000) -> list[str]:
    """Strings of letters, marks, digits, quotes, signs and runs of spaces."""
    generator, found = random.Random(seed), []
    for _ in range(count):
        text = "".join(generator.choices(alphabet, k=generator.randrange(1, 40)))
        text = text.replace("'", generator.choice(["'s", "'LL", "'", "'Ve"]))
        found.append(text.replace(" ", " " * generator.choice([1, 1, 1, 7, 21])))
    return found


@cache
def metadata(pre: str) -> dict[str, Any]:
    """A vocabulary with merges across all kinds of characters, which only a pre-tokenizer keeps
    apart."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(5, ALPHABET, 300), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.mark.parametrize("pre", [name for name in PATTERNS if name not in NOT_OF_LLAMA_CPP])
def test_tokens_equal_those_of_llama_cpp(pre: str, tmp_path: Path) -> None:
    """Wrong twin: the pre-tokenizer of another name."""
    strings = texts(1, ASCII if pre in CASES_OF_ASCII else ALPHABET)
    if pre in NORMALISED:
        strings = [unicodedata.normalize("NFC", text) for text in strings]
    path = as_gguf("maincoder", tmp_path / "x.gguf", tokenizer=metadata(pre))
    tokenizer = HFTokenizer.from_gguf(metadata(pre))
    found = [tokenizer.encode(text) for text in strings]
    assert found == llama_cpp_tokens(path, strings)
    other = "bloom" if PATTERNS[pre] != PATTERNS["bloom"] else "gpt-2"
    twin = HFTokenizer.from_gguf(metadata(other))
    assert [twin.encode(text) for text in strings] != found
