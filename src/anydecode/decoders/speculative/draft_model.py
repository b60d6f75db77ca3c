"""Drafting with a smaller model: the runner "draft", chains of its tokens, and `ModelDrafter`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.draft_candidates import draft_token, fit_vocab
from anydecode.decoders.framework.sampled_chains import distribution_list, sampled_chain
from anydecode.decoders.framework.speculation import Drafter, DraftSession, Proposal
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import DRAFT, TARGET, Sequence

#: What drafters learn that `anydecode train drafter` makes, for cards.
LEARNED = (
    "anydecode train drafter learns the target's distributions on the model's own answers, by KL"
    " divergence where few drafts would be accepted and by total variation where most would"
    " (arXiv:2602.23881)"
)


class _Session(DraftSession):
    learns_without_drafts = False

    def __init__(self, sequence: Sequence, rule: Acceptance | None, runner: str) -> None:
        self.sequence = sequence
        self.rule = rule
        self.runner = runner

    def propose(self, size: int) -> Proposal:
        sequence = self.sequence
        sequence.align(self.runner)
        # At temperature 0 they are single tokens; without them one pass may draft several tokens.
        distributions = None if sequence.sampler.is_greedy else distribution_list(self.rule)
        drafts = yield from draft_chain(
            sequence, [], size, self.runner, distributions=distributions
        )
        return sampled_chain(drafts, distributions)


def draft_chain(
    sequence: Sequence,
    prefix: list[int],
    size: int,
    runner: str = DRAFT,
    distributions: list[np.ndarray] | None = None,
    should_stop: Callable[[Sampler, np.ndarray, int], bool] | None = None,
    probabilities: list[float] | None = None,
    min_probability: float = 0.0,
    states: list[np.ndarray] | None = None,
) -> Generator[DecoderAction, Any, list[int]]:
    """Draft a chain of up to `size` tokens with `runner`, one pass per token, or all of them in one
    multi-step pass where the backend can sample them.

    Tokens are sampled by the sequence's sampler with the target's noise. The runner's cache must
    hold a prefix of the sequence's tokens and `prefix`.

    Args:
        sequence: The sequence to draft for.
        prefix: Tokens that follow the sequence's own, before the drafts.
        size: Maximum number of drafts.
        runner: Name of the model runner that drafts.
        distributions: If given, the distribution of each draft is appended, float64 `[vocab_size]`.
        should_stop: Called with (sampler, logits, token) of each draft; True ends the chain after
            it.
        probabilities: If given, the probability of each draft at temperature 1 is appended.
        min_probability: The product of these below which the chain ends.
        states: If given, the runner's last hidden state before each draft is appended, float32
            `[hidden_size]`.
    """
    sampler = sequence.sampler.fork()
    for given in prefix:
        sampler.advance(given)
    tokens = sequence.all_tokens + prefix
    drafts: list[int] = []
    path_probability = 1.0
    draft_spec, target_spec = (sequence.model(name).spec for name in (runner, TARGET))
    needs_rows = (
        distributions is not None
        or should_stop is not None
        or states is not None
        or draft_spec.vocab_size > target_spec.vocab_size
    )
    while len(drafts) < size and path_probability >= min_probability:
        kv_cache = sequence.kv_cache(runner)
        request = sequence.score(
            (tokens + drafts)[kv_cache.length :],
            runner=runner,
            extra_tokens=0 if needs_rows else size - len(drafts) - 1,
            min_probability=min_probability,
            hidden=() if states is None else (draft_spec.num_layers,),
        )
        scores = yield request
        if request.multi_step_probabilities:  # else the backend has run one step
            if probabilities is not None:
                probabilities += request.multi_step_probabilities
            return drafts + request.multi_step_tokens
        row = fit_vocab(sequence, scores.row(-1))
        if states is not None:
            states.append(scores.hidden[draft_spec.num_layers][-1].copy())
        token = draft_token(sequence, sampler, row, len(tokens) + len(drafts))
        if token is None:
            break
        if distributions is not None:
            distributions.append(sampler.distribution(row).dense(len(row)))
        if probabilities is not None:
            probabilities.append(_probability(row, token))
            path_probability *= probabilities[-1]
        is_last = should_stop is not None and should_stop(sampler, row, token)
        sampler.advance(token)
        drafts.append(token)
        if is_last:
            break
    return drafts


def _probability(row: np.ndarray, token: int) -> float:
    """The probability of a token at temperature 1."""
    weights = np.exp(row - row.max())
    return float(weights[token] / weights.sum())


class ModelDrafter(Drafter):
    """Drafts a chain with a draft model.

    Args:
        rule: The acceptance rule that the drafts are for; None: `TokenExact`.
        runner: The model runner of the draft model.
    """

    requirements = Requirements(runners=(DRAFT,), reads_states=True)

    def __init__(self, rule: Acceptance | None = None, runner: str = DRAFT) -> None:
        self.rule = rule
        self.runner = runner

    def on(self, runner: str) -> Drafter:
        return ModelDrafter(self.rule, runner)

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self.rule, self.runner)


def truncate_to_prefix(kv_cache: SequenceCache, text: list[int]) -> None:
    """Truncate the cache to its common prefix with `text`, at most all of `text` but the last
    token.
    """
    kv_cache.discard()
    cached = kv_cache.tokens
    num_common = min(len(cached), len(text) - 1)
    if cached[:num_common] != text[:num_common]:
        num_common = next(i for i in range(num_common) if cached[i] != text[i])
    if kv_cache.length > num_common:
        kv_cache.truncate(num_common)
