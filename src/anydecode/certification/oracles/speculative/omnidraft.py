"""Oracle test of omnidraft (OmniDraft, arXiv:2507.02659): runs of draft tokens become target tokens
once the target has generated one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.rounds import (
    VOCABULARY,
    Logits,
    TracedRound,
    blurred,
    plain_token,
    rounds,
    wordy,
)
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.omnidraft import Lesson, OmniDrafter, hybrid_loss
from anydecode.errors import UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel


class PairTokenizer(ByteTokenizer):
    """A byte tokenizer with the lowest bit of each byte flipped, and a token for each of three
    pairs."""

    vocab_size = VOCABULARY + 3
    pairs = (b"ab", b"ca", b"bd")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        data, tokens = text.encode(), []
        while data:
            pair = data[:2]
            is_pair = pair in self.pairs
            tokens.append(VOCABULARY + self.pairs.index(pair) if is_pair else data[0] ^ 1)
            data = data[2 if is_pair else 1 :]
        return tokens

    def token_bytes(self, token: int) -> bytes:
        if token >= VOCABULARY:
            return self.pairs[token - VOCABULARY]
        return bytes([token ^ 1]) if token < 256 else b""

    def is_special(self, token: int) -> bool:
        return 256 <= token < VOCABULARY


#: The logit of the recited token; that of all others is 0.
LOGIT = 8.0


def _reciting_logits(tokens: list[int], size: int) -> Logits:
    def logits(seen: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(size, np.float32)
        row[tokens[len(seen) % len(tokens)]] = LOGIT
        return row

    return logits


@oracle_test("omnidraft")
def omnidraft() -> Iterator[Check]:
    """Runs of draft tokens become target tokens once the target has generated one; the text is
    unchanged. Verified drafts are lessons, whose loss is the paper's, and drafts get better."""
    ours, text = PairTokenizer(), "abcabd\u00e9 ca" * 12
    target = ScriptedModel(
        _reciting_logits(ours.encode(text), ours.vocab_size), vocab_size=ours.vocab_size
    )
    draft = ScriptedModel(_reciting_logits(list(text.encode()), VOCABULARY), vocab_size=VOCABULARY)
    draft.tokenizer = ByteTokenizer()  # type: ignore[attr-defined]
    with LLM(target, tokenizer=ours, draft=draft, cache_positions=4096) as llm:
        prompt = ours.encode("abcabd")
        trace = rounds(llm, "omnidraft", prompt, 50)
        method = llm.decoder("omnidraft")
        assert isinstance(method, Speculative) and isinstance(method.drafter, OmniDrafter)
        runs = method.drafter.translation.runs
        yield Check("the text is the target's", _text(ours, trace) in text)
        yield Check("drafts equal the oracle", _translated(ours, trace, text.encode()) == 0)
        yield Check(
            "translations are learned",
            runs == {tuple(p): VOCABULARY + i for i, p in enumerate(PairTokenizer.pairs)},
            f"{runs}",
        )
        yield from _lessons(ours, llm, method, prompt)
        missed = [one for one in trace if one.tokens and one.tokens[0] != one.generated[0]]
        yield Check("unknown translations are rejected", 0 < len(missed) <= 3, f"{len(missed)}")
        known = [one for one in trace if len(one.accepted) == len(one.tokens) > 2]
        is_whole = any(token >= VOCABULARY for one in known for token in one.tokens)
        yield Check("known translations of whole target tokens are accepted", is_whole)
        try:
            llm.generate("abc", decoder="speculative-sampling")
            refused = ""
        except UnsupportedCombinationError as error:
            refused = str(error)
        yield Check(
            "methods that cannot translate the vocabulary are refused",
            "omnidraft" in refused,
            refused,
        )
    yield from _loss()
    yield from _adaptation()
    yield from _lengths()
    yield from _noise()


