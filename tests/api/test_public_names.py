"""The names of the package: complete for the author of a method, and listed alike for type
checkers and at run time. Everything here is imported from `anydecode` itself."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import anydecode
from anydecode import (
    LLM,
    ROOT,
    Acceptance,
    AcceptanceResult,
    Candidates,
    Canvas,
    Card,
    Constraint,
    ConstraintError,
    ConstraintReport,
    ConstraintState,
    Decoder,
    Decoding,
    Denoiser,
    Drafter,
    DraftSession,
    InvalidRequestError,
    LogitsProcessor,
    Predictions,
    Proposal,
    Sampler,
    Schedule,
    ScheduledSpan,
    ScoreRequest,
    Scores,
    Sequence,
    Speculative,
    TextDraftSession,
    TokenExact,
    Tokenizer,
    TokenTree,
    UnmaskPolicy,
    catalogue,
    register,
)
from anydecode.certification.checks import scripted_llm

OPTIONS = {"max_tokens": 24, "temperature": 0.8, "seed": 2, "ignore_eos": True}


def imported_names(repository: Path) -> dict[str, str]:
    """The names that `anydecode/__init__.py` imports from its modules, for type checkers too."""
    source = (repository / "src" / "anydecode" / "__init__.py").read_text(encoding="utf-8")
    return {
        alias.name: node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anydecode.")
        for alias in node.names
    }


def test_type_checkers_see_the_names_that_exist_at_run_time(repository: Path) -> None:
    names = imported_names(repository)
    assert sorted(names) == sorted(anydecode.__all__)
    for name, module in names.items():
        assert getattr(anydecode, name) is getattr(importlib.import_module(module), name)


def test_names_are_sorted_and_unique() -> None:
    *names, last = anydecode.__all__
    assert last == "__version__"
    assert names == sorted(set(names), key=str.lower)


class RepeatLast(Drafter):
    """Drafts the last token again."""

    def open(self, sequence: Sequence) -> DraftSession:
        return RepeatSession(sequence)


class RepeatSession(TextDraftSession):
    def tree(self, size: int) -> TokenTree:
        tree = TokenTree()
        tree.add(self.text[-1], ROOT)
        return tree


class NoDrafts(Acceptance):
    """Accepts nothing: the text of plain decoding, one token per pass."""

    exactness = "token-exact"

    def walk(self, tree: TokenTree, scores: Scores) -> AcceptanceResult:
        return AcceptanceResult([], [scores.sample(0)])


class Plain(Decoder):
    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            scores = yield sequence.score()
            sequence.emit([scores.sampled[-1]])


@pytest.mark.parametrize(
    "decoder",
    [
        Plain(),
        Speculative(RepeatLast(), size=1),
        Speculative(RepeatLast(), size=1, acceptance=NoDrafts()),
        Speculative(RepeatLast(), size=1, acceptance=TokenExact()),
    ],
)
def test_a_decoder_a_drafter_and_an_acceptance_rule(decoder: Decoder) -> None:
    with scripted_llm() as llm:
        plain = llm.generate("the cat", decoder="autoregressive", **OPTIONS)
        answer = llm.generate("the cat", decoder=decoder, trace=True, **OPTIONS)
    assert answer.tokens == plain.tokens
    if isinstance(decoder, Speculative):
        assert answer.trace and all(len(entry["drafted"]) == 1 for entry in answer.trace[:-1])


def test_a_drafter_that_scores() -> None:
    class Scoring(Drafter):
        def open(self, sequence: Sequence) -> DraftSession:
            return ScoringSession(sequence)

    class ScoringSession(DraftSession):
        def __init__(self, sequence: Sequence) -> None:
            self.sequence = sequence

        def propose(self, size: int) -> Proposal:
            branch = self.sequence.fork()
            scores: Scores = yield branch.score()
            token = int(scores.logits[-1].argmax())
            branch.release()
            return TokenTree.chain([token])

    with scripted_llm() as llm:
        options = {**OPTIONS, "temperature": 0.0}
        plain = llm.generate("the cat", decoder="autoregressive", **options)
        answer = llm.generate("the cat", decoder=Speculative(Scoring(), size=1), **options)
    assert answer.tokens == plain.tokens
    assert answer.stats.passes > len(answer.tokens) // 2


def test_a_logits_processor() -> None:
    class OnlyEven(LogitsProcessor):
        def apply(self, candidates: Candidates) -> Candidates:
            scores = candidates.writable()
            scores[1::2] = -np.inf
            return candidates

    class EvenTokens(Plain):
        def prepare(self, sequence: Sequence) -> None:
            sequence.sampler = Sampler(sequence.sampler.temperature, [OnlyEven()])

    with scripted_llm() as llm:
        answer = llm.generate("the cat", decoder=EvenTokens(), **OPTIONS)
    assert len(answer.tokens) == 24 and not any(token % 2 for token in answer.tokens)


class Repeat(Constraint):
    """Allows one byte only, any number of times."""

    def __init__(self, byte: int) -> None:
        self.byte = byte

    def start(self, tokenizer: Tokenizer, vocab_size: int) -> ConstraintState:
        return RepeatState(self.byte, vocab_size)

    def report(self) -> ConstraintReport:
        return ConstraintReport("repeat", "own")


class RepeatState(ConstraintState):
    finished = False
    can_stop = True

    def __init__(self, byte: int, vocab_size: int) -> None:
        self.byte, self.vocab_size = byte, vocab_size

    def mask(self) -> np.ndarray:
        return np.arange(self.vocab_size) == self.byte

    def advance(self, token: int) -> None:
        if token != self.byte:
            raise ConstraintError(f"token {token} is not allowed")

    def rollback(self, count: int) -> None:
        pass

    def fork(self) -> RepeatState:
        return self

    def forced_tokens(self) -> list[int]:
        return []


def test_a_constraint() -> None:
    with scripted_llm() as llm:
        answer = llm.generate("the cat", constraint=Repeat(ord("z")), **OPTIONS)
    assert answer.text == "z" * 24
    assert answer.constraint is not None and answer.constraint["kind"] == "repeat"


class OneRequest(Schedule):
    """One request per pass, the newest first."""

    def __init__(self) -> None:
        self.num_passes = 0

    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        self.num_passes += 1
        for spans in waiting[-1].groups:
            for span in spans:
                if span.remaining:
                    yield waiting[-1], span, span.remaining


def test_a_schedule() -> None:
    schedule = OneRequest()
    prompts = ["the cat", "a dog"]
    with scripted_llm() as llm:
        expected = [one.tokens for one in llm.generate(prompts, decoder=Plain(), **OPTIONS)]
    with scripted_llm(schedule=schedule) as llm:
        answers = llm.generate(prompts, decoder=Plain(), **OPTIONS)
    assert [one.tokens for one in answers] == expected
    assert schedule.num_passes == 48


def test_an_unmask_policy() -> None:
    class Two(UnmaskPolicy):
        def select(
            self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
        ) -> np.ndarray:
            return np.isin(ranks, np.sort(ranks)[-2:])

    with LLM("tiny-diffusion", threads=1) as llm:
        answer = llm.generate("x", decoder=Denoiser(unmask=Two()), max_tokens=16, ignore_eos=True)
    assert len(answer.tokens) == 16 and answer.stats.passes == 8


def test_a_registered_method_is_found_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_entries", {**catalogue.entries()})

    @register(Card("a-test", "search", paper="a test", exactness="token-exact"))
    class Registered(Plain):
        pass

    with scripted_llm() as llm:
        answer = llm.generate("the cat", decoder="a-test", **OPTIONS)
        plain = llm.generate("the cat", decoder="autoregressive", **OPTIONS)
        assert Registered.card.key == answer.decoder == "a-test" and answer.tokens == plain.tokens
        with pytest.raises(InvalidRequestError, match="did you mean a-test"):
            llm.generate("x", decoder="a-tst")
