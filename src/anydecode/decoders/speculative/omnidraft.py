"""OmniDraft: drafts from a model with a different vocabulary (Ramakrishnan et al., "OmniDraft: A
Cross-vocabulary, Online Adaptive Drafter for On-device Speculative Decoding", arXiv:2507.02659).

Draft tokens with the same bytes as a target token are translated directly. Runs of draft tokens are
translated by a cache of how the draft model spells accepted target tokens.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import (
    Drafter,
    DraftSession,
    Proposal,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.speculative.draft_model import DRAFT, truncate_to_prefix
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.tree import TokenTree


class Translation:
    """Translates draft tokens to target tokens: one to one where the bytes are equal, and by a
    cache of runs of draft tokens that spelled an accepted target token."""

    def __init__(self) -> None:
        self.direct: dict[bytes, int] = {}
        self.runs: dict[tuple[int, ...], int] = {}
        self.max_length = 1

    def learn(self, run: list[int], token: int) -> None:
        """Store that the draft model spells the target's `token` with `run`."""
        if len(run) > 1:
            self.runs[tuple(run)] = token
            self.max_length = max(self.max_length, len(run))

    def translate(self, drafts: list[int], draft_bytes: list[bytes]) -> list[int]:
        """Translate `drafts`, whose bytes are `draft_bytes`, from the left, the longest known run
        first, until a token has no translation."""
        tokens: list[int] = []
        at = 0
        while at < len(drafts):
            for length in range(min(self.max_length, len(drafts) - at), 1, -1):
                run = self.runs.get(tuple(drafts[at : at + length]))
                if run is not None:
                    break
            else:
                length, run = 1, self.direct.get(draft_bytes[at])
            if run is None:
                break
            tokens.append(run)
            at += length
        return tokens


class OmniDrafter(Drafter):
    """Drafts chains with a draft model that has its own tokenizer. The cache of spellings is kept
    for later requests."""

    requirements = Requirements(runners=(DRAFT,), can_translate_vocab=True)

    def __init__(self) -> None:
        self.translation = Translation()

    def open(self, sequence: Sequence) -> DraftSession:
        if not self.translation.direct:
            tokenizer = sequence.tokenizers[TARGET]
            token_bytes = (
                (tokenizer.token_bytes(token), token) for token in range(tokenizer.vocab_size)
            )
            for text, token in token_bytes:
                if text:
                    self.translation.direct.setdefault(text, token)
        return _Session(sequence, self.translation)

    def clear(self) -> None:
        self.translation = Translation()


class _Session(DraftSession):
    def __init__(self, sequence: Sequence, translation: Translation) -> None:
        self.sequence = sequence
        self.translation = translation
        self.target_tokenizer = sequence.tokenizers[TARGET]
        self.draft_tokenizer = sequence.tokenizers[DRAFT]
        self.num_read = 0
        self.text: list[int] = []
        self._pending_bytes = b""

    def propose(self, size: int) -> Proposal:
        self._catch_up()
        if size < 1 or self._pending_bytes or not self.text:
            return TokenTree()
        sequence = self.sequence
        drafts: list[int] = []
        draft_bytes: list[bytes] = []
        kv_cache = sequence.kv_cache(DRAFT)
        truncate_to_prefix(kv_cache, self.text)
        for _ in range(size):
            scores = yield sequence.score((self.text + drafts)[kv_cache.length :], runner=DRAFT)
            token = int(scores.row(-1).argmax())
            if self.draft_tokenizer.is_special(token):
                break
            drafts.append(token)
            draft_bytes.append(self.draft_tokenizer.token_bytes(token))
        return TokenTree.chain(self.translation.translate(drafts, draft_bytes)[:size])

    def observe(self, round: SpeculationRound) -> None:
        """Store the draft model's spelling of the emitted tokens."""
        for token in round.result.tokens:
            text = self.target_tokenizer.token_bytes(token)
            try:
                run = self.draft_tokenizer.encode(text.decode(), special=False)
            except UnicodeDecodeError:
                continue
            if b"".join(map(self.draft_tokenizer.token_bytes, run)) == text:
                self.translation.learn(run, token)

    def _catch_up(self) -> None:
        """Encode new tokens for the draft model. The bytes of an incomplete character wait for the
        rest."""
        new_tokens = self.sequence.all_tokens[self.num_read :]
        self.num_read += len(new_tokens)
        self._pending_bytes += b"".join(map(self.target_tokenizer.token_bytes, new_tokens))
        try:
            text, self._pending_bytes = self._pending_bytes.decode(), b""
        except UnicodeDecodeError as error:
            if len(self._pending_bytes) - error.start < 4:
                text, self._pending_bytes = (
                    self._pending_bytes[: error.start].decode(),
                    self._pending_bytes[error.start :],
                )
            else:
                text, self._pending_bytes = self._pending_bytes.decode(errors="replace"), b""
        if text:
            self.text += self.draft_tokenizer.encode(text, special=not self.text)


@register(
    Card(
        "omnidraft",
        "speculative",
        paper="OmniDraft (arXiv:2507.02659)",
        exactness="token-exact",
        summary="A draft model with another vocabulary, translated by a cache of its spellings.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "verified token-exactly; drafts are the draft model's most probable tokens, so the"
            " paper's merged probabilities, exact for point masses only, are not needed",
            "the draft model is not trained here (see online-sd), and the draft length is fixed",
            "the draft model's input omits the special tokens of the prompt",
        ),
        remote={
            "size": Range(0, 64),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def omnidraft(
    size: int = 5,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """OmniDraft: drafting across vocabularies.

    Args:
        size: Maximum number of draft-model tokens per round.
        acceptance: "token-exact", "rejection", "typical" or "top-m", or a rule.
    """
    return Speculative(OmniDrafter(), size, acceptance_rule(acceptance))
