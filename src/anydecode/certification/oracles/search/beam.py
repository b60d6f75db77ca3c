"""Oracle test of beam (Graves, arXiv:1211.3711): beam search that recomputes every hypothesis from
its first token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.scripted_rows import log_softmax, logits_after
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel

PROMPTS = ("ab", "the cat sat on the cat", "0101")


def beam_oracle(
    model: ScriptedModel, prompt: list[int], width: int, limit: int, penalty: float
) -> list[int]:
    """Beam search that keeps no state between steps."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, limit + 1):
        grown = []
        for total, tokens in live:
            logs = log_softmax(logits_after(model, prompt + tokens))
            grown += [(total + logs[t], [*tokens, t]) for t in np.argsort(-logs)[: 2 * width]]
        grown.sort(key=lambda one: -one[0])
        live = []
        for rank, (total, tokens) in enumerate(grown[: 2 * width]):
            if tokens[-1] == EOS:
                if rank < width:
                    ended.append((total / length**penalty, tokens))
            elif len(live) < width:
                live.append((total, tokens))
        ended = sorted(ended, key=lambda one: -one[0])[:width]
        horizon = limit if penalty > 0 else length
        best = max(total / horizon**penalty for total, _ in live)
        if len(ended) == width and best <= ended[-1][0]:
            break
    ended += [(total / len(tokens) ** penalty, tokens) for total, tokens in live]
    return [int(token) for token in max(ended, key=lambda one: one[0])[1]]


def ending_model() -> ScriptedModel:
    """A model whose texts often end, so that hypotheses of different lengths compete."""
    script = ScriptedModel(seed=5, vocab_size=257).script

    def logits(seen: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = np.asarray(script(seen)).copy()
        row[EOS] = row.max() - 0.5
        return row

    return ScriptedModel(logits, vocab_size=257)


@oracle_test("beam")
def beam() -> Iterator[Check]:
    """The output of an oracle that recomputes every hypothesis from its first token."""
    model = ending_model()
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        for width, penalty in ((1, 1.0), (3, 1.0), (4, 0.0), (5, 2.0)):
            wrong = 0
            for prompt in PROMPTS:
                expected = beam_oracle(model, list(prompt.encode()), width, 14, penalty)
                decoder = f"beam:width={width},penalty={penalty}"
                wrong += llm.generate(prompt, max_tokens=14, decoder=decoder).tokens != expected
            yield Check(f"width {width}, penalty {penalty} equals the oracle", wrong == 0)
        greedy = [llm.generate(p, max_tokens=14, decoder="autoregressive").tokens for p in PROMPTS]
        one = [llm.generate(p, max_tokens=14, decoder="beam:width=1").tokens for p in PROMPTS]
        yield Check("width 1 is greedy decoding", greedy == one)


@measure("beam", "log-probability lost against greedy decoding", samples=24, margin=0.0)
def beam_gain(samples: int) -> float:
    """Mean over prompts. Beam search finds more probable texts than greedy decoding, so the mean
    must not be above 0."""
    model = ScriptedModel(seed=6, vocab_size=64)
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
        prompts = [[i % 64, (7 * i) % 64] for i in range(samples)]
        losses = []
        for prompt in prompts:
            texts = [llm.generate(prompt, decoder=d, **options) for d in ("autoregressive", "beam")]
            totals = [llm.score(prompt, text.tokens).total for text in texts]
            losses.append(totals[0] - totals[1])
    return float(np.mean(losses))
