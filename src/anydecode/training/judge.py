"""Training of a judge (Bachmann et al., "Judge Decoding", arXiv:2501.19309) on labels that a search
finds (Garipov et al., "AutoJudge: Judge Decoding Without Manual Annotation", arXiv:2504.20039).

The search takes the model's greedy answer to a question. Where the draft model would have written
another token, that token is put in its place and the model continues behind it. If it comes to the
same result again, the token is right, and the search goes on in the new answer; otherwise in the
old one. Answers whose mistakes are marked, as in "Judge Decoding", need no search: without mistakes
every token is right, and with some only the marked tokens are labels. The judge is a logistic
regression of these labels on the model's last states at the tokens, or on both models' states, with
equal weights of both kinds.

A quarter of the questions is held out: half of these choose penalty and threshold, and on the other
half the judge is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

from anydecode.api.llm import LLM
from anydecode.api.request import Request
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.acceptance import Acceptance, TokenExact
from anydecode.decoders.framework.judging import JudgeAcceptance
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_model import ModelDrafter, truncate_to_prefix
from anydecode.errors import InvalidRequestError
from anydecode.models.exit_files import model_fingerprint, network_of
from anydecode.models.judge import FILE_NAME, Judge
from anydecode.rewards.answers import AnswerFinder
from anydecode.scoring.score import DecoderAction, Decoding
from anydecode.scoring.sequence import DRAFT, TARGET, Sequence
from anydecode.tasks.word_problems import word_problem
from anydecode.training.checkpoint import load_state, save_json, save_state
from anydecode.training.generated import rendered_prompt, run_requests
from anydecode.training.logistic import fit_logistic
from anydecode.training.run import LossRun

#: Penalties of the squared weights, for inputs of variance 1; the best on held-out labels is taken.
PENALTIES = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)

#: A question and its right answer; "" if it is not known.
Question = tuple[str, str]
#: What a judge reads: the target's states, or the draft model's too.
STATES = ("target", "both")


class MarkedAnswer(NamedTuple):
    """An answer to a question, in which someone has marked the mistakes.

    Attributes:
        prompt: The question.
        answer: The answer.
        mistakes: First character and end of each mistake.
    """

    prompt: str
    answer: str
    mistakes: tuple[tuple[int, int], ...]


def own_questions(count: int, seed: int) -> list[Question]:
    """Different word problems of this package."""
    random, found = Random(f"{seed}/judge"), dict[str, str]()
    while len(found) < count:
        problem, answer = word_problem(random)
        found[problem] = answer
    return list(found.items())


@dataclass(frozen=True)
class JudgeRecipe:
    """How a judge is trained.

    Attributes:
        tokens: Maximum number of tokens of an answer.
        batch: Questions that are searched together, a step of the run.
        precision: Share of right ones among the held-out drafts that the judge accepts.
        size: Drafts per round of the test.
        states: One of `STATES`.
        save_seconds: Seconds between saved states.
    """

    tokens: int = 64
    batch: int = 8
    precision: float = 0.97
    size: int = 25
    states: str = "target"
    save_seconds: float = 300.0

    def __post_init__(self) -> None:
        if min(self.tokens, self.batch, self.size) < 1 or not 0 < self.precision <= 1:
            raise InvalidRequestError(
                "tokens, batch and size must be 1 or more, and precision above 0 and at most 1"
            )
        if self.states not in STATES:
            raise InvalidRequestError(f"states is {self.states!r}; choose from {', '.join(STATES)}")


@dataclass(frozen=True, eq=False)
class Labels:
    """Tokens that may stand where they stand, or not.

    Attributes:
        states: The last states at them, after the final norm, float32 `[n, width]`: the model's, or
            also the draft model's, behind it.
        is_right: Whether the model came to the same result, or whether they are not marked as
            mistakes, bool `[n]`.
    """

    states: np.ndarray
    is_right: np.ndarray

    @staticmethod
    def joined(parts: Seq[Labels], width: int) -> Labels:
        """The labels of all parts."""
        empty = Labels(np.zeros((0, width), np.float32), np.zeros(0, bool))
        every = [empty, *parts]
        return Labels(
            np.concatenate([one.states for one in every]),
            np.concatenate([one.is_right for one in every]),
        )


class Labelling(Decoder):
    """Finds the labels of one question.

    Attributes:
        max_tokens: Maximum number of tokens of an answer.
        states: The states at each token with a label, float32 `[width]`.
        is_right: Whether it is right.
    """

    requirements = Requirements(runners=(DRAFT,))
    max_tokens: int

    def __init__(self) -> None:
        self.states: list[np.ndarray] = []
        self.is_right: list[bool] = []

    def labels(self, width: int) -> Labels:
        """What was found."""
        states = np.array(self.states, np.float32).reshape(-1, width)
        return Labels(states, np.array(self.is_right, bool))


class MarkedLabels(Labelling):
    """The labels of an answer whose mistakes are marked.

    Args:
        answer: Its tokens.
        labels: Whether each is right; None for those without a label.
        states: One of `STATES`.
    """

    def __init__(self, answer: list[int], labels: Seq[bool | None], states: str) -> None:
        super().__init__()
        self.answer, self.known, self.max_tokens = answer, labels, len(answer)
        self.runners = (TARGET,) if states == "target" else (TARGET, DRAFT)

    def decode(self, sequence: Sequence) -> Decoding:
        parts = []
        for runner in self.runners:
            kv_cache = sequence.kv_cache(runner)
            truncate_to_prefix(kv_cache, sequence.prompt)
            depth = kv_cache.pool.model.spec.num_layers
            tokens = (sequence.prompt + self.answer)[kv_cache.length :]
            count = len(self.answer)
            scores = yield sequence.score(
                tokens, runner=runner, rows=count, hidden=(depth,), logits=False
            )
            parts.append(np.array([scores.last_state(row) for row in range(count)]))
            kv_cache.truncate(len(sequence.prompt))
        rows = np.concatenate(parts, 1)
        known = [index for index, label in enumerate(self.known) if label is not None]
        self.states = [rows[index] for index in known]
        self.is_right = [bool(self.known[index]) for index in known]


def marked_labels(
    tokens: Seq[int], mistakes: Seq[Seq[int]], decode_text: Callable[[list[int]], str]
) -> list[bool | None]:
    """The label of each token of an answer: right if there are no mistakes; else those with a
    character of a mistake are wrong, and the others have none."""
    ends = [len(decode_text(list(tokens[:count]))) for count in range(len(tokens) + 1)]
    labels: list[bool | None] = []
    for start, end in pairwise(ends):
        is_marked = any(first < end and start < last for first, last in mistakes)
        labels.append(False if is_marked else None if mistakes else True)
    return labels


class LabelSearch(Labelling):
    """Searches the labels of one question, and generates the model's greedy answer: `states` are
    those at the draft tokens that were tried, and `is_right` says whether the model came to the
    same result behind them.

    Args:
        result: The result of a text; None if it has none.
        decode_text: The text of tokens.
        end_tokens: Tokens that end an answer.
        max_tokens: Maximum number of tokens of an answer.
        states: One of `STATES`.
    """

    def __init__(
        self,
        result: AnswerFinder,
        decode_text: Callable[[list[int]], str],
        end_tokens: frozenset[int],
        max_tokens: int,
        states: str = "target",
    ) -> None:
        super().__init__()
        self.result, self.decode_text = result, decode_text
        self.end_tokens, self.max_tokens = end_tokens, max_tokens
        self.reads_draft = states == "both"

    def decode(self, sequence: Sequence) -> Decoding:
        self.states, self.is_right = [], []
        first = answer = (yield from self._continued(sequence, []))[0]
        result, start = self._result_of(answer), 0
        drafts = (yield from self._drafted(sequence, answer, 0)) if result is not None else answer
        while True:
            different = (i for i in range(start, len(answer)) if drafts[i] != answer[i])
            position = next(different, None)
            if position is None:
                break
            prefix = [*answer[:position], drafts[position]]
            other, state = yield from self._continued(sequence, prefix)
            if self.reads_draft:
                draft_state = yield from self._draft_state(sequence, prefix)
                state = np.concatenate([state, draft_state])
            self.states.append(state)
            self.is_right.append(self._result_of(other) == result)
            start = position + 1
            if self.is_right[-1]:
                answer = other
                drafts = other[:start] + (yield from self._drafted(sequence, answer, start))
        for runner in ("target", DRAFT):
            truncate_to_prefix(sequence.kv_cache(runner), sequence.prompt + first)
        sequence.emit(first)

    def _result_of(self, tokens: list[int]) -> str | None:
        return self.result(self.decode_text(tokens))

    def _continued(
        self, sequence: Sequence, prefix: list[int]
    ) -> Generator[DecoderAction, Any, tuple[list[int], np.ndarray]]:
        """The model's greedy answer that begins with a prefix, and its last state at the end of the
        prefix."""
        kv_cache, depth = sequence.kv_cache(), sequence.num_layers
        size, state = sequence.model().spec.vocab_size, None
        tokens = list(prefix)
        truncate_to_prefix(kv_cache, sequence.prompt + tokens)
        while True:
            scores = yield sequence.score(
                (sequence.prompt + tokens)[kv_cache.length :],
                hidden=(depth,) if state is None else (),
            )
            if state is None:
                state = scores.last_state(-1).copy()
            if len(tokens) >= self.max_tokens or tokens[-1:] and tokens[-1] in self.end_tokens:
                return tokens, state
            tokens.append(int(scores.logits[-1, :size].argmax()))

    def _draft_state(
        self, sequence: Sequence, prefix: list[int]
    ) -> Generator[DecoderAction, Any, np.ndarray]:
        """The draft model's last state at the end of a prefix of an answer."""
        kv_cache, text = sequence.kv_cache(DRAFT), sequence.prompt + prefix
        truncate_to_prefix(kv_cache, text)
        depth = kv_cache.pool.model.spec.num_layers
        scores = yield sequence.score(
            text[kv_cache.length :], runner=DRAFT, hidden=(depth,), logits=False
        )
        state: np.ndarray = scores.last_state(-1).copy()
        return state

    def _drafted(
        self, sequence: Sequence, answer: list[int], start: int
    ) -> Generator[DecoderAction, Any, list[int]]:
        """The draft model's most probable token in place of each of an answer, from `start` on."""
        kv_cache, before = sequence.kv_cache(DRAFT), len(sequence.prompt) + start - 1
        size = sequence.model().spec.vocab_size
        kv_cache.truncate(min(kv_cache.length, before))
        if start == len(answer):
            return []
        scores = yield sequence.score(
            (sequence.prompt + answer[:-1])[kv_cache.length :],
            runner=DRAFT,
            rows=len(answer) - start,
        )
        return [int(token) for token in scores.logits[:, :size].argmax(-1)]


