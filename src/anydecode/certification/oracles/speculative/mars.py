"""Oracle test of mars (arXiv:2604.07023): the tokens that every pass keeps, from the
logits of the text and of the masks behind it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import PROMPT, VOCABULARY, bigram_logits
from anydecode.certification.oracles.speculative.mask_groups import BLURRED, PROMPTS, TARGET
from anydecode.certification.oracles.speculative.rejection_rules import MaskTokenizer
from anydecode.certification.rounds import TracedRound, plain_token, rounds, scripted
from anydecode.models.scripted import MASK, ScriptedModel

LENGTH = 48


def logits(seen: tuple[int, ...]) -> np.ndarray:
    """Logits of a target whose masks are often sure: those of the text with its most probable
    tokens in place of the masks, with an error; the mask itself is the most probable token."""
    text = [token for token in seen if token != MASK]
    if len(text) == len(seen):
        return 2 * TARGET(seen)
    for _ in range(len(seen) - len(text)):
        text.append(int(TARGET(tuple(text)).argmax()))
    row: np.ndarray = 2 * BLURRED(tuple(text))
    row[MASK] = 60.0
    return row


@oracle_test("mars")
def mars() -> Iterator[Check]:
    """The tokens of every pass equal the oracle's, for each metric."""
    for key, block, threshold, metric in (
        ("mars", 4, 0.95, "probability"),
        ("mars:block=3,threshold=0.6", 3, 0.6, "probability"),
        ("mars:threshold=0.8,metric=margin", 4, 0.8, "margin"),
        ("mars:threshold=0.3,metric=entropy", 4, 0.3, "entropy"),
    ):
        for temperature in (0.0, 0.8):
            with scripted(logits) as llm:
                found = [
                    rounds(llm, key, prompt, LENGTH, temperature=temperature) for prompt in PROMPTS
                ]
            every = [one for trace in found for one in trace]
            equal = all(
                _kept(trace, one, block, threshold, metric, temperature) == one.generated
                and one.tokens == [MASK] * (_size(trace, one, block) - 1)
                for trace in found
                for one in trace
            )
            about = f"{key}, T={temperature}"
            yield Check(f"{about}: kept tokens equal the oracle's", equal)
            counts = {len(one.generated) for one in every}
            yield Check(f"{about}: passes keep one token or several", len(counts) > 1, f"{counts}")


def _size(trace: list[TracedRound], one: TracedRound, block: int) -> int:
    """The maximum number of tokens of a pass."""
    return min(block, LENGTH - len(one.text) + len(trace[0].text))


def _kept(
    trace: list[TracedRound],
    one: TracedRound,
    block: int,
    threshold: float,
    metric: str,
    temperature: float,
) -> list[int]:
    kept: list[int] = []
    for number in range(_size(trace, one, block)):
        row = logits((*one.text, *[MASK] * number)).copy()
        if number:
            row[MASK] = -np.inf
        token = plain_token(row, len(one.text) + number, temperature)
        p = np.exp(row.astype(np.float64))
        p /= p.sum()
        ranked = sorted(p)
        is_sure = {
            "probability": p[token] >= threshold,
            "margin": ranked[-1] - ranked[-2] >= threshold,
            "entropy": -sum(x * np.log(x) for x in ranked if x) <= threshold,
        }[metric]
        if number and not is_sure:
            break
        kept.append(token)
    return kept


@measure("mars", "log-likelihood lost per token", samples=60, margin=0.3)
def loss(samples: int) -> float:
    """See `likelihood_lost`."""
    return likelihood_lost("mars", samples)


def likelihood_lost(decoder: str, samples: int) -> float:
    """Nats per token by which the text of plain sampling is more probable under the target than
    that of `decoder`, where masks predict the exact distributions of their tokens."""
    return _likelihood("autoregressive", samples) - _likelihood(decoder, samples)


def _likelihood(decoder: str, samples: int) -> float:
    """Mean log-probability under the target of sampled tokens, over `samples` texts of 16."""
    with marginal_llm() as llm:
        answer = llm.generate(
            PROMPT, decoder=decoder, n=samples, temperature=1.0, seed=2, max_tokens=16,
            ignore_eos=True,
        )  # fmt: skip
    total = 0.0
    for sample in answer.samples:
        text = list(PROMPT)
        for token in sample.tokens:
            total += np.log(_marginal(tuple(text), 0)[token])
            text.append(token)
    return float(total) / (16 * samples)


def marginal_llm() -> LLM:
    """A target over five tokens and a mask. Behind the text and several masks, its distribution is
    that of the next token after as many unknown ones."""

    def logits(seen: tuple[int, ...]) -> np.ndarray:
        text = tuple(token for token in seen if token < VOCABULARY)
        row = np.log(_marginal(text, len(seen) - len(text)))
        return np.append(row, -np.inf).astype(np.float32)

    target = ScriptedModel(logits, vocab_size=VOCABULARY + 1)
    return LLM(target, tokenizer=MaskTokenizer(), cache_positions=4096)


SURE = bigram_logits(VOCABULARY, 4, spread=8.0)


def _marginal(text: tuple[int, ...], unknown: int) -> np.ndarray:
    """The distribution of the next token after `text` and `unknown` further tokens."""
    row = SURE(text).astype(np.float64)
    p: np.ndarray = np.exp(row - row.max())
    p /= p.sum()
    if not unknown:
        return p
    rest = [_marginal((*text[-1:], token), unknown - 1) for token in range(VOCABULARY)]
    return np.asarray(p @ np.array(rest))
