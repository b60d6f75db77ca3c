"""Oracle test of specdec++ (SpecDec++, arXiv:2405.19715): the length of every chain, from the draft
model's probabilities before training and from the head's predictions after it, and what the head
learns from."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_chains import (
    DRAFT,
    PROMPTS,
    TARGET,
    chain_oracle,
)
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks
from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks
from anydecode.certification.rounds import TracedRound, accepted, rounds, scripted
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.acceptance_head import AcceptanceHead
from anydecode.decoders.speculative.specdecpp import ThresholdDrafter

Example = tuple[np.ndarray, float]


@oracle_test("specdec++")
def specdec() -> Iterator[Check]:
    """A chain ends with the first draft for which 1 - product > bound; that draft is kept. Samples
    under the paper's rejection rule follow the target."""
    yield from penalty_checks("specdec++")
    for key, bound, min_drafts, size in (
        ("specdec++", 0.7, 2, 20),
        ("specdec++:bound=0.6,min_drafts=3,size=6", 0.6, 3, 6),
    ):
        yield from _compare_chains(key, bound, min_drafts, size)
    for temperature in (0.0, 0.8):
        yield from _compare_trained(temperature)
    yield from _compare_head()
    yield from rejection_checks("specdec++")


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(float) - row.max())
    return np.asarray(weights / weights.sum())


def predict(parameters: dict[str, np.ndarray], state: np.ndarray) -> float:
    """The head's prediction for a state, in float64."""
    p = {name: value.astype(float) for name, value in parameters.items()}
    x = state.astype(float)
    x = x / np.sqrt((x * x).mean() + 1e-6)
    for _ in range(3):
        z = p["block"] @ x + p["block_bias"]
        x = x + z / (1 + np.exp(-z))
    return float(softmax(p["output"] @ x + p["output_bias"])[1])


def labels(one: TracedRound, temperature: float) -> list[float]:
    """min(1, p / q) of every draft but the last."""
    found = []
    for number, token in enumerate(one.tokens[:-1]):
        seen = (*one.text, *one.tokens[:number])
        p, q = TARGET(seen), softmax(DRAFT(seen) / (temperature or 1.0))
        share = softmax(p / temperature)[token] if temperature else float(p.argmax() == token)
        found.append(min(1.0, share / q[token]))
    return found


def _compare_trained(temperature: float) -> Iterator[Check]:
    with scripted(TARGET, DRAFT) as llm:
        decoder = llm.decoder("specdec++")
        assert isinstance(decoder, Speculative) and isinstance(decoder.drafter, ThresholdDrafter)
        online = decoder.drafter.online
        taken: list[Example] = []
        add = online.add

        def take(hidden: np.ndarray, label: float) -> None:
            taken.append((hidden, label))
            add(hidden, label)

        online.add = take  # type: ignore[method-assign]
        wrong, wrong_lengths, lengths, num_trained = 0, 0, set(), 0
        wrong_steps, num_steps, num_new = 0, 0, 0
        for prompt in PROMPTS * 2:
            taken.clear()
            head = None if online.head is None else online.head.parameters
            before = None if head is None else {name: x.copy() for name, x in head.items()}
            trace = [one for one in rounds(llm, decoder, prompt, temperature=temperature)]
            expected = [label for one in trace for label in labels(one, temperature)]
            found = [label for _, label in taken]
            wrong += len(found) != len(expected) or not np.allclose(found, expected, atol=1e-4)
            num_new += len(expected)
            if num_new >= 32:  # 16 steps at the end of a text, once there are 32 new examples
                num_steps, num_new = num_steps + 16, 0
            wrong_steps += num_steps != (0 if online.head is None else online.head.adam.num_steps)
            tokens = [token for one in trace for token in one.tokens[:-1]]
            wrong += [int(state[0]) for state, _ in taken] != tokens
            if before is None:
                continue
            states = iter(taken)
            for one in trace:
                product, num_trained = 1.0, num_trained + 1
                for number in range(1, len(one.tokens) + 1):
                    if number > 1:
                        product *= predict(before, next(states)[0])
                    ends = number == 20 or (number >= 2 and 1 - product > 0.7)
                    wrong_lengths += ends != (number == len(one.tokens)) and bool(one.tokens)
                lengths.add(len(one.tokens))
        decoder.drafter.clear()
        is_clear = online.head is None and not online.examples
    about = f"specdec++ at T={temperature}, trained"
    yield Check(f"{about}: it learns min(1, p / q) of the drafts that were fed", wrong == 0)
    yield Check(f"{about}: it learns when it should", wrong_steps == 0, f"{num_steps} steps")
    yield Check(f"{about}: chains end by the head's predictions", wrong_lengths == 0)
    yield Check(f"{about}: chains differ in length", len(lengths) > 1, f"{sorted(lengths)}")
    yield Check(f"{about}: most rounds have a head", num_trained > 10, f"{num_trained}")
    yield Check(f"{about}: `clear` forgets it", is_clear)


def _compare_head() -> Iterator[Check]:
    """The loss counts rejections six times, and the head learns which states are rejected."""
    random = np.random.default_rng(3)
    states = random.standard_normal((64, 8)).astype(np.float32)
    is_accepted = (states[:, 0] > 0).astype(np.float32)
    head = AcceptanceHead(8, 0.01)
    share = np.array([predict(head.parameters, state) for state in states])
    weights = 6 * (1 - is_accepted) + is_accepted
    logs = is_accepted * np.log(share) + 6 * (1 - is_accepted) * np.log(1 - share)
    losses = head.train(states, is_accepted, 80)
    expected = -logs.sum() / weights.sum()
    yield Check("the loss is that of the paper", abs(losses[0] - expected) < 1e-4, f"{losses[0]}")
    found = head(states)
    gap = float(found[is_accepted == 1].mean() - found[is_accepted == 0].mean())
    yield Check("the head learns what is accepted", gap > 0.5 and losses[-1] < 0.3, f"{gap:.2f}")


def _compare_chains(key: str, bound: float, min_drafts: int, size: int) -> Iterator[Check]:
    """Before the head has learned."""
    lengths = set()
    # At temperature 0.2 the draft model is confident, so chains reach the maximum length.
    for temperature in (0.0, 0.8, 0.2):
        wrong, num_accepted = 0, 0
        for prompt in PROMPTS:
            with scripted(TARGET, DRAFT) as llm:
                trace = rounds(llm, key, prompt, temperature=temperature)
                for one in trace:
                    full = chain_oracle(one.text, size, temperature)
                    product, length = 1.0, 0
                    while length < size:
                        row = DRAFT((*one.text, *full[:length])).astype(float) / (temperature or 1)
                        q = np.exp(row - row.max())
                        product *= q[full[length]] / q.sum()
                        length += 1
                        if length >= min_drafts and 1 - product > bound:
                            break
                    wrong += one.tokens != full[:length]
                    lengths.add(length)
                num_accepted += accepted(trace)
        yield Check(f"{key} at T={temperature} equals the oracle", wrong == 0)
        yield Check(
            f"{key} at T={temperature}: drafts are accepted", num_accepted > 0, f"{num_accepted}"
        )
    yield Check(
        f"{key}: chains of the minimum, the maximum and other lengths occur",
        {min_drafts, size} < lengths,
        f"{sorted(lengths)}",
    )
