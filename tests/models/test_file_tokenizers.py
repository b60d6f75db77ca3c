"""Tokenizers of repositories without tokenizer.json: SentencePiece, Kimi's tiktoken.model, and the
vocab.json and merges.txt of GPT-2."""

from __future__ import annotations

import base64
import json
import struct
import unicodedata
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from anydecode.errors import CheckpointError
from anydecode.models.tokenizers import HFTokenizer

TEXTS = ["Hello world", " two  spaces\n\n x ", "it's 12345", "naïve 日本 🎉", "</s>a<s>", "", "a"]


def written(folder: Path, settings: dict[str, Any], **files: bytes) -> HFTokenizer | None:
    """The tokenizer of a folder with these files."""
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, data in files.items():
        (folder / f"{name}.model").write_bytes(data)
    return HFTokenizer.from_folder(folder)


def field(number: int, value: int | bytes | str | float) -> bytes:
    """A field of a message of protocol buffers."""
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
TOKENS += ["▁H", "el", "lo", "▁Hel", "▁Hello", "▁w", "or", "ld", "▁wor", *"▁aeldHworx"]
TYPES = [2, 3, 3, *[6] * 256, *[1] * 19]
SCORES = [*[0.0] * 259, *(-float(rank) for rank in range(19))]


def sentencepiece(kind: int = 2, squeezes: int = 0) -> bytes:
    pieces = zip(TOKENS, SCORES, TYPES, strict=True)
    model = b"".join(
        field(1, field(1, token) + field(2, score) + field(3, type_))
        for token, score, type_ in pieces
    )
    return model + field(2, field(3, kind)) + field(3, field(1, "identity") + field(4, squeezes))


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_is_read_as_from_gguf(prefix: bool, tmp_path: Path) -> None:
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_prefix_space": prefix,
        "added_tokens_decoder": {"279": {"content": "<turn>", "special": True}},
    }
    found = written(tmp_path, settings, tokenizer=sentencepiece())
    assert found is not None
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*TOKENS, "[unused 278]", "<turn>"],
        "tokenizer.ggml.scores": [*SCORES, 0.0, 0.0],
        "tokenizer.ggml.token_type": [*TYPES, 5, 3],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    expected = HFTokenizer.from_gguf(metadata)
    for text in [*TEXTS, "x<turn>Hello"]:
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))
    if prefix:
        assert found.encode("Hello world")[:2] == [1, TOKENS.index("▁Hello")]
    assert (found.bos_id, found.eos_ids) == (1, {2})


def test_other_models_of_sentencepiece_are_left_out(tmp_path: Path) -> None:
    assert written(tmp_path, {}, tokenizer=sentencepiece(kind=3)) is None
    assert written(tmp_path, {}, tokenizer=sentencepiece(squeezes=1)) is None


@pytest.mark.parametrize("data", [sentencepiece()[:-3], b"\xff" * 20, b"\x0b\x00"])
def test_a_corrupt_model_of_sentencepiece_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: not a tokenizer: [^\n]+$"):
        written(tmp_path, {}, tokenizer=data)


WORDS = ["He", "ll", "llo", " w", "or", " wor", "ld", "'s", "日本", "12", "123"]
KIMI = {
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "added_tokens_decoder": {
        "270": {"content": "[BOS]", "special": True},
        "271": {"content": "[EOS]", "special": True},
    },
}


def tiktoken() -> dict[bytes, int]:
    return {
        word: rank
        for rank, word in enumerate([*(bytes([b]) for b in range(256)), *map(str.encode, WORDS)])
    }


