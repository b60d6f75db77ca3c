"""What a speculative method drafted, round by round, for tests of mechanisms: scripted targets whose
logits anyone can recompute, and the trace of a generation as plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anydecode.engine.llm import LLM
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

VOCABULARY = 259

Logits = Callable[[tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Drafted:
    """One round: the text before it (prompt included), the draft tree, the nodes kept and the
    tokens said."""

    text: list[int]
    tokens: list[int]
    parents: list[int]
    accepted: list[int]
    said: list[int]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """The token path of each node."""
        found: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        return found


def wordy(seed: int = 0, spread: float = 2.5) -> Logits:
    """Pseudo-random logits that follow the last two tokens, over 12 letters mostly, so that texts
    repeat themselves. Every other token is unlikely."""
    rows: dict[tuple[int, ...], np.ndarray] = {}

    def logits(seen: tuple[int, ...]) -> np.ndarray:
        key = seen[-2:]
        if key not in rows:
            row = np.random.default_rng((seed, *key)).normal(size=VOCABULARY)
            row[97:109] += spread
            rows[key] = (spread * row).astype(np.float32)
        return rows[key]

    return logits


def scripted(logits: Logits, draft: Logits | None = None, **options: Any) -> LLM:
    """An engine over these logits, with a draft model if given."""
    small = None if draft is None else ScriptedModel(draft, vocab_size=VOCABULARY)
    return LLM(
        ScriptedModel(logits, vocab_size=VOCABULARY),
        tokenizer=ByteTokenizer(),
        draft=small,
        cache_positions=4096,
        prefix_cache=False,
        **options,
    )


def rounds(
    llm: LLM, decoder: Any, prompt: str | Seq[int], max_tokens: int = 48, **options: Any
) -> list[Drafted]:
    """The rounds of one generation, recomputed from its trace."""
    options = {"seed": 5, "ignore_eos": True, **options}
    answer = llm.generate(
        prompt, decoder=decoder, max_tokens=max_tokens, trace=True, **options
    )
    text = llm.encode(prompt) + answer.tokens
    return [
        Drafted(
            text[: entry["position"]],
            entry["drafted"],
            entry["parents"],
            entry["accepted"],
            entry["tokens"],
            entry,
        )
        for entry in answer.trace
    ]


def accepted(found: Seq[Drafted]) -> int:
    """How many drafts were kept."""
    return sum(len(one.accepted) for one in found)
