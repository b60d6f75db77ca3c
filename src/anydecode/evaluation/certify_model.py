"""Exactness on a real model: the claim of `certify`, over the prompts people measure with.

Every prompt is answered in batches, in the model's own format; a sample of them in every format,
greedy and sampled, alone and in batches with restarts at random yields. What is held against is
plain decoding of each prompt alone, in the same format.

Work goes batch by batch over all methods, so that plain decoding answers a batch once, and methods
find its prompts in the prefix cache. One method in turn finds the cache empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from anydecode import catalogue
from anydecode.decoders.decoder import Decoder
from anydecode.engine.generation import Generation
from anydecode.engine.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.evaluation.certify import (
    Certificate,
    Check,
    _Restarts,
    missing_package,
    one_line,
)
from anydecode.evaluation.results_log import ResultsLog
from anydecode.evaluation.speculative_bench import Question

PLAIN = "autoregressive"
STORED = "as stored"
#: Of the steps that a sequence takes in the sample, the share that ends in a restart.
RESTARTS = 0.03


@dataclass(frozen=True)
class Batch:
    """Questions that every method is asked, `together` at a time."""

    number: int
    check: str
    questions: Sequence[Question]
    heat: float
    tokens: int
    together: int
    restarted: bool = False
    #: Whether one method, by turns, finds nothing of these questions in the prefix cache.
    cold: bool = False

    @cached_property
    def asked(self) -> str:
        """A name for the questions, in whichever run they are asked."""
        texts = "\0".join(question.text for question in self.questions)
        return hashlib.sha256(texts.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class BatchOutcome:
    """What came of one batch by one method: how many answers `differ` from plain ones, and in
    `detail` where first. `passes` show whether any draft was kept."""

    key: str
    check: str
    asked: str
    prompts: int
    tokens: int
    passes: int = 0
    differ: int = 0
    detail: str = ""
    #: Which package it needs that is not installed.
    not_run: str = ""

    @property
    def identity(self) -> tuple[str, str, str]:
        """What it is the outcome of."""
        return self.key, self.check, self.asked


@dataclass(frozen=True)
class Trials:
    """What is asked of every method. `dtypes` are formats of the sample; `STORED` is the file's."""

    questions: Sequence[Question]
    tokens: int = 128
    batch: int = 8
    temperature: float = 0.8
    sample: int = 24
    sample_tokens: int = 64
    dtypes: tuple[str, ...] = (STORED, "bfloat16", "float32")

    def spread(self) -> list[Question]:
        """All questions, from every category in turn; the sample are the first of them."""
        groups: dict[str, list[Question]] = {}
        for question in self.questions:
            groups.setdefault(question.category, []).append(question)
        rounds = max(map(len, groups.values()), default=0)
        return [group[i] for i in range(rounds) for group in groups.values() if i < len(group)]

    def batches(self) -> dict[str, list[Batch]]:
        """All there is to try, by format."""
        found = {STORED: self._all()}
        for dtype in self.dtypes if self.sample else ():
            found.setdefault(dtype, []).extend(self._sample(dtype))
        return found

    def _all(self) -> list[Batch]:
        check = (
            f"all prompts, {STORED}, T={self.temperature:g}, {self.tokens} tokens,"
            f" in batches of {self.batch}"
        )
        cut = self._cut(self.spread())
        return [
            Batch(number, check, part, self.temperature, self.tokens, self.batch, cold=True)
            for number, part in enumerate(cut)
        ]

    def _sample(self, dtype: str) -> Iterator[Batch]:
        tokens = self.sample_tokens
        for number, part in enumerate(self._cut(self.spread()[: self.sample])):
            for heat in (0.0, 0.8):
                name = f"sample, {dtype}, T={heat:g}, {tokens} tokens"
                yield Batch(number, f"{name}, alone", part, heat, tokens, 1)
                batched = f"{name}, in batches of {self.batch}, restarted"
                yield Batch(number, batched, part, heat, tokens, self.batch, restarted=True)

    def _cut(self, questions: Sequence[Question]) -> Iterator[Sequence[Question]]:
        for start in range(0, len(questions), self.batch):
            yield questions[start : start + self.batch]


