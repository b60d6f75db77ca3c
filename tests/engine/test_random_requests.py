"""Random requests of every token-exact decoder, beside each other in a small cache and with little
memory of earlier texts, some of them cancelled: each text is that of plain decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import pytest

from anydecode import Regex
from anydecode.api.llm import LLM
from anydecode.api.request import Request
from anydecode.catalogue import cards, kind_of
from anydecode.certification.oracles.speculative.auto import BatchCosts
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.tiny import (
    eagle3_checkpoint,
    early_exit_checkpoint,
    tiny_model,
    with_drafter,
)
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer

PROMPTS = [
    "one two three one two three one",
    "a lazy dog and a lazy",
    "zqzqzqzq",
    "abc abd abc abd abc",
    "the",
    "a text so long that its prompt takes several passes, and then some more of the same text " * 2,
]
DECODERS = [
    card.key
    for card in cards()
    if card.exactness == "token-exact" and issubclass(kind_of(card.key) or object, Decoder)
]
#: Little enough to drop earlier texts all the time.
LITTLE_MEMORY = ["auto:memory=9000", "auto:memory=30000", "suffix:memory=20000"]
LITTLE_MEMORY += ["aded:memory=6000", "stand:memory=6000", "token-recycling:memory=4000"]


def plain_llm(**options: Any) -> LLM:
    return LLM(tiny_model(layers=4, residual=0.15), tokenizer=ByteTokenizer(), **options)


def drafting_llm(**options: Any) -> LLM:
    return plain_llm(draft=tiny_model(layers=1, residual=0.15), **options)


#: All have the same target.
ENGINES: list[Callable[..., LLM]] = [
    plain_llm,
    drafting_llm,
    partial(with_drafter, eagle3_checkpoint),
    partial(with_drafter, early_exit_checkpoint),
]


def random_engine(random: Random) -> LLM:
    llm = random.choice(ENGINES)(
        cache_positions=random.choice([700, 1200, 4096]),
        row_budget=random.choice([16, 64, 512]),
        prefix_cache=random.random() < 0.8,
        drafting=random.choice(["smartspec-server", "smartspec-server", "fixed"]),
        schedule=random.choice([None, None, "priority", "sarathi", "fair"]),
    )
    costs: list[Callable[[], Any]] = [
        lambda: llm.cost_model,
        lambda: FixedCosts(lambda rows, _: 1e-6 * (1 + 0.01 * rows)),
        lambda: BatchCosts(lambda rows, _: 1e-3 * (1 + 0.002 * rows**2), llm),
    ]
    llm.cost_model = random.choice(costs)()
    return llm


def random_options(random: Random) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_tokens": random.choice([1, 2, 5, 17, 40, 90, 200]),
        "temperature": random.choice([0.0, 0.0, 0.0, 0.3, 0.8, 1.2]),
        "seed": random.randrange(8),
        "ignore_eos": random.random() < 0.8,
    }
    rare = {
        "presence_penalty": 0.5,
        "top_k": 5,
        "constraint": Regex("[a-z ]{5,60}"),
        "stop_tokens": [random.randrange(256)],
    }
    return options | {name: one for name, one in rare.items() if random.random() < 0.07}


def accepts(llm: LLM, decoder: str) -> bool:
    try:
        llm.request(PROMPTS[0], decoder=decoder)
    except UnsupportedCombinationError:
        return False
    return True


def advance(llm: LLM, request: Request, count: int) -> None:
    """Run so many steps, or up to the end of a request."""
    steps = iter(range(count))
    llm.driver.advance(lambda: request.done or next(steps, None) is None)


def play(seed: int, num_requests: int) -> Counter[str]:
    """Send so many requests to an engine, and compare each with plain decoding.

    Returns:
        The number of finished requests by decoder.
    """
    random = Random(seed)
    finished: Counter[str] = Counter()
    running: list[tuple[str, str, dict[str, Any], Request]] = []
    with random_engine(random) as llm, plain_llm() as plain:
        decoders = random.sample([one for one in DECODERS if accepts(llm, one)], 8)
        decoders += [*random.sample(LITTLE_MEMORY, 2), "auto"]
        max_running, num_sent = random.choice([1, 2, 4, 8]), 0
        while num_sent < num_requests or running:
            while len(running) < max_running and num_sent < num_requests:
                prompt, decoder = random.choice(PROMPTS), random.choice(decoders)
                options = random_options(random)
                num_sent += 1
                try:
                    request = llm.request(prompt, decoder=decoder, **options)
                except UnsupportedCombinationError:
                    continue
                llm.start(request, background=False)
                running.append((decoder, prompt, options, request))
            if not running:
                continue
            if random.random() < 0.03:
                llm.abandon(running.pop(random.randrange(len(running)))[-1])
                continue
            advance(llm, random.choice(running)[-1], random.randrange(1, 8))
            for entry in [entry for entry in running if entry[-1].done]:
                running.remove(entry)
                decoder, prompt, options, request = entry
                found = request.generation()
                expected = plain.generate(prompt, decoder="autoregressive", **options)
                assert (found.tokens, found.finish_reason) == (
                    expected.tokens,
                    expected.finish_reason,
                ), (decoder, prompt, options)
                finished[decoder] += 1
        llm.driver.advance(lambda: not llm.engine.running)
        llm.engine.check_integrity()
    return finished


@pytest.mark.parametrize("engine", ENGINES)
def test_requests_that_are_only_made_or_refused_hold_no_memory(engine: Callable[..., LLM]) -> None:
    with engine() as llm:
        llm.generate(PROMPTS[-1], max_tokens=1)
        for card in cards():
            if issubclass(kind_of(card.key) or object, Decoder):
                with suppress(InvalidRequestError):
                    llm.request(PROMPTS[-1], decoder=card.key, temperature=0.5)
                with suppress(InvalidRequestError):
                    llm.request(PROMPTS[-1], decoder=card.key)
        llm.engine.check_integrity()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(4))
def test_random_requests_have_the_texts_of_plain_decoding(seed: int) -> None:
    assert sum(play(seed, 50).values()) > 25


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 16))
def test_many_random_requests_have_the_texts_of_plain_decoding(seed: int) -> None:
    assert sum(play(seed, 120).values()) > 50
