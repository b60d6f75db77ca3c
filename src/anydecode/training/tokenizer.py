"""The tokenizer of the small models: byte-level BPE in which every word, digit and separator of the
tasks is one token, and any other text can be encoded exactly."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from anydecode.tasks.tasks import TASKS, examples, lengths

PAD, EOS, MASK = "<|pad|>", "<|endoftext|>", "<|mdm_mask|>"
PAD_ID, EOS_ID, MASK_ID = 0, 1, 2


@dataclass(frozen=True)
class SpecialTokens:
    """The mask token, the end of text, and the tokens that are never predicted."""

    mask: int
    eos: int
    barred: tuple[int, ...]


#: The special tokens of the small models.
OWN_TOKENS = SpecialTokens(MASK_ID, EOS_ID, (PAD_ID, MASK_ID))

#: A word, a digit or a run of symbols, each with the space before it; or other white space.
_TOKEN_PATTERN = r" ?[A-Za-z_]+| ?[0-9]| ?[^A-Za-z0-9_\s]+(?: [^A-Za-z0-9_\s]+)*|\s"


@cache
def build_tokenizer(per_length: int = 200) -> tokenizers.Tokenizer:
    """Train the tokenizer on `per_length` training examples of every task and length."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_TOKEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        min_frequency=1,
        special_tokens=[PAD, EOS, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = (
        text
        for task in TASKS
        for length in lengths(task)
        for example in examples(task, per_length, length=length, held_out=False)
        for text in (example.prompt, example.answer)
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer
