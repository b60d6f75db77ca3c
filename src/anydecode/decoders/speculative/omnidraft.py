"""OmniDraft: drafts from a model with a different vocabulary (Ramakrishnan et al., "OmniDraft: A
Cross-vocabulary, Online Adaptive Drafter for On-device Speculative Decoding", arXiv:2507.02659).

Draft tokens with the same bytes as a target token are translated directly. Runs of draft tokens are
translated by a cache of how the draft model spells accepted target tokens. Above temperature 0 a
draft is sampled with the noise that the target will use for its translation. Between requests the
draft model is trained on its verified drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance, is_token_exact
from anydecode.decoders.framework.bounded_table import BoundedTable
from anydecode.decoders.framework.draft_candidates import draft_token
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import (
    Drafter,
    DraftSession,
    Proposal,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.speculative.acceptance_head import OnlineHead
from anydecode.decoders.speculative.draft_correction import Correction, Loss
from anydecode.decoders.speculative.draft_model import truncate_to_prefix
from anydecode.errors import InvalidRequestError
from anydecode.kernels.arithmetic import softmax
from anydecode.models.tokenizer import Tokenizer
from anydecode.scoring.sequence import DRAFT, TARGET, Sequence
from anydecode.scoring.tree import TokenTree

#: Rank of the trained addition to the output layer.
RANK = 16
#: Learning rate of the head that predicts acceptance, and the least number of drafts.
HEAD_RATE, MIN_DRAFTS = 0.001, 2
#: Maximum memory of the spellings, and of one of them, in bytes.
RUNS_MEMORY, _BYTES_PER_RUN = 16 << 20, 300
#: A text behind which tokenizers write others as they are.
_BEFORE = "\n"
#: Probabilities below this count as this, so that logarithms are finite.
_SMALLEST = 1e-8


def continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of `text` behind another text, without the space that tokenizers of SentencePiece
    put before every text that they encode."""
    tokens, data = tokenizer.encode(text, special=False), text.encode()
    if b"".join(map(tokenizer.token_bytes, tokens)) == data:
        return tokens
    longer = tokenizer.encode(_BEFORE + text, special=False)
    for first in (1, 2):  # behind the line break, and behind a space before it
        if b"".join(map(tokenizer.token_bytes, longer[first:])) == data:
            return longer[first:]
    return tokens


class Translation:
    """Translates draft tokens to target tokens: one to one where the bytes are equal, and by a
    cache, of up to `RUNS_MEMORY` bytes, of runs of draft tokens that spelled an accepted target
    token."""

    def __init__(self) -> None:
        self.direct: dict[bytes, int] = {}
        self.runs: BoundedTable[tuple[int, ...], int] = BoundedTable(RUNS_MEMORY, _BYTES_PER_RUN)
        self.max_length = 1

    def learn(self, run: list[int], token: int) -> None:
        """Store that the draft model spells the target's `token` with `run`."""
        if len(run) > 1:
            self.runs[tuple(run)] = token
            self.max_length = max(self.max_length, len(run))

    def translate(self, drafts: list[int], draft_bytes: list[bytes]) -> list[tuple[int, int]]:
        """Translate `drafts`, whose bytes are `draft_bytes`, from the left, the longest known run
        first, until a token has no translation. Returns target tokens, each with the length of its
        run."""
        tokens: list[tuple[int, int]] = []
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
            tokens.append((run, length))
            at += length
        return tokens


@dataclass(frozen=True, eq=False)
class DirectTokens:
    """The draft tokens that have the bytes of a target token. It is never changed, so that copies
    of a drafter share it.

    Attributes:
        by_bytes: Every target token by its bytes.
        drafts: The draft tokens, int64 `[n]`.
        targets: Their translations, int64 `[n]`.
        drafts_of: Draft tokens by their translations.
    """

    by_bytes: dict[bytes, int]
    drafts: np.ndarray
    targets: np.ndarray
    drafts_of: dict[int, int]

    @staticmethod
    def of(target: Tokenizer, draft: Tokenizer) -> DirectTokens:
        """Those of two tokenizers."""
        by_bytes: dict[bytes, int] = {}
        for token in range(target.vocab_size):
            if text := target.token_bytes(token):
                by_bytes.setdefault(text, token)
        pairs = [
            (token, by_bytes[text])
            for token in range(draft.vocab_size)
            if (text := draft.token_bytes(token)) in by_bytes and not draft.is_special(token)
        ]
        found = np.array(pairs, np.int64).reshape(-1, 2)
        drafts_of = {target: draft for draft, target in pairs}
        return DirectTokens(by_bytes, found[:, 0], found[:, 1], drafts_of)

    def __deepcopy__(self, memo: dict[int, object]) -> DirectTokens:
        return self


