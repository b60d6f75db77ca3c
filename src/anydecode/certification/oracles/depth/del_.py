"""Oracle test of DEL: exits and draft lengths are replayed from the logits of all layers at the
positions of each round, which a script or a forward pass gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.depth.exit_logits import ExitLogits
from anydecode.certification.oracles.depth.layerskip import (
    LAYERS,
    PROMPTS,
    TARGET,
    early_logits,
    repeats,
    traced,
)
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks, same_layers
from anydecode.certification.rounds import TracedRound, plain_token, rounds
from anydecode.certification.tiny import tiny_model
from anydecode.models.network import Network
from anydecode.models.scripted import ByteTokenizer

LENGTH, MAX_SIZE, MEMORY, WINDOW = 48, 17, 0.95, 32
#: Logits behind a text after a number of layers.
EarlyLogits = Callable[[tuple[int, ...], int], np.ndarray]
Facts = tuple[int | None, int | None, list[int]]


@oracle_test("del")
def dynamic_exits() -> Iterator[Check]:
    """The exit and the length of each round have the most expected tokens per layer, by decayed
    rates of agreement of all layers; a draft ends at a token below the exit's threshold."""
    yield from penalty_checks("del", same_layers)
    for temperature in (0.0, 0.8):
        chosen: set[tuple[int, int]] = set()
        wrong = again = shortened = 0
        for prompt in (*PROMPTS, "abcabcab" * 6):
            trace, ran = traced("del", prompt, temperature, LENGTH)
            expected = _replay(trace, temperature, _scripted_logits, LAYERS, 0.0)
            wrong += _found(trace) != expected
            again += repeats(ran, trace, [layers or LAYERS for layers, _, _ in expected])
            chosen |= {(layers, size) for layers, size, _ in expected if layers and size}
            limits = [min(size or 0, LENGTH - _done(one, trace) - 1) for one, (_, size, _) in
                      zip(trace, expected, strict=True)]  # fmt: skip
            shortened += sum(
                len(one.tokens) < limit for one, limit in zip(trace, limits, strict=True)
            )
        yield Check(f"exits, lengths and drafts equal the replay, T={temperature}", wrong == 0)
        detail = f"{len(chosen)} pairs; {shortened} drafts ended below the threshold"
        name = f"several exits and lengths are chosen, T={temperature}"
        exits, sizes = {one for one, _ in chosen}, {one for _, one in chosen}
        yield Check(name, min(len(exits), len(sizes), shortened) > 1, detail)
        yield Check(f"no layer runs twice for a token, T={temperature}", again == 0)
    yield from _on_weights()


def _on_weights() -> Iterator[Check]:
    """With weights, a row of the head costs its products as a multiple of those of a layer."""
    for temperature in (0.0, 0.8):
        model = tiny_model(layers=6, residual=0.3)
        network: Network = model.network
        logits, head = ExitLogits(network), _head_share(network)
        wrong = differing = 0
        sizes: set[int | None] = set()
        with LLM(model, tokenizer=ByteTokenizer(), prefix_cache=False) as llm:
            for prompt in PROMPTS:
                trace = rounds(llm, "del", prompt, LENGTH, temperature=temperature)
                expected = _replay(trace, temperature, logits, logits.num_layers, head)
                wrong += _found(trace) != expected
                without = _replay(trace, temperature, logits, logits.num_layers, 0.0)
                differing += expected != without
                sizes |= {size for _, size, _ in expected}
        name = f"exits, lengths and drafts equal the replay with the head's cost, T={temperature}"
        yield Check(name, wrong == 0, f"the head costs {head:.3g} layers")
        name = f"the head's cost changes rounds, and several lengths are chosen, T={temperature}"
        yield Check(name, differing > 0 and len(sizes) > 2, f"{sizes}")


def _head_share(network: Network) -> float:
    """The products of the head over those of a layer of the tiny model."""
    spec, shape = network.spec, network.spec.layers[0].attention
    assert shape is not None
    hidden, inner = spec.hidden_size, 2 * spec.hidden_size
    width = shape.num_heads * shape.head_dim
    layer = 2 * hidden * (width + shape.num_kv_heads * shape.head_dim) + 3 * hidden * inner
    return hidden * spec.vocab_size / layer


def _scripted_logits(seen: tuple[int, ...], layers: int) -> np.ndarray:
    return TARGET(seen) if layers == LAYERS else early_logits(seen, layers)


def _found(trace: list[TracedRound]) -> list[Facts]:
    return [(one.entry.get("layers"), one.entry.get("size"), one.tokens) for one in trace]


def _done(one: TracedRound, trace: list[TracedRound]) -> int:
    return len(one.text) - len(trace[0].text)


def _replay(
    trace: list[TracedRound], temperature: float, logits: EarlyLogits, num_layers: int, head: float
) -> list[Facts]:
    """The exit (in layers), the length and the drafts of each round; None for plain ones. A row of
    the head costs `head` layers."""
    exits = range(1, num_layers)
    counts = {layers: [0.0, 0.0, 0.0, 0.0] for layers in exits}

    def record(texts: list[list[int]]) -> None:
        for layers in exits:
            counts[layers] = [MEMORY * one for one in counts[layers]]
            for text in texts:
                row = logits(tuple(text), layers).astype(np.float64)
                sure = float(np.exp(row.max() - np.logaddexp.reduce(row)))
                index = int(row.argmax() != logits(tuple(text), num_layers).argmax())
                counts[layers][index] += 1
                counts[layers][2 + index] += sure

    prompt = trace[0].text
    ends = range(max(1, len(prompt) - WINDOW), len(prompt))
    if len(ends):
        record([prompt[:end] for end in ends])
    facts: list[Facts] = []
    for one in trace:
        size, layers = _most_tokens(counts, num_layers, head)
        limit = min(size, LENGTH - _done(one, trace) - 1)
        drafts: list[int] = []
        if limit < 1:
            facts.append((None, None, []))
            record([one.text])
            continue
        matches, misses, sure, unsure = counts[layers]
        bound = (sure / matches + unsure / misses) / 2 if matches and misses else 0.0
        while len(drafts) < limit:
            row = logits((*one.text, *drafts), layers)
            drafts.append(plain_token(row, len(one.text) + len(drafts), temperature))
            wide = row.astype(np.float64)
            if np.exp(wide.max() - np.logaddexp.reduce(wide)) < bound:
                break
        facts.append((layers, size, drafts))
        seen = min(len(one.accepted) + 1, len(drafts))
        record([[*one.text, *drafts[:count]] for count in range(seen)])
    return facts


def _most_tokens(counts: dict[int, list[float]], num_layers: int, head: float) -> tuple[int, int]:
    """The length and the exit with the most tokens per layer."""
    best = (-1.0, 0, 0)
    for size in range(MAX_SIZE + 1):
        for layers, (matches, misses, _, _) in counts.items():
            rate = matches / (matches + misses) if matches + misses else 0.0
            tokens = sum(rate**power for power in range(size + 1))
            value = tokens / (num_layers + head + size * (layers + head))
            if value > best[0] * (1 + 1e-12):
                best = (value, size, layers)
    return best[1:]
