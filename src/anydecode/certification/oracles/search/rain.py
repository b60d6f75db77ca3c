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
from anydecode.certification.oracles.scripted_rows import logits_after
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


def goodness(text: bytes, first: int = ord("k")) -> int:
    """What the model finds of a text, by its last letter: before `first` it is bad, and from the
    second letter behind it good."""
    last = text.rstrip(b",.")[-1:]
    return 0 if not last else -1 if last[0] < first else 0 if last[0] < first + 2 else 1


class SelfJudge(ScriptedModel):
    """Pseudo-random letters. Asked whether a reply is good it names the right letter, or, if it
    does not know, always the first. Tokens of one group have similar embeddings."""

    def __init__(self, first: int = ord("k")) -> None:
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
            self.judged.add(asked[3])
            row, found = np.zeros(259, np.float32), goodness(asked[3], first)
            says_first = found == 0 or (found == 1) == (asked[1] == b"harmless")
            row[ord("A") if says_first else ord("B")] = 1.0
            return row

        super().__init__(script)
        self.judged: set[bytes] = set()
        random = np.random.default_rng(8)
        groups = random.normal(size=(7, 4))
        self.vectors = groups[np.arange(259) % 7] + 0.1 * random.normal(size=(259, 4))

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Of each token the vector of its group, and a little more."""
        return np.asarray(self.vectors[tokens], np.float32)


def written(tokens: list[int]) -> bytes:
    return bytes(token for token in tokens if token < 256)


Tree = dict[str, Any]


def replay(
    model: SelfJudge,
    seed: int,
    limit: int,
    *,
    k: int = 10,
    visits: int = 50,
    value_of: Callable[[bytes], float] = goodness,
) -> tuple[list[int], set[bytes], int]:
    """The answer, the texts that were valued, and how often nodes were given another child."""
    noise, used, widened = Noise(seed).with_purpose("search"), 0, 0
    valued: set[bytes] = set()

    def is_over(text: list[int]) -> bool:
        return len(text) == limit or text[-1:] == [EOS]

    def next_token(text: list[int], stream: int | None, among: int) -> tuple[int, float]:
        """The token behind `text` and its share among the `among` most probable ones."""
        row = logits_after(model, PROMPT + text).astype(np.float64)
        row[np.argsort(-row, kind="stable")[among:]] = -np.inf
        keys = row
        if stream is not None:
            gumbel = noise.forked(1 + stream % 4095).gumbel(range(len(row)), len(PROMPT + text))
            keys = row + gumbel
        token = int(keys.argmax())
        return token, float(np.exp(row[token]) / np.exp(row).sum())

    def phrase_behind(text: list[int], stream: int) -> list[int]:
        new: list[int] = []
        while not (is_over(text + new) or len(new) == 64):
            if re.search(rb"[,.?:;\n]\Z", bytes(PROMPT) + written(text + new)):
                break
            new.append(next_token(text + new, stream, 259)[0])
        return new

    def leaf(step: int, tokens: list[int], p: float) -> Tree:
        return {"set": tokens, "step": step, "raw": p, "p": p, "e": [], "n": 0.0, "own": 0,
                "q": 0.0, "kids": []}  # fmt: skip

    def sets(node: Tree, text: list[int], count: int, first: int) -> list[Tree]:
        size = {0: 1, 1: 2, 2: 4}.get(node["step"], 10)
        if size == 1:
            row = logits_after(model, PROMPT + text).astype(np.float64)
            best = np.argsort(-row, kind="stable")[:count]
            shares = np.exp(row[best]) / np.exp(row[best]).sum()
            return [leaf(1, [int(token)], float(p)) for token, p in zip(best, shares, strict=True)]
        found: list[Tree] = []
        for stream in (None, *range(first, first + count - 1)):
            new: list[int] = []
            p = 1.0
            while len(new) < size and not is_over(text + new):
                token, share = next_token(text + new, stream, 15)
                new, p = [*new, token], p * share
            if all(one["set"] != new for one in found):
                found.append(leaf(node["step"] + 1, new, p))
        others = [one["raw"] for one in found[1:]]
        if others:
            found[0]["raw"] = max(min(found[0]["raw"], sum(others)), max(others) + min(others))
        return found

    def mixed(shares: list[float]) -> list[float]:
        parts = [0.75 * one + 0.25 / len(shares) for one in shares]
        return [one / sum(parts) for one in parts]

    def shared(kids: list[Tree], at_root: bool) -> list[float]:
        shares = [one["raw"] / sum(one["raw"] for one in kids) for one in kids]
        return mixed(shares) if at_root else shares

    def is_stuck(node: Tree) -> bool:
        kids = node["kids"]
        if len(kids) in (1, 20) or not all(kid["e"] for kid in kids):
            return False
        means = np.array([np.mean(kid["e"], axis=0) for kid in kids])
        deviations = ((means - means.mean(axis=0)) ** 2).sum(axis=0) / (len(kids) - 1)
        spread = float(np.sqrt((deviations**2).sum()))
        return max(kid["q"] for kid in kids) < 0 and spread < 0.03 * len(kids[0]["set"])

    def rank(node: Tree, kid: Tree) -> float:
        q = (kid["q"] + 1) / 2 if kid["n"] else 0.0
        return float(q + 2 * kid["p"] * np.sqrt(node["n"]) / (1 + kid["n"]))

    def learn(node: Tree, value: float, weight: float) -> None:
        node["q"] = (node["q"] * node["n"] + value * weight) / (node["n"] + weight)
        node["n"] += weight

    def direction(tokens: list[int]) -> np.ndarray:
        mean = np.asarray(model.vectors[tokens], np.float32).astype(np.float64).mean(axis=0)
        return np.asarray(mean / np.linalg.norm(mean))

    root: Tree = leaf(0, [], 1.0)
    text: list[int] = []
    while not is_over(text):
        before = root["own"]
        while True:
            path, here = [root], list(text)
            while path[-1]["kids"]:
                node = path[-1]
                if is_stuck(node):
                    count = len(node["kids"]) + 1 if node["step"] == 0 else 2
                    known = [kid["set"] for kid in node["kids"]]
                    for new in sets(node, here, count, used):
                        if new["set"] not in known:
                            node["kids"].append(new)
                            new["p"] = shared(node["kids"], node is root)[-1]
                    used, widened = used + 1, widened + 1
                path.append(max(node["kids"], key=lambda kid: rank(node, kid)))  # noqa: B023
                here += path[-1]["set"]
            node, phrase = path[-1], []
            if not is_over(here):
                phrase = phrase_behind(here, used)
                node["kids"] = sets(node, here, k, used + 1)
                for kid, p in zip(node["kids"], shared(node["kids"], node is root), strict=True):
                    kid["p"] = p
            used += k
            valued.add(written(here + phrase))
            value = value_of(written(here + phrase))
            root["own"] += 1
            learn(root, value, 1.0)
            behind = here[len(text) :] + phrase
            for parent, child in zip(path[:-1], path[1:], strict=True):
                child["own"] += 1
                child["e"].append(direction(behind))
                behind = behind[len(child["set"]) :]
                learn(child, value, 1.0)
                for kid in parent["kids"]:
                    if kid is not child and kid["e"]:
                        one, other = (np.mean(each["e"], axis=0) for each in (child, kid))
                        cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
                        if cosine >= 0.95:
                            learn(kid, value, 0.2 * float(cosine))
            top = max(root["kids"], key=lambda kid: (kid["n"], kid["q"]))
            if (top["own"] > 6 and top["q"] > 0.8) or root["own"] >= max(visits, before + 15):
                break
        root = top
        text += root["set"]
        for kid, p in zip(root["kids"], mixed([kid["p"] for kid in root["kids"]]), strict=True):
            kid["p"] = p
    return text, valued, widened


@oracle_test("rain")
def rain() -> Iterator[Check]:
    """The replays, with two models of which one finds most texts good."""
    strict, lenient = SelfJudge(), SelfJudge(ord("d"))

    def by_count(prompt: str, texts: list[str]) -> list[float]:
        strict.judged.update(text.encode() for text in texts)
        return [counted(text.encode()) for text in texts]

    def counted(text: bytes) -> float:
        return -0.5 - 0.5 * text.count(b".") / max(1, len(text))

    def leniently(text: bytes) -> float:
        return goodness(text, ord("d"))

    # Of each: its model and decoder, how many texts, their tokens, and what its replay is told.
    settings: dict[str, tuple[SelfJudge, Any, int, int, dict[str, Any]]] = {
        "rain": (strict, "rain", 4, 9, {}),
        "most texts good": (lenient, "rain", 6, 9, {"value_of": leniently}),
        "rain:k=2,simulations=30": (strict, "rain:k=2,simulations=30", 4, 24,
                                    {"k": 2, "visits": 30}),
        "bad texts only": (strict, Rain(3, 12, by_count), 3, 9,
                           {"k": 3, "visits": 12, "value_of": counted}),
    }  # fmt: skip
    for name, (model, decoder, count, limit, values) in settings.items():
        wrong = total = 0
        valued: set[bytes] = set()
        model.judged = set()
        with LLM(model, tokenizer=ByteTokenizer(), cache_positions=16384) as llm:
            for seed in range(count):
                found = llm.generate(PROMPT, decoder=decoder, seed=seed, max_tokens=limit)
                expected, added, widened = replay(model, seed, limit, **values)
                valued |= added
                wrong += (found.tokens, model.judged) != (expected, valued)
                total += widened
        detail = f"{wrong} of {count} wrong, {len(valued)} texts, {total} added sets"
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