@dataclass(eq=False)
class Lesson:
    """A verified draft token: the draft model's last hidden state `[hidden_size]` and logits
    `[draft_vocab_size]`. For a token that was translated directly, `target` is the target's
    distribution over all direct translations; for one of an accepted run, `weight` is the target's
    probability of the run's token."""

    hidden: np.ndarray
    logits: np.ndarray
    token: int
    weight: float = 1.0
    target: np.ndarray | None = None


def hybrid_loss(lessons: Seq[Lesson], direct: np.ndarray) -> Loss:
    """The paper's loss: the reverse divergence KL(q || p) over the draft tokens `direct`, which
    have direct translations, and the weighted negative log-probability of tokens of accepted
    runs."""

    def loss(logits: np.ndarray) -> tuple[float, np.ndarray]:
        total, errors = 0.0, np.zeros_like(logits)
        for row, error, lesson in zip(logits, errors, lessons, strict=True):
            if lesson.target is None:
                q = softmax(row)
                total -= lesson.weight * float(np.log(max(q[lesson.token], _SMALLEST)))
                q[lesson.token] -= 1.0
                error += lesson.weight * q
            else:
                q = softmax(row[direct])
                ratios = np.log(np.maximum(q, _SMALLEST) / np.maximum(lesson.target, _SMALLEST))
                divergence = float((q * ratios).sum())
                total += divergence
                error[direct] = q * (ratios - divergence)
        return total / len(lessons), errors / len(lessons)

    return loss


class OmniDrafter(Drafter):
    """Drafts chains with a draft model that has its own tokenizer, plus a `Correction` that is
    trained on verified drafts with the learning rate `rate` (0: never). Training runs when a
    request has ended and at least `batch` lessons are stored. The cache of spellings is kept for
    later requests. Where the text depends on what is drafted, both belong to one request, whose
    correction is trained while it runs.

    Drafting stops when the probability of a rejection exceeds `bound`: 1 minus the product of the
    predictions of a head (SpecDec++) for the drafts that have been fed, which is trained beside the
    correction between requests.

    Drafts share the target's noise, unless `rule` reads probabilities: it takes them for chosen
    tokens."""

    requirements = Requirements(runners=(DRAFT,), can_translate_vocab=True)

    def __init__(
        self,
        rate: float,
        bound: float = 0.7,
        batch: int = 8,
        steps: int = 4,
        memory: int = 64,
        rule: Acceptance | None = None,
    ) -> None:
        if rate < 0:
            raise InvalidRequestError(f"rate is {rate}; omnidraft needs a learning rate >= 0")
        if not 0 < bound <= 1:
            raise InvalidRequestError(f"bound is {bound}; omnidraft needs 0 < bound <= 1")
        self.rate = rate
        self.bound = bound
        self.learns_alone = not is_token_exact(rule)
        self.online = OnlineHead(HEAD_RATE if rate and not self.learns_alone else 0.0)
        self.batch = batch
        self.steps = steps
        self.memory = memory
        self.shares_noise = rule is None or not rule.reads_probabilities
        self.direct: DirectTokens | None = None
        self.clear()

    def clear(self) -> None:
        self.translation = Translation()
        self.lessons: list[Lesson] = []
        self.correction: Correction | None = None
        self.online.clear()

    @property
    def num_bytes(self) -> int:
        lessons = sum(
            array.nbytes
            for lesson in self.lessons
            for array in (lesson.hidden, lesson.logits, lesson.target)
            if array is not None
        )
        added = 0 if self.correction is None else self.correction.num_bytes
        return self.translation.runs.num_bytes + lessons + added + self.online.num_bytes

    def prepare(self, sequence: Sequence) -> None:
        if self.direct is None:
            tokenizers = sequence.tokenizers
            self.direct = DirectTokens.of(tokenizers[TARGET], tokenizers[DRAFT])

    def open(self, sequence: Sequence) -> DraftSession:
        assert self.direct is not None, "found by `prepare`"
        self.translation.direct = self.direct.by_bytes
        return _Session(sequence, self, self.direct)

    def add(self, lessons: list[Lesson]) -> None:
        """Store lessons; the last `memory` are kept."""
        self.lessons = [*self.lessons, *lessons][-self.memory :]

    def train(self) -> None:
        """Train on the stored lessons if there are at least `batch`, and the head."""
        self.online.train()
        lessons = self.lessons
        if not self.rate or len(lessons) < self.batch:
            return
        if self.correction is None:
            sizes = len(lessons[0].hidden), len(lessons[0].logits)
            self.correction = Correction(*sizes, RANK, self.rate)
        hidden = np.stack([lesson.hidden for lesson in lessons])
        logits = np.stack([lesson.logits for lesson in lessons])
        assert self.direct is not None, "there are lessons"
        self.correction.train(hidden, logits, hybrid_loss(lessons, self.direct.drafts), self.steps)
        self.lessons = []


