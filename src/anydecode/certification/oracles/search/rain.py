"""Oracle test of rain (Li et al., arXiv:2309.07124): the whole search replayed on texts alone, each
set of tokens and each phrase from the first token, with a model that answers the question whether
a text is good by a rule that the oracle knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.scripted_rows import log_softmax, logits_after
from anydecode.decoders.search.rain import Rain
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise

PROMPT = list(b"hi")
LETTERS = b"abcdefghijklmnopqr.,"
_QUESTION = re.compile(
    rb"\AIs the reply (\w+) or (\w+)\?\n\(A\) \1\n\(B\) \2\n\nRequest: hi\nReply: (.*)\n\n"
    rb"The letter of the right answer is \(\Z",
    re.S,
)


def goodness(text: bytes) -> int:
    """What the model finds of a text, by its last letter."""
    return 0 if not text else -1 if text[-1:] < b"g" else 0 if text[-1:] < b"k" else 1


class SelfJudge(ScriptedModel):
    """Pseudo-random letters. Asked whether a reply is good it names the right letter, or, if it
    does not know, always the first. Tokens of one group have similar embeddings."""

    def __init__(self) -> None:
        @cache
        def letters(last: tuple[int, ...]) -> np.ndarray:
            row = np.full(259, -30.0, np.float32)
            drawn = np.random.default_rng([4, *last]).normal(size=len(LETTERS) + 1)
            row[[*LETTERS, EOS]] = 1.5 * drawn
            row[EOS] -= 2.0
            return row

        def script(seen: tuple[int, ...]) -> np.ndarray:
            asked = _QUESTION.match(bytes(token for token in seen if token < 256))
            if asked is None:
                return letters(tuple(seen[-2:]))
            row, found = np.zeros(259, np.float32), goodness(asked[3])
            says_first = found == 0 or (found == 1) == (asked[1] == b"harmless")
            row[ord("A") if says_first else ord("B")] = 1.0
            return row

        super().__init__(script)
        random = np.random.default_rng(8)
        groups = random.normal(size=(7, 4))
        self.vectors = groups[np.arange(259) % 7] + 0.1 * random.normal(size=(259, 4))

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Of each token the vector of its group, and a little more."""
        return np.asarray(self.vectors[tokens], np.float32)


def written(tokens: list[int]) -> bytes:
    return bytes(token for token in tokens if token < 256)


def ends_phrase(new: list[int]) -> bool:
    return re.search(rb"[,.?:;\n]", written(new)) is not None or len(new) == 64


Tree = dict[str, Any]


