"""Oracle test of budget-forcing (Muennighoff et al., arXiv:2501.19393): texts written by hand, and
a replay of sampled texts from the whole text in every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.scripted_rows import logits_after
from anydecode.models.scripted import PieceTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise

#: The marker as one token, as parts, and within tokens with other letters; and a token that ends a
#: text.
PIECES = ("a", "b", "</think>", "</", "think", ">", "Wait", "b</", ">a", " so")
END, PROMPT = len(PIECES), [0, 1]


def thinking_model() -> ScriptedModel:
    """Pseudo-random logits, with a preference for continuing a marker that has begun."""
    following = {3: 4, 7: 4, 4: 5}

    def script(seen: tuple[int, ...]) -> np.ndarray:
        row = np.random.default_rng([9, *seen[-3:]]).normal(size=END + 1)
        row[2] += 0.5
        row[END] -= 1.5
        if seen[-1] in following:
            row[following[seen[-1]]] += 2.0
        return np.asarray(row, np.float32)

    return ScriptedModel(script, vocab_size=END + 1)


def counting_model() -> ScriptedModel:
    """Greedy texts that can be written by hand: two letters, the marker, "so", the end."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        row = np.full(END + 1, -9.0, np.float32)
        last = list(seen[-2:])
        following = {0: 1, 1: 2, 2: 9, 9: END, 6: 0}[last[-1]] if last != [0, 1] else 2
        row[following] = 0.0
        return row

    return ScriptedModel(script, vocab_size=END + 1)


def replay(
    model: ScriptedModel, seed: int, *, limit: int, extensions: int, final: str, max_tokens: int
) -> list[int]:
    """The tokens of a text at temperature 1, with "</think>" and "Wait"."""
    tokens: list[int] = []
    spent = extended = segment = 0
    thinks = True

    def words(part: list[int]) -> str:
        return "".join(PIECES[token] for token in part if token != END)

    def without_marker(part: list[int]) -> list[int]:
        """The longest beginning of `part` that the marker, or a beginning of it, does not touch."""
        whole = words(part)
        starts = [i for i in range(len(whole)) if "</think>".startswith(whole[i : i + 8])]
        first = starts[0] if starts else len(whole)
        return max((part[:i] for i in range(len(part) + 1) if len(words(part[:i])) <= first),
                   key=len)  # fmt: skip

    while len(tokens) < max_tokens:
        if thinks and spent >= limit:
            kept = without_marker(tokens[segment:])
            tokens[segment:] = [*kept, 2, *([PIECES.index(final)] if final else [])]
            thinks = False
            continue
        row = logits_after(model, PROMPT + tokens).astype(np.float64)
        noise = Noise(seed).forked(extended) if extended else Noise(seed)
        token = int((row + noise.gumbel(range(END + 1), len(PROMPT) + len(tokens))).argmax())
        tokens.append(token)
        if not thinks:
            if token == END:
                break
            continue
        spent += 1
        ended = token == END or "</think>" in words(tokens[segment:])
        if ended and extended < extensions and spent < limit:
            kept = without_marker(tokens[segment:-1] if token == END else tokens[segment:])
            tokens[segment:] = [*kept, 6]
            segment, extended = len(tokens), extended + 1
        elif ended:
            thinks = False
            if token == END:
                break
    return tokens[:max_tokens]


@oracle_test("budget-forcing")
def budget_forcing() -> Iterator[Check]:
    """Texts written by hand, and the replay."""
    written = {
        "budget-forcing:extensions=0": "a b </think> so",
        "budget-forcing": "a b Wait a b </think> so",
        "budget-forcing:extensions=2": "a b Wait a b Wait a b </think> so",
        "budget-forcing:limit=1": "a </think> so",
        "budget-forcing:limit=0": "</think> so",
        "budget-forcing:limit=4": "a b Wait a </think> so",
        "budget-forcing:limit=3": "a b </think> so",
        "budget-forcing:limit=1,final=b": "a </think> b </think> so",
    }
    with LLM(counting_model(), tokenizer=PieceTokenizer(*PIECES)) as llm:
        for decoder, text in written.items():
            found = llm.generate([5, 6], max_tokens=32, decoder=decoder)
            expected = text.replace(" ", "").replace("so", " so")
            yield Check(f"{decoder}, written by hand", found.text == expected, found.text)
    model = thinking_model()
    settings: dict[str, dict[str, Any]] = {
        "budget-forcing": {"limit": 2048, "extensions": 1, "final": ""},
        "budget-forcing:limit=6,extensions=3,final=b": {
            "limit": 6,
            "extensions": 3,
            "final": "b",
        },
        "budget-forcing:limit=9,extensions=2": {"limit": 9, "extensions": 2, "final": ""},
    }
    with LLM(model, tokenizer=PieceTokenizer(*PIECES)) as llm:
        options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24}
        for decoder, setting in settings.items():
            wrong = 0
            for seed in range(60):
                found = llm.generate(PROMPT, seed=seed, decoder=decoder, **options)
                wrong += found.tokens != replay(model, seed, max_tokens=24, **setting)
            yield Check(f"{decoder} equals its replay", wrong == 0, f"{wrong} of 60 wrong")
        texts = [
            [llm.generate(PROMPT, seed=s, decoder=d, **options).tokens for s in range(40)]
            for d in ("autoregressive", "budget-forcing:extensions=0")
        ]
        yield Check("without a limit in reach, plain decoding", texts[0] == texts[1])


@measure("budget-forcing", "tokens of reasoning lost against sampling", samples=60, margin=-1.0)
def forcing_gain(samples: int) -> float:
    """The mean number of tokens before the marker in samples, less that of the default build."""
    means = []
    with LLM(thinking_model(), tokenizer=PieceTokenizer(*PIECES)) as llm:
        for decoder in ("autoregressive", "budget-forcing"):
            options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 64, "decoder": decoder}
            texts = [llm.generate(PROMPT, seed=seed, **options).text for seed in range(samples)]
            means.append(np.mean([len(text.partition("</think>")[0]) for text in texts]))
    return float(means[0] - means[1])
