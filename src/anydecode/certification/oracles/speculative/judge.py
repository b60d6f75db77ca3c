"""Oracle test of judge (arXiv:2501.19309): every round follows from the logits and the last states
of a forward pass position by position, also with a judge of both models' states (arXiv:2504.20039),
and with a judge that accepts nothing samples follow the target under the rejection rule."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.speculative.mtp_future import small_script
from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks
from anydecode.certification.oracles.speculative.state_drafters import TargetStates
from anydecode.certification.rounds import TracedRound, plain_token, rounds
from anydecode.certification.tiny_judge import (
    judged_model,
    judged_network,
    random_judge,
    small_judged_model,
)
from anydecode.models.network import Network

PROMPTS = ("the cat sat on the cat", "a quick zebra", "h")


class Read:
    """A model that has read a text, which may be cut and continued."""

    def __init__(self, network: Network) -> None:
        self.model, self.text, self.last = TargetStates(network), list[int](), list[np.ndarray]()

    def state(self, text: list[int]) -> np.ndarray:
        """The last state at the end of a text, after the final norm."""
        same = 0
        while same < min(len(text), len(self.text)) and text[same] == self.text[same]:
            same += 1
        for stored in (*self.model.keys, *self.model.values, self.last):
            del stored[same:]
        for token in text[same:]:
            self.last.append(self.model.normed(self.model.states(token)[-1]))
        self.text = list(text)
        return self.last[-1]

    def logits(self, text: list[int]) -> np.ndarray:
        """The logits behind a text."""
        logits: np.ndarray = self.model.weights.head.data @ self.state(text)
        return logits


class Rounds:
    """The expected rounds.

    Args:
        reads_draft: Whether the judge reads the draft model's states too.

    Attributes:
        num_judged: Drafts that the judge alone accepted.
        num_sampled: Drafts that it would have rejected, but the target samples.
        num_rejected: Drafts that were rejected.
    """

    def __init__(self, reads_draft: bool = False) -> None:
        network, draft = judged_network(), judged_network(2)
        self.target, self.draft = Read(network), Read(draft)
        self.judge = random_judge(network, draft if reads_draft else None)
        self.num_judged = self.num_sampled = self.num_rejected = 0

    def logit(self, text: list[int]) -> float:
        """What the judge makes of the last token of a text."""
        logit = self.judge.weights.astype(np.float64) @ self.target.state(text) + self.judge.bias
        if self.judge.draft_weights is not None:
            logit += self.judge.draft_weights.astype(np.float64) @ self.draft.state(text)
        return float(logit)

    def is_right(self, text: list[int], threshold: float) -> bool:
        """Whether the judge accepts the last token of a text."""
        return bool(1 / (1 + np.exp(-self.logit(text))) > threshold)

    def equal(self, one: TracedRound, size: int, threshold: float, temperature: float) -> bool:
        """Whether a round drafts so many tokens, keeps the first ones that either rule accepts, and
        samples one behind them."""
        text = list(one.text)
        drafts = list[int]()
        for _ in range(size):
            seen = [*text, *drafts]
            drafts.append(plain_token(self.draft.logits(seen), len(seen), temperature))
        kept = list[int]()
        for draft in drafts:
            seen = [*text, *kept]
            is_sampled = draft == plain_token(self.target.logits(seen), len(seen), temperature)
            is_right = self.is_right([*seen, draft], threshold)
            self.num_judged += is_right and not is_sampled
            self.num_sampled += is_sampled and not is_right
            if not (is_sampled or is_right):
                self.num_rejected += 1
                break
            kept.append(draft)
        seen = [*text, *kept]
        following = plain_token(self.target.logits(seen), len(seen), temperature)
        return (
            one.tokens == drafts
            and len(one.accepted) == len(kept)
            and one.generated == [*kept, following][: len(one.generated)]
            and len(one.generated) > len(kept)
        )


@oracle_test("judge")
def judge() -> Iterator[Check]:
    """Rounds equal the oracle's; the rejection rule without a judge is exact."""
    for key, size, threshold, reads_draft in (
        ("judge", 25, 0.7, False),
        ("judge:size=5,threshold=0.5", 5, 0.5, False),
        ("judge:threshold=0.9", 25, 0.9, True),
    ):
        for temperature in (0.0, 0.8):
            oracle, wrong = Rounds(reads_draft), 0
            about = f"{key}{' of both states' if reads_draft else ''} at T={temperature}"
            for prompt in PROMPTS:
                with judged_model(prefix_cache=False, reads_draft=reads_draft) as llm:
                    trace = rounds(llm, key, prompt, 90, temperature=temperature)
                # The last one may be shortened by the limit of tokens.
                wrong += not all(
                    oracle.equal(one, size, threshold, temperature)
                    for one in trace
                    if len(one.text) + size < len(trace[0].text) + 90
                )
            yield Check(f"{about}: rounds equal the oracle's", wrong == 0)
            for name, count in (
                ("the judge alone accepts drafts", oracle.num_judged),
                ("drafts are accepted that the judge would reject", oracle.num_sampled),
                ("drafts are rejected", oracle.num_rejected),
            ):
                yield Check(f"{about}: {name}", count > 2, str(count))
    yield from rejection_checks("judge", small_judged_model, script=small_script(), threshold=1.0)


@measure("judge", "share of tokens that neither rule accepts", samples=120, margin=0.0)
def judge_loss(samples: int) -> float:
    """Measured at temperature 0, over `samples` tokens."""
    with judged_model() as llm:
        prompt = llm.encode(PROMPTS[0])
        answer = llm.generate(
            prompt, decoder="judge", max_tokens=samples, temperature=0.0, ignore_eos=True
        )
    tokens = answer.tokens
    oracle, wrong = Rounds(), 0
    for number, token in enumerate(tokens):
        text = [*prompt, *tokens[:number]]
        is_plain = token == int(oracle.target.logits(text).argmax())
        wrong += not (is_plain or oracle.is_right([*text, token], 0.7))
    return wrong / len(tokens)
