"""Small trained tokenizers as repositories have them: tokenizer.json and its settings."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

#: The words of training texts and of strings that are compared.
WORDS = (
    *("the", "cat", "Sat", "don't", "I'LL", "we've", "mat", "HTTP", "x1", "42", "123456", "3.14"),
    *("été", "Straße", "мир", "日本", "नमस्ते", "👍", "...", "->", "(a)", "\n", "\n\n", "\t", "  "),
)
SPECIAL = ("<pad>", "<s>", "</s>", "<|im_end|>")
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Kind -> the expression that splits texts, and the name that llama.cpp has for it.
SPLITS = {
    "gpt-2": (None, "gpt-2"),
    "llama 3": (_LLAMA_3, "llama-bpe"),
    "qwen 2": (_LLAMA_3.replace("{1,3}", ""), "qwen2"),
}
#: Kinds with marks for spaces: whether a text begins with one.
MARKS = {"llama 2": True, "llama 2, metaspace": True, "gemma": False}


def strings(seed: int, count: int = 300) -> list[str]:
    """Strings of words, with and without spaces between them."""
    generator, found = random.Random(seed), []
    for _ in range(count):
        joint = generator.choice(("", " ", " ", "  "))
        found.append(joint.join(generator.choices(WORDS, k=generator.randint(1, 12))))
    return found


def trained(kind: str) -> Tokenizer:
    """A tokenizer of one of `SPLITS` or `MARKS`."""
    has_marks = kind in MARKS
    ignores = kind == "llama 3"
    model = models.BPE(
        byte_fallback=has_marks,
        ignore_merges=ignores,
        fuse_unk=has_marks,
        unk_token="<unk>" if has_marks else None,
    )
    tokenizer = Tokenizer(model)
    special, bytes_ = list(SPECIAL), [f"<0x{i:02X}>" for i in range(256)]
    if has_marks:
        special += ["<unk>", *bytes_]
    alphabet = [] if has_marks else pre_tokenizers.ByteLevel.alphabet()
    if has_marks:
        steps: list[Any] = [normalizers.Replace(" ", "▁")]
        if MARKS[kind]:
            steps.insert(0, normalizers.Prepend("▁"))
        tokenizer.normalizer = normalizers.Sequence(steps)
        ends: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*ends, *([decoders.Strip(" ", 1, 0)] * MARKS[kind])])
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]+"), "isolated")
    else:
        pattern = SPLITS[kind][0]
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
        tokenizer.pre_tokenizer = whole
        if pattern is not None:
            split = pre_tokenizers.Split(Regex(pattern), "isolated")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
        tokenizer.decoder = decoders.ByteLevel()
        if kind == "qwen 2":
            tokenizer.normalizer = normalizers.NFC()
    tokenizer.train_from_iterator(
        strings(7),
        trainers.BpeTrainer(
            vocab_size=len(special) + len(alphabet) + 120,
            initial_alphabet=alphabet,
            special_tokens=special,
            show_progress=False,
        ),
    )
    state = json.loads(tokenizer.to_str())
    if has_marks:  # they are bytes, no special tokens
        state["added_tokens"] = state["added_tokens"][: len(SPECIAL) + 1]
        state["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(state))
    if kind == "llama 2, metaspace":
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    own = ["<tool>", "\n\n"] if kind == "gemma" else ["<tool>"]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in own])
    if kind != "qwen 2":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return tokenizer


def write_tokenizer(folder: Path, kind: str = "gpt-2") -> Tokenizer:
    """Write the files of a tokenizer into a folder."""
    tokenizer = trained(kind)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": "{% for m in messages %}<s>{{ m.content }}<|im_end|>{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer
