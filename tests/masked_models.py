"""A small model with a mask token."""

from __future__ import annotations

from typing import Any

from anydecode.api.llm import LLM
from anydecode.certification.tiny import readable_executor, tiny_network
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.transformer import Transformer


def tiny_masked_llm(**options: Any) -> LLM:
    """A transformer over bytes in which four letters and digits are likely behind every token,
    masks included, so that some drafts are accepted."""
    network = tiny_network()
    embedding, head = network.weights.embedding.data, network.weights.head.data
    embedding[:, 0] = 2.0
    head[[97, 101, 48, 49], 0] += 3.0
    executor = readable_executor(options.pop("backend", None))
    model = Transformer(network, name="tiny", executor=executor)
    return LLM(
        model,
        tokenizer=ByteTokenizer(),
        **{"cache_positions": 2048, "drafting": "fixed", **options},
    )
