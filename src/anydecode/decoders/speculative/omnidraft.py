"""Drafts from a model with another vocabulary (Ramakrishnan et al., "OmniDraft: A Cross-vocabulary,
Online Adaptive Drafter for On-device Speculative Decoding", arXiv:2507.02659)."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import (
    Drafter,
    DraftSession,
    Proposal,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.speculative.draft_model import DRAFT
from anydecode.decoders.speculative.windows import follow
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.tree import TokenTree


class Translation:
    """From draft tokens to target tokens: one to one where the bytes are the same, and runs of
    draft tokens that were once the spelling of an accepted target token."""

    def __init__(self) -> None:
        self.direct: dict[bytes, int] = {}
        self.runs: dict[tuple[int, ...], int] = {}
        self.longest = 1

    def learn(self, run: list[int], token: int) -> None:
        """The target said `token`, which the draft model spells with `run`."""
        if len(run) > 1:
            self.runs[tuple(run)] = token
            self.longest = max(self.longest, len(run))

    def translate(self, drafts: list[int], spelled: list[bytes]) -> list[int]:
        """Target tokens for `drafts`, whose bytes are `spelled`: the longest known run first, from
        the left, as far as it goes."""
        tokens: list[int] = []
        at = 0
        while at < len(drafts):
            for length in range(min(self.longest, len(drafts) - at), 1, -1):
                run = self.runs.get(tuple(drafts[at : at + length]))
                if run is not None:
                    break
            else:
                length, run = 1, self.direct.get(spelled[at])
            if run is None:
                break
            tokens.append(run)
            at += length
        return tokens


class OmniDrafter(Drafter):
    """Chains of a draft model with a tokenizer of its own. What it learns about spellings is kept
    for later requests."""

    runners = (DRAFT,)
    can_translate_vocab = True

    def __init__(self) -> None:
        self.translation = Translation()

    def open(self, sequence: Sequence) -> DraftSession:
        if not self.translation.direct:
            ours = sequence.tokenizers[TARGET]
            spelled = ((ours.token_bytes(token), token) for token in range(ours.vocab_size))
            for text, token in spelled:
                if text:
                    self.translation.direct.setdefault(text, token)
        return _Session(sequence, self.translation)

    def clear(self) -> None:
        self.translation = Translation()


class _Session(DraftSession):
    def __init__(self, sequence: Sequence, translation: Translation) -> None:
        self.sequence = sequence
        self.translation = translation
        self.ours = sequence.tokenizers[TARGET]
        self.theirs = sequence.tokenizers[DRAFT]
        self.known = 0
        self.text: list[int] = []
        self._rest = b""

    def propose(self, size: int) -> Proposal:
        self._catch_up()
        if size < 1 or self._rest or not self.text:
            return TokenTree()
        sequence = self.sequence
        drafts: list[int] = []
        spelled: list[bytes] = []
        context = sequence.context(DRAFT)
        follow(context, self.text)
        for _ in range(size):
            scores = yield sequence.score((self.text + drafts)[context.length :], runner=DRAFT)
            token = int(scores.row(-1).argmax())
            if self.theirs.is_special(token):
                break
            drafts.append(token)
            spelled.append(self.theirs.token_bytes(token))
        return TokenTree.chain(self.translation.translate(drafts, spelled)[:size])

    def observe(self, round: SpeculationRound) -> None:
        """Spell what the target said with the draft model's tokens."""
        for token in round.verdict.tokens:
            text = self.ours.token_bytes(token)
            try:
                run = self.theirs.encode(text.decode(), special=False)
            except UnicodeDecodeError:
                continue
            if b"".join(map(self.theirs.token_bytes, run)) == text:
                self.translation.learn(run, token)

    def _catch_up(self) -> None:
        """Spell new tokens for the draft model; a character cut in two waits for its other half."""
        news = self.sequence.all_tokens[self.known :]
        self.known += len(news)
        self._rest += b"".join(map(self.ours.token_bytes, news))
        try:
            text, self._rest = self._rest.decode(), b""
        except UnicodeDecodeError as error:
            if len(self._rest) - error.start < 4:
                text, self._rest = self._rest[: error.start].decode(), self._rest[error.start :]
            else:
                text, self._rest = self._rest.decode(errors="replace"), b""
        if text:
            self.text += self.theirs.encode(text, special=not self.text)


@register(
    Card(
        "omnidraft",
        "speculative",
        paper="OmniDraft (arXiv:2507.02659)",
        exactness="token-exact",
        summary="A draft model with another vocabulary, through a cache of how it spells tokens.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "verified token-exactly; drafts are the draft model's likeliest tokens, and the paper's"
            " merged probabilities, exact for points only, are not needed",
            "the draft model is not trained here (see online-sd) and its length is fixed",
            "special tokens of the prompt are left out of what the draft model reads",
        ),
    )
)
def omnidraft(size: int = 5) -> Speculative:
    """Up to `size` tokens of the draft model a round, translated."""
    return Speculative(OmniDrafter(), size)
