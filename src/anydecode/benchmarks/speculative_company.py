"""Company in `anydecode bench speculative`: groups of prompts that are answered together, by
`multi-step` and by each method in turn, in a rotating order.

Every prompt is in at most one group of each size, in a shuffled order that is the same in every
run. Before each timed group, drafter state and cached prefixes are cleared, and plain decoding
reads the prompts into the target's prefix cache. So no method's time has the target's pass over the
prompts, and what a draft model or drafter computes from them counts as its own time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.benchmarks.speculative_answers import (
    MULTI_STEP,
    PLAIN,
    TimedAnswer,
    digest,
    rotated,
    with_multi_step,
)
from anydecode.benchmarks.speculative_drafts import DEFAULT, find_llm
from anydecode.benchmarks.speculative_summary import speedup
from anydecode.errors import InvalidRequestError
from anydecode.report import split_names
from anydecode.results_log import ResultsLog
from anydecode.tasks.spec_bench import Question
from anydecode.training.generated import rendered_prompt

#: Seed of the order in which prompts are put into groups.
ORDER_SEED = 20


@dataclass(frozen=True)
class TimedGroup:
    """One group of prompts, answered together by one method.

    Attributes:
        size: Prompts of the group.
        number: Index of the group among those of its size.
        method: Decoding method.
        temperature: Sampling temperature.
        num_tokens: Generated tokens of all answers.
        seconds: Time from submission of all prompts to the last token; the fastest round.
        same_text: Answers whose tokens equal those of plain decoding, alone.
    """

    size: int
    number: int
    method: str
    temperature: float
    num_tokens: int
    seconds: float
    same_text: int

    @property
    def rate(self) -> float:
        """Tokens per second, over all answers."""
        return self.num_tokens / self.seconds


def group_sizes(text: str) -> list[int]:
    """The values of `--company`, without repetitions.

    Raises:
        InvalidRequestError: A value is not a number from 1.
    """
    names = split_names(text)
    if not all(name.isdecimal() and int(name) for name in names):
        raise InvalidRequestError(
            f"--company is {text!r}; give numbers of prompts from 1, separated by commas, or ''"
        )
    return list(dict.fromkeys(map(int, names)))


def groups_of(size: int, num_prompts: int) -> list[list[int]]:
    """Groups of `size` of the prompts' indices, in shuffled order. The prompts that remain when no
    more group can be filled are in none."""
    order = np.random.default_rng(ORDER_SEED).permutation(num_prompts).tolist()
    return [order[i : i + size] for i in range(0, num_prompts - size + 1, size)]


def run_groups(
    llms: Mapping[str, LLM],
    question_list: Sequence[Question],
    methods: Sequence[str],
    answers: Sequence[TimedAnswer],
    sizes: Sequence[int],
    tokens: int,
    rounds: int = 1,
    on_step: Callable[[str], None] = lambda step: None,
    results_log: ResultsLog | None = None,
) -> Iterator[TimedGroup]:
    """Time groups of prompts with `multi-step` and every method.

    Args:
        llms: The model with each draft model, by its name; see `find_llm`.
        question_list: The questions.
        methods: Keys of decoding methods; `multi-step` runs in any case.
        answers: Single answers to all questions, with which texts are compared; the groups have
            their temperatures.
        sizes: Prompts per group. Size 1 is taken from `answers`.
        tokens: Token limit of an answer.
        rounds: Timed runs of each group and method, of which the fastest counts.
        on_step: Called with a description after each group, unless it was recorded.
        results_log: Where groups are recorded; recorded ones are not generated again.

    Yields:
        The timed groups.
    """
    plain = {(r.temperature, r.prompt): r.digest for r in answers if r.method == PLAIN}
    recorded = {} if results_log is None else recorded_groups(results_log)
    names = with_multi_step(methods)
    if 1 in sizes:
        yield from _single(answers, names)
    for temperature in dict.fromkeys(r.temperature for r in answers):
        options = {"max_tokens": tokens, "temperature": temperature, "seed": 1}
        for size in sizes:
            groups = groups_of(size, len(question_list)) if size > 1 else []
            for number, group in enumerate(groups):
                timed = recorded.get((temperature, size, number))
                if timed is None:
                    asked = [question_list[prompt] for prompt in group]
                    expected = [plain[temperature, prompt] for prompt in group]
                    turns = rotated(names, number) * rounds
                    results = _answer_in_turn(llms, asked, expected, turns, options)
                    timed = [
                        TimedGroup(size, number, method, temperature, *results[method])
                        for method in names
                    ]
                    if results_log is not None:
                        results_log.write({"company": [asdict(one) for one in timed]})
                    label = f"group {number + 1} of {len(groups)}, T={temperature:g}"
                    on_step(f"{size} together: {label}")
                yield from timed


def num_groups_left(
    num_prompts: int,
    sizes: Sequence[int],
    temperatures: Sequence[float],
    results_log: ResultsLog | None,
) -> int:
    """The number of groups that `run_groups` will answer: those that are not recorded."""
    recorded = {} if results_log is None else recorded_groups(results_log)
    return sum(
        (temperature, size, number) not in recorded
        for temperature in temperatures
        for size in sizes
        if size > 1
        for number in range(num_prompts // size)
    )


def recorded_groups(results_log: ResultsLog) -> dict[tuple[float, int, int], list[TimedGroup]]:
    """Recorded groups by temperature, size and index: one `TimedGroup` per method."""
    found = filter(None, results_log.read(_timed_groups))
    return {(g[0].temperature, g[0].size, g[0].number): g for g in found}


def _timed_groups(entry: Any) -> list[TimedGroup]:
    """The groups of an entry of the results log; none if it has single answers."""
    return [TimedGroup(**one) for one in entry["company"]] if isinstance(entry, dict) else []


def _answer_in_turn(
    llms: Mapping[str, LLM],
    asked: Sequence[Question],
    expected: Sequence[str],
    turns: Sequence[str],
    options: dict[str, Any],
) -> dict[str, tuple[int, float, int]]:
    """Tokens, seconds and number of expected texts of each method's fastest turn."""
    tokenizer = llms[DEFAULT].tokenizer
    prompts = [rendered_prompt(tokenizer, question.text) for question in asked]
    fastest: dict[str, tuple[int, float, int]] = {}
    for method in turns:
        llm, key = find_llm(llms, method)
        llm.clear()
        llm.generate(prompts, decoder=PLAIN, max_tokens=1)  # reads them into the prefix cache
        start = perf_counter()
        answers = llm.generate(prompts, decoder=key, **options)
        seconds = perf_counter() - start
        found = [digest(answer.tokens) for answer in answers]
        num_same = sum(a == b for a, b in zip(found, expected, strict=True))
        result = sum(len(answer.tokens) for answer in answers), seconds, num_same
        fastest[method] = min(fastest.get(method, result), result, key=lambda one: one[1])
    return fastest


