"""Oracle tests of prompts that end inside a token, of infilling, and of code with monitored names:
each against the published rule, computed by hand or by enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.constraints.languages import Regex
from anydecode.constraints.monitors import Monitor, MonitorState
from anydecode.constraints.vocabulary import vocabulary
from anydecode.decoders.constrained.self_infill import SelfInfill
from anydecode.decoders.constrained.token_healing import TokenHealing, healing_tokens
from anydecode.decoders.constrained.unbiased_tokenization import (
    PromptBoundaryDecoder,
    UnbiasedTokenization,
    covers,
)
from anydecode.models.scripted import EOS, FillInTokenizer, PieceTokenizer, ScriptedModel

#: The probability of an "A" after each letter of a Markov chain of "A" and "B".
CHAIN = {"A": 0.7, "B": 0.4}
_A, _B, _AA = range(3)


def chain_llm() -> LLM:
    """The chain as a language model over the tokens "A", "B" and "AA". Tokenization is greedy: the
    token "A" is never followed by an "A", since "AA" would have been used."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        again, first = CHAIN["A"], CHAIN["A" if seen[-1] == _AA else "B"]
        probabilities = np.array([first * (1 - again), 1 - first, first * again, 0.0])
        if seen[-1] == _A:
            probabilities = np.array([0.0, 1.0, 0.0, 0.0])
        logits: np.ndarray = np.log(np.maximum(probabilities, 1e-30))
        return logits

    model = ScriptedModel(script, vocab_size=4)
    return LLM(model, tokenizer=PieceTokenizer("A", "B", "AA"), cache_positions=2048)


def share_of_a(decoder: PromptBoundaryDecoder | None, samples: int, prompt: str = "BA") -> float:
    """How often the letter after `prompt` is an "A"."""
    options: dict[str, Any] = {"decoder": decoder or "autoregressive"}
    with chain_llm() as llm:
        texts = [
            str(llm.generate(prompt, max_tokens=1, temperature=1.0, seed=seed, **options).text)
            for seed in range(samples)
        ]
    return sum(text.startswith("A") for text in texts) / samples


@measure("unbiased-tokenization", "distance from the true chain", samples=400, margin=0.07)
def unbiased_loss(samples: int) -> float:
    """The error of the share of the next letter. Plain decoding has an error of 0.7."""
    return abs(share_of_a(UnbiasedTokenization(), samples) - CHAIN["A"])


@measure("token-healing", "distance from the true chain", samples=400, margin=0.07)
def healing_loss(samples: int) -> float:
    """The error of the share of the next letter; healing one token is enough here."""
    return abs(share_of_a(TokenHealing(), samples) - CHAIN["A"])


@oracle_test("unbiased-tokenization")
def unbiased_tokenization() -> Iterator[Check]:
    """The paper's chain: covers found by hand, and the exact distribution of the next letter."""
    tokenizer = PieceTokenizer("A", "B", "AA")
    tree, completions = covers(tokenizer, vocabulary(tokenizer, 4), [_B], b"AAA")
    paths = sorted([*(tree.tokens[n] for n in tree.path(c.node)), c.token] for c in completions)
    yield Check("covers of the prompt's end", paths == [[_AA, _A], [_AA, _AA]], f"{paths}")
    with chain_llm() as llm:
        for prompt, truth in (("BA", 0.7), ("BAAA", 0.7), ("BAA", 0.7), ("AB", 0.4)):
            decoder = UnbiasedTokenization()
            llm.generate(prompt, decoder=decoder, max_tokens=1)
            got = decoder.last_bytes
            assert got is not None
            exact = abs(got[ord("A")] - truth) < 1e-6 and abs(got.sum() - 1) < 1e-9
            yield Check(f"next letter after {prompt}", bool(exact), f"{got[ord('A')]:.6f}")
    plain = share_of_a(None, 20)
    yield Check("plain decoding never generates it", plain == 0, f"{plain}, truth {CHAIN['A']}")


@oracle_test("token-healing")
def token_healing() -> Iterator[Check]:
    """`http:`, whose last token is replaced by the longer token that the model would have
    generated."""
    tokenizer = PieceTokenizer("http", ":", "://", "x", "/", "h")
    vocab = vocabulary(tokenizer, 7)
    for tail, truth in ((b":", {1, 2}), (b"http", {0, 5}), (b"x", {3}), (b"://", {1, 2})):
        got = healing_tokens(vocab, tail)
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
    yield Check("continues with the longer token", (plain, healed) == ("", "//x"), healed)


_PREFIX, _SUFFIX, _MIDDLE = range(259, 262)


def filling_llm(seen: list[tuple[int, ...]]) -> LLM:
    """A model that generates "x" after "f(" and is then uncertain; it continues a suffix with "!",
    and fills the middle with "m"."""

    def script(path: tuple[int, ...]) -> np.ndarray:
        seen.append(path)
        fillers = {_MIDDLE: "m", _SUFFIX: "!"}
        logits = np.zeros(262)
        mark = max((path.index(m), m) for m in (_PREFIX, _SUFFIX, _MIDDLE) if m in path)[1]
        if mark == _PREFIX:
            if path[-1] == ord("("):
                logits[ord("x")] = 20.0
            return logits
        logits[EOS if path[-1] == ord(fillers[mark]) else ord(fillers[mark])] = 20.0
        return logits

    model = ScriptedModel(script, vocab_size=262)
    return LLM(model, tokenizer=FillInTokenizer(), cache_positions=1024)


