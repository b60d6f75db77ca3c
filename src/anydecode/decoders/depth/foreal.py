"""FoReaL-Decoding (Li et al., "What makes Reasoning Models Different? Follow the Reasoning Leader
for Efficient Decoding", arXiv:2506.06998).

A large model begins sentences, and a small one ends them.
"""

from __future__ import annotations

from dataclasses import dataclass

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.two_models import emit_sampled, next_row, refuse_guidance
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import DRAFT, TARGET, Sequence
from anydecode.scoring.state import StateKey

_ENDS = (b".", b"?", b"!", b"\n")


@dataclass(frozen=True)
class Sentence:
    """The sentence that goes on: the number of tokens before it, and whether the large model
    begins it."""

    start: int
    leads: bool


_STATE: StateKey[Sentence] = StateKey("foreal", "sentence")


@register(
    Card(
        "foreal",
        "depth",
        paper="What makes Reasoning Models Different? Follow the Reasoning Leader for Efficient"
        " Decoding (arXiv:2506.06998)",
        exactness="lossy",
        summary="A large model writes the first tokens of sentences, and a small one the rest.",
        needs=("draft model",),
        works_with=("constraints", "penalties", "samplers", "logprobs", "batches", "adapters"),
        deviations=(
            "a sentence ends with a token that ends in a full stop, a question mark, an exclamation"
            " mark or a new line; a full stop behind a digit ends none",
            "each model reads the tokens that it has missed when its turn comes, not at the end of"
            " the sentence",
        ),
        remote={"lead": Range(0, 4096), "probability": Range(0, 1)},
    )
)
class Foreal(Decoder):
    """The target, the reasoning model, leads: with the given probability it generates the first
    `lead` tokens of a sentence. The draft model generates all others.

    With a large `lead` and probability 1 the text is that of the target; with `lead` or probability
    0 that of the draft model.

    Args:
        lead: The number of tokens (the paper's n).
        probability: The probability that the target leads a sentence (the paper's p).
    """

    requirements = Requirements(runners=(DRAFT,))

    def __init__(self, lead: int = 15, probability: float = 1.0) -> None:
        if lead < 0 or not 0 <= probability <= 1:
            raise InvalidRequestError(
                "foreal needs lead of at least 0 and a probability from 0 to 1, not"
                f" {lead} and {probability}"
            )
        self.lead = lead
        self.probability = probability

    def prepare(self, sequence: Sequence) -> None:
        refuse_guidance(sequence, "foreal")

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            sentence = self._sentence(sequence)
            count = len(sequence.tokens) - sentence.start
            leads = sentence.leads and count < self.lead
            row = yield from next_row(sequence, TARGET if leads else DRAFT)
            sequence.state[_STATE] = sentence
            emit_sampled(sequence, row)

    def _sentence(self, sequence: Sequence) -> Sentence:
        """The sentence of the next token."""
        state = sequence.state.get(_STATE)
        if state is not None and not ends_sentence(sequence):
            return state
        coin = sequence.noise.with_purpose("coin").coin(sequence.length)
        return Sentence(len(sequence.tokens), coin < self.probability)


def ends_sentence(sequence: Sequence) -> bool:
    """Whether the last generated token ends a sentence."""
    tokenizer = sequence.tokenizers[TARGET]
    before, last = map(tokenizer.token_bytes, sequence.all_tokens[-2:])
    if not last.endswith(_ENDS):
        return False
    return not (last.endswith(b".") and (before + last)[-2:-1].isdigit())
