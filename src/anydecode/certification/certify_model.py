"""Certification on a real model: token-exactness over the prompts of the benchmarks.

Every prompt is answered in batches, in the model's stored format; a sample of the prompts in every
format, greedy and sampled, alone and in batches with restarts at random yields. The reference is
plain decoding of each prompt alone, in the same format.

Batches are processed one after another over all methods, so that plain decoding answers each batch
once and methods find its prompts in the prefix cache. For each batch, one method (the methods take
turns) starts with an empty cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from anydecode import catalogue
from anydecode.api.generation import Generation
from anydecode.api.llm import LLM
from anydecode.certification.certify import missing_package, one_line
from anydecode.certification.checks import Certificate, Check, Restarts
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError
from anydecode.results_log import ResultsLog
from anydecode.tasks.spec_bench import Question

PLAIN = "autoregressive"
STORED = "as stored"
#: In the restarted runs of the sample, the share of engine steps before which a sequence is
#: restarted.
RESTARTS = 0.03


@dataclass(frozen=True)
class Batch:
    """Questions that every method answers, `together` at a time."""

    number: int
    check: str
    questions: Sequence[Question]
    temperature: float
    tokens: int
    batch_size: int
    has_restarts: bool = False
    #: Whether one method, by turns, starts with an empty prefix cache.
    is_cold: bool = False

    @cached_property
    def questions_digest(self) -> str:
        """A digest that identifies the questions across runs."""
        texts = "\0".join(question.text for question in self.questions)
        return hashlib.sha256(texts.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class BatchOutcome:
    """The result of one batch with one method: how many answers `differ` from plain decoding, and
    in `detail` where the first one does. Fewer `passes` than tokens show that drafts were accepted.
    """

    key: str
    check: str
    asked: str
    prompts: int
    tokens: int
    passes: int = 0
    differ: int = 0
    detail: str = ""
    #: The missing package, if the batch could not run.
    not_run: str = ""

    @property
    def identity(self) -> tuple[str, str, str]:
        """What identifies this batch and method in a results log."""
        return self.key, self.check, self.asked


@dataclass(frozen=True)
class Trials:
    """The settings of a run. `dtypes` are the formats of the sample; `STORED` is the format of the
    file."""

    questions: Sequence[Question]
    tokens: int = 128
    batch: int = 8
    temperature: float = 0.8
    sample: int = 24
    sample_tokens: int = 64
    dtypes: tuple[str, ...] = (STORED, "bfloat16", "float32")

    def interleaved(self) -> list[Question]:
        """All questions, taken from each category in turn; the sample is the beginning of this
        list."""
        groups: dict[str, list[Question]] = {}
        for question in self.questions:
            groups.setdefault(question.category, []).append(question)
        rounds = max(map(len, groups.values()), default=0)
        return [group[i] for i in range(rounds) for group in groups.values() if i < len(group)]

    def batches(self) -> dict[str, list[Batch]]:
        """All batches, by format."""
        by_format = {STORED: self._all()}
        for dtype in self.dtypes if self.sample else ():
            by_format.setdefault(dtype, []).extend(self._sample(dtype))
        return by_format

    def _all(self) -> list[Batch]:
        check = (
            f"all prompts, {STORED}, T={self.temperature:g}, {self.tokens} tokens,"
            f" in batches of {self.batch}"
        )
        parts = self._split(self.interleaved())
        return [
            Batch(number, check, part, self.temperature, self.tokens, self.batch, is_cold=True)
            for number, part in enumerate(parts)
        ]

    def _sample(self, dtype: str) -> Iterator[Batch]:
        tokens = self.sample_tokens
        for number, part in enumerate(self._split(self.interleaved()[: self.sample])):
            for temperature in (0.0, 0.8):
                name = f"sample, {dtype}, T={temperature:g}, {tokens} tokens"
                yield Batch(number, f"{name}, alone", part, temperature, tokens, 1)
                batched = f"{name}, in batches of {self.batch}, restarted"
                yield Batch(
                    number, batched, part, temperature, tokens, self.batch, has_restarts=True
                )

    def _split(self, questions: Sequence[Question]) -> Iterator[Sequence[Question]]:
        for start in range(0, len(questions), self.batch):
            yield questions[start : start + self.batch]


@dataclass
class Bench:
    """A model in one format, with the cached answers of plain decoding and the decoders, which keep
    what they learn between batches."""

    llm: LLM
    _plain: dict[tuple[str, float, int], list[int]] = field(default_factory=dict)
    _decoders: dict[str, Any] = field(default_factory=dict)

    def plain(self, batch: Batch) -> list[list[int]]:
        """Answers of plain decoding, each generated once: alone and with an empty cache."""
        keys = [(question.text, batch.temperature, batch.tokens) for question in batch.questions]
        if not all(key in self._plain for key in keys):
            self.llm.clear()
            answers = self._answers(batch, PLAIN, batch_size=1)
            self._plain.update(zip(keys, (one.tokens for one in answers), strict=True))
        return [self._plain[key] for key in keys]

    def outcome(self, key: str, batch: Batch) -> BatchOutcome:
        """The result of one batch with one method. Exceptions become failed outcomes."""
        llm = self.llm
        restarts = Restarts(llm.engine, 3 + batch.number, RESTARTS)
        try:
            expected = self.plain(batch)
            decoder = self._decoders.setdefault(key, _build(key)[0])
            with restarts if batch.has_restarts else nullcontext():
                answers = self._answers(batch, decoder, batch.batch_size)
            llm.engine.check_integrity()
        except Exception as error:
            return _raised(key, batch, error)
        got = [answer.tokens for answer in answers]
        wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
        detail = (
            f"{_first_difference(got, expected, wrong[0])}, batch {batch.number}" if wrong else ""
        )
        tokens, passes = sum(map(len, got)), sum(answer.stats.passes for answer in answers)
        return BatchOutcome(
            key, batch.check, batch.questions_digest, len(got), tokens, passes, len(wrong), detail
        )

    def _answers(self, batch: Batch, decoder: Any, batch_size: int) -> list[Generation]:
        """Answers to a batch; each ends at the model's end-of-text token or at the batch's token
        limit."""
        tokenizer = self.llm.tokenizer
        answers: list[Generation] = []
        for start in range(0, len(batch.questions), batch_size):
            prompts = [
                self.llm.encode(tokenizer.render_chat([{"role": "user", "content": one.text}]))
                for one in batch.questions[start : start + batch_size]
            ]
            answers += self.llm.generate(
                prompts,
                decoder=decoder,
                temperature=batch.temperature,
                max_tokens=batch.tokens,
                seed=11,
            )
        return answers


def _build(choice: str) -> tuple[Any, catalogue.Card]:
    """The method that `choice` ("key" or "key:name=value,name=value") names, and its card."""
    key, given = catalogue.parse(choice)
    return catalogue.build(key, **given), catalogue.find(key).card


def _raised(key: str, batch: Batch, error: Exception) -> BatchOutcome:
    """The outcome of a batch that raised `error` before any answer was complete."""
    count, needs = len(batch.questions), missing_package(error)
    if needs:
        return BatchOutcome(key, batch.check, batch.questions_digest, count, 0, not_run=needs)
    return BatchOutcome(
        key, batch.check, batch.questions_digest, count, 0, differ=count, detail=one_line(error)
    )


def _first_difference(got: list[list[int]], expected: list[list[int]], prompt: int) -> str:
    a, b = got[prompt], expected[prompt]
    position = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
    return f"first at token {position} of prompt {prompt}"


def outcomes(
    model: Any,
    keys: Sequence[str],
    trials: Trials,
    *,
    draft: str | None = "self:int4",
    threads: int | None = None,
    results_log: ResultsLog | None = None,
) -> Iterator[BatchOutcome]:
    """Results of token-exact methods on `model`, batch by batch. Batches that passed according to
    `results_log` are not run again.

    Raises:
        InvalidRequestError: A method is not token-exact.
    """
    for key in keys:
        decoder, card = _build(key)
        if not isinstance(decoder, Decoder) or card.exactness != "token-exact":
            raise InvalidRequestError(
                f"{key!r} is {card.exactness}: only token-exact methods can be certified on a model"
            )
    passed = _passed_outcomes(results_log)
    for dtype, batches in trials.batches().items():
        identities = {(key, one.check, one.questions_digest) for key in keys for one in batches}
        yield from (passed[position] for position in sorted(identities & passed.keys()))
        if identities <= passed.keys():
            continue
        for outcome in _of_format(model, dtype, batches, keys, passed, draft, threads):
            if results_log is not None:
                results_log.write(asdict(outcome))
            yield outcome


def _of_format(
    model: Any,
    dtype: str,
    batches: Sequence[Batch],
    keys: Sequence[str],
    passed: Container[tuple[str, str, str]],
    draft: str | None,
    threads: int | None,
) -> Iterator[BatchOutcome]:
    """The batches of one format that are not in `held`. A format that cannot be opened fails on its
    own; if the model cannot be opened in its stored format, the error is raised, as it is the
    caller's."""
    chosen = None if dtype == STORED else dtype
    try:
        llm = LLM(model, dtype=chosen, draft=draft, threads=threads)
    except Exception as error:
        if chosen is None:
            raise
        for batch in batches:
            for key in keys:
                if (key, batch.check, batch.questions_digest) not in passed:
                    yield _raised(key, batch, error)
        return
    with llm:
        bench = Bench(llm)
        for batch in batches:
            for position, key in enumerate(keys):
                if (key, batch.check, batch.questions_digest) in passed:
                    continue
                if batch.is_cold and position == batch.number % len(keys):
                    with suppress(Exception):  # the method's own run reports the error
                        bench.plain(batch)
                    llm.clear()
                yield bench.outcome(key, batch)