@measure("self-infill", "answers that do not end with the generated suffix", samples=40, margin=0.0)
def infill_loss(samples: int) -> float:
    """The share of answers that do not end with their suffix."""
    with filling_llm([]) as llm:
        options: dict[str, Any] = {
            "decoder": SelfInfill(begins="r"),
            "temperature": 0.7,
            "max_tokens": 12,
        }
        texts = [llm.generate("f(", seed=seed, **options).text for seed in range(samples)]
    return sum(not text.endswith("r!") for text in texts) / samples


@oracle_test("self-infill")
def self_infill() -> Iterator[Check]:
    """A run computed by hand: the generated text, and the order in which the model sees its
    parts."""
    seen: list[tuple[int, ...]] = []
    with filling_llm(seen) as llm:
        text = llm.generate("f(", decoder=SelfInfill(begins="r"), max_tokens=12).text
        yield Check("prefix, middle and suffix", text == "xmr!", text)
        prompt_of_middle = (_PREFIX, *b"f(x", _SUFFIX, *b"r!", _MIDDLE)
        yield Check("the prompt for the middle", prompt_of_middle in seen, "prefix, suffix, middle")
        twice = llm.generate("f(", decoder=SelfInfill(begins="r", cycles=2), max_tokens=12).text
        between = (_PREFIX, *b"f(xm", _SUFFIX, *b"r")
        yield Check("a second cycle", twice == text and between in seen, "after the first middle")
        sure = llm.generate("f(", decoder=SelfInfill(threshold=0.0), max_tokens=3)
        yield Check(
            "no interruption at threshold 0",
            len(sure.tokens) == 3 and sure.text[0] == "x",
            sure.text,
        )
        gap = llm.generate("f(", decoder="self-infill:suffix=)", constraint=Regex("[a-k]+"))
        inside = set(gap.text) <= set("abcdefghijk")
        yield Check("a constraint on a gap", bool(gap.text) and inside, gap.text)
        given = llm.generate("f(", decoder="self-infill:suffix=)").text
        yield Check("fills a given gap", given == "m", given)


_TOKENS = (
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


def allowed_by_rule(typed: str, names: set[str]) -> set[str]:
    """The paper's rule, checked for each token; `typed` is the beginning of the name."""
    rest = {name[len(typed) :] for name in names if name.startswith(typed)}
    allowed = set()
    for token in _TOKENS:
        whole = any(name.startswith(token) for name in rest)
        tails = [token[len(name) :] for name in rest if token.startswith(name)]
        ends = any(b and not (b[0].isalnum() or b[0] == "_") for b in tails)
        carries = any(token[i] == "." and token[i + 1].isalpha() for i in range(len(token) - 1))
        if whole or (ends and not carries):
            allowed.add(token)
    return allowed


@oracle_test("monitors")
def monitors() -> Iterator[Check]:
    """Masks against the rule in every state of a small vocabulary; a fork and a rollback."""
    tokenizer = PieceTokenizer(*_TOKENS)
    size, names = tokenizer.vocab_size, {"meow", "milk"}
    constraint = Monitor("c", completions=lambda text: names if text.endswith("c.") else ())

    def allowed_tokens(state: MonitorState) -> set[str]:
        return {_TOKENS[token] for token in np.flatnonzero(state.mask()) if token < len(_TOKENS)}

    state = constraint.start(tokenizer, size)
    free = {token for token in _TOKENS if token != ".meow" and token != "(.k"}
    yield Check(
        "no restriction outside names", allowed_tokens(state) == free, f"{len(free)} tokens"
    )
    state.advance(_TOKENS.index("."))
    for typed in ("", "me", "mil"):
        branch = state.fork()
        if typed:
            branch.advance(_TOKENS.index(typed))
        rule = allowed_by_rule(typed, names)
        yield Check(
            f"allowed after c.{typed}",
            allowed_tokens(branch) == rule,
            f"{sorted(allowed_tokens(branch))}",
        )
        yield Check(f"may not stop after c.{typed}", not branch.may_stop)
    state.advance(_TOKENS.index("meow"))
    yield Check("may stop after a whole name", state.may_stop and state.mask()[size - 1])
    state.rollback(2)
    yield Check("rollback restores the mask", allowed_tokens(state) == free)


@measure("monitors", "names that the object does not have", samples=24, margin=0.0)
def monitors_loss(samples: int) -> float:
    """The share of dereferences in random text that name no member; without a monitor it is nearly
    one."""
    return unknown_names(samples, watched=True)


def unknown_names(samples: int, watched: bool) -> float:
    """The share of names after a dot that jedi does not know."""
    code = "class Cat:\n    def meow(self): ...\n    def milk(self): ...\nc = Cat()\nc."
    members = {"meow", "milk"}
    model = ScriptedModel(lambda seen: np.where(np.arange(259) < 123, 0.0, -1e9))
    from anydecode.models.scripted import ByteTokenizer

    wrong = 0
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=1024) as llm:
        constraint = Monitor(code) if watched else None
        for seed in range(samples):
            options: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": seed}
            text = llm.generate(code, constraint=constraint, **options).text
            name = ""
            for letter in text:
                if not (name + letter).isidentifier():
                    break
                name += letter
            wrong += name not in members and not hasattr(object, name) and name not in DUNDERS
    return wrong / samples


#: Attributes of every object and class besides those of `object`.
DUNDERS = {"__annotations__", "__dict__", "__module__", "__slots__"}
