"""`anydecode bench draft-priors`: how often copies from the text and the model's own most probable
tokens are right, how well such rates predict, what recording the tokens saves, how often there is a
draft, and what its drafter and drafts in company bring, on prompts and answers that the model
writes itself.

`auto`, `token-recycling` and `stand` begin with rates of these kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from math import inf, isnan, log, nan
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer

from anydecode.api.llm import LLM
from anydecode.benchmarks.lm_eval_bench import mean_and_error
from anydecode.decoders.framework.ngram_index import NgramIndex
from anydecode.decoders.speculative.auto import Auto
from anydecode.decoders.speculative.draft_sources import (
    MATCH_LENGTHS,
    PRIORS,
    SHARED_PRIORS,
    AcceptanceRates,
    SharedDrafts,
    class_of,
)
from anydecode.decoders.speculative.match_cursor import NGRAM_SIZES, MatchCursor
from anydecode.decoders.speculative.successors import NUM_SUCCESSORS, Successors
from anydecode.errors import InvalidRequestError
from anydecode.progress import Progress, note, progress
from anydecode.report import JsonFile, write_report
from anydecode.results_log import ResultsLog
from anydecode.scoring.sequence import DRAFT, Sequence
from anydecode.training.generated import generate_prompts

Given = TypeVar("Given")
Result = TypeVar("Result")

#: The ranks of token recycling's matrix.
NUM_RANKS = 8
#: The temperatures of greedy and of sampled texts.
TEMPERATURES = (0.0, 0.8)
#: Prompts that are answered together, for what drafts in company bring.
TOGETHER = 4
#: Numbers of observations that rates are averaged over, and of tokens between two searches.
MEMORIES, LIMITS = (15.0, 30.0, 60.0, 120.0, inf), (1, 2, 4, 8, 16)


class Rates:
    """Counts of drafts by kind, and of those that were right."""

    def __init__(self, num_kinds: int) -> None:
        self.tries, self.hits = [0] * num_kinds, [0] * num_kinds

    def record(self, kind: int, hit: bool) -> None:
        self.tries[kind] += 1
        self.hits[kind] += hit

    def summary(self) -> list[dict[str, float | int | None]]:
        """The rate of each kind, None if it never occurred, and the number of its drafts."""
        pairs = zip(self.hits, self.tries, strict=True)
        return [{"rate": hits / tries if tries else None, "drafts": tries} for hits, tries in pairs]


class DraftRates:
    """The rates of all sources over several texts.

    Attributes:
        copies: Of tokens copied from the text, by the class of the match's length.
        successors: Of the most probable tokens when the same two tokens were last scored, by rank,
            then of those when the same token was, where there was no such pair.
        ranks: Of the most probable tokens when the same token was last scored, by rank.
        copied: The class of each copied token and whether it was right, in order.
    """

    def __init__(self) -> None:
        self.copies = Rates(len(MATCH_LENGTHS))
        self.successors = Rates(2 * NUM_SUCCESSORS)
        self.ranks = Rates(NUM_RANKS)
        self.copied: list[tuple[int, bool]] = []
        self._pairs = Successors()
        self._singles: dict[int, list[int]] = {}

    def read(self, prompt: Seq[int], answer: Seq[int], top_tokens: Seq[list[int]]) -> None:
        """Count the drafts for the tokens of an answer.

        Args:
            prompt: The tokens before it.
            answer: Its tokens.
            top_tokens: For each of them, the most probable tokens, best first.
        """
        history = NgramIndex(NGRAM_SIZES)
        cursor, text = MatchCursor(history), history.tokens
        for token in prompt:
            history.append(token)
            cursor.step(text)
        for token, best in zip(answer, top_tokens, strict=True):
            if len(text) > 1:
                self._read_successors(text[-2], text[-1], token, best)
            length = cursor.length
            history.append(token)
            is_hit = cursor.step(text)
            if is_hit is not None:
                self.copies.record(class_of(length), is_hit)
                self.copied.append((class_of(length), is_hit))

    def _read_successors(self, before: int, last: int, token: int, best: list[int]) -> None:
        for kind, is_hit in self._pairs.outcomes(before, last, token):
            self.successors.record(kind, is_hit)
        self._pairs.learn(before, last, best[:NUM_SUCCESSORS])
        for rank, other in enumerate(self._singles.get(last, ())):
            self.ranks.record(rank, other == token)
        self._singles[last] = best

    def summary(self) -> dict[str, Any]:
        """The rates and counts by source."""
        return {
            "copies": self.copies.summary(),
            "successors": self.successors.summary(),
            "ranks": self.ranks.summary(),
        }


class Pieces:
    """The pieces of a run, each of one prompt or group of prompts; those that a log has are not run
    again.

    Args:
        results_log: Where pieces are recorded.
        bar: Shows how many are done.
    """

    def __init__(self, results_log: ResultsLog | None = None, bar: Progress | None = None) -> None:
        self._log, self._bar = results_log, bar
        self._logged = {} if results_log is None else dict(results_log.read(_logged_piece))

    def run(
        self, part: str, temperature: float, inputs: Seq[Given], run: Callable[[Given], Result]
    ) -> list[Result]:
        """The results of a measurement.

        Args:
            part: Its name.
            temperature: The temperature of its texts.
            inputs: A prompt or group of prompts for each piece.
            run: Runs a piece; returns a JSON value.
        """
        results = []
        for index, given in enumerate(inputs):
            key = part, temperature, index
            is_logged = key in self._logged
            if not is_logged:
                if self._bar is not None:
                    self._bar.update(self._bar.done, step=f"{part}, T={temperature}")
                self._logged[key] = run(given)
                if self._log is not None:
                    self._log.write([*key, self._logged[key]])
            if self._bar is not None:
                self._bar.advance(skipped=is_logged)
            results.append(self._logged[key])
        return results


def _logged_piece(entry: Any) -> tuple[tuple[str, float, int], Any]:
    return (entry[0], entry[1], entry[2]), entry[3]


def num_pieces(num_prompts: int, has_drafter: bool) -> int:
    """The number of pieces of a run."""
    per_prompt = 1 + has_drafter + len(LIMITS) + 1  # rates, rounds, searches, passes saved
    return len(TEMPERATURES) * (per_prompt * num_prompts + num_prompts // TOGETHER)


def means(sums: np.ndarray, weights: np.ndarray, names: Seq[str]) -> dict[str, Any]:
    """Means over prompts, None if nothing was counted, and under "errors" their standard errors,
    None for one prompt.

    Args:
        sums: The sums of each quantity for each prompt, `[prompts, quantities]`.
        weights: What each is divided by, `[prompts, quantities]`.
        names: The names of the quantities.
    """
    found: dict[str, Any] = {}
    errors: dict[str, float | None] = {}
    for name, values, counts in zip(names, sums.T, weights.T, strict=True):
        found[name], error = mean_and_error(values, counts) if counts.any() else (None, nan)
        errors[name] = None if isnan(error) else error
    return {**found, "errors": errors}


def measure(
    llm: LLM, prompts: Seq[list[int]], tokens: int, temperature: float, pieces: Pieces
) -> DraftRates:
    """The rates over answers of up to `tokens` tokens."""

    def run(prompt: list[int]) -> tuple[list[int], list[list[int]]]:
        answer = llm.generate(
            list(prompt),
            decoder="autoregressive",
            max_tokens=tokens,
            temperature=temperature,
            seed=1,
            logprobs=NUM_RANKS,
        )
        found = answer.logprobs or []
        top = [[one for one, _ in row.top] if row is not None else [] for row in found]
        return answer.tokens, top

    rates = DraftRates()
    answers = pieces.run("rates", temperature, prompts, run)
    for prompt, (answer, top) in zip(prompts, answers, strict=True):
        rates.read(prompt, answer, top)
    return rates


def prediction_losses(copied: Seq[tuple[int, bool]], is_greedy: bool) -> dict[str, float]:
    """The mean log loss, in nats, of the rates that `auto` has of copies before each of them, by
    the number of observations that they are averaged over."""
    losses = {}
    for memory in MEMORIES:
        rates, total = AcceptanceRates(PRIORS[is_greedy], memory=memory), 0.0
        for kind, hit in copied:
            rate = rates.hits[kind] / rates.tries[kind]
            total -= log(max(rate if hit else 1 - rate, 1e-9))
            rates.record(kind, hit)
        losses[str(memory)] = total / max(1, len(copied))
    return losses


def drafter_rounds(
    llm: LLM, prompts: Seq[list[int]], tokens: int, temperature: float, pieces: Pieces
) -> dict[str, Any]:
    """What rounds with drafts of the model's drafter bring where `auto` drafts with it: the means
    of the verified drafts, of the accepted ones, and of the time of drafting and of one draft, in
    passes over one row. Drafters and caches are cleared before each prompt, whose first round, in
    which the drafter reads the text, does not count."""

    def run(prompt: list[int]) -> list[float]:
        llm.clear()
        answer = llm.generate(
            list(prompt),
            decoder="auto",
            max_tokens=tokens,
            temperature=temperature,
            seed=1,
            trace=True,
        )
        pass_seconds = llm.cost_model.seconds(1, len(prompt) + tokens // 2)
        rounds = [step for step in answer.trace or () if "model" in (step["sources"] or ())][1:]
        return [
            len(rounds),
            sum(len(step["drafted"]) for step in rounds),
            sum(len(step["accepted"]) for step in rounds),
            sum(step["draft_seconds"] / pass_seconds for step in rounds),
        ]

    sums: np.ndarray = np.array(pieces.run("rounds of the drafter", temperature, prompts, run))
    rounds, drafts, _, seconds = sums.T
    weights = np.stack([rounds, rounds, rounds, drafts], 1)
    names = ("drafts", "accepted", "seconds", "seconds_per_draft")
    return {
        "rounds": int(rounds.sum()),
        **means(np.column_stack([sums[:, 1:], seconds]), weights, names),
    }


class _SinglePasses(Auto):
    """`auto` with one pass per call, whose top tokens are always recorded."""

    def multi_step_pays(self, pass_seconds: float, measures_calls: bool) -> bool:
        return False

    def learning_pays(self, pass_seconds: float) -> bool:
        return True


class _Bursts(Auto):
    """`auto` with several passes per call, wherever the engine allows it."""

    def multi_step_pays(self, pass_seconds: float, measures_calls: bool) -> bool:
        return True


def saved_by_top_tokens(
    llm: LLM, prompts: Seq[list[int]], tokens: int, temperature: float, pieces: Pieces
) -> dict[str, Any]:
    """The share of passes that `auto` without a drafter saves by calls of one pass, which record
    the model's top tokens and verify trees, of those with several passes per call. Decoders and
    caches are cleared before each prompt."""
    decoders = (_SinglePasses(max_model_drafts=0), _Bursts(max_model_drafts=0))

    def run(prompt: list[int]) -> list[int]:
        counts = []
        for decoder in decoders:
            llm.clear()
            decoder.clear()
            answer = llm.generate(
                list(prompt), decoder=decoder, max_tokens=tokens, temperature=temperature, seed=1
            )
            counts.append(answer.stats.passes)
        return counts

    counts = pieces.run("passes saved by top tokens", temperature, prompts, run)
    single, several = np.array(counts).T[:, :, None]
    return means(several - single, several, ["share"])


class Searching(Auto):
    """`auto` that searches for drafts itself, at least once in `limit` tokens.

    Attributes:
        num_bursts: Number of searches without a draft.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(max_model_drafts=0)
        self.limit, self.num_bursts = limit, 0

    def drafts_in_bursts(self, sequence: Sequence) -> bool:
        return False

    def max_multi_step(self, is_greedy: bool) -> int:
        self.num_bursts += 1
        return self.limit

    def multi_step_pays(self, pass_seconds: float, measures_calls: bool) -> bool:
        return True


