"""Tokenizers from vocab.json and merges.txt (Dream's checkpoints have no tokenizer.json) against
`transformers` and against an independent implementation of the published rules."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import regex
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from anydecode.errors import CheckpointError
from anydecode.models.tokenizers import HFTokenizer

CORPUS = [
    "the quick brown fox's 12345 jumps, it's we've I'll",
    "  def f(x):\n\treturn x**2\r\n\r\n    # done\n",
    "naïve café 日本語 🎉 été",
    "Hello world. Hello world! hello   world",
] * 5
TEXTS = [
    "Hello world",
    " Hello world",
    "  two  spaces\tand\n\n\nlines \n x \r\n\r\n y",
    "3.14159 2024-01-01 ¼ ² ٣ Ⅷ 12345",
    "日本語テキスト、混ざる",
    "cafe\u0301 e\u0301te\u0301 \u212b \ufb01",
    "🎉👩‍👩‍👧 🇫🇷 emoji",
    "def f(x):\n    return x ** 2  # ok\n",
    "it's we've I'll 'S DON'T 'Ve",
    "مرحبا \u00a0\u2003 weird\u200b",
    "<|im_start|>user\nHi<|mask|><|mask|> <|im_end|>\n<|beginoftext|>x<tool_call>y</tool_call>",
    "<|im_start <|mask|",
    "",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: The added tokens of Dream, in order, and whether they are special.
ADDED = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<|beginoftext|>": True,
    "<|mask|>": True,
}
FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
NAMED = {
    "additional_special_tokens": ["<|beginoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>"],
    "bos_token": "<|beginoftext|>",
    "eos_token": "<|endoftext|>",
    "mask_token": "<|mask|>",
    "pad_token": "<|endoftext|>",
    "unk_token": None,
}


def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A small byte-level vocabulary and its merges."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


VOCAB, MERGES = trained()
IDS = {text: len(VOCAB) + index for index, text in enumerate(ADDED)}


def write_folder(folder: Path, *, legacy: bool = False, **changes: Any) -> Path:
    """Write Dream's files. `legacy`: the ids of added tokens are in added_tokens.json only."""
    (folder / "vocab.json").write_text(json.dumps(VOCAB, ensure_ascii=False), "utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in MERGES)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", "utf-8")
    (folder / "added_tokens.json").write_text(json.dumps(IDS))
    settings = {
        "add_prefix_space": False,
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": 131072,
        "split_special_tokens": False,
        "tokenizer_class": "DreamTokenizer",
    }
    if legacy:
        (folder / "special_tokens_map.json").write_text(json.dumps(NAMED))
    else:
        decoder = {
            str(IDS[text]): {"content": text, **FLAGS, "special": special}
            for text, special in ADDED.items()
        }
        settings |= {**NAMED, "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **changes}))
    (folder / "config.json").write_text(json.dumps({"mask_token_id": IDS["<|mask|>"]}))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": IDS["<|endoftext|>"], "mask_token_id": None})
    )
    return folder


def load_tokenizer(folder: Path) -> HFTokenizer:
    tokenizer = HFTokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("dream"))


class ReferenceTokenizer:
    """The slow tokenizer's rules: normalize to NFC, split off added tokens, split words, merge
    bytes."""

    words = regex.compile(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    cut = regex.compile("(" + "|".join(map(regex.escape, ADDED)) + ")")

    def __init__(self) -> None:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self.byte_characters = {byte: chr(byte) for byte in printable}
        self.byte_characters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
        self.ranks = {pair: rank for rank, pair in enumerate(MERGES)}

    def encode(self, text: str) -> list[int]:
        ids = []
        for piece in self.cut.split(unicodedata.normalize("NFC", text)):
            if piece in IDS:
                ids.append(IDS[piece])
                continue
            for word in self.words.findall(piece):
                ids.extend(VOCAB[part] for part in self.merged(word))
        return ids

    def merged(self, word: str) -> list[str]:
        parts = [self.byte_characters[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:], strict=False))
            best = min(range(len(pairs)), key=lambda at: self.ranks.get(pairs[at], len(MERGES)))
            if pairs[best] not in self.ranks:
                break
            parts[best : best + 2] = ["".join(pairs[best])]
        return parts


