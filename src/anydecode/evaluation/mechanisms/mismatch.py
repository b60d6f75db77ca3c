"""Draft models that differ from the target in what they see, say or compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from anydecode import catalogue
from anydecode.decoders.speculative.core import Speculative
from anydecode.decoders.speculative.omnidraft import OmniDrafter
from anydecode.decoders.speculative.online import Correction, Lesson, OnlineDrafter
from anydecode.decoders.speculative.windows import retrieved
from anydecode.engine.llm import LLM
from anydecode.errors import UnsupportedCombinationError
from anydecode.evaluation.certify import Check, mechanism
from anydecode.evaluation.mechanisms.layer_parallel import Forward
from anydecode.evaluation.rounds import (
    VOCABULARY,
    Drafted,
    Logits,
    accepted,
    blurred,
    picked,
    rounds,
    scripted,
    wordy,
)
from anydecode.evaluation.tiny import tiny_model
from anydecode.kernels.interface import KeyValues, Output, OutputSpec, Rows
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.models.transformer import Transformer

PROMPTS = ("abcabcabdabcabcabd", "the cab had a bad cab and a dab", "h")
TARGET = wordy()


def sighted(seen: tuple[int, ...]) -> np.ndarray:
    """Draft logits that follow everything a row sees."""
    row: np.ndarray = blurred(TARGET, error=0.3)(seen).copy()
    row[97 + sum(seen) % 12] += 2.0
    return row


@mechanism("longspec")
def longspec() -> Iterator[Check]:
    """The draft model sees the sinks and the window, and holds no more than that."""
    window, sinks, size = 6, 2, 3
    for temperature in (0.0, 0.8):
        most, wrong, kept = 0, 0, 0
        with scripted(TARGET, sighted) as llm:
            pool = llm.engine.runners["draft"].pool
            for prompt in PROMPTS:
                decoder = f"longspec:size={size},window={window},sinks={sinks}"
                found = rounds(llm, decoder, prompt, 30, temperature=temperature)
                gone, length = sinks, 0
                for one in found:
                    while len(one.text) - length > window:
                        length += window
                        gone = max(gone, length - window)
                    drafts: list[int] = []
                    for _ in range(size):
                        text = [*one.text, *drafts]
                        # The scripted model turns its logits by one token per hole.
                        row = np.roll(sighted((*text[:sinks], *text[gone:])), gone - sinks)
                        drafts.append(picked(row, len(text), temperature))
                    wrong += one.tokens != drafts
                    length = len(one.text) + size - 1
                    gone = max(gone, length - window)
                    length = min(length, len(one.text) + len(one.accepted))
                kept += accepted(found)
                most = max(most, pool.num_used)
        yield Check(f"T={temperature} equals the oracle", wrong == 0)
        yield Check(f"drafts are accepted at T={temperature}", kept > 0, f"{kept}")
        yield Check("everything is given back", most == 0)
    held = [_most_held(count) for count in (60, 120)]
    yield Check("memory is constant", held[0] == held[1] <= sinks + 2 * window + size, f"{held}")


def _most_held(count: int) -> int:
    held = [0]

    def draft(seen: tuple[int, ...]) -> np.ndarray:
        held.append(llm.engine.runners["draft"].pool.num_used)
        return TARGET(seen)

    with scripted(TARGET, draft) as llm:
        options = {"decoder": "longspec:size=3,window=6,sinks=2", "ignore_eos": True}
        llm.generate("abcabcabdabc" * 4, max_tokens=count, **options)
    return max(held)


@mechanism("rapid")
def rapid() -> Iterator[Check]:
    """Chunks like the question are retrieved, in order; the draft model reads nothing else."""
    text = [1, 1, 2, 2, 7, 8, 9, 2, 1, 2, 1, 2, 9, 9, 1, 1, 3, 9, 8, 7]
    yield Check(
        "worked by hand", retrieved(text, 4, 2, 4) == [*text[4:8], *text[12:16], *text[16:]]
    )
    yield Check("a short prompt is read whole", retrieved(text, 4, 9, 4) == text)
    for temperature in (0.0, 0.8):
        wrong, kept = 0, 0
        with scripted(TARGET, sighted) as llm:
            for prompt in PROMPTS:
                decoder = "rapid:size=4,chunk=4,count=2,query=5"
                found = rounds(llm, decoder, prompt, 30, temperature=temperature)
                kept += accepted(found)
                for one in found:
                    said = one.text[len(prompt) :]
                    short = [*_alike(list(prompt.encode()), 4, 2, 5), *said]
                    drafts: list[int] = []
                    for position in range(4):
                        row = sighted((*short, *drafts))
                        drafts.append(picked(row, len(one.text) + position, temperature))
                    wrong += one.tokens != drafts
        yield Check(f"T={temperature} equals the oracle", wrong == 0)
        yield Check(f"drafts are accepted at T={temperature}", kept > 0, f"{kept}")


def _alike(prompt: list[int], chunk: int, count: int, query: int) -> list[int]:
    """The chunks of largest cosine with the question, as rows of one matrix of token counts."""
    body, question = prompt[:-query], prompt[-query:]
    chunks = [body[i : i + chunk] for i in range(0, len(body), chunk)]
    if not chunks:
        return question
    words = sorted(set(body))
    counts = np.array([[part.count(word) for word in words] for part in chunks], float)
    rarity = np.log((1 + len(chunks)) / (0.5 + (counts > 0).sum(axis=0)))
    asked = rarity * [question.count(word) for word in words]
    cosine = (counts * rarity) @ asked / np.linalg.norm(counts * rarity, axis=1)
    best = np.argsort(-cosine.round(9), kind="stable")[:count]
    return [token for position in sorted(best) for token in chunks[position]] + question


class Pairs(ByteTokenizer):
    """Bytes with their lowest bit turned, and a token for each of three pairs."""

    vocab_size = VOCABULARY + 3
    pairs = (b"ab", b"ca", b"bd")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        data, tokens = text.encode(), []
        while data:
            pair = data[:2]
            known = pair in self.pairs
            tokens.append(VOCABULARY + self.pairs.index(pair) if known else data[0] ^ 1)
            data = data[2 if known else 1 :]
        return tokens

    def token_bytes(self, token: int) -> bytes:
        if token >= VOCABULARY:
            return self.pairs[token - VOCABULARY]
        return bytes([token ^ 1]) if token < 256 else b""

    def is_special(self, token: int) -> bool:
        return 256 <= token < VOCABULARY


def _reciting(tokens: list[int], size: int) -> Logits:
    def logits(seen: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(size, np.float32)
        row[tokens[len(seen) % len(tokens)]] = 30.0
        return row

    return logits


@mechanism("omnidraft")
def omnidraft() -> Iterator[Check]:
    """Runs of draft tokens become target tokens once the target has used one; text is the same."""
    ours, text = Pairs(), "abcabd\u00e9 ca" * 12
    target = ScriptedModel(
        _reciting(ours.encode(text), ours.vocab_size), vocab_size=ours.vocab_size
    )
    draft = ScriptedModel(_reciting(list(text.encode()), VOCABULARY), vocab_size=VOCABULARY)
    draft.tokenizer = ByteTokenizer()  # type: ignore[attr-defined]
    with LLM(target, tokenizer=ours, draft=draft, cache_positions=4096) as llm:
        prompt = ours.encode("abcabd")
        found = rounds(llm, "omnidraft:size=6", prompt, 50)
        method = llm.decoder("omnidraft:size=6")
        assert isinstance(method, Speculative) and isinstance(method.drafter, OmniDrafter)
        runs = method.drafter.translation.runs
        yield Check("the text is the target's", _text(ours, found) in text)
        yield Check("drafts equal the oracle", _translated(ours, found, text.encode()) == 0)
        yield Check(
            "spellings are learned",
            runs == {tuple(p): VOCABULARY + i for i, p in enumerate(Pairs.pairs)},
            f"{runs}",
        )
        last = found[-2]
        missed = [one for one in found if one.tokens and one.tokens[0] != one.said[0]]
        yield Check("unknown spellings are rejected", 0 < len(missed) <= 3, f"{len(missed)}")
        yield Check("a known one is accepted", len(last.accepted) == len(last.tokens) > 2)
        yield Check("drafts are whole target tokens", any(t >= VOCABULARY for t in last.tokens))
        try:
            llm.generate("abc", decoder="speculative-sampling")
            refused = ""
        except UnsupportedCombinationError as error:
            refused = str(error)
        yield Check("methods that cannot translate refuse", "omnidraft" in refused, refused)


def _translated(ours: Pairs, found: list[Drafted], recited: bytes) -> int:
    """Rounds whose drafts are not the next six recited bytes, pairs that were said before as one
    token; none where a character is cut in two."""
    wrong, said = 0, set()
    for one in found:
        seen = b"".join(map(ours.token_bytes, one.text))
        ahead = [recited[(len(seen) + i) % len(recited)] for i in range(6)]
        expected: list[int] = []
        while ahead:
            pair = bytes(ahead[:2])
            size = 2 if pair in said else 1
            expected += ours.encode(pair.decode()) if size == 2 else [ahead[0] ^ 1]
            ahead = ahead[size:]
        whole = seen.decode(errors="ignore").encode() == seen
        wrong += one.tokens != (expected if whole else [])
        said |= {ours.token_bytes(token) for token in one.said if token >= VOCABULARY}
    return wrong


def _text(tokenizer: ByteTokenizer, found: list[Drafted]) -> str:
    return tokenizer.decode([token for one in found for token in one.said][:40])


class Watched(ScriptedModel):
    """Keeps (position, first layer, last layer) of every row it runs, and counts the cache's slots
    that changed between two passes."""

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


@mechanism("s2d")
def s2d() -> Iterator[Check]:
    """Exits at the shares of the depth; later layers run only where an exit was unsure."""
    expected = {0.0: {(0, 4)}, 1.0: {(0, 4), (4, 6), (6, 8)}}
    for confidence in (0.0, 0.6, 1.0):
        draft = Watched(blurred(TARGET, error=0.4), vocab_size=VOCABULARY, num_layers=8)
        model = ScriptedModel(TARGET, vocab_size=VOCABULARY)
        with LLM(model, tokenizer=ByteTokenizer(), draft=draft, prefix_cache=False) as llm:
            decoder = f"s2d:size=3,confidence={confidence}"
            found = rounds(llm, decoder, [97], 24)
        ranges = {position[1:] for position in draft.ran} - {(0, 8)}
        if confidence in expected:
            yield Check(
                f"confidence {confidence}: the right layers run",
                ranges == expected[confidence] or confidence == 0.0 and ranges <= _lazily,
                f"{sorted(ranges)}",
            )
        else:
            early = sum(position[1:] == (0, 4) for position in draft.ran)
            late = sum(position[1:] == (6, 8) for position in draft.ran)
            yield Check("some tokens exit early, some late", 0 < late < early, f"{late} of {early}")
        yield Check(
            f"confidence {confidence}: three drafts", all(len(o.tokens) == 3 for o in found)
        )
        yield Check(f"confidence {confidence}: accepted", accepted(found) > 0)
    for temperature, confidence in ((0.0, 0.35), (0.8, 0.5)):
        small = tiny_model(layers=8, seed=3, backend="torch")
        with LLM(small, tokenizer=ByteTokenizer(), draft=small, cache_positions=1024) as llm:
            decoder = f"s2d:size=3,confidence={confidence}"
            found = rounds(llm, decoder, "the cat sat", 20, temperature=temperature)
        wrong, exits = _nested_mistakes(small, found, temperature, confidence)
        name = f"T={temperature}: drafts are those of the first sure exit"
        yield Check(name, wrong == 0, f"exits after {exits} layers")
        yield Check(f"T={temperature}: every exit occurs", set(exits) == {4, 6, 8}, f"{exits}")


def _nested_mistakes(
    model: Transformer, found: list[Drafted], temperature: float, confidence: float
) -> tuple[int, list[int]]:
    """How many drafts differ from a forward pass that stops at the first sure exit, and where it
    stopped. What an exit left out of memory changes nothing."""
    stops, wrong, exits = (4, 6, 8), 0, []
    for one in found:
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
            wrong += picked(rows[position].numpy(), at, temperature) != draft
            rows = forward.exits(draft, stops)
    return wrong, exits


#: What an early exit left out is completed when the next round scores several tokens at once.
_lazily = {(0, 4), (4, 8)}


def ragged(key: str) -> Iterator[Check]:
    """Rows of a batch accept different numbers of drafts, outputs are those of each row alone, and
    between passes not one slot is copied."""
    prompts = ["abcabcabd", "the cab had a bad cab", "h", "daddaddad"]
    options = {"decoder": key, "max_tokens": 40, "ignore_eos": True, "trace": True, "seed": 1}
    with scripted(TARGET, blurred(TARGET, error=0.6)) as llm:
        alone = [llm.generate(prompt, **options) for prompt in prompts]
    target = Watched(TARGET, vocab_size=VOCABULARY)
    draft = ScriptedModel(blurred(TARGET, error=0.6), vocab_size=VOCABULARY)
    with LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=2048) as llm:
        batch = llm.generate(prompts, **options)
        llm.engine.check_integrity()
    yield Check(
        "outputs equal each row's own", [a.tokens for a in batch] == [a.tokens for a in alone]
    )
    by_round = [[len(entry["accepted"]) for entry in answer.trace] for answer in batch]
    mixed = sum(len(set(counts)) > 1 for counts in zip(*by_round, strict=False))
    yield Check("acceptance is ragged", mixed > 3, f"in {mixed} passes")
    yield Check("no slot is copied", target.copied == 0, f"{target.copied}")
    rows = sum(1 + len(entry["drafted"]) for answer in batch for entry in answer.trace)
    extra = sum(len(prompt) - 1 for prompt in prompts)
    yield Check("no row is run again", len(target.ran) == rows + extra, f"{len(target.ran)}")
    whole = [e for a in batch for e in a.trace if len(e["accepted"]) == len(e["drafted"])]
    yield Check(
        "all accepted gives one more", all(len(e["tokens"]) == 6 for e in whole) and whole != []
    )


@mechanism("eqspec")
def eqspec() -> Iterator[Check]:
    """Realignment costs nothing."""
    yield from ragged("eqspec")


@mechanism("exspec")
def exspec() -> Iterator[Check]:
    """Requests of different length share passes."""
    yield from ragged("exspec")


@mechanism("online-sd")
def online() -> Iterator[Check]:
    """Lessons are first wrong drafts; the loss is forward cross-entropy; drafts get better."""
    correction = Correction(2, 5, 2, 0.1)
    shares = torch.tensor([0.75, 0.25])
    lesson = Lesson(torch.ones(2), torch.zeros(5), torch.tensor([1, 3]), shares)
    losses = correction.learn([lesson], 30)
    yield Check("the first loss is log 5", abs(losses[0] - np.log(5)) < 1e-6)
    entropy = -float((shares * shares.log()).sum())
    yield Check("it falls towards the entropy", entropy < losses[-1] < losses[0] - 0.5)

    def wrong(seen: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = TARGET(seen).copy()
        row[122] += 40.0
        return row

    with scripted(TARGET, wrong) as llm:
        decoder = llm.decoder("online-sd:batch=8,steps=12,rate=0.3")
        assert isinstance(decoder, Speculative) and isinstance(decoder.drafter, OnlineDrafter)
        taken: list[Lesson] = []
        remember = decoder.drafter.take

        def take(lesson: Lesson) -> None:
            taken.append(lesson)
            remember(lesson)

        decoder.drafter.take = take  # type: ignore[method-assign]
        before = rounds(llm, decoder, "abcabcabd", 24)
        chains = [[122] * 4 for _ in before]  # what it says before it has learned
        yield Check("at first the draft model drafts", [o.tokens for o in before] == chains)
        mistakes = [one for one in before if len(one.accepted) < len(one.tokens)]
        yield Check("a lesson per rejected draft", len(taken) == len(mistakes) > 8, f"{len(taken)}")
        aligned = all(
            int(lesson.tokens[0])
            == int(TARGET((*one.text, *one.tokens[: len(one.accepted)])).argmax())
            for lesson, one in zip(taken, mistakes, strict=True)
        )
        yield Check("lessons teach the target's row of the same place", aligned)
        for _ in range(3):
            after = rounds(llm, decoder, "abcabcabd", 24)
        yield Check(
            "more is accepted after lessons",
            accepted(after) > accepted(before),
            f"{accepted(before)} -> {accepted(after)}",
        )
        decoder.drafter.clear()
        again = rounds(llm, decoder, "abcabcabd", 24)
        yield Check("clear forgets them", accepted(again) == accepted(before))
    yield Check("it is in the catalogue", "online-sd" in catalogue.entries())