def searches(
    llm: LLM, prompts: Seq[list[int]], tokens: int, temperature: float, pieces: Pieces
) -> dict[str, dict[str, Any]]:
    """What `auto` without a drafter takes where it searches for drafts itself, by the maximum
    number of tokens between two searches: passes and calls of the kernels per token, the time of
    both in passes over one row, and the share of the tokens' passes that have a draft. Decoders and
    caches are cleared before each prompt."""
    costs = llm.cost_model

    def run(decoder: Searching, prompt: list[int]) -> list[float]:
        llm.clear()
        decoder.clear()
        decoder.num_bursts = 0
        answer = llm.generate(
            list(prompt),
            decoder=decoder,
            max_tokens=tokens,
            temperature=temperature,
            seed=1,
            trace=True,
        )
        passes = answer.stats.passes
        host = costs.host_seconds(1) / costs.seconds(1, len(prompt) + tokens // 2)
        steps = [len(step["drafted"]) > 0 for step in answer.trace or ()]
        calls = 1 + sum(steps) + decoder.num_bursts  # one for the prompt
        seconds = passes - (passes - calls) * host
        return [passes, calls, seconds, sum(steps), answer.stats.num_tokens, len(steps)]

    found = {}
    for limit in LIMITS:
        part = f"searches, up to {limit} tokens between them"
        sums: np.ndarray = np.array(
            pieces.run(part, temperature, prompts, partial(run, Searching(limit)))
        )
        weights = sums[:, [4, 4, 4, 5]]  # tokens; of those with a draft: steps
        found[str(limit)] = means(sums[:, :4], weights, ("passes", "calls", "time", "drafted"))
    return found


class _EveryBurst(SharedDrafts):
    """Drafts in company that are prepared for every burst in which one may save time.

    Attributes:
        counts: Of all bursts, the passes, those with a draft, the drafted and the accepted tokens.
    """

    def __init__(self, share: float, drafts: float, accepted: float) -> None:
        super().__init__(share, drafts, accepted)
        self.counts = np.zeros(4, np.int64)

    def record(self, rows: Seq[int], accepted: int, seconds: float) -> None:
        num_drafted = sum(count > 1 for count in rows)
        self.counts += len(rows), num_drafted, sum(rows) - len(rows), accepted

    def pays(self, num_drafted: float, token_seconds: float, row_seconds: float) -> bool:
        return True


def shared_bursts(
    llm: LLM, prompts: Seq[list[int]], tokens: int, temperature: float, pieces: Pieces
) -> dict[str, Any]:
    """What drafts within bursts in company bring where `auto` asks for some in every burst: the
    number of a sequence's passes, the share of them with a useful draft, and the means of its
    tokens and of the accepted ones. `TOGETHER` prompts are answered together; decoders and caches
    are cleared before each group."""
    decoder = Auto(max_model_drafts=0)

    def run(group: Seq[list[int]]) -> list[int]:
        llm.clear()
        decoder.clear()
        bursts = {greedy: _EveryBurst(*prior) for greedy, prior in SHARED_PRIORS.items()}
        decoder.shared_drafts = dict(bursts)
        texts = [list(prompt) for prompt in group]
        llm.generate(texts, decoder=decoder, max_tokens=tokens, temperature=temperature, seed=1)
        counts: list[int] = bursts[temperature == 0].counts.tolist()
        return counts

    starts = range(0, len(prompts) - TOGETHER + 1, TOGETHER)
    groups = [prompts[start : start + TOGETHER] for start in starts]
    found = pieces.run(f"{TOGETHER} answers together", temperature, groups, run)
    counts: np.ndarray = np.array(found).reshape(-1, 4)
    passes, drafted = counts[:, 0], counts[:, 1]
    weights = np.stack([passes, drafted, drafted], 1)
    return {
        "passes": int(passes.sum()),
        **means(counts[:, 1:], weights, ("share", "drafts", "accepted")),
    }


def show(result: dict[str, Any]) -> None:
    """Print the rates as tables."""
    print(f"{result['model']}: {result['prompts']} prompts, answers of {result['tokens']} tokens")
    labels = {
        "copies": [f"copies, matches from {low}" for low in MATCH_LENGTHS],
        "successors": [
            f"{kind}, rank {rank}"
            for kind in ("successors of two tokens", "of one token")
            for rank in range(NUM_SUCCESSORS)
        ],
        "ranks": [f"successors of one token alone, rank {rank}" for rank in range(NUM_RANKS)],
    }
    columns = "  ".join(f"{f'T={one}':>7} {'drafts':>7}" for one in TEMPERATURES)
    print(f"{'':40} {columns}")
    for source, names in labels.items():
        for kind, name in enumerate(names):
            cells = []
            for temperature in TEMPERATURES:
                one = result["rates"][str(temperature)][source][kind]
                rate = "-" if one["rate"] is None else f"{one['rate']:.3f}"
                cells.append(f"{rate:>7} {one['drafts']:>7}")
            print(f"{name:40} {'  '.join(cells)}")
    for temperature, found in result["rounds"].items():
        if found["rounds"]:
            print(
                f"T={temperature}: {found['rounds']} rounds with drafts of its drafter, each of"
                f" {_figure(found, 'drafts')} drafts, {_figure(found, 'accepted')} of them"
                f" accepted; drafting takes {_figure(found, 'seconds')} passes,"
                f" {_figure(found, 'seconds_per_draft')} per draft"
            )
    for temperature, found in result["company"].items():
        if found["passes"]:
            print(
                f"T={temperature}: {TOGETHER} answers together: {_figure(found, 'share')} of"
                f" {found['passes']} passes of an answer have a useful draft, of"
                f" {_figure(found, 'drafts')} tokens, {_figure(found, 'accepted')} of them accepted"
            )
    for temperature, losses in result["losses"].items():
        values = ", ".join(f"{name}: {loss:.4f}" for name, loss in losses.items())
        print(
            f"T={temperature}: log loss of the rates of copies, by observations averaged: {values}"
        )
    for temperature, limits in result["searches"].items():
        for limit, one in limits.items():
            print(
                f"T={temperature}: up to {limit} tokens between searches: {_figure(one, 'drafted')}"
                f" of the passes have a draft; per token {_figure(one, 'passes')} passes in"
                f" {_figure(one, 'calls')} calls, which take {_figure(one, 'time')} passes"
            )
    for temperature, saved in result["saved"].items():
        print(
            f"T={temperature}: recording top tokens saves {_figure(saved, 'share')} of the passes"
        )


def _figure(found: dict[str, Any], name: str) -> str:
    """A mean and its standard error, if there is one."""
    mean, error = found[name], found["errors"][name]
    if mean is None:
        return "-"
    return f"{mean:.3f}" if error is None else f"{mean:.3f} ± {error:.3f}"


def bench_draft_priors(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model name, folder or .gguf file.")
    ] = "smollm2-135m-instruct",
    prompts: Annotated[
        int, typer.Option("--prompts", min=1, help="Prompts that the model writes.")
    ] = 96,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each answer.")] = 128,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the prompts.")] = 7,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            help="Record the results of each prompt here; a later run resumes from it, with more"
            " --prompts too.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Acceptance rates of drafts that need no model: copies by the length of the match, and the
    most probable tokens of earlier passes, in greedy and in sampled texts; what rounds with drafts
    of the model's drafter bring, if it has one, and drafts in company; how well the rates of copies
    predict; how often there is a draft, and what rarer searches for one take; and the passes that
    recording the most probable tokens saves. The model writes its prompts itself, every fourth of
    many lines. Errors are standard errors of the means over prompts.

    Example: anydecode bench draft-priors --prompts 16 --keep priors.jsonl
    """
    settings = {"model": model, "tokens": tokens, "seed": seed}
    results_log = None if keep is None else ResultsLog(keep, settings)
    with LLM(model) as llm:
        note(f"{model} writes {prompts} prompts")
        texts = generate_prompts(llm, prompts, seed, has_long=True)
        if not texts:
            raise InvalidRequestError("the model wrote no prompt; give more --prompts")
        has_drafter = DRAFT in llm.engine.runners
        with progress("pieces", num_pieces(len(texts), has_drafter)) as bar:
            pieces = Pieces(results_log, bar)
            found = {one: measure(llm, texts, tokens, one, pieces) for one in TEMPERATURES}
            result = {
                "model": llm.model.name,
                "prompts": len(texts),
                "tokens": tokens,
                "seed": seed,
                "rates": {str(one): rates.summary() for one, rates in found.items()},
                "losses": {
                    str(one): prediction_losses(rates.copied, one == 0)
                    for one, rates in found.items()
                },
            }
            measurements = {
                "rounds": drafter_rounds,
                "company": shared_bursts,
                "saved": saved_by_top_tokens,
                "searches": searches,
            }
            for name, measurement in measurements.items():
                is_possible = has_drafter or measurement is not drafter_rounds
                result[name] = {
                    str(one): measurement(llm, texts, tokens, one, pieces)
                    for one in TEMPERATURES
                    if is_possible
                }
    write_report(result, json_file, lambda: show(result))
