"""Oracle test of online-sd (Online Speculative Decoding, arXiv:2310.07177): the training examples,
their loss, and drafts that get better."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks
from anydecode.certification.oracles.speculative.reading_drafts import TARGET
from anydecode.certification.oracles.transformer import softmax
from anydecode.certification.rounds import Logits, accepted, blurred, rounds, scripted
from anydecode.certification.tiny import readable_executor, tiny_model, tiny_network
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_correction import Correction
from anydecode.decoders.speculative.online_sd import OnlineDrafter
from anydecode.decoders.speculative.rejected_drafts import RejectedDraft, cross_entropy
from anydecode.decoders.speculative.routed_drafters import RoutedDrafter
from anydecode.models.network import GatedMlp, Network
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.transformer import Transformer


@oracle_test("online-sd")
def online() -> Iterator[Check]:
    """Training examples are the first rejected drafts; the loss is forward cross-entropy; drafts
    get better: with a correction of the output layer, and with the draft model's own weights."""
    yield from penalty_checks("online-sd")
    correction = Correction(2, 5, 2, 0.1)
    shares = np.array([0.75, 0.25])
    lesson = RejectedDraft(np.ones(2), np.zeros(5), np.array([1, 3]), shares)
    losses = correction.train(np.ones((1, 2)), np.zeros((1, 5)), cross_entropy([lesson]), 30)
    yield Check("the first loss is log 5", abs(losses[0] - np.log(5)) < 1e-6)
    entropy = -float((shares * np.log(shares)).sum())
    yield Check("the loss falls towards the entropy", entropy < losses[-1] < losses[0] - 0.5)

    def wrong(seen: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = TARGET(seen).copy()
        row[122] += 40.0
        return row

    with scripted(TARGET, wrong) as llm:
        decoder = llm.decoder("online-sd:batch=8,steps=12,rate=0.3")
        assert isinstance(decoder, Speculative) and isinstance(decoder.drafter, OnlineDrafter)
        taken: list[RejectedDraft] = []
        remember = decoder.drafter.add_example

        def take(example: RejectedDraft) -> None:
            taken.append(example)
            remember(example)

        decoder.drafter.add_example = take  # type: ignore[method-assign]
        before = rounds(llm, decoder, "abcabcabd", 24)
        chains = [[122] * 4 for _ in before]  # the draft model's tokens before training
        yield Check("the untrained draft model drafts first", [o.tokens for o in before] == chains)
        mistakes = [one for one in before if len(one.accepted) < len(one.tokens)]
        yield Check(
            "one training example per rejected draft",
            len(taken) == len(mistakes) > 8,
            f"{len(taken)}",
        )
        aligned = all(
            int(lesson.tokens[0])
            == int(TARGET((*one.text, *one.tokens[: len(one.accepted)])).argmax())
            for lesson, one in zip(taken, mistakes, strict=True)
        )
        yield Check("examples have the target's row of the same position", aligned)
        for _ in range(3):
            after = rounds(llm, decoder, "abcabcabd", 24)
        yield Check(
            "more drafts are accepted after training",
            accepted(after) > accepted(before),
            f"{accepted(before)} -> {accepted(after)}",
        )
        decoder.drafter.clear()
        again = rounds(llm, decoder, "abcabcabd", 24)
        yield Check("`clear` resets the correction", accepted(again) == accepted(before))
    yield from _example_checks()
    yield from _weight_checks()
    yield _default_steps()
    yield from _shift_checks()
    yield from _routing_checks()


def _example_checks() -> Iterator[Check]:
    """Each round with a rejection gives one example, of the first rejected draft: behind the
    accepted ones, with both models' rows there."""
    draft_row = blurred(TARGET, error=0.9)
    with scripted(TARGET, draft_row) as llm:
        decoder = llm.decoder("online-sd:batch=1024")
        assert isinstance(decoder, Speculative) and isinstance(decoder.drafter, OnlineDrafter)
        trace = rounds(llm, decoder, "the cat sat", 64)
        examples = decoder.drafter.examples
    cut = [one for one in trace if len(one.accepted) < len(one.tokens)]
    texts = [[*one.text, *(one.tokens[node] for node in one.accepted)] for one in cut]
    num_equal = 0
    for example, text in zip(examples, texts, strict=False):
        tokens, shares = _top(TARGET(tuple(text)))
        num_equal += (
            list(example.text) == text
            and example.position == len(text)
            and np.allclose(example.logits, draft_row(tuple(text)), atol=1e-4)
            and sorted(example.tokens) == sorted(tokens)
            and np.allclose(sorted(example.probabilities), sorted(shares), atol=1e-5)
        )
    num_behind = sum(bool(one.accepted) for one in cut)
    yield Check(
        "examples are the first rejected drafts",
        len(examples) == len(cut) == num_equal and num_behind > 5 and len(cut) < len(trace),
        f"{num_equal} of {len(cut)} rounds with a rejection, {num_behind} behind accepted drafts",
    )


def _default_steps() -> Check:
    """By default a run has 4 steps of Adam on the weights, each of which moves some by the rate."""
    draft = tiny_model(layers=2, seed=7)
    before = [array.copy() for array in _arrays(draft)]
    with LLM(tiny_model(layers=2), tokenizer=ByteTokenizer(), draft=draft) as llm:
        llm.generate("the cat sat", decoder="online-sd", max_tokens=24, ignore_eos=True)
    pairs = zip(_arrays(draft), before, strict=True)
    moved = max(float(np.abs(after - old).max()) for after, old in pairs)
    return Check("by default a run has 4 steps", 3.5e-3 < moved < 4.1e-3, f"{moved:.5f}")


def _weight_checks() -> Iterator[Check]:
    """The first step on a draft model's own weights follows the gradient of the examples' mean
    cross-entropy, by finite differences of another forward pass."""
    draft = tiny_model(layers=2, seed=7)
    before = [array.copy() for array in _arrays(draft)]
    with LLM(tiny_model(layers=2), tokenizer=ByteTokenizer(), draft=draft) as llm:
        trace = rounds(llm, "online-sd:steps=1", "the cat sat", 24)
        target: Network = llm.model.network  # type: ignore[attr-defined]
    changes = [after - old for after, old in zip(_arrays(draft), before, strict=True)]
    moved = np.concatenate([np.abs(change).ravel() for change in changes])
    yield Check("weights move by the rate in the first step of Adam", 9e-4 < moved.max() < 1.1e-3)
    for array, old in zip(_arrays(draft), before, strict=True):
        array[...] = old
    examples = [
        ([*one.text, *(one.tokens[node] for node in one.accepted)], one)
        for one in trace
        if len(one.accepted) < len(one.tokens)
    ]
    texts = [text for text, _ in examples]
    targets = [_top(_row(target, text)) for text in texts]

    def loss() -> float:
        rows = _rows(draft.network, texts)
        pairs = zip(targets, rows, strict=True)
        return -float(np.mean([(p * np.log(softmax(row)[t])).sum() for (t, p), row in pairs]))

    random, num_wrong, num_compared = np.random.default_rng(0), 0, 0
    for array, change in zip(_arrays(draft), changes, strict=True):
        flat, moves = array.reshape(-1), change.reshape(-1)
        moved_places = np.flatnonzero(moves)
        num_wrong += not len(moved_places)  # every array has some that count
        for place in random.permutation(moved_places)[:4]:
            old, values = flat[place], []
            for step in (1e-3, -1e-3):
                flat[place] = old + step
                values.append(loss())
            flat[place] = old
            slope = (values[0] - values[1]) / 2e-3
            if abs(slope) > 1e-4:
                num_compared += 1
                num_wrong += np.sign(slope) == np.sign(moves[place])
    yield Check(
        "every weight moves against the gradient",
        not num_wrong and num_compared > 40,
        f"{num_wrong} of {num_compared} with it",
    )


def _shift_checks() -> Iterator[Check]:
    """The draft model learns one half of the letters, then requests are of the other half."""
    target, draft = _two_domains(), tiny_model(layers=1, seed=7)
    with LLM(target, tokenizer=ByteTokenizer(), draft=draft, prefix_cache=False) as llm:
        decoder = llm.decoder("online-sd:weight_rate=0.003")
        untrained = _acceptance(llm, decoder, range(97, 110), 6)
        _acceptance(llm, decoder, range(97, 110), 40)
        learned = _acceptance(llm, decoder, range(97, 110), 6)
        shifted = _acceptance(llm, decoder, range(110, 123), 6)
        _acceptance(llm, decoder, range(110, 123), 40)
        adapted = _acceptance(llm, decoder, range(110, 123), 6)
        assert isinstance(decoder, Speculative)
        decoder.drafter.clear()
        cleared = _acceptance(llm, decoder, range(97, 110), 6)
    detail = f"{untrained:.2f}, then {learned:.2f}; shifted {shifted:.2f}, then {adapted:.2f}"
    yield Check("weights learn", learned > untrained + 0.5, detail)
    yield Check("acceptance falls with another domain", shifted < learned - 0.5, detail)
    yield Check("weights adapt to the other domain", adapted > shifted + 0.5, detail)
    yield Check("`clear` resets the weights", abs(cleared - untrained) < 0.3, f"{cleared:.2f}")


def _routing_checks() -> Iterator[Check]:
    """With two draft models, each of which knows one half of the letters, a request is drafted by
    the one that predicts the last 64 tokens of its prompt better, which alone learns from it."""
    halves = range(97, 103), range(103, 109)
    drafts = [_of_letters(half, error=3.0) for half in halves]
    random = np.random.default_rng(5)

    def target(seen: tuple[int, ...]) -> np.ndarray:
        half = halves[bool(seen) and seen[-1] in halves[1]]
        return _of_letters(half)(seen)

    def letters(half: range, count: int) -> list[int]:
        return [int(one) for one in random.choice(half, count)]

    prompts = [letters(halves[number % 2], 9) for number in range(4)]
    prompts += [letters(halves[0], 200) + letters(halves[1], 64), letters(halves[1], 1)]
    found, expected, learning = list[list[int]](), list[list[int]](), list[list[bool]]()
    with scripted(target, drafts) as llm:
        decoder = llm.decoder("online-sd:route=true,batch=1")
        assert isinstance(decoder, Speculative) and isinstance(decoder.drafter, RoutedDrafter)
        runners = [llm.engine.runners[name] for name in ("draft", "draft-2")]
        for prompt in prompts:
            decoder.drafter.clear()
            before = [runner.num_passes for runner in runners]
            trace = rounds(llm, decoder, prompt, 24)
            passes = [runner.num_passes - old for runner, old in zip(runners, before, strict=True)]
            losses = [_loss_of(draft, prompt[-65:]) for draft in drafts]
            best = int(np.argmin(losses))
            num_steps = sum(len(one.tokens) for one in trace)
            reading = int(len(prompt) > 1)  # of the prompt, by both
            expected.append([num_steps * (number == best) + reading for number in range(2)])
            found.append(passes)
            members = [decoder.drafter.by_runner.get(runner.name) for runner in runners]
            learning.append([one is not None and one.num_bytes > 0 for one in members])
    yield Check("the better predictor of the prompt drafts", found == expected, f"{found}")
    yield Check(
        "it alone learns from the request",
        learning == [[number == best for number in range(2)] for best in (0, 1, 0, 1, 1, 0)],
        f"{learning}",
    )


def _of_letters(half: range, error: float = 0.0) -> Logits:
    """Logits of texts of these letters."""
    row_of = blurred(TARGET, error=error)

    def logits(seen: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = row_of(seen).copy()
        row[half.start : half.stop] += 30.0
        return row

    return logits


def _loss_of(logits: Logits, text: list[int]) -> float:
    """The mean negative log-probability of all tokens of a text but the first."""
    chances = [
        softmax(logits(tuple(text[:end])).astype(np.float64))[text[end]]
        for end in range(1, len(text))
    ]
    return -float(np.log(chances).mean()) if chances else 0.0


def _two_domains() -> Transformer:
    """A target whose text stays in that half of the letters in which it begins."""
    network = tiny_network(layers=3, residual=0.15)
    embedding, head = network.weights.embedding.data, network.weights.head.data
    head[:, 0] = -1.0
    for sign, letters in ((1.0, range(97, 110)), (-1.0, range(110, 123))):
        embedding[letters, :2] = 3.0, 3.0 * sign
        head[letters, :2] = 2.0, 3.0 * sign
    return Transformer(network, name="two domains", executor=readable_executor())


def _acceptance(llm: LLM, decoder: Any, letters: range, count: int) -> float:
    """The mean number of accepted drafts per round."""
    totals = []
    for seed in range(count):
        prompt = [int(one) for one in np.random.default_rng(seed).choice(letters, 6)]
        trace = rounds(llm, decoder, prompt, 32, temperature=0.8, seed=seed)
        totals.append(accepted(trace) / len(trace))
    return float(np.mean(totals))


def _arrays(model: Transformer) -> list[np.ndarray]:
    """Some matrices and norms of every layer of a model."""
    weights, found = model.network.weights, []
    for layer in weights.layers:
        linears = [layer.query, layer.key, layer.value, layer.output]
        assert isinstance(layer.mlp, GatedMlp)
        linears += [layer.mlp.gate, layer.mlp.up, layer.mlp.down]
        found += [one.weight.data for one in linears if one is not None]
        found += [one for one in (layer.attention_norm, layer.mlp_norm) if one is not None]
    assert weights.final_norm is not None
    return [*found, weights.final_norm, weights.head.data, weights.embedding.data]


def _rows(network: Network, texts: list[list[int]]) -> list[np.ndarray]:
    """The logits behind texts that are prefixes of the last."""
    forward = Forward(network)
    rows = [forward.step(token) for token in texts[-1]]
    return [rows[len(text) - 1] for text in texts]


def _row(network: Network, text: list[int]) -> np.ndarray:
    return _rows(network, [text])[0]


def _top(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 16 most probable tokens, and their shares of their sum."""
    tokens = np.argsort(-row)[:16]
    return tokens, softmax(row[tokens])
