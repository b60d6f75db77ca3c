"""Oracle test of mustdrop (MustDrop, arXiv:2411.10803): merging and dropping by hand, the stage in
the vision encoder replayed head by head, and the positions that a dense pass with the same
thresholds leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.prefill.clip_forward import (
    EncoderForward,
    image,
    tiny_encoder,
)
from anydecode.certification.oracles.prefill.dense_pass import (
    DEPTH,
    TEXT,
    after_prefill,
    deep_model,
    dense_pass,
    is_close,
    open_llm,
    prompt_rows,
    same_text,
)
from anydecode.certification.oracles.prefill.planted_model import distance
from anydecode.decoders.prefill.mustdrop import MustDrop, dropped, merged
from anydecode.models.clip import ClipEncoder
from anydecode.models.transformer import Transformer
from anydecode.scoring.prompt_embeds import PromptEmbeds

#: Seeds of images with a window whose mean cosine is just above or below 0.8; of the first, 64 rows
#: are left, as many as a grid has.
IMAGES = (249, 20)
#: Windows of the default check: row, column, noise, and whether it is merged.
WINDOWS = ((0, 0, 0.52, True), (3, 6, 0.52, False), (9, 9, 0.5, True), (6, 0, 0.53, False))


@oracle_test("mustdrop")
def mustdrop() -> Iterator[Check]:
    """Merging and dropping by hand; then the positions that a dense pass with the same thresholds
    leaves."""
    grid = np.eye(16, 20)
    grid[[0, 1, 2, 4, 5, 6, 8, 9, 10]] = np.ones(20) + 0.01 * np.eye(9, 20)
    rows, stays = merged(grid, 4, 0.8)
    left = [0, 3, 7, 11, 12, 13, 14, 15]
    yield Check("a window of similar rows is merged", np.flatnonzero(stays).tolist() == left)
    yield Check(
        "the merged row is the mean",
        is_close(rows[0], np.ones(20) + 0.01 / 9 * (np.arange(20) < 9)),
    )
    yield Check("dissimilar rows stay", bool(merged(np.eye(9), 3, 0.8)[1].all()))
    share = np.array([[0.50, 0.01, 0.02, 0.00], [0.40, 0.01, 0.06, 0.00]])
    yield Check(
        "both thresholds must be met",
        dropped(share, 0.09, 0.05).tolist() == [False, True, False, True],
    )
    model, length = deep_model(), len(TEXT) - 1
    random = np.random.default_rng(1)
    importance = random.random(40, np.float32)
    media = PromptEmbeds(6, random.standard_normal((40, 64), np.float32), importance)
    unprotected = _surviving(model, media, 0.03, 0.05, 0)[2]  # after the last dropping layer
    would_be_dropped = np.setdiff1d(np.arange(6, 46), unprotected)[:4]
    importance[would_be_dropped - 6] += 1
    yield Check("important positions would be dropped", len(would_be_dropped) == 4)
    method = MustDrop(overall=0.03, single=0.05, key=0.1, alike=2)
    layers = after_prefill(model, method, TEXT, media)
    positions = _surviving(model, media, 0.03, 0.05, 4)
    num_alive, right = _agreeing_layers(model, media, TEXT, positions, np.arange(length), layers)
    yield Check(
        "some positions are dropped, some stay",
        length - 40 < num_alive < length,
        f"{num_alive} of {length}",
    )
    yield Check(
        "every layer ends with the surviving positions", right == DEPTH, f"{right} of {DEPTH}"
    )
    yield from _default_checks(model)
    with open_llm(model) as llm:
        options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "prompt_embeds": media}
        none = llm.generate(TEXT, decoder="mustdrop:overall=0,alike=2", **options).tokens
        whole = llm.generate(TEXT, decoder="quickprefill:keep=1", **options).tokens
    yield Check("dropping nothing changes nothing", none == whole)
    yield _merging(model)
    yield from _encoder_checks(model)
    yield from same_text("mustdrop:overall=0.03,single=0.05", media)


def _default_checks(model: Transformer) -> Iterator[Check]:
    """By default, a token with less than 1.1 % of all attention and less than 1 % of each text
    token's is dropped, 8 % of the tokens are protected, and windows are merged from a mean cosine
    of 0.8."""
    method = MustDrop()
    attention = np.zeros((2, 6))
    attention[:, :4] = [[0.0054, 0.0055, 0.0099, 0.0101], [0.0055, 0.0056, 0.0, 0.0]]
    attention[:, 4] = 0.5 - attention.sum(1)
    found = dropped(attention, method.overall, method.single)[:4].tolist()
    yield Check("the default thresholds", found == [True, False, True, False], str(found))
    text, first, side = TEXT * 3, 6, 14
    length = len(text) - 1
    random = np.random.default_rng(1)
    rows = random.standard_normal((side * side, 64), np.float32)
    importance = random.random(side * side, np.float32)
    grid = np.arange(side * side).reshape(side, side)
    merged_rows, start = rows.copy(), np.ones(length, bool)
    for top, left, noise, is_similar in WINDOWS:
        window = grid[top : top + 3, left : left + 3].ravel()
        rows[window] = random.standard_normal(64, np.float32) + noise * rows[window]
        unit = rows[window] / np.linalg.norm(rows[window], axis=1, keepdims=True)
        cosine = np.mean([unit[i] @ unit[j] for i in range(9) for j in range(9) if i != j])
        low = 0.8 if is_similar else 0.78
        name = f"the window at {top}, {left} is close to the threshold"
        yield Check(name, low < cosine < low + 0.02, f"{cosine:.3f}")
        merged_rows[window] = rows[window]
        if cosine >= 0.8:
            merged_rows[window[0]] = rows[window].mean(0)
            start[first + window[1:]] = False
    begin = np.flatnonzero(start)
    media = PromptEmbeds(first, merged_rows, importance)
    unprotected = _surviving(model, media, 0.011, 0.010, 0, text, begin)[2]
    would_be_dropped = np.setdiff1d(begin, unprotected)
    importance[would_be_dropped[:20] - first] += 1
    media = PromptEmbeds(first, merged_rows, importance)
    layers = after_prefill(model, method, text, PromptEmbeds(first, rows, importance))
    positions = _surviving(model, media, 0.011, 0.010, 16, text, begin)  # 16 of 196: 8 %
    num_alive, right = _agreeing_layers(model, media, text, positions, begin, layers)
    yield Check(
        "the default parameters are the published ones",
        right == DEPTH and num_alive < len(begin),
        f"{right} of {DEPTH} layers; {num_alive} of {len(begin)} positions stay",
    )


def _encoder_checks(model: Transformer) -> Iterator[Check]:
    """The encoder merges windows behind its first layer and finds the key tokens, 8 % of what is
    left, rounded up; the decoder with default parameters takes both as they are."""
    config, tensors = tiny_encoder(model.spec.hidden_size)
    encoder, forward = ClipEncoder(config, tensors), EncoderForward(tensors)
    nearest = []
    for seed in IMAGES:
        rows, importance = encoder.merge(image(seed))
        expected, weights, cosines = forward.run(image(seed), 0.8)
        same = rows.shape == expected.shape and np.allclose(rows, expected, atol=1e-4)
        same = same and np.allclose(importance, weights, rtol=1e-4)
        yield Check(f"image {seed}: rows and importance equal the replay", same, f"{len(rows)}")
        nearest += [cosine - 0.8 for cosine in cosines]
    closest = min(map(abs, nearest))
    detail = f"{max(x for x in nearest if x < 0):.4f} and {min(x for x in nearest if x > 0):.4f}"
    yield Check("windows are close to the threshold on both sides", closest > 1e-3, detail)
    plain, _ = encoder.merge(image(IMAGES[0]), alike=2.0)
    yield Check(
        "merging no window leaves the rows", np.array_equal(plain, encoder.encode(image(IMAGES[0])))
    )
    text, first = TEXT * 4, 224
    rows, weights, _ = forward.run(image(IMAGES[0]), 0.8)
    media = PromptEmbeds(first, rows.astype(np.float32), weights, is_grid=False)
    positions = _surviving(model, media, 0.011, 0.010, 6, text)  # 6 of 64: 8 %, rounded up
    others = _surviving(model, media, 0.011, 0.010, 5, text)
    yield Check("the last key token would be dropped", len(positions[2]) != len(others[2]))
    rows, importance = encoder.merge(image(IMAGES[0]))
    given = PromptEmbeds(first, rows, importance, is_grid=False)
    layers = after_prefill(model, MustDrop(), text, given)
    every = np.arange(len(text) - 1)
    num_alive, right = _agreeing_layers(model, media, text, positions, every, layers)
    yield Check(
        "the decoder drops from the encoder's rows what is published",
        right == DEPTH and num_alive < len(every),
        f"{right} of {DEPTH} layers; {num_alive} of {len(every)} positions stay",
    )


def _agreeing_layers(
    model: Transformer,
    media: PromptEmbeds,
    text: str,
    positions: dict[int, np.ndarray],
    begin: np.ndarray,
    layers: list[tuple[np.ndarray, np.ndarray]],
) -> tuple[int, int]:
    """How many positions survive, and in how many of `layers` the cached keys are theirs. `begin`
    are the positions before the first layer, `positions` those after each dropping layer."""
    state = prompt_rows(model, text)
    state[media.first : media.stop] = media.rows
    seen, alive = {}, begin
    for layer in range(DEPTH):
        seen[layer] = alive
        alive = positions.get(layer, alive)
    _, keys, _, _ = dense_pass(model, state, seen)
    right = sum(
        is_close(layers[layer][0], keys[layer][np.isin(seen[layer], alive)])
        for layer in range(DEPTH)
    )
    return len(alive), right


def _merging(model: Transformer) -> Check:
    """Nine similar embeddings become one, their mean, before the first layer."""
    similar = 1 + 0.1 * np.random.default_rng(2).standard_normal((9, 64), np.float32)
    media = PromptEmbeds(6, similar)
    layers = after_prefill(model, MustDrop(overall=0.0, alike=0.8), TEXT, media)
    rows = prompt_rows(model, TEXT)
    rows[6] = media.rows.mean(0)
    left = np.array([i for i in range(len(rows)) if not 6 < i < 15])
    _, keys, _, _ = dense_pass(model, rows, dict.fromkeys(range(DEPTH), left))
    right = sum(is_close(layers[layer][0], keys[layer]) for layer in range(DEPTH))
    return Check("similar embeddings are merged", right == DEPTH, f"{right} of {DEPTH} layers")


def _surviving(
    model: Transformer,
    media: PromptEmbeds,
    overall: float,
    single: float,
    keys: int,
    prompt: str = TEXT,
    begin: np.ndarray | None = None,
) -> dict[int, np.ndarray]:
    """The positions left after each dropping layer, by the definition. `begin` are those before the
    first layer (default: all)."""
    assert media.importance is not None
    rows = prompt_rows(model, prompt)
    rows[media.first : media.stop] = media.rows
    ranked = sorted(range(len(media.rows)), key=lambda i: -media.importance[i])  # type: ignore[index]
    protected = {media.first + i for i in ranked[:keys]}
    begin = np.arange(len(rows)) if begin is None else begin
    alive = begin.tolist()
    left: dict[int, np.ndarray] = {}
    for layer in (0, 1, 2):  # (2, 6, 10, 14) * 6 / 32, rounded down
        seen = {i: left.get(i - 1, begin) for i in range(layer + 1)}
        share = dense_pass(
            model, rows, seen | dict.fromkeys(range(layer + 1, DEPTH), np.array(alive))
        )
        attention = share[3][layer].mean(0)
        text = [i for i, position in enumerate(alive) if position >= media.stop]
        vision = [i for i, position in enumerate(alive) if media.first <= position < media.stop]
        total = sum(float(attention[t, v]) for t in text for v in vision)
        dropped_now = set()
        for v in vision:
            column = [float(attention[t, v]) for t in text]
            if sum(column) < overall * total and max(column) < single and alive[v] not in protected:
                dropped_now.add(alive[v])
        alive = [position for position in alive if position not in dropped_now]
        left[layer] = np.array(alive)
    return left


@measure("mustdrop", "total variation of the next token, published options", samples=12, margin=0.2)
def mustdrop_loss(samples: int) -> float:
    """The claim: positions that the text attends to little can be dropped."""
    return distance(MustDrop, samples, media=True)