def _translated(ours: PairTokenizer, trace: list[TracedRound], recited: bytes) -> int:
    """The number of rounds whose drafts are not the next five bytes of `recited`, with pairs
    generated before as one token; no drafts where a character is incomplete."""
    wrong, generated = 0, set()
    for one in trace:
        seen = b"".join(map(ours.token_bytes, one.text))
        ahead = [recited[(len(seen) + i) % len(recited)] for i in range(5)]
        expected: list[int] = []
        while ahead:
            pair = bytes(ahead[:2])
            size = 2 if pair in generated else 1
            expected += ours.encode(pair.decode()) if size == 2 else [ahead[0] ^ 1]
            ahead = ahead[size:]
        whole = seen.decode(errors="ignore").encode() == seen
        wrong += one.tokens != (expected if whole else [])
        generated |= {ours.token_bytes(token) for token in one.generated if token >= VOCABULARY}
    return wrong


def _lessons(
    ours: PairTokenizer, llm: LLM, method: Speculative, prompt: list[int]
) -> Iterator[Check]:
    """The lessons of a request, replayed from its rounds."""
    drafter, taken = method.drafter, list[Lesson]()
    assert isinstance(drafter, OmniDrafter)
    drafter.clear()
    drafter.add = lambda lessons: taken.extend(lessons)  # type: ignore[method-assign]
    trace = rounds(llm, method, prompt, 50)
    expected: list[tuple[int, bool | None]] = []
    for one in trace:
        for number, token in enumerate(one.tokens[: len(one.accepted) + 1]):
            spelled, is_accepted = list(ours.token_bytes(token)), number < len(one.accepted)
            if len(spelled) == 1:
                expected.append((spelled[0], is_accepted))
            elif is_accepted:
                expected += [(byte, None) for byte in spelled]
    # The target is nearly sure of its token, so a direct draft has most probability or none.
    assert drafter.direct is not None
    places = {int(token): place for place, token in enumerate(drafter.direct.drafts)}
    found = [
        (one.token, None if one.target is None else bool(one.target[places[one.token]] > 0.5))
        for one in taken
    ]
    yield Check("lessons are the verified drafts", found == expected, f"{len(taken)}")
    yield Check("of every kind", {kind for _, kind in found} == {None, True, False})
    share = np.exp(LOGIT) / (np.exp(LOGIT) + ours.vocab_size - 1)
    weights = [one.weight for one in taken if one.target is None]
    name = "the weight of a run is the target's probability of it"
    yield Check(name, np.allclose(weights, share, atol=1e-4), f"{share:.3f}")


def _loss() -> Iterator[Check]:
    """The loss by its definition, and its gradient by differences."""
    random, size = np.random.default_rng(2), 6
    direct = np.array([0, 2, 3, 5])
    logits = random.normal(size=(3, size))
    target = random.dirichlet(np.ones(len(direct)))
    none = np.empty(0)
    lessons = [
        Lesson(none, none, 2, target=target),
        Lesson(none, none, 1, 0.3),
        Lesson(none, none, 4, 0.8),
    ]

    def defined(rows: np.ndarray) -> float:
        shares = np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True)
        q = shares[0, direct] / shares[0, direct].sum()
        reverse = (q * (np.log(q) - np.log(target))).sum()
        return float(reverse - 0.3 * np.log(shares[1, 1]) - 0.8 * np.log(shares[2, 4])) / 3

    value, gradient = hybrid_loss(lessons, direct)(logits)
    differences = np.zeros_like(logits)
    for at in np.ndindex(logits.shape):
        step = np.zeros_like(logits)
        step[at] = 1e-5
        differences[at] = (defined(logits + step) - defined(logits - step)) / 2e-5
    yield Check("the loss equals its definition", abs(value - defined(logits)) < 1e-6)
    yield Check("its gradient equals differences", np.allclose(gradient, differences, atol=1e-5))


def _adaptation() -> Iterator[Check]:
    """A draft model that always prefers one wrong token learns the target's."""
    right = wordy()

    def wrong(seen: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = right(seen).copy()
        row[122] += 40.0
        return row

    num_accepted = {}
    for rate in (0.0, 0.5):
        target, draft = ScriptedModel(right), ScriptedModel(wrong)
        draft.tokenizer = ByteTokenizer()  # type: ignore[attr-defined]
        with LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=4096) as llm:
            key = f"omnidraft:rate={rate}"
            traces = [rounds(llm, key, "abcabcabd", 24) for _ in range(10)]
            num_accepted[rate] = [sum(len(one.accepted) for one in part) for part in traces]
            llm.clear()
            again = rounds(llm, key, "abcabcabd", 24)
        name = f"`clear` resets the adaptation, rate {rate}"
        yield Check(name, sum(len(one.accepted) for one in again) == num_accepted[rate][0])
    detail = f"{num_accepted}"
    yield Check("without adaptation nothing changes", len(set(num_accepted[0.0])) == 1, detail)
    yield Check("drafts get better", num_accepted[0.5][-1] > num_accepted[0.5][0], detail)


