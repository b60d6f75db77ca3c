"""Tokenizers and chat templates."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models import chat
from anydecode.models.gguf_tokenizer import PATTERNS, make_pre_tokenizer, merges_from_scores
from anydecode.models.tokenizers import HFTokenizer

CORPUS = [
    "the quick brown fox's 12345 jumps",
    "  def f(x):\n\treturn x**2",
    "naïve café 日本語 🎉",
] * 5
TEXTS = [
    "Hello world",
    "  two  spaces\tand\n\n\nlines \n x",
    "3.14159 2024-01-01 ¼ ² ٣ Ⅷ",
    "日本語テキスト、混ざる",
    "🎉👩‍👩‍👧 🇫🇷 emoji",
    "def f(x):\n    return x ** 2  # ok\n",
    "it's we've I'll 'S don't",
    "مرحبا \u00a0\u2003 weird\u200b",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level() -> Tokenizer:
    """A trained byte-level BPE with single digits, like the default model's tokenizer."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metadata_of(tokenizer: Tokenizer, pre: str = "smollm") -> dict[str, Any]:
    """What a GGUF file would say of a byte-level tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


@pytest.fixture(scope="module")
def original() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def rebuilt(original: Tokenizer) -> HFTokenizer:
    return HFTokenizer.from_gguf(metadata_of(original))


def test_the_rebuilt_tokenizer_equals_the_original(
    original: Tokenizer, rebuilt: HFTokenizer
) -> None:
    for text in TEXTS:
        assert rebuilt.encode(text) == original.encode(text).ids


def test_the_pre_tokenizer_is_the_named_one(original: Tokenizer) -> None:
    """With a token "12" in the vocabulary, only a pre-tokenizer that joins digits uses it."""

    def encode(pre: str) -> list[int]:
        metadata = metadata_of(original, pre)
        metadata["tokenizer.ggml.tokens"].append("12")
        metadata["tokenizer.ggml.token_type"].append(1)
        metadata["tokenizer.ggml.merges"].append("1 2")
        return HFTokenizer.from_gguf(metadata).encode("12")

    assert encode("smollm") == original.encode("12").ids
    assert encode("gpt-2") != original.encode("12").ids


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_bytes_and_text_round_trip(text: str) -> None:
    tokenizer = SHARED
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids)


SHARED = HFTokenizer.from_gguf(metadata_of(byte_level()))


def test_smollm_splits_every_digit(rebuilt: HFTokenizer) -> None:
    pieces = [rebuilt.token_bytes(token) for token in rebuilt.encode("a 12345")]
    assert pieces[-5:] == [b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("bytewise", [True, False])
def test_reasoning_tags_are_text(special: bool, bytewise: bool) -> None:
    """The token of a reasoning tag, special or not, is part of the text that a parser reads."""
    backend = byte_level() if bytewise else Tokenizer(BPE({"a": 0, "b": 1}, []))
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tags = [AddedToken(tag, special=special) for tag in ("<think>", "</think>")]
    (backend.add_special_tokens if special else backend.add_tokens)(tags)
    tokenizer = HFTokenizer(backend)
    ids = tokenizer.encode("<think>a</think>b<|im_end|>", special=False)
    assert len(ids) == 5
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"<think>a</think>b"
    assert "".join(tokenizer.decode(ids).split()) == "<think>a</think>b"
    assert [tokenizer.is_special(token) for token in ids] == [False] * 4 + [True]


def test_special_tokens(rebuilt: HFTokenizer) -> None:
    text = rebuilt.render_chat([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = rebuilt.encode(text, special=False)
    assert [token for token in ids if rebuilt.is_special(token)] == [1, 2, 1]
    assert rebuilt.decode(ids, skip_special=False) == text
    assert rebuilt.decode(ids) == "user\nHi\nassistant\n"
    assert rebuilt.token_bytes(1) == b"" and rebuilt.token_text(1) == "<|im_start|>"
    assert (rebuilt.bos_id, rebuilt.eos_ids) == (1, frozenset({0, 2}))
    assert rebuilt.token_bytes(10**6) == b""
    assert rebuilt.vocab_size == 1 + max(rebuilt.backend.get_vocab().values())


@pytest.mark.parametrize("pre", PATTERNS)
def test_every_pre_tokenizer_round_trips(original: Tokenizer, pre: str) -> None:
    tokenizer = HFTokenizer.from_gguf(metadata_of(original, pre))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=True) == text


def test_pre_tokenizer_splits() -> None:
    def words(pre: str, text: str) -> list[str]:
        tokens = pre_tokenizers.ByteLevel.alphabet()
        made = HFTokenizer.from_gguf(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": pre,
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.merges": [],
            }
        )
        pieces = made.backend.pre_tokenizer.pre_tokenize_str(text)
        return [made.backend.decoder.decode([piece]) for piece, _ in pieces]

    assert words("gpt-2", "I'll 123456!") == ["I", "'ll", " 123456", "!"]
    assert words("smollm", "a 123") == ["a", " ", "1", "2", "3"]
    assert words("llama-bpe", "x 123456!") == ["x", " ", "123", "456", "!"]
    assert words("qwen2", "x 123") == ["x", " ", "1", "2", "3"]
    assert words("default", "a, b") == ["a", ",", " b"]
    assert words("falcon-h1", "x 1234") == words("pixtral", "x 1234") == ["x", " ", "123", "4"]
    assert words("glm4", "x 1234") == ["x", " ", "123", "4"]
    assert words("exaone4", "I'll 1234") == ["I", "'ll", " 1234"]
    assert words("qwen2", "x;\ny") == ["x", ";\n", "y"]
    assert words("seed-coder", "x;\n12") == ["x", ";", "\n", "1", "2"]
    assert words("falcon", "x=1234`") == ["x", "=", "123", "4", "`"]
    assert words("bloom", "it's (ok), 12") == ["it's", " (", "ok", "),", " 12"]
    text = "é x;1234\n日本 end  "
    found = ["é", " x", ";", "1234", "\n", "日本", " end", "  "]
    assert words("deepseek-llm", text) == found
    assert words("deepseek-coder", text) == [*found[:3], *"1234", *found[4:]]
    assert words("hunyuan-dense", "日本x 1234-y") == ["日本", "x", " ", "123", "4", "-y"]
    assert words("afmoe", "x12345 日本y") == ["x", "12", "345", " ", "日本", "y"]
    assert words("ufakzeka", "I'll x12") == ["I", "'ll", " x", "1", "2"]
    assert words("ufakzeka", "it'sx") == ["it", "'sx"]
    assert words("spark2_5", "日本x 123;\n\n y") == [
        *("日本", "x", " ", *"123", ";"),
        "\n",
        "\n",
        " y",
    ]
    assert words("hy_v4", "日本x 1234;\n") == ["日本", "x", " ", "123", "4", ";\n"]
    assert words("glm5", "x 1234") == ["x", " ", "123", "4"]
    assert words("tiny_aya", "x 12345") == ["x", " ", "12", "345"]
    assert words("superbpe", "a b 12345") == ["a b ", "12", "345"]
    assert words("minimax-m2", "aB 1234") == ["a", "B", " ", "123", "4"]
    assert words("viking", "it's, 12") == ["it's", ",", " ", "1", "2"]
    assert words("youtu", "日本。x 12") == ["日本", "。", "x", " ", "1", "2"]
    assert words("exaone-moe", "I am here; 12") == ["I am here", ";", " ", "1", "2"]
    assert words("laguna", "a  \n\nb") == ["a", "  ", "\n\n", "b"]
    assert words("minicpm5", "x 12345") == ["x", " ", "123", "45"]
    assert words("chameleon", "a  b1") == ["a", "  ", "b", "1"]


#: The pattern that OpenAI publishes for o200k (in tiktoken, `o200k_base`).
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


#: The pattern of Kimi K2's own tokenizer.
KIMI_K2 = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


#: The pattern of Qwen3.5's own tokenizer.
QWEN_35 = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


#: The pattern of Jais 2's own tokenizer.
JAIS_2 = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        *(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")),
        r"\s{1}",
    ]
)


@pytest.mark.parametrize(
    ("pre", "pattern"),
    [("gpt-4o", O200K), ("kimi-k2", KIMI_K2), ("qwen35", QWEN_35), ("jais-2", JAIS_2)],
)
def test_pre_tokenizers_split_like_the_published_pattern(pre: str, pattern: str) -> None:
    """A thousand strings of letters, marks, digits, quotes and spaces of several scripts."""
    regex = pytest.importorskip("regex")
    splitter = make_pre_tokenizer(PATTERNS[pre])
    to_text = decoders.ByteLevel()
    alphabet = "aBcÉéßǅʰ日本ع́1²Ⅷ '’/.,!🎉\t\r\n\u00a0\u2003" + "abAB  '\n"
    generator = random.Random(0)
    for _ in range(1000):
        text = "".join(generator.choices(alphabet, k=generator.randrange(1, 40)))
        text = text.replace("'", generator.choice(["'s", "'LL", "'", "'Ve"]))
        text = text.replace(" ", " " * generator.choice([1, 1, 1, 7, 21]))
        pieces = [to_text.decode([piece]) for piece, _ in splitter.pre_tokenize_str(text)]
        assert pieces == regex.findall(pattern, text, regex.V1), text


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
WORDS = ["▁", "h", "e", "l", "o", "w", "r", "d", "ll", "he", "hell", "hello", "▁hello", "▁w", "or"]


def spm_metadata(**more: Any) -> dict[str, Any]:
    scores = [0.0] * len(PIECES) + [-float(i) for i in range(len(WORDS))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES + WORDS,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(WORDS),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


def test_sentencepiece() -> None:
    tokenizer = HFTokenizer.from_gguf(spm_metadata())
    ids = tokenizer.encode("hello world")
    names = [PIECES[i] if i < len(PIECES) else WORDS[i - len(PIECES)] for i in ids]
    assert names == ["<s>", "▁hello", "▁w", "or", "l", "d"]
    assert tokenizer.encode("hello", special=False) == ids[1:2]
    assert tokenizer.decode(ids) == "hello world"
    # Bytes include the space that decoding removes from the start of a text.
    assert tokenizer.strips_first_space
    assert b"".join(map(tokenizer.token_bytes, ids)) == b" hello world"


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_sentencepiece_falls_back_to_bytes(text: str) -> None:
    tokenizer = SPM
    ids = tokenizer.encode(text, special=False)
    if "<" not in text:
        assert tokenizer.decode(ids, skip_special=False) == text
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert joined == (" " + text if text else "")


SPM = HFTokenizer.from_gguf(spm_metadata())


def test_add_space_prefix_false() -> None:
    tokenizer = HFTokenizer.from_gguf(spm_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
    assert not tokenizer.strips_first_space
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("hello"))) == b"hello"


def test_merges_are_sorted_by_score() -> None:
    tokens, scores = ["a", "b", "c", "ab", "bc", "abc"], [0.0, 0.0, 0.0, -2.0, -1.0, -3.0]
    assert merges_from_scores(tokens, scores, [1] * 6) == [
        ("b", "c"),
        ("a", "b"),
        ("ab", "c"),
        ("a", "bc"),
    ]


def test_add_bos_and_eos_flags() -> None:
    flags = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    tokenizer = HFTokenizer.from_gguf(spm_metadata(**flags))
    assert tokenizer.encode("h")[-1] == 2
    assert tokenizer.encode("h")[0] != 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "hybriddna"}, "'hybriddna' are not supported"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer"),
        ({"tokenizer.ggml.scores": [0.0]}, "no score for each"),
        ({"tokenizer.ggml.token_type": [1]}, "do not match"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "odd"}, "'odd' is not supported"),
        ({"tokenizer.ggml.model": "gpt2"}, "no merges"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["zz qq"]},
            "tokenizer is corrupt",
        ),
    ],
)
def test_invalid_metadata_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        HFTokenizer.from_gguf(spm_metadata(**change), "tiny.gguf")
    assert str(caught.value).startswith("tiny.gguf: ")


def save_folder(folder: Path) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("  wide  ", special=False)])
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": [
            {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
            {"name": "tool_use", "template": "{{ tools | tojson }}"},
        ],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    return tokenizer


def test_tokenizer_of_a_folder(tmp_path: Path) -> None:
    assert HFTokenizer.from_folder(tmp_path) is None
    save_folder(tmp_path)
    tokenizer = HFTokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    ids = tokenizer.encode("a  wide  and long text")
    assert ids[0] == 1 and len(ids) > 3
    assert tokenizer.encode("a", special=False)[0] != 1
    assert tokenizer.decode(ids) == "a  wide  and long text"
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "a  wide  and long text"
    assert tokenizer.eos_ids == {0, 2} and tokenizer.bos_id == 1
    messages = [{"role": "user", "content": "é"}]
    assert tokenizer.render_chat(messages) == "<|im_start|>é"
    assert tokenizer.render_chat(messages, tools=[{"é": 1}]) == '[{"é": 1}]'
    (tmp_path / "chat_template.jinja").write_text("from a file")
    from_file = HFTokenizer.from_folder(tmp_path)
    assert from_file is not None and from_file.chat_template == "from a file"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        HFTokenizer.from_folder(tmp_path)


def test_sentencepiece_folder_with_either_decoder(tmp_path: Path) -> None:
    vocab = {token: index for index, token in enumerate(PIECES + WORDS)}
    for decoder in (decoders.Metaspace(), None):
        tokenizer = Tokenizer(BPE(vocab, [("h", "e")], unk_token="<unk>", byte_fallback=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoder or decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        made = HFTokenizer.from_folder(tmp_path)
        assert made is not None
        assert made.strips_first_space == (decoder is not None)
        assert made.token_bytes(vocab["▁w"]) == b" w"
        assert made.token_bytes(vocab["<0x0A>"]) == b"\n"


def test_half_a_surrogate_pair_is_rejected(rebuilt: HFTokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        rebuilt.encode("a\ud800")


MESSAGES = [{"role": "user", "content": "Hi"}]


def test_chat_template_variables_and_filters() -> None:
    def render(template: str, **variables: Any) -> str:
        return chat.render(template, MESSAGES, **variables)

    assert render("{{ bos_token }}|{{ add_generation_prompt }}", bos_token="<s>") == "<s>|True"
    assert render("{% if true %}\n  x\n  {% endif %}\ny") == "  x\ny"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ {'a': 1} | tojson(indent=1) }}") == '{\n "a": 1\n}'
    assert render("{% generation %}mine{% endgeneration %}") == "mine"
    assert render("{% for m in messages %}{% break %}{% endfor %}z") == "z"
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content.foo.bar }}", "undefined|no attribute"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ 'x' * 100000000 }}", "too long"),
        ("{{ 9 ** 99999999 }}", "power"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "range|Range"),
    ],
)
def test_faulty_and_malicious_templates_raise_one_line_errors(template: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        chat.render(template, MESSAGES)
    assert "\n" not in str(caught.value)


def test_threads_that_render_the_same_template_have_their_own_deadlines() -> None:
    template = "{% for i in range(300) %}{{ messages[0].content }}{% endfor %}"

    def busy_render(seconds: float) -> str:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        with chat.time_limit(1.0):
            return chat.render(template, MESSAGES)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(busy_render, 1.5)
        others = [threads.submit(busy_render, 0.0) for _ in range(20)]
        assert {job.result() for job in (first, *others)} == {MESSAGES[0]["content"] * 300}


def test_endless_templates_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.05)
    endless = (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = messages[0].role %}"
        "{% endfor %}{% endfor %}"
    )
    with pytest.raises(InvalidRequestError, match="more than 0.05 seconds"):
        chat.render(endless, MESSAGES)
    monkeypatch.setattr(chat, "MAX_CHARACTERS", 100)
    with pytest.raises(InvalidRequestError, match="too long"):
        chat.render("{% for i in range(99999) %}xx{% endfor %}", MESSAGES)


def test_render_chat_without_a_template(original: Tokenizer) -> None:
    bare = HFTokenizer(original)
    assert bare.chat_template is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        bare.render_chat(MESSAGES)


#: llama.cpp's tokens of the same texts with the same file.
DEFAULT_MODEL_TOKENS = {
    "<|im_start|>user\nHi 123<|im_end|>\n": [1, 4093, 198, 26843, 216, 33, 34, 35, 2, 198],
    "You are a helpful AI assistant": [2683, 359, 253, 5356, 5646, 11173],
}


@pytest.mark.model
def test_the_default_model(default_model_path: Path) -> None:
    from anydecode.models.loading import load_checkpoint

    checkpoint = load_checkpoint(default_model_path)
    tokenizer = checkpoint.tokenizer
    assert isinstance(tokenizer, HFTokenizer)
    for text, expected in DEFAULT_MODEL_TOKENS.items():
        assert tokenizer.encode(text) == expected
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    chat_text = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert chat_text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(chat_text, special=False)[0] == 1
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (49152, {0, 2})
    assert checkpoint.config["num_hidden_layers"] == 30
    assert len(checkpoint.tensors) == 272
