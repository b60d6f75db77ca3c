"""What drafters keep of texts is bounded by bytes, and forgotten piece by piece."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.certification.chi_square import small_llm
from anydecode.certification.rounds import scripted, wordy
from anydecode.decoders.speculative import lookahead, omnidraft, successors, suffix
from anydecode.decoders.speculative.auto import Auto
from anydecode.decoders.speculative.lookahead import LookaheadDrafter
from anydecode.decoders.speculative.omnidraft import Translation
from anydecode.decoders.speculative.successors import Successors
from anydecode.decoders.speculative.suffix import SuffixDrafter

#: Methods whose `memory`, in bytes, bounds what they learn from earlier texts, and a small one.
BOUNDED = {"suffix": 60_000, "stand": 60_000, "aded": 40_000, "token-recycling": 6_000}
#: Combinations of these; `auto`, whose `memory` counts tokens; and methods that train on the last
#: few drafts, whose number is fixed.
OTHERS = {"taps", "stree", "auto", "online-sd", "specdec++", "omnidraft"}


def texts(llm: LLM, key: str, count: int, **options: Any) -> list[list[int]]:
    """The tokens of answers to prompts that differ."""
    letters = np.random.default_rng(3).integers(97, 123, (count, 12))
    return [
        llm.generate(
            row.tolist(), decoder=key, max_tokens=24, temperature=1.0, seed=number, **options
        ).tokens
        for number, row in enumerate(letters)
    ]


@pytest.mark.parametrize("key", BOUNDED)
def test_a_full_memory_forgets_piece_by_piece(key: str) -> None:
    memory, sizes = BOUNDED[key], list[int]()
    choice = f"{key}:memory={memory}"
    with scripted(wordy(spread=1.0)) as llm:
        expected = texts(llm, "autoregressive", 40)
        letters = np.random.default_rng(3).integers(97, 123, (40, 12))
        for number, row in enumerate(letters.tolist()):
            answer = llm.generate(row, decoder=choice, max_tokens=24, temperature=1.0, seed=number)
            assert answer.tokens == expected[number]
            sizes.append(llm.decoder(choice).num_bytes)
    assert max(sizes) <= memory
    full = next(number for number, size in enumerate(sizes) if size > 0.8 * memory)
    assert full < 30 and min(sizes[full:]) > 0.6 * memory


@pytest.mark.parametrize("key", BOUNDED)
def test_the_bound_is_a_documented_parameter(key: str) -> None:
    (memory,) = [one for one in catalogue.parameters(key) if one.name == "memory"]
    assert memory.description.endswith("in bytes.") and not memory.remote
    decoder: Any = catalogue.build(key, memory=0)
    with scripted(wordy()) as llm:
        plain, drafted = (texts(llm, one, 3) for one in ("autoregressive", decoder))
    assert drafted == plain and decoder.num_bytes == 0


def test_no_other_method_learns_from_earlier_texts_without_a_bound() -> None:
    learning = set()
    with small_llm() as llm:
        for card in catalogue.cards("speculative"):
            if card.use or card.key in OTHERS:
                continue
            try:
                decoder: Any = llm.decoder(card.key)
                llm.generate([1, 0, 3, 1, 0, 3], decoder=decoder, max_tokens=24, ignore_eos=True)
            except ValueError:
                continue  # it needs another kind of model
            if decoder.num_bytes:
                learning.add(card.key)
    assert learning == set(BOUNDED)


def test_pairs_of_tokens_are_bounded_while_a_text_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(successors, "MAX_PAIRS", 800)
    table, sizes = Successors(), list[int]()
    for number in range(5000):
        table.learn(number, number % 61, [1, 2])
        sizes.append(len(table))
    assert max(sizes) <= 800 and min(sizes[800:]) >= 700
    assert table.find(4999, 4999 % 61)[0] == 0  # of the pair: the last one is known


def test_the_answers_of_auto_are_bounded_in_bytes() -> None:
    decoder = Auto(memory=200_000)
    sizes = []
    for number in range(100):
        decoder._learn([number] * 20)
        sizes.append(decoder.num_bytes)
    assert max(sizes) <= 100_000 and min(sizes[20:]) >= 85_000


def test_a_request_keeps_a_bounded_part_of_its_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tokens of a text are still copied when its memory is full, and a match in an older
    part is found too."""
    monkeypatch.setattr(suffix, "TEXT_MEMORY", 200_000)
    random = np.random.default_rng(0)
    sequence: Any = SimpleNamespace(prompt=[], tokens=[], prediction=None)
    session: Any = SuffixDrafter(memory=0).open(sequence)
    own = session._own
    sizes = []
    for _ in range(60):
        block = random.integers(0, 500, 20).tolist()
        sequence.tokens = [*sequence.tokens, *block]
        session.catch_up()
        sizes.append(own.num_bytes)
    assert max(sizes) <= 200_000 and min(sizes[40:]) > 140_000
    assert len(own.parts) > 3
    for distance in (30, 150):  # in the last part, and in an older one
        sequence.tokens = [*sequence.tokens, *sequence.tokens[-distance : -distance + 6]]
        expected = sequence.tokens[-distance : -distance + 2]
        assert session.draft(2).tokens == expected


def test_the_ngrams_of_lookahead_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "POOL_MEMORY", 20_000)
    sequence: Any = SimpleNamespace(prompt=[1], tokens=[], prediction=None)
    session: Any = LookaheadDrafter(window=3, ngram=3, guesses=4).open(sequence)
    for number in range(200):
        session._store([number, number + 1, number + 2])
        session._store([7, number, number])
        assert session.pool.num_bytes <= 20_000
    assert list(session.pool) == [*range(201 - len(session.pool), 200), 7]
    assert len(session.pool) > 10 and len(session.pool[7]) == 4


def test_spellings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(omnidraft, "RUNS_MEMORY", 3_000)
    translation = Translation()
    for number in range(50):
        translation.learn([number, number + 1], number)
    assert list(translation.runs.values()) == [*range(40, 50)]
