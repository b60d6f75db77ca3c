"""Builds a tokenizer of the `tokenizers` library from a GGUF file's metadata.

A file names its pre-tokenizer (`tokenizer.ggml.pre`); llama.cpp defines the rule of each name.
"smollm" isolates every digit (Unicode category N) and then splits by GPT-2's pattern.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.processors import Sequence as ProcessorSequence

from anydecode.errors import CheckpointError
from anydecode.models.gguf_word_tokenizers import (
    encoder_tokens,
    plain_words,
    plamo,
    text_and_pair,
    unigram,
    word_piece,
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CL100K_SINGLE_DIGITS = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
#: Marks are part of words.
_QWEN_35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Long runs of spaces are cut into powers of two.
_JAIS_2 = _CL100K.replace(
    r"\s+(?!\S)|\s+",
    "".join(rf"\s{{{2**k}}}(?!\S)|" for k in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s",
)
#: No contractions.
_UFAKZEKA = _CL100K_SINGLE_DIGITS.removeprefix("(?i:'s|'t|'re|'ve|'m|'ll|'d)|")
_SEED = _CL100K_SINGLE_DIGITS.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}]+")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
#: Line ends are words of their own.
_SPARK = (*_DEEPSEEK_V3[:2], _DEEPSEEK_V3[2].replace(r"+[\r\n]*|\s*[\r\n]+", r"+|[\r\n]"), r"\p{N}")
_CASED = (
    # Upper- and lower-case letters as the tokenizer of DeepSeek LLM lists them.
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷ"
    "ᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿ"
    "ⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_HAN = r"[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM = (
    r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _HAN, r"\p{N}+",
)  # fmt: skip
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")
# Chinese characters are words of their own.
_KIMI_K2 = r"\p{Han}+|" + _O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("/]", "]")
#: Digits are grouped by three from the end of a number.
_LAST_THREE = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_AFMOE = (
    _LAST_THREE,
    "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
    _DEEPSEEK_V3[2],
)
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    _O200K.replace(r"\p{N}{1,3}", r"\p{N}"),
)
#: Phrases of several words are split together.
_EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SUPERBPE = (r"\p{N}+", r"(?=(\d{3})+(?!\d))")
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_SINGLE_DIGITS = (r"\p{N}", _GPT2)

#: The names of Llama 3's pre-tokenizer.
_LLAMA_3 = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"),
    "jina-v5-nano",
)
#: Name of the pre-tokenizer -> regular expressions, each applied to the result of the one before.
PATTERNS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling"),
            *("gigachat", "a.x-4.0", "mellum", "modern-bert", "roberta-bpe", "jina-v1-en"),
            *("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v2-code"),
        ),
        (_GPT2,),
    ),
    **dict.fromkeys(
        (
            *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
            "mellum2",
        ),
        _SINGLE_DIGITS,
    ),
    **dict.fromkeys((*_LLAMA_3, "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), (_CL100K,)),
    "jais-2": (_JAIS_2,),
    "ufakzeka": (_UFAKZEKA,),
    "spark2_5": _SPARK,
    "minicpm5": (r"\p{N}{1,3}", _CL100K.replace("{1,3}", "+")),
    "qwen35": (_QWEN_35,),
    **dict.fromkeys(
        (
            *("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "kormo", "f2llmv2"),
            *("bailingmoe", "bailingmoe2", "llada-moe", "solar-open", "grok-2"),
        ),
        (_CL100K_SINGLE_DIGITS,),
    ),
    "laguna": (r"[^\n]+|[\n]+", _CL100K_SINGLE_DIGITS),
    "seed-coder": (_SEED,),
    "falcon": _FALCON,
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), (_BLOOM,)),
    "viking": (_BLOOM, r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK_V3),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "kimi-k2": (_KIMI_K2,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "granite-embed-multi-97m"),
        (_O200K,),
    ),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _O200K)),
    "youtu": _YOUTU,
    "exaone-moe": (_EXAONE_MOE,),
    "afmoe": _AFMOE,
    "superbpe": _SUPERBPE,
    "chameleon": _CHAMELEON,
}
#: Pre-tokenizers with which a word that is itself a token skips the merges.
IGNORE_MERGES = (
    *_LLAMA_3,
    "tekken",
    "youtu",
    "minicpm5",
    "granite-embed-multi-97m",
    "glm4",
    "glm5",
)
#: Pre-tokenizers whose tokenizer normalizes text to NFC first.
NFC = ("qwen2", "qwen35", "deepseek-r1-qwen", "megrez", "stablelm2", "command-r")
#: Pre-tokenizers with which a prompt starts with BOS unless the metadata say otherwise.
_BOS_FIRST = (*_LLAMA_3, "tekken", "chameleon")
#: Pre-tokenizers of files that call these tokenizers "gpt2": merges of characters, not of bytes.
_OF_CHARACTERS = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "mmbert")
#: The name of such a pre-tokenizer whose words start at spaces.
_OF_WORDS = "mmbert"
#: The pre-tokenizer of jina-embeddings-v2-base-zh, which is a kind of tokenizers too.
_WHITESPACE = "whitespace"

#: Maximum length of a token: every split of a token in two is looked up.
MAX_TOKEN_CHARACTERS = 1 << 12

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Build the tokenizer that a GGUF file's metadata describe.

    Args:
        metadata: The file's metadata by key.
        source: The file's name, for errors.

    Raises:
        CheckpointError: The tokenizer is missing, corrupt, or cannot be rebuilt exactly.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind is None or not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{source}: the file holds no tokenizer")
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(f"{source}: the tokenizer's token types do not match its tokens")
    if not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{source}: the tokenizer's tokens are not strings")
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN_CHARACTERS:
        raise CheckpointError(
            f"{source}: a token has {longest} characters; allowed are up to {MAX_TOKEN_CHARACTERS}"
        )
    builders = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
        "gemma4": _merged_characters,
        _WHITESPACE: _words_between_spaces,
        "bert": word_piece,
        "t5": unigram,
        "plamo2": plamo,
    }
    if not isinstance(kind, str) or kind not in builders:
        raise CheckpointError(f"{source}: tokenizers of kind {kind!r} are not supported")
    if kind == "bert":
        tokens = plain_words(tokens, types)
    try:
        tokenizer = builders[kind](metadata, tokens, types, source)
        _add_tokens(tokenizer, tokens, types)
        _add_post_processor(tokenizer, metadata, kind, tokens)
    except CheckpointError:
        raise
    except BaseException as error:  # the library raises bare Exceptions, and panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{source}: the tokenizer is corrupt: {reason}") from None
    return tokenizer


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], source: str
) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name in _OF_CHARACTERS:
        return _merged_characters(metadata, tokens, types, source)
    if name == _WHITESPACE:
        return _words_between_spaces(metadata, tokens, types, source)
    if name not in PATTERNS:
        supported = ", ".join((*PATTERNS, *_OF_CHARACTERS, _WHITESPACE))
        raise CheckpointError(
            f"{source}: pre-tokenizer {name!r} is not supported; supported are {supported}"
        )
    model = BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merges(metadata, source),
        ignore_merges=name in IGNORE_MERGES,
    )
    tokenizer = Tokenizer(model)
    if metadata.get("tokenizer.ggml.normalizer.nfc", name in NFC):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = make_pre_tokenizer(PATTERNS[name])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merged_characters(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], source: str
) -> Tokenizer:
    """Gemma 4: merges of characters, with marks for spaces and bytes for unknown ones. Runs of
    line ends are merged separately. In mmBERT a line begins with a space, and each space begins a
    word."""
    tokenizer = Tokenizer(_characters(metadata, tokens, types, source))
    marks: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    splits: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex("\\n+"), "isolated")]
    if metadata.get("tokenizer.ggml.pre") == _OF_WORDS:
        marks += [
            normalizers.Replace(Regex(rf"\n(?=[^\n{_SPACE}])"), f"\n{_SPACE}"),
            normalizers.Prepend(_SPACE),
            normalizers.Replace(Regex(rf"\A{_SPACE}(?=[\n{_SPACE}])"), ""),
        ]
        splits.append(pre_tokenizers.Split(Regex(rf"{_SPACE}[^{_SPACE}]*"), "isolated"))
    tokenizer.normalizer = normalizers.Sequence(marks)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _words_between_spaces(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], source: str
) -> Tokenizer:
    """Merges of characters within words; spaces are left out."""
    tokenizer = Tokenizer(_characters(metadata, tokens, types, source))
    if metadata.get("tokenizer.ggml.normalizer.lowercase", False):
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _characters(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], source: str
) -> BPE:
    """Merges of characters; one that is no token becomes its bytes, where these are tokens."""
    return BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merges(metadata, source),
        byte_fallback=BYTE in types,
    )


def _merges(metadata: Mapping[str, Any], source: str) -> list[tuple[str, str]]:
    """The merges that a file lists."""
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise CheckpointError(f"{source}: the tokenizer has no merges")
    # In some vocabularies a part starts with a space; the first part is never empty.
    cuts = [merge.find(" ", 1) for merge in merges]
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]


def make_pre_tokenizer(patterns: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    """A pre-tokenizer that splits by `patterns` (a value of `PATTERNS`) and maps characters to the
    byte-level alphabet."""
    if patterns == (_GPT2,):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if patterns == _SINGLE_DIGITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, to_bytes])


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], source: str
) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{source}: the tokenizer has no score for each token")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=merges_from_scores(tokens, scores, types),
        unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=BYTE in types,
    )
    tokenizer = Tokenizer(model)
    to_marks = normalizers.Replace(" ", _SPACE)
    steps: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_marks])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = to_marks
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_from_scores(
    tokens: list[str], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """Reconstruct the merges of a SentencePiece BPE vocabulary, which stores only a score per
    token.

    Returns:
        Every split of a token into two other tokens, sorted by the token's score, highest first.
    """
    ids = {token: id for id, token in enumerate(tokens)}
    candidates: list[tuple[float, int, int, str, str]] = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind not in (NORMAL, UNUSED):
            continue
        cuts = []
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                cuts.append((ids[left], ids[right], left, right))
        for *_, left, right in sorted(cuts):
            candidates.append((score, len(left), len(right), left, right))
    candidates.sort(key=lambda entry: entry[:3], reverse=True)
    return [(left, right) for *_, left, right in candidates]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Add control tokens as special tokens, and user-defined ones as plain added tokens, which are
    matched before the text is split."""
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if not token:
            continue
        if kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_post_processor(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], kind: str, tokens: list[str]
) -> None:
    """Add the tokens before and after a text as the metadata say."""
    bos_default = kind in ("llama", "gemma4") or metadata.get("tokenizer.ggml.pre") in _BOS_FIRST
    is_added = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", bos_default),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", kind == "t5"),
    }
    around: dict[str, tuple[str, int]] = {}
    for name in ("bos", "eos"):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if is_added[name] and isinstance(token, int) and 0 <= token < len(tokens):
            text = tokenizer.id_to_token(token)
            if text is not None:
                around[name] = text, token
    if kind == "bert":
        around = encoder_tokens(metadata, tokens)
    processor = text_and_pair(around.get("bos"), around.get("eos"))
    steps: list[Any] = [ByteLevelProcessor(trim_offsets=False)] if kind == "gpt2" else []
    steps += [] if processor is None else [processor]
    if steps:
        tokenizer.post_processor = ProcessorSequence(steps)
