"""Single answers of `anydecode bench speculative`: each prompt is answered by plain decoding, every
method and every baseline in turn, in a rotating order.

Drafter state and cached prefixes are cleared before each timed answer (cold); warm answers keep the
drafter state from prompt to prompt."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from anydecode.api.generation import Generation
from anydecode.api.llm import LLM
from anydecode.benchmarks.baselines import Worker
from anydecode.benchmarks.llama_server import LlamaServer
from anydecode.benchmarks.speculative_drafts import DEFAULT, find_llm
from anydecode.decoders.decoder import Decoder
from anydecode.results_log import ResultsLog
from anydecode.scoring.cost import CostModel
from anydecode.tasks.spec_bench import Question
from anydecode.training.generated import rendered_prompt, rendered_text

T = TypeVar("T")

PLAIN = "autoregressive"
#: The second baseline: plain decoding with several tokens per kernel call, without drafts.
MULTI_STEP = "multi-step"


@dataclass(frozen=True)
class TimedAnswer:
    """One timed answer.

    Attributes:
        category: Category of the question.
        prompt: Index of the question.
        method: Decoding method, or name of a baseline.
        temperature: Sampling temperature.
        warm: Whether drafter state was kept from earlier prompts.
        num_tokens: Generated tokens.
        num_first_tokens: Those that came together with the first one, before `seconds`.
        passes: Forward passes; 0 for baselines, which do not report them.
        seconds: Time from the first token to the last.
        draft_seconds: Part of `seconds` that was spent on drafting.
        modelled: Speed-up in `seconds` by the cost model instead of the clock, so without noise
            from other load; 0 for baselines.
        loops: Whether the answer ends in repetition.
        same_text: Whether the tokens equal those of plain decoding.
        digest: `digest` of the tokens; "" for baselines.
    """

    category: str
    prompt: int
    method: str
    temperature: float
    warm: bool
    num_tokens: int
    num_first_tokens: int
    passes: int
    seconds: float
    draft_seconds: float
    modelled: float
    loops: bool
    same_text: bool
    digest: str

    @property
    def num_later_tokens(self) -> int:
        """Tokens that were generated in `seconds`."""
        return self.num_tokens - self.num_first_tokens

    @property
    def rate(self) -> float:
        """Tokens per second, of those after the first emission."""
        return self.num_later_tokens / self.seconds if self.seconds > 0 else 0.0


def loops(tokens: Sequence[int], max_period: int = 64, min_length: int = 32) -> bool:
    """Whether `tokens` ends in a sequence of at most `max_period` tokens that is repeated four
    times or more, over at least `min_length` tokens."""
    for period in range(1, max_period + 1):
        size = max(4 * period, min_length)
        if len(tokens) < size:
            continue
        tail = tokens[-size:]
        if all(a == b for a, b in zip(tail, tail[period:], strict=False)):
            return True
    return False


def digest(tokens: Sequence[int]) -> str:
    """A hash of tokens, by which texts are compared."""
    return hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:16]


def with_multi_step(methods: Sequence[str]) -> list[str]:
    """The methods, and `multi-step` if it is not one of them."""
    return list(dict.fromkeys([*methods, MULTI_STEP]))


def run(
    llms: Mapping[str, LLM],
    question_list: Sequence[Question],
    methods: Sequence[str],
    temperatures: Sequence[float],
    tokens: int,
    warm: bool = True,
    on_step: Callable[[str], None] = lambda step: None,
    rounds: int = 1,
    baselines: Sequence[Worker | LlamaServer] = (),
    results_log: ResultsLog | None = None,
) -> Iterator[TimedAnswer]:
    """Time every question with plain decoding, every method and every baseline.

    Args:
        llms: The model with each draft model, by its name; see `find_llm`.
        question_list: The questions.
        methods: Keys of decoding methods; `multi-step` runs in any case.
        temperatures: Sampling temperatures.
        tokens: Token limit of an answer.
        warm: Whether to also time each method with drafter state kept between questions.
        on_step: Called with a description after each answer.
        rounds: Cold answers per question, of which the fastest counts.
        baselines: Other engines.
        results_log: Where answers are recorded; recorded ones are not generated again.

    Yields:
        The timed answers; for each question, plain decoding first.
    """
    variants = variants_of(methods, warm)
    warm_decoders = {method: _decoder(llms, method) for method, is_warm in variants if is_warm}
    for llm in llms.values():
        llm.generate([1] * 8, max_tokens=4, ignore_eos=True)
        llm.cost_model.seconds(1, 0)  # measures the costs before anything is timed
    recorded = {} if results_log is None else recorded_answers(results_log)
    for temperature in temperatures:
        options = {"max_tokens": tokens, "trace": True, "temperature": temperature, "seed": 1}
        for number, question in enumerate(question_list):
            label = f"question {number + 1} of {len(question_list)}, T={temperature:g}"
            report_step = partial(_report_step, on_step, label)
            answers = recorded.get((temperature, number), [])
            if not answers:
                answers = _run_methods(
                    llms, question, number, variants, warm_decoders, options, rounds, report_step
                )
                _record(results_log, answers)
            yield from answers
            engines_done = {one.method for one in answers}
            for worker in rotated([w for w in baselines if w.engine not in engines_done], number):
                timed = _run_baseline(llms[DEFAULT], question, number, worker, options, answers[0])
                report_step(
                    worker.engine if worker.missing is None else f"{worker.engine} is missing"
                )
                if timed is not None:
                    _record(results_log, [timed])
                    yield timed


def variants_of(methods: Sequence[str], warm: bool) -> list[tuple[str, bool]]:
    """The methods that answer a question, each with whether it is warm. `multi-step` keeps no
    state, so it is never warm."""
    cold = [(method, False) for method in (PLAIN, *with_multi_step(methods))]
    return cold + [(method, True) for method in methods if warm and method != MULTI_STEP]


def num_answers_left(
    num_questions: int,
    methods: Sequence[str],
    temperatures: Sequence[float],
    warm: bool,
    rounds: int,
    baselines: Sequence[str],
    results_log: ResultsLog | None,
) -> int:
    """The number of answers that `run` will generate: those that are not recorded."""
    num_own = sum(1 if is_warm else rounds for _, is_warm in variants_of(methods, warm))
    left = num_questions * len(temperatures) * (num_own + len(baselines))
    for answers in recorded_answers(results_log).values() if results_log else ():
        left -= num_own + sum(one.method in baselines for one in answers)
    return max(0, left)


def _decoder(llms: Mapping[str, LLM], method: str) -> Decoder:
    llm, key = find_llm(llms, method)
    return llm.decoder(key)


def _report_step(on_step: Callable[[str], None], label: str, name: str) -> None:
    on_step(f"{label}: {name}")


def _record(results_log: ResultsLog | None, runs: Sequence[TimedAnswer]) -> None:
    if results_log is not None:
        results_log.write([asdict(one) for one in runs])


def rotated(parts: Sequence[T], number: int) -> list[T]:
    """The parts, beginning with another one for each `number`."""
    offset = number % max(len(parts), 1)
    return [*parts[offset:], *parts[:offset]]


def _run_methods(
    llms: Mapping[str, LLM],
    question: Question,
    number: int,
    variants: list[tuple[str, bool]],
    warm_decoders: dict[str, Decoder],
    options: dict[str, Any],
    rounds: int,
    report_step: Callable[[str], None],
) -> list[TimedAnswer]:
    """One question with all variants (method, is warm); plain decoding is first in the result."""
    answers: dict[tuple[str, bool], Generation] = {}
    for method, is_warm in rotated(variants, number) * rounds:
        if is_warm and (method, is_warm) in answers:
            continue  # a second run would draft from this very answer
        llm, key = find_llm(llms, method)
        llm.clear()
        decoder = warm_decoders[method] if is_warm else llm.decoder(key)
        prompt = rendered_prompt(llm.tokenizer, question.text)
        answer = llm.generate(prompt, decoder=decoder, **options)
        best = answers.get((method, is_warm), answer)
        answers[method, is_warm] = min(best, answer, key=decode_seconds)
        report_step(f"{method}, warm" if is_warm else method)
    plain = answers[PLAIN, False].tokens
    return [
        TimedAnswer(
            question.category,
            number,
            method,
            options["temperature"],
            is_warm,
            (stats := answers[method, is_warm].stats).num_tokens,
            stats.num_first_tokens,
            stats.passes,
            decode_seconds(answers[method, is_warm]),
            sum(r.get("draft_seconds", 0.0) for r in later_rounds(answers[method, is_warm])),
            modelled_speedup(answers[method, is_warm], llms[DEFAULT].cost_model),
            loops(answers[method, is_warm].tokens),
            answers[method, is_warm].tokens == plain,
            digest(answers[method, is_warm].tokens),
        )
        for method, is_warm in variants
    ]


def _run_baseline(
    llm: LLM,
    question: Question,
    number: int,
    worker: Worker | LlamaServer,
    options: dict[str, Any],
    plain: TimedAnswer,
) -> TimedAnswer | None:
    """The same question with a baseline, which reports neither passes nor drafts; None if it
    failed. `loops` is copied from our plain answer, since the baseline returns no tokens."""
    if worker.missing is not None:
        return None
    temperature = options["temperature"]
    response = worker.ask(
        prompt=rendered_text(llm.tokenizer, question.text),
        tokens=options["max_tokens"],
        temperature=temperature,
        ends=True,
    )
    worker.missing = response.get("missing")
    if worker.missing is not None or response["tokens"] < 2:
        return None
    seconds = response["total"] - response["first"]
    return TimedAnswer(
        question.category, number, worker.engine, temperature, False, response["tokens"], 1, 0,
        seconds, 0.0, 0.0, plain.loops, False, "",
    )  # fmt: skip


def recorded_answers(results_log: ResultsLog) -> dict[tuple[float, int], list[TimedAnswer]]:
    """Recorded answers by temperature and index of the question; plain decoding comes first."""
    result: dict[tuple[float, int], list[TimedAnswer]] = {}
    for runs in filter(None, results_log.read(_timed_answers)):
        result.setdefault((runs[0].temperature, runs[0].prompt), []).extend(runs)
    return result


def _timed_answers(entry: Any) -> list[TimedAnswer]:
    """The answers of an entry of the results log; none if it is one of `speculative_company`."""
    if isinstance(entry, dict) and "company" in entry:
        return []
    first, others = entry[0], entry[1:]
    return [TimedAnswer(**one) for one in (first, *others)]


def decode_seconds(answer: Generation) -> float:
    """Time from the first token to the last."""
    return answer.stats.seconds - answer.stats.time_to_first_token


def later_rounds(answer: Generation) -> list[dict[str, Any]]:
    """The traced rounds after the first tokens, which `decode_seconds` lasts. A drafter may read
    the prompt before them."""
    start = answer.stats.num_prompt_tokens + answer.stats.num_first_tokens
    return [record for record in answer.trace or () if record["position"] >= start]


def modelled_speedup(answer: Generation, cost_model: CostModel) -> float:
    """Modelled seconds of plain decoding for the tokens after the first ones, over those of the
    passes that were made and the drafting."""
    records = later_rounds(answer)
    drafted_seconds = sum(cost_model.seconds(1 + len(r["drafted"]), r["position"]) for r in records)
    drafted_seconds += sum(r.get("draft_seconds", 0.0) for r in records)
    plain = sum(
        cost_model.seconds(1, r["position"] + position)
        for r in records
        for position in range(len(r["tokens"]))
    )
    return plain / drafted_seconds if drafted_seconds else 1.0


def memory(
    llms: Mapping[str, LLM], question: Question, methods: Sequence[str], tokens: int
) -> dict[str, int]:
    """Peak bytes of Python allocations of each method beyond plain decoding, on one question."""
    peaks = {}
    for method in (PLAIN, *methods):
        llm, key = find_llm(llms, method)
        llm.clear()
        tracemalloc.start()
        prompt = rendered_prompt(llm.tokenizer, question.text)
        llm.generate(prompt, decoder=key, max_tokens=tokens)
        peaks[method] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return {method: max(0, peaks[method] - peaks[PLAIN]) for method in methods}
