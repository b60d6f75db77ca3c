"""Exactness on a real model: the claim of `certify`, over the prompts people measure with.

`on_all` has every prompt answered in batches, in the model's own format; `on_sample` takes a few
prompts through every format, temperature and company, with restarts at random yields. What is held
against is plain decoding of each prompt alone, in the same format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from anydecode import catalogue
from anydecode.decoders.decoder import Decoder
from anydecode.engine.llm import LLM
from anydecode.errors import AnydecodeError, InvalidRequestError
from anydecode.evaluation.certify import Certificate, Check, _equal, _Restarts
from anydecode.evaluation.speculative_bench import Question

PLAIN = "autoregressive"
STORED = "as stored"
#: Of the steps that a sequence takes in the sample, the share that ends in a restart.
RESTARTS = 0.03


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
        """The sample: from every category in turn."""
        groups: dict[str, list[Question]] = {}
        for question in self.questions:
            groups.setdefault(question.category, []).append(question)
        rounds = max(map(len, groups.values()), default=0)
        turns = [group[i] for i in range(rounds) for group in groups.values() if i < len(group)]
        return turns[: self.sample]


@dataclass
class Bench:
    """A model in one format, and what plain decoding says, prompt by prompt and alone."""

    llm: LLM
    _plain: dict[tuple[str, float, int], list[int]] = field(default_factory=dict)

    def plain(self, questions: Sequence[Question], temperature: float, tokens: int) -> Any:
        """Plain answers, each made once."""
        for question in questions:
            key = (question.text, temperature, tokens)
            if key not in self._plain:
                self._plain[key] = self.answers([question], PLAIN, temperature, tokens, 1)[0]
        return [self._plain[question.text, temperature, tokens] for question in questions]

    def answers(
        self,
        questions: Sequence[Question],
        decoder: Any,
        temperature: float,
        tokens: int,
        size: int,
    ) -> list[list[int]]:
        """The tokens of every answer, in batches of `size`. Answers end where the model ends."""
        tokenizer, found = self.llm.tokenizer, []
        for start in range(0, len(questions), size):
            prompts = [
                self.llm.encode(tokenizer.render_chat([{"role": "user", "content": one.text}]))
                for one in questions[start : start + size]
            ]
            made = self.llm.generate(
                prompts, decoder=decoder, temperature=temperature, max_tokens=tokens, seed=11
            )
            found += [answer.tokens for answer in made]
        return found


def certify_on(
    model: Any,
    keys: Sequence[str],
    trials: Trials,
    *,
    draft: str | None = "self:layers=10",
    threads: int | None = None,
    on_done: Callable[[str, Check], None] = lambda key, check: None,
) -> list[Certificate]:
    """Certificates of token-exact methods on `model`; raises InvalidRequestError for others."""
    decoders = {key: catalogue.build(key) for key in keys}
    for key, decoder in decoders.items():
        card = catalogue.entries()[key].card
        if not isinstance(decoder, Decoder) or card.exactness != "token-exact":
            raise InvalidRequestError(f"{key!r} is {card.exactness}: only token-exact is certified")
    checks: dict[str, list[Check]] = {key: [] for key in keys}
    for dtype in dict.fromkeys((STORED, *trials.dtypes)):
        with LLM(
            model, dtype=None if dtype == STORED else dtype, draft=draft, threads=threads
        ) as llm:
            bench = Bench(llm)
            for key in keys:
                for check in _checks(bench, key, dtype, trials):
                    checks[key].append(check)
                    on_done(key, check)
    return [Certificate(key, "token-exact", found) for key, found in checks.items()]


def _checks(bench: Bench, key: str, dtype: str, trials: Trials) -> Iterator[Check]:
    try:
        if dtype == STORED:
            yield on_all(bench, key, trials)
        if dtype in trials.dtypes and trials.sample:
            yield from on_sample(bench, key, dtype, trials)
    except AnydecodeError as error:
        yield Check(f"runs, {dtype}", False, str(error))


def on_all(bench: Bench, key: str, trials: Trials) -> Check:
    """Every prompt, in batches."""
    heat, tokens, questions = trials.temperature, trials.tokens, trials.questions
    expected = bench.plain(questions, heat, tokens)
    got = bench.answers(questions, catalogue.build(key), heat, tokens, trials.batch)
    name = f"all prompts, {STORED}, T={heat:g}, in batches of {trials.batch}"
    return _equal(name, got, expected)


def on_sample(bench: Bench, key: str, dtype: str, trials: Trials) -> Iterator[Check]:
    """A few prompts, greedy and sampled, alone and in batches with restarts."""
    questions, tokens = trials.spread(), trials.sample_tokens
    for heat in (0.0, 0.8):
        expected = bench.plain(questions, heat, tokens)
        alone = bench.answers(questions, catalogue.build(key), heat, tokens, 1)
        yield _equal(f"sample, {dtype}, T={heat:g}, alone", alone, expected)
        with _Restarts(bench.llm.engine, seed=3, share=RESTARTS):
            batched = bench.answers(questions, catalogue.build(key), heat, tokens, trials.batch)
        name = f"sample, {dtype}, T={heat:g}, in batches of {trials.batch}, restarted"
        yield _equal(name, batched, expected)
    bench.llm.engine.check_integrity()
