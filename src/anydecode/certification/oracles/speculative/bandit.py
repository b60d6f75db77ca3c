"""Oracle test of the bandit: draft lengths replayed from the rounds, with copies, and with an early
exit whose drafts follow from a forward pass of the target's first layers and the trained one."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
from ml_dtypes import bfloat16

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_lengths import latest_copy
from anydecode.certification.oracles.speculative.eagle import Cache, Drafting
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks
from anydecode.certification.oracles.speculative.rejection_rules import REPEATING, rejection_checks
from anydecode.certification.oracles.speculative.state_drafters import TargetStates
from anydecode.certification.rounds import (
    TracedRound,
    accepted,
    plain_token,
    rounds,
    scripted,
    wordy,
)
from anydecode.certification.tiny import early_exit_checkpoint, with_drafter
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network

PROMPTS = ("abcabcabd", "the cab had a bad cab", "aaaaaaaa")
MAX_DRAFTS, MEMORY = 8, 0.95
EXIT_PROMPT = "the cat sat on the cat"


@oracle_test("bandit")
def bandit() -> Iterator[Check]:
    """A draft follows another with a rate drawn from the posterior, anew for each, whose counts
    decay. Samples under the rejection rule follow the target."""
    yield from penalty_checks("bandit:control=calibration")
    for temperature in (0.0, 0.8):
        wrong, num_accepted, sizes = 0, 0, set()
        for prompt in PROMPTS:
            with scripted(wordy()) as llm:
                trace = rounds(llm, "bandit", prompt, 80, temperature=temperature)
            chosen = _replay(trace)
            wrong += sum(
                one.tokens != latest_copy(one.text, size)
                for one, size in zip(trace, chosen, strict=True)
            )
            num_accepted += sum(len(one.accepted) for one in trace)
            sizes |= set(chosen)
        yield Check(f"draft lengths equal the replay, T={temperature}", wrong == 0)
        yield Check(f"several are tried, T={temperature}", len(sizes) > 2, f"{sorted(sizes)}")
        yield Check(f"drafts are accepted, T={temperature}", num_accepted > 0, f"{num_accepted}")
    for control in ("beta", "calibration"):
        for temperature in (0.0, 0.8):
            yield from _exit_checks(control, temperature)
    yield from rejection_checks("bandit", prompt=REPEATING)


def _exit_checks(control: str, temperature: float) -> Iterator[Check]:
    """Drafts of an early exit, which is the drafter by default where there is one."""
    decoder = "bandit" if control == "beta" else "bandit:control=calibration"
    with with_drafter(early_exit_checkpoint, cache_positions=1024) as llm:
        target: Network = llm.model.network  # type: ignore[attr-defined]
        trace = rounds(llm, decoder, EXIT_PROMPT, 40, temperature=temperature)
    early_exit = early_exit_checkpoint(target)
    if control == "beta":
        wrong = 0
        for one, size in zip(trace, _replay(trace), strict=True):
            drafts = [token for token, _ in _drafts(early_exit, target, one, temperature, size)]
            wrong += one.tokens != drafts
    else:
        wrong = _calibration_errors(early_exit, target, trace, temperature)
    sizes = {len(one.tokens) for one in trace}
    where = f"early exit, {control}, T={temperature}"
    yield Check(f"drafts equal the oracle's, {where}", wrong == 0, f"{wrong} of {len(trace)}")
    yield Check(f"several lengths are tried, {where}", len(sizes) > 2, f"{sorted(sizes)}")
    yield Check(f"drafts are accepted, {where}", accepted(trace) > 5, f"{accepted(trace)}")


def _calibration_errors(
    early_exit: Checkpoint, target: Network, trace: list[TracedRound], temperature: float
) -> int:
    """Rounds whose drafts are not those of Calibration-TS: behind a draft of confidence c, the rate
    is drawn with 5 c more accepted and 5 (1 - c) more rejected drafts."""
    random, accepted_drafts, rejected, wrong = Random("5/0"), 0.0, 0.0, 0
    for one in trace:
        expected = []
        for token, confidence in _drafts(early_exit, target, one, temperature, MAX_DRAFTS):
            expected.append(token)
            if len(expected) == MAX_DRAFTS:
                break
            rate = random.betavariate(
                1 + accepted_drafts + 5 * confidence, 1 + rejected + 5 * (1 - confidence)
            )
            if random.random() >= rate:
                break
        wrong += one.tokens != expected
        is_cut = len(one.accepted) < len(one.tokens)
        accepted_drafts = MEMORY * accepted_drafts + len(one.accepted)
        rejected = MEMORY * rejected + is_cut
    return wrong


def _drafts(
    early_exit: Checkpoint, target: Network, one: TracedRound, temperature: float, count: int
) -> Iterator[tuple[int, float]]:
    """Up to `count` drafts after the text of a round, with their probabilities."""
    forward, text = ExitForward(early_exit, target), list(one.text)
    for token in text[:-1]:
        forward.step(token)
    for _ in range(count):
        logits = forward.step(text[-1])
        text.append(plain_token(logits, len(text), temperature))
        weights = np.exp(logits - logits.max())
        yield text[-1], float(weights[text[-1]] / weights.sum())


class ExitForward:
    """The first layers of a target and the trained layer, position by position."""

    def __init__(self, early_exit: Checkpoint, target: Network) -> None:
        self.layer, self.states = Drafting(early_exit, target), TargetStates(target)
        self.cache, self.after = Cache(), early_exit.config["exit_after"]
        offsets = self.layer.tensors["d2t"].astype(int)
        self.tokens, self.num_tokens = offsets + np.arange(len(offsets)), target.spec.vocab_size
        # Rows of the target's head for a part of its tokens are read in bfloat16.
        rows = target.weights.head.data[self.tokens].astype(bfloat16)
        self.head = rows.astype(np.float64)

    def step(self, token: int) -> np.ndarray:
        """The logits of all tokens behind a further one; -inf for those that the head leaves
        out."""
        self.cache.positions.append(len(self.cache.positions))
        x = self.states.states(token)[self.after]
        inputs = self.layer._norm(x, "exit_layer.input_layernorm")
        x = self.layer._layer(self.cache, 0, "exit_layer", x, inputs)
        logits = np.full(self.num_tokens, -np.inf)
        logits[self.tokens] = self.head @ self.layer._norm(x, "exit_norm")
        return logits


def _replay(trace: list[TracedRound]) -> list[int]:
    """The draft length of each round."""
    random, sizes = Random("5/0"), []
    outcomes: list[tuple[int, bool]] = []
    for one in trace:
        weights = [MEMORY**age for age in range(len(outcomes) - 1, -1, -1)]
        accepted = sum(w * n for w, (n, _) in zip(weights, outcomes, strict=True))
        rejected = sum(w for w, (_, is_cut) in zip(weights, outcomes, strict=True) if is_cut)
        # The numbers of a round that does not end early: rate, coin, rate, coin, ...
        state, coins = random.getstate(), []
        for _ in range(MAX_DRAFTS - 1):
            rate = random.betavariate(1 + accepted, 1 + rejected)
            coins.append(random.random() < rate)
        length = coins.index(False) if False in coins else len(coins)
        sizes.append(1 + length)
        random.setstate(state)
        for _ in range(min(length + 1, MAX_DRAFTS - 1)):
            random.betavariate(1 + accepted, 1 + rejected)
            random.random()
        if one.tokens:
            outcomes.append((len(one.accepted), len(one.accepted) < len(one.tokens)))
    return sizes