def merged(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The rule of tiktoken: the neighbours whose joint token has the lowest rank are merged."""
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [(ranks.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, at = min(pairs, default=(1 << 30, 0))
        if rank == 1 << 30:
            return [ranks[part] for part in parts]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_the_tokenizer_of_kimi(tmp_path: Path) -> None:
    ranks = tiktoken()
    lines = [base64.b64encode(word) + b" %d\n" % rank for word, rank in ranks.items()]
    found = written(tmp_path, KIMI, tiktoken=b"".join(lines))
    assert found is not None
    words = ["Hello", " world's", " ", "123", "45", " ", "日本", "x", "!"]
    expected = [token for word in words for token in merged(word.encode(), ranks)]
    assert found.encode("Hello world's 12345 日本x!") == expected
    assert found.encode("Hello[EOS]")[-1] == 271
    assert found.decode(expected) == "Hello world's 12345 日本x!"
    assert (found.bos_id, found.eos_ids) == (270, {271})
    assert written(tmp_path, {}, tiktoken=b"".join(lines)) is None
    with pytest.raises(CheckpointError, match=r"tiktoken\.model: not a tokenizer"):
        written(tmp_path, KIMI, tiktoken=b"".join([*lines, b"AAAA 900\n"]))


def test_the_tokenizer_of_qwen(tmp_path: Path) -> None:
    """Texts are normalised to NFC; the special tokens follow the vocabulary."""
    ranks = tiktoken()
    lines = [base64.b64encode(word) + b" %d\n" % rank for word, rank in ranks.items()]
    (tmp_path / "qwen.tiktoken").write_bytes(b"".join(lines))
    found = HFTokenizer.from_folder(tmp_path)
    assert found is not None
    words = ["Hello", " world", "'s", " ", "1", "2", "3", " é"]
    expected = [token for word in words for token in merged(word.encode(), ranks)]
    assert found.encode("Hello world's 123 e\u0301") == expected
    first = len(ranks)
    assert found.encode("<|endoftext|><|im_start|><|im_end|>") == [first, first + 1, first + 2]
    assert found.encode("<|extra_0|><|extra_204|>") == [first + 3, first + 207]
    assert found.vocab_size == first + 208
    assert found.decode(expected) == "Hello world's 123 é"


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "pad_token": "<pad>"},
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
        {},
    ],
)
def test_the_files_of_gpt2(settings: dict[str, Any], tmp_path: Path) -> None:
    """As in OPT and DialoGPT."""
    transformers = pytest.importorskip("transformers")
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(["Hello world, it's naïve 12345"] * 4, trainer)
    trained.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"}))
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
    found = written(tmp_path, {**names, **settings})
    assert found is not None
    expected = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    first = [2] if settings.get("add_bos_token") else []
    for text in TEXTS:
        ids = expected(text, add_special_tokens=False)["input_ids"]
        assert found.encode(text) == first + ids
        assert found.encode(text, special=False) == ids
    assert (found.bos_id, found.eos_ids) == (2, {2})


def test_the_files_of_roberta(tmp_path: Path) -> None:
    """Rejects a text without the tokens around it, and one separator between the texts of a
    pair."""
    transformers = pytest.importorskip("transformers")
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(["Hello world, it's naïve 12345"] * 4, trainer)
    trained.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roberta"}))
    expected = transformers.RobertaTokenizer.from_pretrained(tmp_path)
    for settings in ({}, {"tokenizer_class": "RobertaTokenizerFast"}):
        found = written(tmp_path, settings)
        assert found is not None
        for text in TEXTS:
            assert found.encode(text) == expected(text)["input_ids"], text
        assert found.encode_pair("Hello", "it's")[0] == expected("Hello", "it's")["input_ids"]


@pytest.mark.parametrize(
    "settings",
    [{}, {"tokenizer_class": "BertTokenizer", "do_lower_case": False}, {"strip_accents": False}],
)
def test_the_vocabulary_of_bert(settings: dict[str, Any], tmp_path: Path) -> None:
    """Rejects another casing, accents that are stripped or kept, and token types of one text."""
    transformers = pytest.importorskip("transformers")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*"abcdeHhlorwxit'12345日本é", "hello", "world", "naïve", "naive", "##s", "##llo"]
    words += [f"##{letter}" for letter in "abcdelorwxéï"]
    (tmp_path / "vocab.txt").write_text("\n".join([*special, *words]) + "\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    found = written(tmp_path, settings)
    assert found is not None
    expected = transformers.BertTokenizer.from_pretrained(tmp_path)
    for text in ["Hello hellos worlds", *TEXTS, "naïve NAÏVE é", "a[SEP]b [MASK] 日本12"]:
        assert found.encode(text) == expected(text)["input_ids"], text
    pair = expected("hello a", "b")
    assert found.encode_pair("hello a", "b") == (pair["input_ids"], pair["token_type_ids"])


def random_texts(parts: list[str], count: int = 1000) -> list[str]:
    draw = Random(1)
    return ["".join(draw.choices(parts, k=draw.randint(0, 9))) for _ in range(count)]


def test_a_unigram_model_of_t5(tmp_path: Path) -> None:
    """Its sentinels count down, and there is no space behind a symbol that users have defined."""
    pieces = [("<pad>", 0.0, 3), ("</s>", 0.0, 3), ("<unk>", 0.0, 2), ("▁", -1.0, 1),
              ("(", 0.0, 4), ("a", -2.0, 1), ("▁a", -1.5, 1)]  # fmt: skip
    model = b"".join(
        field(1, field(1, token) + field(2, score) + field(3, type_))
        for token, score, type_ in pieces
    )
    model += field(2, field(3, 1) + field(40, 2) + field(42, 1)) + field(3, field(1, "identity"))
    found = written(tmp_path, {"tokenizer_class": "T5Tokenizer", "extra_ids": 3}, spiece=model)
    assert found is not None and found.vocab_size == len(pieces) + 3
    assert found.encode("(a a") == [3, 4, 5, 6, 1]
    for number in range(3):
        assert found.encode(f"a<extra_id_{number}>") == [6, len(pieces) + 2 - number, 1]


#: Words and characters that normalisation replaces, joins, or removes.
NORMALIZED = [
    "Hello", " ", "  ", "world", "é", "e\u0301", "ﬁ", "Ａ", "\t", "\n", "\u200b", "日本", "12,",
    "(", ")", "£", "🎉", "ｱﾞ", "½", "it's", "\u3000", "\u00a0", "Å", "ö", "q", "xyz", ",", "①", "…",
    "한국", "ก็", "''",
]  # fmt: skip
CORPUS = [
    "Hello world, it's a naïve test of 12345 words (and more).",
    "日本語のテキスト ﬁne ＡＢＣ",
    "the quick brown fox jumps over the lazy dog £5 – €3",
    "Les élèves sont arrivés à l'école",
]


def unigram(**options: Any) -> bytes:
    """A model that SentencePiece trains."""
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    model = BytesIO()
    options = {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", **options}
    trainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_writer=model,
        vocab_size=400 if options.get("byte_fallback") else 150,
        hard_vocab_limit=False,
        user_defined_symbols=["(", ")", "£"],
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def slow_albert(text: str) -> str:
    """What ALBERT does to a text before SentencePiece."""
    text = " ".join(text.strip().split()).replace("``", '"').replace("''", '"')
    decomposed = unicodedata.normalize("NFKD", text)
    return "".join(c for c in decomposed if not unicodedata.combining(c)).lower()


def ids_of_class(kind: str, ids: list[int], size: int) -> list[int]:
    """The ids of a class of transformers for those of SentencePiece."""
    if kind == "T5Tokenizer":
        return [*ids, 1]
    if kind == "XLMRobertaTokenizer":
        return [0, *(3 if token == 0 else token + 1 for token in ids), 2]
    return [3, *ids, 4] if kind == "AlbertTokenizer" else ids


@pytest.mark.parametrize(
    ("kind", "file", "options"),
    [
        ("", "tokenizer.model", {}),
        ("", "tokenizer.model", {"normalization_rule_name": "identity",
                                 "remove_extra_whitespaces": False}),
        ("", "tokenizer.model", {"normalization_rule_name": "nfkc_cf", "add_dummy_prefix": False}),
        ("T5Tokenizer", "spiece.model", {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}),
        ("XLMRobertaTokenizerFast", "sentencepiece.bpe.model", {}),
        ("AlbertTokenizer", "spiece.model",
         {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1,
          "control_symbols": ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]}),
    ],
)  # fmt: skip
def test_unigram_models_are_read_as_sentencepiece_reads_them(
    kind: str, file: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = unigram(**options)
    library = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_proto=model)
    (tmp_path / file).write_bytes(model)
    found = written(tmp_path, {"tokenizer_class": kind} if kind else {})
    assert found is not None
    kind = kind.removesuffix("Fast")
    marks = set()
    for text in random_texts(NORMALIZED):
        plain = slow_albert(text) if kind == "AlbertTokenizer" else text
        expected = ids_of_class(kind, library.encode(plain), library.vocab_size())
        assert found.encode(text) == expected, text
        marks |= {*library.encode_as_pieces(plain)}
    assert len(marks) > 60


def test_tokens_beside_a_unigram_model(tmp_path: Path) -> None:
    """The sentinels of T5 and the mask of XLM-RoBERTa; wrong ones are those of plain files."""
    model = unigram(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    size = (
        pytest.importorskip("sentencepiece").SentencePieceProcessor(model_proto=model).vocab_size()
    )
    (tmp_path / "spiece.model").write_bytes(model)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mt5", "eos_token_id": 1}))
    found = written(tmp_path, {"extra_ids": 7})
    assert found is not None and found.vocab_size == size + 7 and found.eos_ids == {1}
    assert found.encode("Hello <extra_id_0>")[-2:] == [size + 6, 1]
    assert found.decode(found.encode("a dog <extra_id_6>")) == "a dog"
    with pytest.raises(CheckpointError, match=r"spiece\.model: not a tokenizer: extra_ids -1"):
        written(tmp_path, {"extra_ids": -1})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlm-roberta"}))
    found = written(tmp_path, {"mask_token": "<mask>"})
    assert found is not None and found.mask_id == size + 1
    assert found.encode("<mask>") == [0, size + 1, 2]


@pytest.mark.parametrize(
    "options",
    [{"byte_fallback": True}, {"treat_whitespace_as_suffix": True}, {"model_type": "word"}],
)
def test_other_kinds_of_unigram_models_are_left_out(
    options: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(unigram(**options))
    assert written(tmp_path, {}) is None


def test_texts_of_qwen_are_those_of_tiktoken(tmp_path: Path) -> None:
    """Against tiktoken itself."""
    library = pytest.importorskip("tiktoken")
    # tiktoken also takes words that no merges lead to, which vocabularies do not have.
    reachable = [word for word in tiktoken() if word != "日本".encode()]
    ranks = {word: rank for rank, word in enumerate(reachable)}
    lines = [base64.b64encode(word) + b" %d\n" % rank for word, rank in ranks.items()]
    (tmp_path / "qwen.tiktoken").write_bytes(b"".join(lines))
    found = written(tmp_path, {"tokenizer_class": "QWenTokenizer"})
    assert found is not None
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    names += [f"<|extra_{number}|>" for number in range(205)]
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    expected = library.Encoding(
        "qwen",
        pat_str=pattern,
        mergeable_ranks=ranks,
        special_tokens={name: len(ranks) + index for index, name in enumerate(names)},
    )
    for text in random_texts([*NORMALIZED, "llo", "or", "<|im_start|>", "123", "<|extra_204|>"]):
        normal = unicodedata.normalize("NFC", text)
        assert found.encode(text) == expected.encode(normal, allowed_special="all"), text
    assert found.vocab_size == len(ranks) + 208
