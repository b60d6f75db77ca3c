"""What stands before and behind an answer: prompts that end inside a token, gaps to fill, and code
whose names are watched. Each against the published rule, worked out by hand or by trying all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.constraints.languages import Regex
from anydecode.constraints.monitors import Monitor, MonitorState
from anydecode.constraints.vocabulary import vocabulary
from anydecode.decoders.constrained.self_infill import SelfInfill
from anydecode.decoders.constrained.token_healing import TokenHealing, fitting
from anydecode.decoders.constrained.unbiased_tokenization import (
    PromptEnd,
    UnbiasedTokenization,
    covers,
)
from anydecode.engine.llm import LLM
from anydecode.evaluation.certify import Check, measure, mechanism
from anydecode.models.scripted import EOS, FillInTokenizer, PieceTokenizer, ScriptedModel

#: How likely an "A" is behind each letter of a chain of "A" and "B".
CHAIN = {"A": 0.7, "B": 0.4}
_A, _B, _AA = range(3)


def chain_llm() -> LLM:
    """The chain as a language model over the tokens "A", "B" and "AA", the longest first: behind
    the token "A" there is never an "A", for then it would have been "AA"."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        again, first = CHAIN["A"], CHAIN["A" if seen[-1] == _AA else "B"]
        chances = np.array([first * (1 - again), 1 - first, first * again, 0.0])
        if seen[-1] == _A:
            chances = np.array([0.0, 1.0, 0.0, 0.0])
        logits: np.ndarray = np.log(np.maximum(chances, 1e-30))
        return logits

    model = ScriptedModel(script, vocab_size=4)
    return LLM(model, tokenizer=PieceTokenizer("A", "B", "AA"), cache_positions=2048)


def share_of_a(decoder: PromptEnd | None, samples: int, prompt: str = "BA") -> float:
    """How often the letter behind `prompt` is an "A"."""
    options: dict[str, Any] = {"decoder": decoder or "autoregressive"}
    with chain_llm() as llm:
        texts = [
            str(llm.generate(prompt, max_tokens=1, temperature=1.0, seed=seed, **options).text)
            for seed in range(samples)
        ]
    return sum(text.startswith("A") for text in texts) / samples


@measure("unbiased-tokenization", "distance from the true chain", samples=400, margin=0.07)
def unbiased_loss(samples: int) -> float:
    """How far the share of the next letter is off. Plain decoding is off by 0.7."""
    return abs(share_of_a(UnbiasedTokenization(), samples) - CHAIN["A"])


@measure("token-healing", "distance from the true chain", samples=400, margin=0.07)
def healing_loss(samples: int) -> float:
    """The same; one token is all that must be healed here."""
    return abs(share_of_a(TokenHealing(), samples) - CHAIN["A"])


@mechanism("unbiased-tokenization")
def unbiased_tokenization() -> Iterator[Check]:
    """The paper's chain: covers found by hand, and the next letter's exact distribution."""
    tokenizer = PieceTokenizer("A", "B", "AA")
    tree, found = covers(tokenizer, vocabulary(tokenizer, 4), [_B], b"AAA")
    paths = sorted([*(tree.tokens[n] for n in tree.path(c.node)), c.token] for c in found)
    yield Check("covers that are written so", paths == [[_AA, _A], [_AA, _AA]], f"{paths}")
    with chain_llm() as llm:
        for prompt, truth in (("BA", 0.7), ("BAAA", 0.7), ("BAA", 0.7), ("AB", 0.4)):
            decoder = UnbiasedTokenization()
            llm.generate(prompt, decoder=decoder, max_tokens=1)
            got = decoder.last_bytes
            assert got is not None
            exact = abs(got[ord("A")] - truth) < 1e-6 and abs(got.sum() - 1) < 1e-9
            yield Check(f"next letter behind {prompt}", bool(exact), f"{got[ord('A')]:.6f}")
    plain = share_of_a(None, 20)
    yield Check("plain decoding never says it", plain == 0, f"{plain}, truth {CHAIN['A']}")


@mechanism("token-healing")
def token_healing() -> Iterator[Check]:
    """`http:` and the longer token that the model would have written."""
    tokenizer = PieceTokenizer("http", ":", "://", "x", "/", "h")
    words = vocabulary(tokenizer, 7)
    for tail, truth in ((b":", {1, 2}), (b"http", {0, 5}), (b"x", {3}), (b"://", {1, 2})):
        got = fitting(words, tail)
        yield Check(f"tokens that fit {tail.decode()}", got == truth, f"{sorted(got)}")
    after: dict[tuple[int, ...], dict[int, float]] = {
        (0,): {1: 0.0, 2: 3.0, 6: 9.0},
        (2,): {3: 9.0},
        (1,): {6: 9.0},
        (3,): {6: 9.0},
    }
    model = ScriptedModel(after, vocab_size=7)
    with LLM(model, tokenizer=tokenizer, cache_positions=64) as llm:
        plain = llm.generate("http:").text
        healed = llm.generate("http:", decoder="token-healing").text
    yield Check("goes on with the longer token", (plain, healed) == ("", "//x"), healed)


_PREFIX, _SUFFIX, _MIDDLE = range(259, 262)


def filling_llm(seen: list[tuple[int, ...]]) -> LLM:
    """Says "x" behind "f(", then is unsure; an end goes on with "!", a middle is "m"."""

    def script(path: tuple[int, ...]) -> np.ndarray:
        seen.append(path)
        said = {_MIDDLE: "m", _SUFFIX: "!"}
        logits = np.zeros(262)
        mark = max((path.index(m), m) for m in (_PREFIX, _SUFFIX, _MIDDLE) if m in path)[1]
        if mark == _PREFIX:
            if path[-1] == ord("("):
                logits[ord("x")] = 20.0
            return logits
        logits[EOS if path[-1] == ord(said[mark]) else ord(said[mark])] = 20.0
        return logits

    model = ScriptedModel(script, vocab_size=262)
    return LLM(model, tokenizer=FillInTokenizer(), cache_positions=1024)