def _passed_outcomes(results_log: ResultsLog | None) -> dict[tuple[str, str, str], BatchOutcome]:
    if results_log is None:
        return {}
    logged = results_log.read(lambda one: BatchOutcome(**one))
    return {one.identity: one for one in logged if not one.differ and not one.not_run}


def certificates(batch_outcomes: Iterable[BatchOutcome]) -> list[Certificate]:
    """One certificate per method, with one check for each group of batches."""
    by_method: dict[str, dict[str, list[BatchOutcome]]] = {}
    for one in batch_outcomes:
        by_method.setdefault(one.key, {}).setdefault(one.check, []).append(one)
    return [
        Certificate(key, "token-exact", [_check(name, tried) for name, tried in checks.items()])
        for key, checks in by_method.items()
    ]


def _check(name: str, batch_outcomes: Sequence[BatchOutcome]) -> Check:
    prompts, differ = (
        sum(one.prompts for one in batch_outcomes),
        sum(one.differ for one in batch_outcomes),
    )
    needs = next((one.not_run for one in batch_outcomes if one.not_run), "")
    if needs and not differ:
        return Check(name, None, needs)
    if not differ:
        tokens, passes = (
            sum(one.tokens for one in batch_outcomes),
            sum(one.passes for one in batch_outcomes),
        )
        return Check(name, True, f"{prompts} prompts, {tokens} tokens in {passes} passes")
    first = next(one.detail for one in batch_outcomes if one.differ)
    return Check(name, False, f"{differ} of {prompts} prompts differ: {first}")