@dataclass(frozen=True)
class Fit:
    """How well a judge fits held-out labels.

    Attributes:
        labels: Number of labels that it has learned from.
        loss: Of these, in nats per label, with equal weights of both kinds.
        held_out: Of the held-out ones that choose penalty and threshold.
        penalty: The penalty.
    """

    labels: int
    loss: float
    held_out: float
    penalty: float


def fit_judge(
    labels: Labels,
    held_out: Labels,
    precision: float,
    fingerprint: str,
    hidden_size: int | None = None,
    draft_fingerprint: str = "",
) -> tuple[Judge, Fit] | None:
    """A judge of the penalty with the least loss on held-out labels; None unless both have labels
    of both kinds. Behind the first `hidden_size` numbers, states are the draft model's."""
    if any(len(set(one.is_right.tolist())) < 2 for one in (labels, held_out)):
        return None
    inputs = labels.states.astype(np.float64)
    mean, scale = inputs.mean(0), np.maximum(inputs.std(0), 1e-6)
    best: tuple[Judge, Fit] | None = None
    for penalty in PENALTIES:
        weights, bias = fit_logistic(
            (inputs - mean) / scale, labels.is_right, penalty, is_balanced=True
        )
        own = weights / scale
        # As the file has it.
        target, draft = np.split(own.astype(np.float32), [hidden_size or len(own)])
        judge = Judge(target, _rounded(bias - own @ mean), 1.0, fingerprint)
        if len(draft):
            judge = replace(judge, draft_weights=draft, draft_fingerprint=draft_fingerprint)
        fit = Fit(
            len(inputs), balanced_loss(judge, labels), balanced_loss(judge, held_out), penalty
        )
        if best is None or fit.held_out < best[1].held_out:
            best = judge, fit
    assert best is not None
    judge, fit = best
    threshold = threshold_of(probabilities(judge, held_out), held_out.is_right, precision)
    return replace(judge, threshold=_rounded(threshold)), fit


