"""Oracle test of monitors (Monitor-Guided Decoding, arXiv:2306.10763): masks against the paper's
rule in every state of a small vocabulary, and names in random text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.constraints.monitors import Monitor, MonitorState
from anydecode.models.scripted import ByteTokenizer, PieceTokenizer, ScriptedModel

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
        yield Check(f"may not stop after c.{typed}", not branch.can_stop)
    state.advance(_TOKENS.index("meow"))
    yield Check("may stop after a whole name", state.can_stop and state.mask()[size - 1])
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
