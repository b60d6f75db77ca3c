"""Oracle test of transfer-q (Chakraborty et al., arXiv:2405.20495): every token by brute force with
each continuation from the first token, and the law of samples without continuations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import Text, fit
from anydecode.certification.oracles.scripted_rows import log_softmax, logits_after
from anydecode.certification.oracles.search.beam import ShortTokenizer
from anydecode.certification.oracles.search.deal import (
    END,
    PROMPT,
    flat_model,
    is_over,
    share_of_twos,
    share_reward,
)
from anydecode.decoders.search.transfer_q import TransferQ
from anydecode.models.scripted import ScriptedModel
from anydecode.sampling.noise import Noise

LIMIT = 10


def mixed_confidence(
    target: ScriptedModel, other: ScriptedModel, text: list[int], at: int
) -> float:
    """The geometric mean of the probabilities of the tokens: under the target up to number `at`,
    and under the model that continues from there."""
    logs = []
    for i, token in enumerate(text):
        model = target if i <= at else other
        logs.append(log_softmax(logits_after(model, PROMPT + text[:i]))[token])
    return float(np.exp(np.mean(logs)))


def transfer_oracle(
    target: ScriptedModel,
    other: ScriptedModel,
    setting: dict[str, Any],
    temperature: float,
    noise: Noise,
) -> list[int]:
    """The text, each token by brute force."""
    text: list[int] = []

    def next_token(model: ScriptedModel, seen: list[int], own: Noise) -> int:
        row = logits_after(model, PROMPT + seen).astype(np.float64)
        if temperature == 0:
            return int(row.argmax())
        keys = row / temperature + own.gumbel(range(len(row)), len(PROMPT) + len(seen))
        return int(keys.argmax())

    def value(ahead: list[int]) -> float:
        if setting["reward"] == "confidence":
            return mixed_confidence(target, other, ahead, len(text))
        reward = share_of_twos(target, ahead)
        if not setting["indirect"]:
            return reward
        source = len([token for token in ahead if token != END]) / 10
        return float(np.exp(0.5 * (reward - source)) * reward)

    while not is_over(text, LIMIT):
        logs = log_softmax(logits_after(target, PROMPT + text))
        k = min(setting["k"], len(logs))
        totals = np.full(len(logs), -np.inf)
        for number, token in enumerate(sorted(range(len(logs)), key=lambda t: (-logs[t], t))[:k]):
            stream = 1 + (len(text) * setting["k"] + number) % 4095
            own = noise.with_purpose("search").forked(stream)
            ahead = [*text, token]
            while len(ahead) <= len(text) + setting["length"] and not is_over(ahead, LIMIT):
                ahead.append(next_token(other, ahead, own))
            totals[token] = logs[token] + setting["weight"] * value(ahead)
        if temperature:
            gumbel = noise.gumbel(range(len(logs)), len(PROMPT) + len(text))
            totals = totals / temperature + gumbel
        text.append(int(totals.argmax()))
    return text


def lengths(prompt: str, texts: list[str]) -> list[float]:
    """A tenth of the number of tokens."""
    return [len(text) / 10 for text in texts]


@oracle_test("transfer-q")
def transfer_q() -> Iterator[Check]:
    """The oracle's texts with and without an aligned model; greedy decoding without a reward; and
    the law of samples without continuations."""
    default = {"k": 10, "length": 20, "weight": 1.0, "reward": "confidence", "indirect": False}
    shares = {"k": 3, "length": 3, "weight": 4.0, "reward": "share", "indirect": False}
    settings: dict[str, tuple[Any, dict[str, Any]]] = {
        "the default build": ("transfer-q", default),
        "a weight of 10": ("transfer-q:weight=10", {**default, "weight": 10.0}),
        "direct": (TransferQ(3, 3, 4.0, share_reward), shares),
        "indirect": (TransferQ(3, 3, 4.0, share_reward, lengths), {**shares, "indirect": True}),
    }
    for has_other in (False, True):
        for name, (decoder, setting) in settings.items():
            wrong = changed = 0
            for seed in range(12):
                target = flat_model(seed)
                other = flat_model(seed + 50) if has_other else target
                draft: dict[str, Any] = {"draft": other} if has_other else {}
                temperature = (0.0, 0.8)[seed % 2]
                options: dict[str, Any] = {"temperature": temperature, "seed": seed}
                with LLM(target, tokenizer=ShortTokenizer(), cache_positions=2048, **draft) as llm:
                    found, plain = (
                        llm.generate(PROMPT, decoder=one, max_tokens=LIMIT, **options).tokens
                        for one in (decoder, "autoregressive")
                    )
                wrong += found != transfer_oracle(target, other, setting, temperature, Noise(seed))
                changed += found != plain
            detail = f"{wrong} of 12 wrong, {changed} not plain decoding"
            which = "with an aligned model" if has_other else "alone"
            yield Check(f"{name}, {which}, equals the oracle", wrong == 0 < changed, detail)
    model = flat_model(3)
    with LLM(model, tokenizer=ShortTokenizer(), cache_positions=2048) as llm:
        greedy = llm.generate(PROMPT, decoder="autoregressive", max_tokens=LIMIT).tokens
        text = llm.generate(PROMPT, decoder="transfer-q:weight=0", max_tokens=LIMIT).tokens
        yield Check("weight=0 is greedy decoding", text == greedy)
        one_token = TransferQ(4, 0, 3.0, share_reward)
        samples = llm.generate(
            PROMPT, decoder=one_token, n=400, seed=6, temperature=0.8, max_tokens=3
        ).samples
        result = fit([tuple(one.tokens) for one in samples], law(model, 3.0, 0.8))
        yield Check("law of samples, nothing continued", result.passed, str(result))


def law(model: ScriptedModel, weight: float, temperature: float) -> dict[Text, float]:
    """The law of texts of up to three tokens whose tokens follow softmax((ln p + weight * r) /
    temperature), with the reward of the text with the token."""
    texts: dict[Text, float] = {(): 1.0}
    for _ in range(3):
        grown: dict[Text, float] = defaultdict(float)
        for text, probability in texts.items():
            if text[-1:] == (END,):
                grown[text] += probability
                continue
            logs = log_softmax(logits_after(model, [*PROMPT, *text]))
            values = [share_of_twos(model, [*text, token]) for token in range(len(logs))]
            weights = np.exp((logs + weight * np.array(values)) / temperature)
            for token, one in enumerate(weights / weights.sum()):
                longer = (*text, token)
                grown[longer] += probability * float(one)
        texts = grown
    return dict(texts)


@measure("transfer-q", "reward lost against sampling", samples=24, margin=-0.15)
def transfer_gain(samples: int) -> float:
    """The mean share of one token in samples, less that with this reward."""
    losses = []
    for seed in range(samples):
        model = flat_model(seed)
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": LIMIT}
        with LLM(model, tokenizer=ShortTokenizer(), cache_positions=2048) as llm:
            values = [
                share_of_twos(model, llm.generate(PROMPT, decoder=decoder, **options).tokens)
                for decoder in ("autoregressive", TransferQ(weight=4.0, reward=share_reward))
            ]
        losses.append(values[0] - values[1])
    return float(np.mean(losses))