def _rounded(number: float) -> float:
    return float(np.float32(number))


def probabilities(judge: Judge, labels: Labels) -> np.ndarray:
    """The judge's probabilities, float64 `[n]`."""
    size = len(judge.weights)
    return np.array([judge(state[:size], state[size:]) for state in labels.states])


def cross_entropies(judge: Judge, labels: Labels) -> np.ndarray:
    """The cross-entropy of each label, in nats, float64 `[n]`."""
    p = np.clip(probabilities(judge, labels), 1e-12, 1 - 1e-12)
    return -np.log(np.where(labels.is_right, p, 1 - p))


def balanced_loss(judge: Judge, labels: Labels) -> float:
    """The mean of both kinds' cross-entropies, in nats per label."""
    losses = cross_entropies(judge, labels)
    return float(np.mean([losses[labels.is_right == kind].mean() for kind in (False, True)]))


def threshold_of(p: np.ndarray, is_right: np.ndarray, precision: float) -> float:
    """The threshold above which the most drafts are accepted of which the share `precision` is
    right; 1, above which there are none, if none has that.

    Args:
        p: The judge's probabilities, float64 `[n]`.
        is_right: bool `[n]`.
        precision: See above.
    """
    ordered = np.unique(p)
    for below, above in zip([0.0, *ordered[:-1]], ordered, strict=True):
        if is_right[p >= above].mean() >= precision:
            return float((below + above) / 2)
    return 1.0