def _single(answers: Sequence[TimedAnswer], methods: Sequence[str]) -> Iterator[TimedGroup]:
    """Cold single answers of the methods as groups of one, timed from their first tokens."""
    compared = {(r.temperature, r.prompt) for r in answers if r.method == MULTI_STEP and r.rate > 0}
    for r in answers:
        is_asked = r.method in methods and not r.warm and r.rate > 0
        if is_asked and (r.temperature, r.prompt) in compared:
            yield TimedGroup(
                1, r.prompt, r.method, r.temperature, r.num_later_tokens, r.seconds, r.same_text
            )


def company_summary(groups: Sequence[TimedGroup]) -> list[dict[str, Any]]:
    """Result rows by temperature, method and size of group: the tokens per second over those of
    `multi-step`, paired by group. The interval is None where there is one group only."""
    baseline = {(g.temperature, g.size, g.number): g for g in groups if g.method == MULTI_STEP}
    methods = list(dict.fromkeys(g.method for g in groups))
    keys = {(g.temperature, g.method, g.size) for g in groups}
    rows = []
    for key in sorted(keys, key=lambda key: (key[0], methods.index(key[1]), key[2])):
        temperature, method, size = key
        chosen = [g for g in groups if (g.temperature, g.method, g.size) == key]
        ratios = [g.rate / baseline[temperature, size, g.number].rate for g in chosen]
        rows.append(
            {
                "temperature": temperature,
                "method": method,
                "together": size,
                "groups": len(chosen),
                "tokens_per_second": float(np.mean([g.rate for g in chosen])),
                "over_multi_step": speedup([np.array(ratios)]),
                "same_text": sum(g.same_text for g in chosen),
            }
        )
    return rows
