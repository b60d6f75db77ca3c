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
    model: ScriptedModel,
    prompt: list[int],
    width: int,
    limit: int,
    penalty: float,
    end: int = EOS,
) -> list[list[int]]:
    """The texts that beam search finds, best first. Keeps no state between steps, and always
    continues up to the limit."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    found: list[tuple[float, list[int]]] = []
    for length in range(1, limit + 1):
        grown = []
        for total, tokens in live:
            logs = log_softmax(logits_after(model, prompt + tokens))
            grown += [(total + logs[t], [*tokens, int(t)]) for t in range(len(logs))]
        grown.sort(key=lambda one: -one[0])
        found += [
            (total / length**penalty, tokens)
            for total, tokens in grown[:width]
            if tokens[-1] == end
        ]
        live = [one for one in grown if one[1][-1] != end][:width]
    found += [(total / limit**penalty, tokens) for total, tokens in live]
    return [tokens for _, tokens in sorted(found, key=lambda one: -one[0])]


def ending_model() -> ScriptedModel:
    """A model whose texts often end, so that hypotheses of different lengths compete."""
    script = ScriptedModel(seed=5, vocab_size=257).script

    def logits(seen: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = np.asarray(script(seen)).copy()
        row[EOS] = row.max() - 0.5
        return row

    return ScriptedModel(logits, vocab_size=257)


class ShortTokenizer(ByteTokenizer):
    """A vocabulary of four tokens, of which the last ends a text."""

    vocab_size = 4
    eos_ids = frozenset({3})


def short_model(seed: int) -> ScriptedModel:
    """Pseudo-random logits of four tokens, which depend on the whole text. Many texts end early."""

    def logits(path: tuple[int, ...]) -> np.ndarray:
        return 1.5 * np.random.default_rng([seed, *path]).normal(size=4)

    return ScriptedModel(logits, vocab_size=4)


@oracle_test("beam")
def beam() -> Iterator[Check]:
    """The texts of an oracle that recomputes every hypothesis from its first token, where few texts
    end before the limit and where many do."""
    model = ending_model()
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        for decoder, width, penalty in (
            ("beam:width=1", 1, 1.0),
            ("beam", 4, 1.0),
            ("beam:penalty=0", 4, 0.0),
            ("beam:width=5,penalty=2", 5, 2.0),
        ):
            wrong = 0
            for prompt in PROMPTS:
                expected = beam_oracle(model, list(prompt.encode()), width, 14, penalty)[0]
                wrong += llm.generate(prompt, max_tokens=14, decoder=decoder).tokens != expected
            yield Check(f"{decoder} equals the oracle", wrong == 0)
        greedy = [llm.generate(p, max_tokens=14, decoder="autoregressive").tokens for p in PROMPTS]
        one = [llm.generate(p, max_tokens=14, decoder="beam:width=1").tokens for p in PROMPTS]
        yield Check("width 1 is greedy decoding", greedy == one)
    for penalty in (-1.0, 0.5, 1.0, 2.0):
        wrong = ended = 0
        for seed in range(12):
            model = short_model(seed)
            with LLM(model, tokenizer=ShortTokenizer(), cache_positions=1024) as llm:
                for width in (1, 2, 4):
                    expected = beam_oracle(model, [0, 1], width, 6, penalty, end=3)[0]
                    decoder = f"beam:width={width},penalty={penalty}"
                    answer = llm.generate([0, 1], max_tokens=6, decoder=decoder)
                    wrong += answer.tokens != expected
                    ended += answer.finish_reason == "stop"
        detail = f"{wrong} of 36 wrong, {ended} ended by themselves"
        yield Check(f"texts that end, penalty {penalty}", wrong == 0 < ended, detail)


@measure("beam", "log-probability lost against greedy decoding", samples=24, margin=-0.5)
def beam_gain(samples: int) -> float:
    """Mean over prompts, in nats. Beam search finds more probable texts than greedy decoding."""
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
