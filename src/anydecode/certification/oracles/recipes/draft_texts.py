"""What the oracles of recipes for draft models share: distributions at the tokens of texts, and the
text that a draft model must not change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, equal_tokens
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.certification.oracles.transformer import softmax
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network

TARGET = "tiny-autoregressive"
#: A prompt and its answer.
Pair = tuple[list[int], list[int]]


def opened(model: str | Path) -> Network:
    """A model, with numbers of single precision."""
    return load_network(load_checkpoint(model), "float32")


def distributions(network: Network, tokens: Sequence[int]) -> np.ndarray:
    """The distribution behind each of `tokens`, float64 `[tokens, vocab_size]`."""
    passes = Forward(network)
    return np.stack([softmax(passes.step(token)) for token in tokens])


def log_loss(network: Network, pairs: Sequence[Pair]) -> float:
    """Minus the logarithm of the probability of the answers' tokens: the mean over the tokens of
    each, and the mean of these. The first token of a text without a prompt is given."""
    means = []
    for prompt, answer in pairs:
        text, first = [*prompt, *answer], max(1, len(prompt))
        rows = distributions(network, text[:-1])[first - 1 :]
        losses = [-math.log(row[token]) for row, token in zip(rows, text[first:], strict=True)]
        means.append(sum(losses) / len(losses))
    return sum(means) / len(means)


def drafted_text(draft: Path, prompts: Sequence[list[int]], **options: Any) -> Check:
    """The target's texts with a draft model equal those of plain decoding."""
    with LLM(TARGET, draft=draft) as llm:
        plain, drafted = (
            [llm.generate(prompt, decoder=decoder, **options).tokens for prompt in prompts]
            for decoder in ("autoregressive", "speculative-sampling")
        )
    return equal_tokens("the text is that of plain decoding", drafted, plain)