class JudgeRun(LossRun):
    """A training run in a folder, from which it can be resumed: `state.pt`, `log.json` and
    `judge.safetensors`, once there are labels of both kinds.

    Args:
        llm: The model, a transformer, with a draft model.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.
        questions: The questions; of a `MarkedAnswer` the marks are learned.
        result: The result of an answer; None if it has none.

    Attributes:
        labels: Of each question that has been searched.
        judge: The judge; None as long as there are too few labels.

    Raises:
        InvalidRequestError: The folder holds another run, or there are fewer than 4 questions.
        UnsupportedCombinationError: The model has no states for a judge, or the draft model has
            none and they are to be read.
    """

    def __init__(
        self,
        llm: LLM,
        folder: Path,
        recipe: JudgeRecipe,
        questions: Seq[Question | MarkedAnswer],
        result: AnswerFinder,
    ) -> None:
        lacks = "states for a judge, which needs a transformer"
        network = network_of(llm.model, lacks)
        if len(questions) < 4:
            raise InvalidRequestError(
                f"{len(questions)} questions were given; training a judge needs 4 or more, of which"
                " it holds 2 out"
            )
        steps = -(-len(questions) // recipe.batch)
        super().__init__(folder, _Steps(steps, recipe.save_seconds))
        self.llm, self.recipe, self.result = llm, recipe, result
        self.questions: list[list[Any]] = [list(one) for one in questions]
        self.fingerprint = model_fingerprint(network)
        self.width, self.draft_fingerprint = llm.model.spec.hidden_size, ""
        if recipe.states == "both":
            draft = network_of(llm.engine.runners[DRAFT].model, lacks)
            self.draft_fingerprint = model_fingerprint(draft)
            self.width += draft.spec.hidden_size
        self.labels: list[Labels] = []
        self.judge: Judge | None = None
        self.tested: dict[str, Any] = {}
        self._num_fitted = 0
        self._settings = [self.fingerprint, self.draft_fingerprint, asdict(recipe), self.questions]
        state = load_state(folder / "state.pt")
        if state is None:
            return
        if state["settings"] != self._settings:
            raise InvalidRequestError(
                f"{folder} holds a run of another model, recipe or questions: give another folder"
            )
        self.labels = [Labels(states.numpy(), kind.numpy()) for states, kind in state["labels"]]
        for name in _KEPT:
            setattr(self, name, state[name])
        if self.path.is_file():
            self.judge = Judge.load(self.path)

    @property
    def path(self) -> Path:
        """The judge's file."""
        return self.folder / FILE_NAME

    @property
    def num_labels(self) -> int:
        """Number of labels found so far."""
        return sum(len(one.is_right) for one in self.labels)

    @property
    def num_held_out(self) -> int:
        """How many of the first questions test the judge, and how many next ones choose its penalty
        and threshold."""
        return max(1, len(self.questions) // 8)

    def of_part(self, part: str) -> Labels:
        """The labels of "test", "choice" or "training"."""
        first = self.num_held_out
        parts = {
            "test": self.labels[:first],
            "choice": self.labels[first : 2 * first],
            "training": self.labels[2 * first :],
        }
        return self._joined(parts[part])

    def _joined(self, parts: Seq[Labels]) -> Labels:
        return Labels.joined(parts, self.width)

    def _update(self) -> float:
        """Search the labels of the next questions; returns the loss of the judge so far on them."""
        first = self.step * self.recipe.batch
        last = min(first + self.recipe.batch, len(self.questions))
        searches = [self._labelling(index) for index in range(first, last)]
        run_requests(
            self.llm,
            [self._request(i, one, one.max_tokens) for i, one in enumerate(searches, first)],
        )
        found = [one.labels(self.width) for one in searches]
        self.labels += found
        self.step += 1
        new = self._joined(found)
        loss = float(np.log(2))
        if self.judge is not None and len(new.is_right):
            loss = float(cross_entropies(self.judge, new).mean())
        if self.num_labels >= 1.5 * self._num_fitted:
            self._fit()
        return loss

    def _labelling(self, index: int) -> Labelling:
        """What finds the labels of a question."""
        tokenizer, states = self.llm.tokenizer, self.recipe.states
        _, answer, *marks = self.questions[index]
        if marks:
            tokens = tokenizer.encode(answer, special=False)
            return MarkedLabels(tokens, marked_labels(tokens, marks[0], tokenizer.decode), states)
        return LabelSearch(
            self.result, tokenizer.decode, tokenizer.eos_ids, self.recipe.tokens, states
        )

    def _request(self, index: int, decoder: Decoder, max_tokens: int) -> Request:
        """The request for the greedy answer to a question."""
        return self.llm.request(
            rendered_prompt(self.llm.tokenizer, self.questions[index][0]),
            decoder=decoder,
            max_tokens=max_tokens,
            temperature=0.0,
        )

    def _fit(self) -> None:
        """Fit the judge to all labels so far, and record how well it does."""
        parts = self.of_part("training"), self.of_part("choice")
        hidden_size = self.llm.model.spec.hidden_size
        found = fit_judge(
            *parts, self.recipe.precision, self.fingerprint, hidden_size, self.draft_fingerprint
        )
        if found is None:
            return
        self.judge, fit = found
        self._num_fitted = self.num_labels
        self._record(
            labels=fit.labels,
            fitted=fit.loss,
            penalty=fit.penalty,
            held_out={"labels": fit.held_out},
        )

    def test(self, judge: Judge) -> dict[str, Any]:
        """What a judge does with questions that it has not learned from, beside the standard
        rule.

        Returns:
            Of the labels of these questions their number, the shares of right ones, of those that
            the judge accepts and of right ones among these, by name; and for each rule the tokens
            per pass, the share of right answers (None if they are not known) and the share of
            answers with the result of the standard rule.
        """
        labels = self.of_part("test")
        accepted = probabilities(judge, labels) > judge.threshold
        tested: dict[str, Any] = {
            "labels": len(accepted),
            "right": _mean(labels.is_right),
            "accepted": _mean(accepted),
            "precision": _mean(labels.is_right[accepted]),
        }
        rules: dict[str, Acceptance] = {
            "standard": TokenExact(),
            "judge": JudgeAcceptance(judge=judge),
        }
        results: dict[str, list[str | None]] = {}
        for name, rule in rules.items():
            decoder = Speculative(ModelDrafter(rule), self.recipe.size, rule)
            requests = [
                self._request(index, decoder, self.recipe.tokens)
                for index in range(self.num_held_out)
            ]
            answers = run_requests(self.llm, requests)
            results[name] = [self.result(one.text) for one in answers]
            known = [
                found == expected
                for found, (_, answer, *marks) in zip(results[name], self.questions, strict=False)
                if (expected := self.result(answer)) is not None and not any(marks)
            ]
            passes = sum(one.stats.passes for one in answers)
            same = [a == b for a, b in zip(results[name], results["standard"], strict=True)]
            tested[name] = {
                "tokens_per_pass": sum(len(one.tokens) for one in answers) / passes,
                "right": _mean(known) if known else None,
                "same": _mean(same),
            }
        return tested

    def save(self) -> None:
        """Fit, and write the state, the log and the judge; after the last question, test it too.

        Raises:
            InvalidRequestError: All questions have been searched, and the labels are of one kind.
        """
        if self._num_fitted < self.num_labels:
            self._fit()
        if self.judge is not None and self.progress == 1.0 and not self.tested:
            self.tested = self.test(self.judge)
        labels = [
            (torch.from_numpy(one.states), torch.from_numpy(one.is_right)) for one in self.labels
        ]
        kept = {name: getattr(self, name) for name in _KEPT}
        save_state(self.folder / "state.pt", {"settings": self._settings, "labels": labels, **kept})
        save_json(self.folder / "log.json", self.log())
        if self.judge is not None:
            self.judge.save(self.path)
        elif self.progress == 1.0:
            raise InvalidRequestError(
                f"the {len(self.labels)} questions have labels of one kind only, and a judge needs"
                " both: give more or other questions, or another draft model"
            )

    def log(self) -> dict[str, Any]:
        """Recipe, history and results as plain JSON."""
        return {
            "recipe": asdict(self.recipe),
            "questions": len(self.questions),
            "threshold": None if self.judge is None else self.judge.threshold,
            "test": self.tested,
            "steps": self.step,
            "history": self.history,
        }


@dataclass(frozen=True)
class _Steps:
    """The budget of a run over all questions."""

    steps: int
    save_seconds: float
    minutes: float | None = None


_KEPT = ("step", "seconds", "history", "tested", "_num_fitted")


def _mean(values: Seq[bool] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else 0.0