@measure("self-infill", "answers without the end they were to reach", samples=40, margin=0.0)
def infill_loss(samples: int) -> float:
    """The share of answers that do not end with the suffix they begin from."""
    with filling_llm([]) as llm:
        options = {"decoder": SelfInfill(begins="r"), "temperature": 0.7, "max_tokens": 12}
        texts = [llm.generate("f(", seed=seed, **options).text for seed in range(samples)]
    return sum(not text.endswith("r!") for text in texts) / samples


@mechanism("self-infill")
def self_infill() -> Iterator[Check]:
    """A run worked out by hand: what is said, and in which order the model is shown it."""
    seen: list[tuple[int, ...]] = []
    with filling_llm(seen) as llm:
        text = llm.generate("f(", decoder=SelfInfill(begins="r"), max_tokens=12).text
        yield Check("left, middle, end", text == "xmr!", text)
        shown = (_PREFIX, *b"f(x", _SUFFIX, *b"r!", _MIDDLE)
        yield Check("prefix, suffix, middle", shown in seen, "shown in the model's own order")
        twice = llm.generate("f(", decoder=SelfInfill(begins="r", cycles=2), max_tokens=12).text
        between = (_PREFIX, *b"f(xm", _SUFFIX, *b"r")
        yield Check("a second cycle", twice == text and between in seen, "behind the first middle")
        sure = llm.generate("f(", decoder=SelfInfill(threshold=0.0), max_tokens=3)
        yield Check(
            "no interruption at 0", len(sure.tokens) == 3 and sure.text[0] == "x", sure.text
        )
        gap = llm.generate("f(", decoder="self-infill:suffix=)", constraint=Regex("[a-k]+"))
        inside = set(gap.text) <= set("abcdefghijk")
        yield Check("a constraint in a gap", bool(gap.text) and inside, gap.text)
        given = llm.generate("f(", decoder="self-infill:suffix=)").text
        yield Check("fills a given gap", given == "m", given)


_PIECES = (
    "me",
    "meow",
    "meow(",
    "meowing",
    "mil",
    "milk",
    "k",
    "k)",
    "x",
    ".",
    ".meow",
    "(.k",
    "a.",
)


def allowed_by_rule(said: str, names: set[str]) -> set[str]:
    """The paper's rule, read off piece by piece; `said` is the begun name."""
    rest = {name[len(said) :] for name in names if name.startswith(said)}
    found = set()
    for piece in _PIECES:
        whole = any(name.startswith(piece) for name in rest)
        behind = [piece[len(name) :] for name in rest if piece.startswith(name)]
        ends = any(b and not (b[0].isalnum() or b[0] == "_") for b in behind)
        carries = any(piece[i] == "." and piece[i + 1].isalpha() for i in range(len(piece) - 1))
        if whole or (ends and not carries):
            found.add(piece)
    return found


@mechanism("monitors")
def monitors() -> Iterator[Check]:
    """Masks against the rule on every state of a small vocabulary; a fork and a rollback."""
    tokenizer = PieceTokenizer(*_PIECES)
    size, names = tokenizer.vocab_size, {"meow", "milk"}
    constraint = Monitor("c", completions=lambda text: names if text.endswith("c.") else ())

    def pieces(state: MonitorState) -> set[str]:
        return {_PIECES[token] for token in np.flatnonzero(state.mask()) if token < len(_PIECES)}

    state = constraint.start(tokenizer, size)
    free = {piece for piece in _PIECES if piece != ".meow" and piece != "(.k"}
    yield Check("free outside of names", pieces(state) == free, f"{len(free)} pieces")
    state.advance(_PIECES.index("."))
    for said in ("", "me", "mil"):
        branch = state.fork()
        if said:
            branch.advance(_PIECES.index(said))
        rule = allowed_by_rule(said, names)
        yield Check(f"behind c.{said}", pieces(branch) == rule, f"{sorted(pieces(branch))}")
        yield Check(f"no end behind c.{said}", not branch.may_stop)
    state.advance(_PIECES.index("meow"))
    yield Check("an end behind a whole name", state.may_stop and state.mask()[size - 1])
    state.rollback(2)
    yield Check("taken back", pieces(state) == free)


@measure("monitors", "names that the object does not have", samples=24, margin=0.0)
def monitors_loss(samples: int) -> float:
    """The share of dereferences in random text that name nothing; unwatched it is near one."""
    return unknown_names(samples, watched=True)


def unknown_names(samples: int, watched: bool) -> float:
    """The share of names behind a dot that jedi does not know."""
    code = "class Cat:\n    def meow(self): ...\n    def milk(self): ...\nc = Cat()\nc."
    known = {"meow", "milk"}
    model = ScriptedModel(lambda seen: np.where(np.arange(259) < 123, 0.0, -1e9))
    from anydecode.models.scripted import ByteTokenizer

    wrong = 0
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=1024) as llm:
        constraint = Monitor(code) if watched else None
        for seed in range(samples):
            options = {"max_tokens": 20, "temperature": 1.0, "seed": seed}
            text = llm.generate(code, constraint=constraint, **options).text
            name = ""
            for letter in text:
                if not (name + letter).isidentifier():
                    break
                name += letter
            wrong += name not in known and not hasattr(object, name) and name not in DUNDERS
    return wrong / samples


#: What every object and class statement has besides the attributes of `object`.
DUNDERS = {"__annotations__", "__dict__", "__module__", "__slots__"}
