"""Oracle test of s2d (Sorted Speculative Decoding, arXiv:2407.01955): the layers that run, and the
drafts of the first confident exit."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks
from anydecode.certification.oracles.speculative.reading_drafts import TARGET
from anydecode.certification.oracles.speculative.recording_model import RecordingModel
from anydecode.certification.oracles.transformer import softmax
from anydecode.certification.rounds import (
    VOCABULARY,
    TracedRound,
    accepted,
    blurred,
    plain_token,
    rounds,
)
from anydecode.certification.tiny import tiny_model
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.models.transformer import Transformer


@oracle_test("s2d")
def s2d() -> Iterator[Check]:
    """Exits at fixed shares of the depth; later layers run only if an exit is not confident."""
    yield from penalty_checks("s2d:confidence=1")
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
    for key, temperature, confidence, size in (
        ("s2d", 0.5, 0.7, 4),
        ("s2d:size=3,confidence=0.35", 0.0, 0.35, 3),
        ("s2d:size=3,confidence=0.5", 0.8, 0.5, 3),
    ):
        small = tiny_model(layers=8, seed=3)
        with LLM(small, tokenizer=ByteTokenizer(), draft=small, cache_positions=1024) as llm:
            trace = rounds(llm, key, "the cat sat", 20, temperature=temperature)
        wrong, exits = _nested_mistakes(small, trace, temperature, confidence)
        right = wrong == 0 and all(len(one.tokens) == size for one in trace)
        name = f"{key} at T={temperature}"
        yield Check(
            f"{name}: {size} drafts, those of the first confident exit",
            right,
            f"exits after {exits} layers",
        )
        yield Check(f"{name}: every exit occurs", set(exits) == {4, 6, 8}, f"{exits}")


def _nested_mistakes(
    model: Transformer, trace: list[TracedRound], temperature: float, confidence: float
) -> tuple[int, list[int]]:
    """How many drafts differ from a forward pass that stops at the first confident exit, and where
    it stopped. Layers skipped by an exit do not change later drafts."""
    stops, wrong, exits = (4, 6, 8), 0, []
    for one in trace:
        forward = Forward(model.network)
        for token in one.text:
            rows = forward.exits(token, stops)
        for draft in one.tokens:
            sure = [float(softmax(row / (temperature or 1.0)).max()) >= confidence for row in rows]
            position = sure.index(True) if True in sure else 2
            exits.append(stops[position])
            at = len(forward.keys[0])
            wrong += plain_token(rows[position], at, temperature) != draft
            rows = forward.exits(draft, stops)
    return wrong, exits


#: Layers skipped by an early exit are completed when the next round scores several tokens at once.
_LATE_LAYERS = {(0, 4), (4, 8)}
