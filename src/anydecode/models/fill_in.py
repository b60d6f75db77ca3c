"""Fill-in-the-middle models: the special tokens around the text before and after a gap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from anydecode.models.tokenizer import Tokenizer

#: The prefix, suffix, middle and end tokens of fill-in-the-middle models.
SENTINELS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<|endoftext|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
    ("<PRE>", "<SUF>", "<MID>", "<EOT>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<｜end▁of▁sentence｜>"),
)


@dataclass(frozen=True)
class Sentinels:
    """The sentinel token ids of a fill-in-the-middle model. `ends` end a middle or a suffix."""

    prefix: int
    suffix: int
    middle: int
    ends: frozenset[int]

    @property
    def infill_tokens(self) -> tuple[int, int, int]:
        return self.prefix, self.suffix, self.middle

    def prompt(self, before: Sequence[int], after: Sequence[int], bos: int | None) -> list[int]:
        """The prompt whose continuation is the text between `before`, which may start with the
        token `bos`, and `after`."""
        num_bos = int(len(before) > 0 and before[0] == bos)
        start = [*before[:num_bos], self.prefix, *before[num_bos:]]
        return [*start, self.suffix, *after, self.middle]


def find_sentinels(
    tokenizer: Tokenizer, names: Iterable[Sequence[str]] = SENTINELS
) -> Sentinels | None:
    """The sentinels of a tokenizer, by their names; None if it has none of them."""
    for four in names:
        prefix, suffix, middle, end = (special_token(tokenizer, name) for name in four)
        if prefix is not None and suffix is not None and middle is not None:
            ends = tokenizer.eos_ids | (set() if end is None else {end})
            return Sentinels(prefix, suffix, middle, ends)
    return None


_special_tokens: WeakKeyDictionary[Tokenizer, dict[str, int]] = WeakKeyDictionary()


def special_token(tokenizer: Tokenizer, name: str) -> int | None:
    """The id of the special token `name`; None if there is none."""
    if tokenizer not in _special_tokens:
        ids_by_name = {
            tokenizer.token_text(token): token
            for token in range(tokenizer.vocab_size)
            if tokenizer.is_special(token)
        }
        _special_tokens[tokenizer] = ids_by_name
    return _special_tokens[tokenizer].get(name)