REFERENCE = ReferenceTokenizer()


@pytest.mark.parametrize("legacy", [False, True])
def test_tokens_equal_transformers_and_the_reference(tmp_path: Path, legacy: bool) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, legacy=legacy))
    hf_tokenizer = transformers.Qwen2Tokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, *CORPUS]:
        ids = tokenizer.encode(text)
        assert ids == REFERENCE.encode(text), text
        assert ids == hf_tokenizer(text)["input_ids"], text
        assert tokenizer.decode(ids, skip_special=False) == unicodedata.normalize("NFC", text)
        assert tokenizer.decode(ids) == hf_tokenizer.decode(ids, skip_special_tokens=True), text


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text() | st.text(alphabet="aé'stTe \n\r\t1<|mask|>\u0301"))
def test_tokens_of_any_text_equal_the_reference(folder: Path, text: str) -> None:
    if (
        "|>\u0301" not in text and "|>\u0338" not in text
    ):  # combining marks that change a token's text
        assert load_tokenizer(folder).encode(text) == REFERENCE.encode(text)


@pytest.mark.parametrize("legacy", [False, True])
def test_special_tokens_and_the_chat_template(tmp_path: Path, legacy: bool) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, legacy=legacy))
    assert tokenizer.mask_id == IDS["<|mask|>"]
    assert tokenizer.eos_ids == {IDS["<|endoftext|>"]}
    assert tokenizer.bos_id == IDS["<|beginoftext|>"]
    assert tokenizer.vocab_size == len(VOCAB) + len(ADDED)
    for text, special in ADDED.items():
        assert tokenizer.encode(text) == [IDS[text]]
        assert tokenizer.is_special(IDS[text]) == special
        assert tokenizer.token_bytes(IDS[text]) == (b"" if special else text.encode())
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.render_chat(messages) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    # No special tokens are added to a prompt.
    assert tokenizer.encode("Hi") == tokenizer.encode("Hi", special=False)


def test_added_token_ids_may_have_gaps(tmp_path: Path) -> None:
    far = {str(1000 + index): {"content": text, **FLAGS} for index, text in enumerate(ADDED)}
    tokenizer = load_tokenizer(write_folder(tmp_path, added_tokens_decoder=far))
    assert tokenizer.mask_id == 1006 and tokenizer.encode("a<|mask|>") == [VOCAB["a"], 1006]


def test_a_mask_token_is_found_by_its_name(tmp_path: Path) -> None:
    """SDAR's configs do not contain the mask token."""
    write_folder(tmp_path, mask_token=None)
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path).mask_id == IDS["<|mask|>"]
    # A mask token that is not in the vocabulary is ignored.
    write_folder(tmp_path, mask_token="<nowhere>")
    assert load_tokenizer(tmp_path).mask_id == IDS["<|mask|>"]


def test_other_classes_and_corrupt_files(tmp_path: Path) -> None:
    write_folder(tmp_path, tokenizer_class="CodeGenTokenizer")
    assert HFTokenizer.from_folder(tmp_path) is None
    same = {"1": {"content": "<|mask|>", **FLAGS}}
    for changes, words in (
        ({"added_tokens_decoder": same}, "two tokens have the same id"),
        ({"added_tokens_decoder": {"x": {}}}, "not a tokenizer"),
    ):
        write_folder(tmp_path, **changes)
        with pytest.raises(CheckpointError, match=words):
            HFTokenizer.from_folder(tmp_path)
    write_folder(tmp_path)
    (tmp_path / "merges.txt").write_text("#version: 0.2\nno such merge\n")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        HFTokenizer.from_folder(tmp_path)
    (tmp_path / "merges.txt").unlink()
    assert HFTokenizer.from_folder(tmp_path) is None
