"""Tiny models with a random judge of their states, and their first layers as the draft model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.chi_square import DRAFT_SCRIPT, VOCABULARY
from anydecode.certification.tiny import readable_executor, tiny_network
from anydecode.certification.tiny_future import SmallTokenizer, small_future_network
from anydecode.models.exit_files import model_fingerprint
from anydecode.models.judge import Judge
from anydecode.models.network import Network
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.models.transformer import Transformer


def judged_network(layers: int = 4) -> Network:
    """A random Llama over bytes, whose first layers often predict its tokens."""
    network = tiny_network(layers=layers, residual=0.3)
    network.weights.embedding.data[:, 0] = 2.0
    network.weights.head.data[97:109, 0] += 2.0
    return network


def random_judge(network: Network, draft: Network | None = None) -> Judge:
    """A judge that accepts about every third token. With `draft` it reads the states of that draft
    model too."""
    random = np.random.default_rng(6)
    weights = random.standard_normal(network.spec.hidden_size, np.float32) / 4
    judge = Judge(weights, 0.25, 0.7, model_fingerprint(network))
    if draft is None:
        return judge
    weights = random.standard_normal(draft.spec.hidden_size, np.float32) / 4
    return replace(judge, draft_weights=weights, draft_fingerprint=model_fingerprint(draft))


def with_judge(network: Network, backend: str | None = None) -> Transformer:
    """The model of `network` with a judge."""
    model = Transformer(network, name="tiny", executor=readable_executor(backend))
    model.judge = random_judge(network)
    return model


def judged_model(*, reads_draft: bool = False, **options: Any) -> LLM:
    """An engine over `judged_network` with a judge, which may read the draft model's states too;
    `options` are those of `LLM`."""
    backend = options.pop("backend", None)
    model, network = with_judge(judged_network(), backend), judged_network(2)
    draft = Transformer(network, name="draft", executor=readable_executor(backend))
    if reads_draft:
        model.judge = random_judge(judged_network(), network)
    options = {"draft": draft, "cache_positions": 4096, "drafting": "fixed", **options}
    return LLM(model, tokenizer=ByteTokenizer(), **options)


def small_judged_model() -> LLM:
    """An engine over `small_future_network` with a judge."""
    draft = ScriptedModel(DRAFT_SCRIPT, vocab_size=VOCABULARY)
    model = with_judge(small_future_network())
    return LLM(model, tokenizer=SmallTokenizer(), draft=draft, cache_positions=8192)