def _lengths() -> Iterator[Check]:
    """Chains end by the predictions for the drafts that were fed, which a head learns from the
    drafts up to the first rejection."""
    right = wordy()
    target, draft = ScriptedModel(right), ScriptedModel(blurred(right))
    draft.tokenizer = ByteTokenizer()  # type: ignore[attr-defined]

    def trust(token: int) -> float:
        return (0.95, 0.6, 0.5)[token % 3]

    with LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=4096) as llm:
        method = llm.decoder("omnidraft:size=8")
        assert isinstance(method, Speculative) and isinstance(method.drafter, OmniDrafter)
        online = method.drafter.online
        for _ in range(4):
            rounds(llm, method, "abcabcabd", 24)
        yield Check("a head is trained", online.head is not None)
        taken: list[tuple[int, float]] = []
        online.head = lambda hidden: trust(int(hidden[0]))  # type: ignore
        online.add = lambda hidden, label: taken.append((int(hidden[0]), label))  # type: ignore
        trace, learned, wrong = rounds(llm, method, "abcabcabd", 40), [], 0
        for one in trace:
            product = 1.0
            for number, token in enumerate(one.tokens, 1):
                ends = number == 8 or (number > 1 and 1 - product > 0.7)
                wrong += ends != (number == len(one.tokens))
                product *= trust(token)
            known = one.tokens[: len(one.accepted) + 1]
            fed = known[: len(one.tokens) - 1]
            learned += [(token, float(at < len(one.accepted))) for at, token in enumerate(fed)]
    lengths = {len(one.tokens) for one in trace}
    yield Check("chains end by the predictions", wrong == 0 and len(lengths) > 2, f"{lengths}")
    kinds = {label for _, label in learned}
    yield Check("the head learns what was accepted", taken == learned and kinds == {0.0, 1.0})


def _noise() -> Iterator[Check]:
    """Above temperature 0 a draft is what the target would sample at its position by the draft
    model's logits, in the target's numbers of the bytes. The target generates neither pairs nor
    characters of several bytes."""
    ours, right = PairTokenizer(), wordy()
    guess = blurred(right)

    def swapped(row: np.ndarray) -> np.ndarray:
        result = np.full(ours.vocab_size, -40.0, np.float32)
        result[:256] = row[np.arange(256) ^ 1]
        return result

    def read(seen: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(token ^ 1 for token in seen)

    def plain(seen: tuple[int, ...]) -> np.ndarray:
        row = swapped(right(read(seen)))
        row[128:] = -40.0
        return row

    target = ScriptedModel(plain, vocab_size=ours.vocab_size)
    draft = ScriptedModel(guess)
    draft.tokenizer = ByteTokenizer()  # type: ignore[attr-defined]
    temperature, counts = 0.8, {}
    with LLM(target, tokenizer=ours, draft=draft, cache_positions=4096) as llm:
        prompt, wrong = list(read(tuple(b"abcabcabd"))), 0
        for rule in ("token-exact", "rejection"):
            key = f"omnidraft:rate=0,acceptance={rule}"
            trace = rounds(llm, key, prompt, 120, temperature=temperature)
            counts[rule] = sum(len(one.accepted) for one in trace)
            for one in trace:
                text = list(one.text)
                for token in one.tokens:
                    row = swapped(guess(read(tuple(text))))
                    row[256:] = -np.inf
                    sampled = plain_token(row, len(text), temperature)
                    wrong += token != (sampled if rule == "token-exact" else row.argmax())
                    text.append(token)
    yield Check("drafts share the target's noise", wrong == 0, f"{wrong} drafts differ")
    fewer = counts["token-exact"] > counts["rejection"]
    yield Check("and more of them are accepted than of the most probable", fewer, f"{counts}")


def _text(tokenizer: ByteTokenizer, trace: list[TracedRound]) -> str:
    return tokenizer.decode([token for one in trace for token in one.generated][:40])