def replay(
    model: SelfJudge,
    seed: int,
    limit: int,
    *,
    k: int = 10,
    visits: int = 50,
    value_of: Callable[[bytes], float] = goodness,
) -> tuple[list[int], int]:
    """The answer, and how often nodes were given another child."""
    noise, used, widened = Noise(seed).with_purpose("search"), 0, 0

    def is_over(text: list[int]) -> bool:
        return len(text) == limit or text[-1:] == [EOS]

    def grown(text: list[int], stream: int | None, ends: Callable[[list[int]], bool]) -> list[int]:
        """The tokens that follow `text`; greedy ones without a stream."""
        new: list[int] = []
        while not is_over(text + new) and not ends(new):
            row = logits_after(model, PROMPT + text + new).astype(np.float64)
            if stream is not None:
                rare = np.argsort(-row, kind="stable")[15:]
                place = len(PROMPT) + len(text) + len(new)
                row = row + noise.forked(1 + stream % 4095).gumbel(range(len(row)), place)
                row[rare] = -np.inf
            new.append(int(row.argmax()))
        return new

    def leaf(text: list[int], tokens: list[int]) -> Tree:
        log, vectors = 0.0, np.asarray(model.vectors[tokens], np.float32).astype(np.float64)
        for i, token in enumerate(tokens):
            log += log_softmax(logits_after(model, PROMPT + text + tokens[:i]))[token]
        mean = vectors.mean(axis=0)
        return {"set": tokens, "p": np.exp(log), "e": mean / np.linalg.norm(mean), "n": 0.0,
                "q": 0.0, "kids": [], "tries": 0}  # fmt: skip

    def sets(text: list[int], size: int, streams: list[int]) -> list[list[int]]:
        found = [grown(text, None, lambda new: len(new) == size)]
        for stream in streams:
            one = grown(text, stream, lambda new: len(new) == size)
            found += [one] if one not in found else []
        return found

    def is_stuck(node: Tree) -> bool:
        kids = node["kids"]
        spread = np.linalg.norm(np.array([kid["e"] for kid in kids]).var(axis=0))
        return bool(
            node["tries"] < 20 and max(k["q"] for k in kids) < 0 and spread < 0.03 * len(kids)
        )

    def below(node: Tree) -> list[Tree]:
        return [one for kid in node["kids"] for one in (kid, *below(kid))]

    def learn(node: Tree, value: float, weight: float) -> None:
        node["q"] = (node["q"] * node["n"] + value * weight) / (node["n"] + weight)
        node["n"] += weight

    def walked(root: Tree, low: float, high: float) -> list[Tree]:
        path = [root]
        while path[-1]["kids"] and not is_stuck(path[-1]):
            ranks = []
            for kid in path[-1]["kids"]:
                p = kid["p"]
                if len(path) == 1:
                    p = 0.75 * p + 0.25 / len(root["kids"])
                q = (kid["q"] - low) / (high - low) if high > low else 0.0
                ranks.append(q + 2 * p * np.sqrt(path[-1]["n"]) / (1 + kid["n"]))
            path.append(path[-1]["kids"][int(np.argmax(ranks))])
        return path

    root: Tree = leaf([], [0])
    text: list[int] = []
    while not is_over(text):
        before = root["n"]
        while True:
            if root["kids"]:
                top = max(root["kids"], key=lambda kid: (kid["n"], kid["q"]))
                if (top["n"] > 6 and top["q"] > 0.8) or root["n"] >= max(visits, before + 15):
                    break
            values = [node["q"] for node in below(root)] or [0.0]
            path = walked(root, min(values), max(values))
            here = text + [token for node in path[1:] for token in node["set"]]
            size, node = (1, 2, 4, 10)[min(len(path), 4) - 1], path[-1]
            if node["kids"]:
                new = sets(here, size, [used + 1])
                known = [kid["set"] for kid in node["kids"]]
                node["kids"] += [leaf(here, one) for one in new if one not in known][-1:]
                node["tries"] += 1
                used, widened = used + 2, widened + 1
                continue
            phrase: list[int] = []
            if not is_over(here):
                phrase = grown(here, used, ends_phrase)
                streams = list(range(used + 1, used + k))
                node["kids"] = [leaf(here, one) for one in sets(here, size, streams)]
            node["tries"], used = k, used + k
            value = value_of(written(here + phrase))
            learn(root, value, 1.0)
            for parent, child in zip(path[:-1], path[1:], strict=True):
                learn(child, value, 1.0)
                for kid in parent["kids"]:
                    cosine = float(kid["e"] @ child["e"])
                    if kid is not child and cosine >= 0.95:
                        learn(kid, value, 0.2 * cosine)
        root = top
        text += root["set"]
    return text, widened


@oracle_test("rain")
def rain() -> Iterator[Check]:
    """The replays."""
    model = SelfJudge()

    def by_count(prompt: str, texts: list[str]) -> list[float]:
        return [counted(text.encode()) for text in texts]

    def counted(text: bytes) -> float:
        return -0.5 - 0.5 * text.count(b".") / max(1, len(text))

    # Of each: its decoder, how many texts, their tokens, and what its replay is told.
    settings: dict[str, tuple[Any, int, int, dict[str, Any]]] = {
        "rain": ("rain", 6, 9, {}),
        "rain:k=2,simulations=30": ("rain:k=2,simulations=30", 4, 24, {"k": 2, "visits": 30}),
        "bad texts only": (Rain(3, 12, by_count), 3, 9,
                           {"k": 3, "visits": 12, "value_of": counted}),
    }  # fmt: skip
    for name, (decoder, count, limit, values) in settings.items():
        wrong = total = 0
        with LLM(model, tokenizer=ByteTokenizer(), cache_positions=16384) as llm:
            for seed in range(count):
                found = llm.generate(PROMPT, decoder=decoder, seed=seed, max_tokens=limit)
                expected, widened = replay(model, seed, limit, **values)
                wrong += found.tokens != expected
                total += widened
        detail = f"{wrong} of {count} wrong, {total} added continuations"
        expects_more = name == "bad texts only"
        yield Check(f"{name} equals its replay", wrong == 0 and (total > 0) >= expects_more, detail)


@measure("rain", "how often the model finds its text good, against sampling", samples=12,
         margin=-0.5)  # fmt: skip
def rain_gain(samples: int) -> float:
    """The mean judgement of samples, less that of the texts of the default build."""
    means = []
    with LLM(SelfJudge(), tokenizer=ByteTokenizer(), cache_positions=16384) as llm:
        for decoder in ("autoregressive", "rain"):
            options: dict[str, Any] = {"decoder": decoder, "temperature": 1.0, "max_tokens": 6}
            found = [llm.generate(PROMPT, seed=seed, **options) for seed in range(samples)]
            means.append(np.mean([goodness(written(one.tokens)) for one in found]))
    return float(means[0] - means[1])