@dataclass
class Bench:
    """A model in one format, what plain decoding says, and the methods with what they learn."""

    llm: LLM
    _plain: dict[tuple[str, float, int], list[int]] = field(default_factory=dict)
    _decoders: dict[str, Any] = field(default_factory=dict)

    def plain(self, batch: Batch) -> list[list[int]]:
        """Plain answers, each made once: alone, from its first token on."""
        keys = [(question.text, batch.heat, batch.tokens) for question in batch.questions]
        if not all(key in self._plain for key in keys):
            self.llm.clear()
            made = self._answers(batch, PLAIN, together=1)
            self._plain.update(zip(keys, (one.tokens for one in made), strict=True))
        return [self._plain[key] for key in keys]

    def outcome(self, key: str, batch: Batch) -> BatchOutcome:
        """One batch by one method. Whatever it raises is an outcome as well."""
        llm = self.llm
        restarts = _Restarts(llm.engine, 3 + batch.number, RESTARTS)
        try:
            expected = self.plain(batch)
            decoder = self._decoders.setdefault(key, catalogue.build(key))
            with restarts if batch.restarted else nullcontext():
                answers = self._answers(batch, decoder, batch.together)
            llm.engine.check_integrity()
        except Exception as error:
            return _raised(key, batch, error)
        got = [answer.tokens for answer in answers]
        wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
        detail = f"{_parting(got, expected, wrong[0])}, batch {batch.number}" if wrong else ""
        tokens, passes = sum(map(len, got)), sum(answer.stats.passes for answer in answers)
        return BatchOutcome(
            key, batch.check, batch.asked, len(got), tokens, passes, len(wrong), detail
        )

    def _answers(self, batch: Batch, decoder: Any, together: int) -> list[Generation]:
        """Answers end where the model ends."""
        tokenizer = self.llm.tokenizer
        found: list[Generation] = []
        for start in range(0, len(batch.questions), together):
            prompts = [
                self.llm.encode(tokenizer.render_chat([{"role": "user", "content": one.text}]))
                for one in batch.questions[start : start + together]
            ]
            found += self.llm.generate(
                prompts,
                decoder=decoder,
                temperature=batch.heat,
                max_tokens=batch.tokens,
                seed=11,
            )
        return found


def _raised(key: str, batch: Batch, error: Exception) -> BatchOutcome:
    """The outcome of a batch that came to no answers."""
    count, needs = len(batch.questions), missing_package(error)
    if needs:
        return BatchOutcome(key, batch.check, batch.asked, count, 0, not_run=needs)
    return BatchOutcome(
        key, batch.check, batch.asked, count, 0, differ=count, detail=one_line(error)
    )


def _parting(got: list[list[int]], expected: list[list[int]], prompt: int) -> str:
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
    """What comes of token-exact methods on `model`, batch by batch. What `results_log` holds as
    passed is
    not tried again. Raises InvalidRequestError for methods that are not token-exact."""
    for key in keys:
        decoder, card = catalogue.build(key), catalogue.entries()[key].card
        if not isinstance(decoder, Decoder) or card.exactness != "token-exact":
            raise InvalidRequestError(f"{key!r} is {card.exactness}: only token-exact is certified")
    held = _held(results_log)
    for dtype, batches in trials.batches().items():
        wanted = {(key, one.check, one.asked) for key in keys for one in batches}
        yield from (held[position] for position in sorted(wanted & held.keys()))
        if wanted <= held.keys():
            continue
        for outcome in _of_format(model, dtype, batches, keys, held, draft, threads):
            if results_log is not None:
                results_log.write(asdict(outcome))
            yield outcome


def _of_format(
    model: Any,
    dtype: str,
    batches: Sequence[Batch],
    keys: Sequence[str],
    held: Container[tuple[str, str, str]],
    draft: str | None,
    threads: int | None,
) -> Iterator[BatchOutcome]:
    """What is not `held` of one format. A format that the model cannot have fails by itself; a
    model that cannot be opened as it is stored is the user's mistake, and raised."""
    chosen = None if dtype == STORED else dtype
    try:
        llm = LLM(model, dtype=chosen, draft=draft, threads=threads)
    except Exception as error:
        if chosen is None:
            raise
        for batch in batches:
            for key in keys:
                if (key, batch.check, batch.asked) not in held:
                    yield _raised(key, batch, error)
        return
    with llm:
        bench = Bench(llm)
        for batch in batches:
            for position, key in enumerate(keys):
                if (key, batch.check, batch.asked) in held:
                    continue
                if batch.cold and position == batch.number % len(keys):
                    with suppress(Exception):  # which is the method's outcome
                        bench.plain(batch)
                    llm.clear()
                yield bench.outcome(key, batch)


def _held(results_log: ResultsLog | None) -> dict[tuple[str, str, str], BatchOutcome]:
    if results_log is None:
        return {}
    try:
        kept = [BatchOutcome(**one) for one in results_log.held]
    except TypeError:
        raise results_log.foreign() from None
    return {one.identity: one for one in kept if not one.differ and not one.not_run}


def certificates(found: Iterable[BatchOutcome]) -> list[Certificate]:
    """A certificate per method, with a check for each thing that was tried."""
    parts: dict[str, dict[str, list[BatchOutcome]]] = {}
    for one in found:
        parts.setdefault(one.key, {}).setdefault(one.check, []).append(one)
    return [
        Certificate(key, "token-exact", [_check(name, tried) for name, tried in checks.items()])
        for key, checks in parts.items()
    ]


def _check(name: str, tried: Sequence[BatchOutcome]) -> Check:
    prompts, differ = sum(one.prompts for one in tried), sum(one.differ for one in tried)
    needs = next((one.not_run for one in tried if one.not_run), "")
    if needs and not differ:
        return Check(name, None, needs)
    if not differ:
        tokens, passes = sum(one.tokens for one in tried), sum(one.passes for one in tried)
        return Check(name, True, f"{prompts} prompts, {tokens} tokens in {passes} passes")
    first = next(one.detail for one in tried if one.differ)
    return Check(name, False, f"{differ} of {prompts} prompts differ: {first}")
