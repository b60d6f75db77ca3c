"""The rounds of a speculative method as plain data, for oracle tests: scripted targets whose logits
a test can recompute, and the trace of a generation."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.engine.model_runner import ModelRunner
from anydecode.engine.plan import Plan
from anydecode.models.scripted import ByteTokenizer, ScriptedModel, normal_row
from anydecode.sampling.noise import Noise

VOCABULARY = 259

Logits = Callable[[tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class TracedRound:
    """One round: the text before it (prompt included), the draft tree, the accepted nodes and the
    generated tokens. `facts` is the whole trace entry."""

    text: list[int]
    tokens: list[int]
    parents: list[int]
    accepted: list[int]
    generated: list[int]
    entry: dict[str, Any] = field(default_factory=dict)

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """The tokens from the root to each node."""
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return paths


def wordy(seed: int = 0, spread: float = 2.5, echo: int = 0) -> Logits:
    """Pseudo-random logits that depend on the last two tokens. Twelve letters are likely, so that
    texts repeat themselves; all other tokens are unlikely. With `echo`, the token that many
    positions back is likely too, so that texts copy themselves with edits."""
    rows: dict[tuple[int, ...], np.ndarray] = {}

    def logits(seen: tuple[int, ...]) -> np.ndarray:
        key = seen[-2:]
        if key not in rows:
            fresh = normal_row((seed, *key)).copy()
            fresh[97:109] += spread
            rows[key] = (spread * fresh).astype(np.float32)
        if not 0 < echo <= len(seen):
            return rows[key]
        row: np.ndarray = rows[key].copy()
        row[seen[-echo]] += 3 * spread
        return row

    return logits


def blurred(logits: Logits, seed: int = 9, error: float = 1.5) -> Logits:
    """Logits of a draft model: `logits` with a pseudo-random error."""

    def draft(seen: tuple[int, ...]) -> np.ndarray:
        noise = normal_row((seed, *seen[-3:]))
        row: np.ndarray = logits(seen) + (error * noise).astype(np.float32)
        return row

    return draft


def scripted(logits: Logits, draft: Logits | Seq[Logits] = (), **options: Any) -> LLM:
    """An engine over these logits, with draft models of the logits `draft`. Each request drafts as
    its method says."""
    drafts = [draft] if callable(draft) else draft
    return LLM(
        ScriptedModel(logits, vocab_size=VOCABULARY),
        tokenizer=ByteTokenizer(),
        draft=[ScriptedModel(one, vocab_size=VOCABULARY) for one in drafts],
        cache_positions=4096,
        prefix_cache=False,
        drafting="fixed",
        **options,
    )


def rounds(
    llm: LLM, decoder: Any, prompt: str | Seq[int], max_tokens: int = 48, **options: Any
) -> list[TracedRound]:
    """The rounds of one generation, from its trace."""
    (trace,) = traced_rounds(llm, decoder, [prompt], max_tokens, **options)
    return trace


def traced_rounds(
    llm: LLM, decoder: Any, prompts: Seq[str | Seq[int]], max_tokens: int = 48, **options: Any
) -> list[list[TracedRound]]:
    """The rounds of each of several generations side by side, from their traces."""
    options = {"seed": 5, "ignore_eos": True, **options}
    answers = llm.generate(
        list(prompts), decoder=decoder, max_tokens=max_tokens, trace=True, **options
    )
    texts = [llm.encode(prompt) + one.tokens for prompt, one in zip(prompts, answers, strict=True)]
    return [
        [
            TracedRound(
                text[: entry["position"]],
                entry["drafted"],
                entry["parents"],
                entry["accepted"],
                entry["tokens"],
                entry,
            )
            for entry in answer.trace or ()
        ]
        for text, answer in zip(texts, answers, strict=True)
    ]


def accepted(trace: Seq[TracedRound]) -> int:
    """The number of accepted draft tokens."""
    return sum(len(one.accepted) for one in trace)


def plain_token(logits: np.ndarray, position: int, temperature: float, seed: int = 5) -> int:
    """The token that plain decoding samples at `position`: argmax of logit / T + noise, over the
    whole row."""
    if not temperature:
        return int(logits.argmax())
    noise = Noise(seed).gumbel(range(len(logits)), position)
    return int((logits / np.float32(temperature) + noise).argmax())


class VirtualClock:
    """A virtual clock: a pass of a model runner takes `costs[runner]` seconds, however many rows it
    has. `passes` lists the runner, start and end of each pass."""

    def __init__(self, llm: LLM, **costs: float) -> None:
        self.engine = llm.engine
        self.costs = costs
        self.passes: list[tuple[str, float, float]] = []
        self.engine.clock = self

    def seconds(self, runner: ModelRunner, plan: Plan) -> float:
        """The duration of a pass. The engine calls this when a pass starts."""
        now = self.engine.now
        self.passes.append((runner.name, now, now + self.costs[runner.name]))
        return self.costs[runner.name]

    @property
    def overlap(self) -> float:
        """Seconds during which passes of two model runners overlapped."""
        return sum(
            max(0.0, min(end, stop) - max(start, begin))
            for i, (name, start, end) in enumerate(self.passes)
            for other, begin, stop in self.passes[:i]
            if other != name
        )