class _Session(DraftSession):
    def __init__(self, sequence: Sequence, drafter: OmniDrafter, direct: DirectTokens) -> None:
        self.sequence = sequence
        self.drafter = drafter
        self.direct = direct
        self.target_tokenizer = sequence.tokenizers[TARGET]
        self.draft_tokenizer = sequence.tokenizers[DRAFT]
        self.num_read = 0
        self.text: list[int] = []
        self._pending_bytes = b""
        self._drafts: list[int] = []
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []
        self._runs: list[tuple[int, int]] = []
        self._drafted: TokenTree | None = None

    def propose(self, size: int) -> Proposal:
        self._catch_up()
        if size < 1 or self._pending_bytes or not self.text:
            return TokenTree()
        sequence, correction = self.sequence, self.drafter.correction
        self._drafts, self._rows = [], []
        draft_bytes: list[bytes] = []
        kv_cache = sequence.kv_cache(DRAFT)
        top = kv_cache.pool.model.spec.num_layers
        truncate_to_prefix(kv_cache, self.text)
        head, all_accepted_probability = self.drafter.online.head, 1.0
        for number in range(size):
            text = (self.text + self._drafts)[kv_cache.length :]
            scores = yield sequence.score(text, runner=DRAFT, hidden=(top,))
            hidden, row = scores.hidden[top][-1].copy(), scores.row(-1).copy()
            if head is not None and number:
                all_accepted_probability *= float(head(hidden))
            corrected = row if correction is None else row + correction(hidden)
            token = self._choose(corrected, draft_bytes)
            if token is None or self.draft_tokenizer.is_special(token):
                break
            self._rows.append((hidden, row))
            self._drafts.append(token)
            draft_bytes.append(self.draft_tokenizer.token_bytes(token))
            rejection_probability = 1 - all_accepted_probability
            if rejection_probability > self.drafter.bound and len(self._drafts) >= MIN_DRAFTS:
                break
        self._runs = self.drafter.translation.translate(self._drafts, draft_bytes)[:size]
        self._drafted = TokenTree.chain([token for token, _ in self._runs])
        return self._drafted

    def _choose(self, row: np.ndarray, draft_bytes: list[bytes]) -> int | None:
        """The next draft token: the most probable one. Where that has a direct translation and
        noise is shared, the one whose translation the target would sample by the draft model's
        logits of all direct translations; None if no such is allowed.

        Args:
            row: The draft model's logits, float32 `[draft_vocab_size]`.
            draft_bytes: The bytes of the drafts so far.
        """
        sequence, drafter = self.sequence, self.drafter
        best = int(row.argmax())
        if not drafter.shares_noise or sequence.sampler.is_greedy:
            return best
        runs = drafter.translation.translate(self._drafts, draft_bytes)
        is_inside = sum(length for _, length in runs) < len(self._drafts)
        if is_inside or self.draft_tokenizer.token_bytes(best) not in drafter.translation.direct:
            return best
        sampler = sequence.sampler.fork()
        for token, _ in runs:
            sampler.advance(token)
        logits = np.full(sequence.model().spec.vocab_size, -np.inf, np.float32)
        logits[self.direct.targets] = row[self.direct.drafts]
        found = draft_token(sequence, sampler, logits, sequence.length + len(runs))
        return None if found is None else self.direct.drafts_of[found]

    def observe(self, round: SpeculationRound) -> None:
        """Store the draft model's spelling of the emitted tokens, and lessons from the drafts;
        train at the end of the request, or after each round on a request's own drafts."""
        for token in round.result.tokens:
            text = self.target_tokenizer.token_bytes(token)
            try:
                run = continuation(self.draft_tokenizer, text.decode())
            except UnicodeDecodeError:
                continue
            if b"".join(map(self.draft_tokenizer.token_bytes, run)) == text:
                self.drafter.translation.learn(run, token)
        drafted, self._drafted = self._drafted, None
        if drafted is not None and self.drafter.rate:
            tested = round.tested(drafted)
            self.drafter.add(self._lessons(round, *tested))
            self._add_acceptances(*tested)
        if round.sequence.finished or self.drafter.learns_alone:
            self.drafter.train()

    def _add_acceptances(self, num_accepted: int, num_tested: int) -> None:
        """Store the states of the accepted drafts and of the first rejected ones that were fed."""
        at = 0
        for node, (_, length) in enumerate(self._runs[:num_tested]):
            for hidden, _ in self._rows[at + 1 : at + length + 1]:
                self.drafter.online.add(hidden, float(node < num_accepted))
            at += length

    def _lessons(self, round: SpeculationRound, num_accepted: int, num_tested: int) -> list[Lesson]:
        """Lessons from the accepted drafts, and from the first rejected one if it was translated
        directly."""
        lessons: list[Lesson] = []
        at = 0
        for node, (token, length) in enumerate(self._runs[:num_tested]):
            row = round.scores.row(node)
            if length == 1:
                target = softmax(row[self.direct.targets])
                lessons.append(Lesson(*self._rows[at], self._drafts[at], target=target))
            elif node < num_accepted:
                weight = float(softmax(row)[token])
                lessons += [
                    Lesson(*self._rows[part], self._drafts[part], weight)
                    for part in range(at, at + length)
                ]
            at += length
        return lessons

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
        if text and not self.text:
            self.text = self.draft_tokenizer.encode(text)
        elif text:
            self.text += continuation(self.draft_tokenizer, text)


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
            "verified token-exactly; above temperature 0 a draft with a direct translation is"
            " sampled with the noise that the target will use, other drafts are the most probable"
            " tokens; with acceptance='rejection' all are, and the rule is that for chosen tokens,"
            " so that the paper's merged probabilities, exact for point masses only, are not"
            " needed",
            "a low-rank addition to the draft model's output layer is trained, between requests,"
            " and not its weights; the weight of a run's tokens is the target's probability of it",
            "the head of the draft length learns whether drafts were accepted, up to the first"
            " rejection, in runs of its own beside the adaptation; before the first run, and with"
            " rate=0, the length is fixed",
            "with another rule than token-exact, whose texts depend on the drafts, the addition and"
            " the cache of spellings belong to the request, and the addition learns while it runs,"
            " so that its text is the same in any company; the length is fixed then",
            "the draft model's input omits the special tokens of the prompt",
            "of the cache of spellings, those seen longest ago are dropped above 16 MiB",
        ),
        remote={
            "size": Range(1, 64),
            "rate": Range(0, 1),
            "bound": Range(0, 1),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def omnidraft(
    size: int = 5,
    rate: float = 0.01,
    bound: float = 0.7,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """OmniDraft: drafting across vocabularies.

    Args:
        size: Maximum number of draft-model tokens per round.
        rate: Learning rate of the drafter's online adaptation; 0: none, and a fixed draft length.
        bound: Probability of a rejection at which drafting stops, above 0 and at most 1.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(OmniDrafter(rate, bound, rule=rule), size, rule)
