"""Oracle tests of draft models that differ from the target in context, vocabulary or depth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.layer_parallel import Forward
from anydecode.certification.rounds import (
    VOCABULARY,
    Logits,
    TracedRound,
    accepted,
    blurred,
    plain_token,
    rounds,
    scripted,
    wordy,
)
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.omnidraft import OmniDrafter
from anydecode.decoders.speculative.online import Correction, OnlineDrafter, RejectedDraft
from anydecode.decoders.speculative.windows import retrieve_chunks
from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.interface import KeyValues, Output, OutputSpec, Rows
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.models.transformer import Transformer

PROMPTS = ("abcabcabdabcabcabd", "the cab had a bad cab and a dab", "h")
TARGET = wordy()


def context_logits(seen: tuple[int, ...]) -> np.ndarray:
    """Draft logits that depend on everything that a row attends to."""
    row: np.ndarray = blurred(TARGET, error=0.3)(seen).copy()
    row[97 + sum(seen) % 12] += 2.0
    return row


@oracle_test("longspec")
def longspec() -> Iterator[Check]:
    """The draft model attends to the sinks and the window only, and caches no more than that."""
    window, sinks, size = 6, 2, 3
    for temperature in (0.0, 0.8):
        num_used, wrong, total = 0, 0, 0
        with scripted(TARGET, context_logits) as llm:
            pool = llm.engine.runners["draft"].pool
            for prompt in PROMPTS:
                decoder = f"longspec:size={size},window={window},sinks={sinks}"
                trace = rounds(llm, decoder, prompt, 30, temperature=temperature)
                first_kept, length = sinks, 0
                for one in trace:
                    while len(one.text) - length > window:
                        length += window
                        first_kept = max(first_kept, length - window)
                    drafts: list[int] = []
                    for _ in range(size):
                        text = [*one.text, *drafts]
                        # The scripted model rotates its logits by one token per hole in the
                        # positions.
                        row = np.roll(
                            context_logits((*text[:sinks], *text[first_kept:])), first_kept - sinks
                        )
                        drafts.append(plain_token(row, len(text), temperature))
                    wrong += one.tokens != drafts
                    length = len(one.text) + size - 1
                    first_kept = max(first_kept, length - window)
                    length = min(length, len(one.text) + len(one.accepted))
                total += accepted(trace)
                num_used = max(num_used, pool.num_used)
        yield Check(f"T={temperature} equals the oracle", wrong == 0)
        yield Check(f"drafts are accepted at T={temperature}", total > 0, f"{total}")
        yield Check("all slots are freed", num_used == 0)
    sizes = [_max_used(count) for count in (60, 120)]
    yield Check(
        "the cache size is constant", sizes[0] == sizes[1] <= sinks + 2 * window + size, f"{sizes}"
    )


def _max_used(count: int) -> int:
    used = [0]

    def draft(seen: tuple[int, ...]) -> np.ndarray:
        used.append(llm.engine.runners["draft"].pool.num_used)
        return TARGET(seen)

    with scripted(TARGET, draft) as llm:
        options: dict[str, Any] = {
            "decoder": "longspec:size=3,window=6,sinks=2",
            "ignore_eos": True,
        }
        llm.generate("abcabcabdabc" * 4, max_tokens=count, **options)
    return max(used)


@oracle_test("rapid")
def rapid() -> Iterator[Check]:
    """Chunks similar to the query are retrieved, in order; the draft model reads nothing else."""
    text = [1, 1, 2, 2, 7, 8, 9, 2, 1, 2, 1, 2, 9, 9, 1, 1, 3, 9, 8, 7]
    yield Check(
        "retrieval by hand",
        retrieve_chunks(text, 4, 2, 4) == [*text[4:8], *text[12:16], *text[16:]],
    )
    yield Check("a short prompt is used whole", retrieve_chunks(text, 4, 9, 4) == text)
    for temperature in (0.0, 0.8):
        wrong, total = 0, 0
        with scripted(TARGET, context_logits) as llm:
            for prompt in PROMPTS:
                decoder = "rapid:size=4,chunk=4,count=2,query=5"
                trace = rounds(llm, decoder, prompt, 30, temperature=temperature)
                total += accepted(trace)
                for one in trace:
                    generated = one.text[len(prompt) :]
                    short = [*_similar_chunks(list(prompt.encode()), 4, 2, 5), *generated]
                    drafts: list[int] = []
                    for position in range(4):
                        row = context_logits((*short, *drafts))
                        drafts.append(plain_token(row, len(one.text) + position, temperature))
                    wrong += one.tokens != drafts
        yield Check(f"T={temperature} equals the oracle", wrong == 0)
        yield Check(f"drafts are accepted at T={temperature}", total > 0, f"{total}")


def _similar_chunks(prompt: list[int], chunk: int, count: int, query: int) -> list[int]:
    """The chunks with the largest cosine similarity to the query, as rows of a matrix of token
    counts."""
    body, question = prompt[:-query], prompt[-query:]
    chunks = [body[i : i + chunk] for i in range(0, len(body), chunk)]
    if not chunks:
        return question
    words = sorted(set(body))
    counts = np.array([[part.count(word) for word in words] for part in chunks], float)
    rarity = np.log((1 + len(chunks)) / (0.5 + (counts > 0).sum(axis=0)))
    query_counts = rarity * [question.count(word) for word in words]
    cosine = (counts * rarity) @ query_counts / np.linalg.norm(counts * rarity, axis=1)
    best = np.argsort(-cosine.round(9), kind="stable")[:count]
    return [token for position in sorted(best) for token in chunks[position]] + question


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


def _reciting_logits(tokens: list[int], size: int) -> Logits:
    def logits(seen: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(size, np.float32)
        row[tokens[len(seen) % len(tokens)]] = 30.0
        return row

    return logits


@oracle_test("omnidraft")
def omnidraft() -> Iterator[Check]:
    """Runs of draft tokens become target tokens once the target has generated one; the text is
    unchanged."""
    ours, text = PairTokenizer(), "abcabd\u00e9 ca" * 12
    target = ScriptedModel(
        _reciting_logits(ours.encode(text), ours.vocab_size), vocab_size=ours.vocab_size
    )
    draft = ScriptedModel(_reciting_logits(list(text.encode()), VOCABULARY), vocab_size=VOCABULARY)
    draft.tokenizer = ByteTokenizer()  # type: ignore[attr-defined]
    with LLM(target, tokenizer=ours, draft=draft, cache_positions=4096) as llm:
        prompt = ours.encode("abcabd")
        trace = rounds(llm, "omnidraft:size=6", prompt, 50)
        method = llm.decoder("omnidraft:size=6")
        assert isinstance(method, Speculative) and isinstance(method.drafter, OmniDrafter)
        runs = method.drafter.translation.runs
        yield Check("the text is the target's", _text(ours, trace) in text)
        yield Check("drafts equal the oracle", _translated(ours, trace, text.encode()) == 0)
        yield Check(
            "translations are learned",
            runs == {tuple(p): VOCABULARY + i for i, p in enumerate(PairTokenizer.pairs)},
            f"{runs}",
        )
        last = trace[-2]
        missed = [one for one in trace if one.tokens and one.tokens[0] != one.generated[0]]
        yield Check("unknown translations are rejected", 0 < len(missed) <= 3, f"{len(missed)}")
        yield Check("a known translation is accepted", len(last.accepted) == len(last.tokens) > 2)
        yield Check("drafts are whole target tokens", any(t >= VOCABULARY for t in last.tokens))
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


def _translated(ours: PairTokenizer, trace: list[TracedRound], recited: bytes) -> int:
    """The number of rounds whose drafts are not the next six bytes of `recited`, with pairs
    generated before as one token; no drafts where a character is incomplete."""
    wrong, generated = 0, set()
    for one in trace:
        seen = b"".join(map(ours.token_bytes, one.text))
        ahead = [recited[(len(seen) + i) % len(recited)] for i in range(6)]
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


def _text(tokenizer: ByteTokenizer, trace: list[TracedRound]) -> str:
    return tokenizer.decode([token for one in trace for token in one.generated][:40])


class RecordingModel(ScriptedModel):
    """Records (position, first layer, last layer) of every row it runs, and counts the cache slots
    that change between two passes."""

    def __init__(self, script: Logits, **options: Any) -> None:
        super().__init__(script, **options)
        self.ran: list[tuple[int, int, int]] = []
        self.copied = 0
        self._after: list[torch.Tensor] = []

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        positions = zip(
            rows.positions.tolist(), rows.start.tolist(), rows.stop.tolist(), strict=True
        )
        self.ran += positions
        for before, keys in zip(self._after, cache.keys, strict=False):
            self.copied += int((before != keys).sum())
        output = super().run(rows, cache, output_spec)
        self._after = [keys.clone() for keys in cache.keys]
        return output


@oracle_test("s2d")
def s2d() -> Iterator[Check]:
    """Exits at fixed shares of the depth; later layers run only if an exit is not confident."""
    expected = {0.0: {(0, 4)}, 1.0: {(0, 4), (4, 6), (6, 8)}}
    for confidence in (0.0, 0.6, 1.0):
        draft = RecordingModel(blurred(TARGET, error=0.4), vocab_size=VOCABULARY, num_layers=8)
        model = ScriptedModel(TARGET, vocab_size=VOCABULARY)
        with LLM(model, tokenizer=ByteTokenizer(), draft=draft, prefix_cache=False) as llm:
            decoder = f"s2d:size=3,confidence={confidence}"
            trace = rounds(llm, decoder, [97], 24)
        ranges = {position[1:] for position in draft.ran} - {(0, 8)}
        if confidence in expected:
            yield Check(
                f"confidence {confidence}: the expected layers run",
                ranges == expected[confidence] or confidence == 0.0 and ranges <= _LATE_LAYERS,
                f"{sorted(ranges)}",
            )
        else:
            early = sum(position[1:] == (0, 4) for position in draft.ran)
            late = sum(position[1:] == (6, 8) for position in draft.ran)
            yield Check("some tokens exit early, some late", 0 < late < early, f"{late} of {early}")
        yield Check(
            f"confidence {confidence}: three drafts", all(len(o.tokens) == 3 for o in trace)
        )
        yield Check(f"confidence {confidence}: drafts are accepted", accepted(trace) > 0)
    for temperature, confidence in ((0.0, 0.35), (0.8, 0.5)):
        small = tiny_model(layers=8, seed=3, backend="torch")
        with LLM(small, tokenizer=ByteTokenizer(), draft=small, cache_positions=1024) as llm:
            decoder = f"s2d:size=3,confidence={confidence}"
            trace = rounds(llm, decoder, "the cat sat", 20, temperature=temperature)
        wrong, exits = _nested_mistakes(small, trace, temperature, confidence)
        name = f"T={temperature}: drafts are those of the first confident exit"
        yield Check(name, wrong == 0, f"exits after {exits} layers")
        yield Check(f"T={temperature}: every exit occurs", set(exits) == {4, 6, 8}, f"{exits}")


def _nested_mistakes(
    model: Transformer, trace: list[TracedRound], temperature: float, confidence: float
) -> tuple[int, list[int]]:
    """How many drafts differ from a forward pass that stops at the first confident exit, and where
    it stopped. Layers skipped by an exit do not change later drafts."""
    stops, wrong, exits = (4, 6, 8), 0, []
    for one in trace:
        forward = Forward(model)
        for token in one.text:
            rows = forward.exits(token, stops)
        for draft in one.tokens:
            sure = [
                float((row / (temperature or 1.0)).softmax(0).max()) >= confidence for row in rows
            ]
            position = sure.index(True) if True in sure else 2
            exits.append(stops[position])
            at = len(forward.keys[0])
            wrong += plain_token(rows[position].numpy(), at, temperature) != draft
            rows = forward.exits(draft, stops)
    return wrong, exits


#: Layers skipped by an early exit are completed when the next round scores several tokens at once.
_LATE_LAYERS = {(0, 4), (4, 8)}


def ragged_batch(key: str) -> Iterator[Check]:
    """Rows of a batch accept different numbers of drafts, outputs equal those of each row alone,
    and no slot is copied between passes."""
    prompts = ["abcabcabd", "the cab had a bad cab", "h", "daddaddad"]
    options: dict[str, Any] = {
        "decoder": key,
        "max_tokens": 40,
        "ignore_eos": True,
        "trace": True,
        "seed": 1,
    }
    with scripted(TARGET, blurred(TARGET, error=0.6)) as llm:
        alone = [llm.generate(prompt, **options) for prompt in prompts]
    target = RecordingModel(TARGET, vocab_size=VOCABULARY)
    draft = ScriptedModel(blurred(TARGET, error=0.6), vocab_size=VOCABULARY)
    with LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=2048) as llm:
        batch = llm.generate(prompts, **options)
        llm.engine.check_integrity()
    yield Check(
        "outputs equal each row alone", [a.tokens for a in batch] == [a.tokens for a in alone]
    )
    by_round = [[len(entry["accepted"]) for entry in answer.trace or ()] for answer in batch]
    mixed = sum(len(set(counts)) > 1 for counts in zip(*by_round, strict=False))
    yield Check("rows accept different numbers of drafts", mixed > 3, f"in {mixed} passes")
    yield Check("no slot is copied", target.copied == 0, f"{target.copied}")
    rows = sum(1 + len(entry["drafted"]) for answer in batch for entry in answer.trace or ())
    extra = sum(len(prompt) - 1 for prompt in prompts)
    yield Check("no row is computed twice", len(target.ran) == rows + extra, f"{len(target.ran)}")
    whole = [e for a in batch for e in a.trace or () if len(e["accepted"]) == len(e["drafted"])]
    yield Check(
        "if all drafts are accepted, one more token is generated",
        all(len(e["tokens"]) == 6 for e in whole) and whole != [],
    )


@oracle_test("eqspec")
def eqspec() -> Iterator[Check]:
    """Realignment of a ragged batch costs nothing."""
    yield from ragged_batch("eqspec")


@oracle_test("exspec")
def exspec() -> Iterator[Check]:
    """Requests of different lengths share passes."""
    yield from ragged_batch("exspec")


@oracle_test("online-sd")
def online() -> Iterator[Check]:
    """Training examples are the first rejected drafts; the loss is forward cross-entropy; drafts
    get better."""
    correction = Correction(2, 5, 2, 0.1)
    shares = torch.tensor([0.75, 0.25])
    lesson = RejectedDraft(torch.ones(2), torch.zeros(5), torch.tensor([1, 3]), shares)
    losses = correction.train_steps([lesson], 30)
    yield Check("the first loss is log 5", abs(losses[0] - np.log(5)) < 1e-6)
    entropy = -float((shares * shares.log()).sum())
    yield Check("the loss falls towards the entropy", entropy < losses[-1] < losses[0] - 0.5)

    def wrong(seen: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = TARGET(seen).copy()
        row[122] += 40.0
        return row

    with scripted(TARGET, wrong) as llm:
        decoder = llm.decoder("online-sd:batch=8,steps=12,rate=0.3")
        assert isinstance(decoder, Speculative) and isinstance(decoder.drafter, OnlineDrafter)
        taken: list[RejectedDraft] = []
        remember = decoder.drafter.add_example

        def take(example: RejectedDraft) -> None:
            taken.append(example)
            remember(example)

        decoder.drafter.add_example = take  # type: ignore[method-assign]
        before = rounds(llm, decoder, "abcabcabd", 24)
        chains = [[122] * 4 for _ in before]  # the draft model's tokens before training
        yield Check("the untrained draft model drafts first", [o.tokens for o in before] == chains)
        mistakes = [one for one in before if len(one.accepted) < len(one.tokens)]
        yield Check(
            "one training example per rejected draft",
            len(taken) == len(mistakes) > 8,
            f"{len(taken)}",
        )
        aligned = all(
            int(lesson.tokens[0])
            == int(TARGET((*one.text, *one.tokens[: len(one.accepted)])).argmax())
            for lesson, one in zip(taken, mistakes, strict=True)
        )
        yield Check("examples have the target's row of the same position", aligned)
        for _ in range(3):
            after = rounds(llm, decoder, "abcabcabd", 24)
        yield Check(
            "more drafts are accepted after training",
            accepted(after) > accepted(before),
            f"{accepted(before)} -> {accepted(after)}",
        )
        decoder.drafter.clear()
        again = rounds(llm, decoder, "abcabcabd", 24)
        yield Check("`clear` resets the correction", accepted(again) == accepted(before))
    yield Check("it is in the catalogue", "online-sd" in catalogue.entries())
