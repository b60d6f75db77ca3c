"""Oracle tests of prompt pruning: states, attention, norms and the kept positions are recomputed
from the definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, _Restarts, measure, oracle_test
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.prefill.fastkv import FastKV, chosen, window_scores
from anydecode.decoders.prefill.gear import Gear
from anydecode.decoders.prefill.mustdrop import MustDrop, dropped, merged
from anydecode.decoders.prefill.prefilled import Prefilled
from anydecode.decoders.prefill.quickprefill import QuickPrefill, smallest
from anydecode.memory.codecs.gear import compress, low_rank_factors, outlier_mask, quantise_groups
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.transformer import Transformer
from anydecode.scoring.prompt_embeds import PromptEmbeds

_DEPTH = 6
_TEXT = "it was the best of times, it was the worst of times, it was the age of wisdom"


def _model() -> Transformer:
    return tiny_model(layers=_DEPTH, backend="torch")


def _llm(model: Transformer) -> LLM:
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=1024)


def _dense(model: Transformer, rows: torch.Tensor, seen: dict[int, torch.Tensor]) -> Any:
    """A plain forward pass over the embeddings `rows`. Returns, per layer, the input states, the
    keys and values `[positions, kv_heads, head_dim]`, and the attention `[heads, queries, keys]`.
    Layer l computes only the positions `seen[l]`."""
    weights, spec = model.network.weights, model.spec
    states, keys, values, shares = [], [], [], []
    state, positions = rows, torch.arange(len(rows))
    for index, layer in enumerate(weights.layers):
        here = torch.isin(positions, seen[index])
        state, positions = state[here], positions[here]
        shape, rope = spec.layers[index].attention, spec.layers[index].rope
        assert rope is not None and layer.attention_norm is not None and layer.mlp_norm is not None

        def rotated(x: torch.Tensor, heads: int, at: torch.Tensor = positions) -> torch.Tensor:
            x = x.view(len(x), heads, -1)
            half = x.shape[2] // 2
            angle = (at[:, None] * rope.frequencies)[:, None]  # noqa: B023
            a, b = x[..., :half], x[..., half:]
            return torch.cat(
                [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 2
            )

        def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x / (x.pow(2).mean(1, keepdim=True) + spec.norm_eps).sqrt() * weight

        states.append(state)
        y = normed(state, layer.attention_norm)
        q = rotated(y @ layer.query.weight.data.T, shape.num_heads)
        k = rotated(y @ layer.key.weight.data.T, shape.num_kv_heads)
        v = (y @ layer.value.weight.data.T).view(len(y), shape.num_kv_heads, -1)
        group = shape.num_heads // shape.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * shape.scale
        hidden = torch.ones(scores.shape[1:]).triu(1).bool()
        share = scores.masked_fill(hidden, -torch.inf).softmax(2)
        mixed = torch.einsum("hqk,khd->qhd", share, v.repeat_interleave(group, 1)).flatten(1)
        state = state + mixed @ layer.output.weight.data.T
        y, mlp = normed(state, layer.mlp_norm), layer.mlp
        gate, up = y @ mlp.gate.weight.data.T, y @ mlp.up.weight.data.T  # type: ignore[union-attr]
        state = state + (torch.nn.functional.silu(gate) * up) @ mlp.down.weight.data.T  # type: ignore[union-attr]
        keys.append(k)
        values.append(v)
        shares.append(share)
    return states, keys, values, shares


def _after_prefill(
    model: Transformer, decoder: Prefilled, prompt: str, prompt_embeds: PromptEmbeds | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer the cached keys and values when decoding begins."""
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []
    inner = decoder.inner.decode

    def recording(sequence: Any) -> Any:
        context: SequenceCache = sequence.context()
        slots = torch.from_numpy(context.table[context.table >= 0].astype(np.int64))
        cache = context.pool.cache
        layers.extend((k[slots], v[slots]) for k, v in zip(cache.keys, cache.values, strict=True))
        yield from inner(sequence)

    decoder.inner.decode = recording  # type: ignore[method-assign]
    with _llm(model) as llm:
        llm.generate(
            prompt, decoder=decoder, max_tokens=2, ignore_eos=True, prompt_embeds=prompt_embeds
        )
        llm.engine.check_integrity()
    return layers


def _rows(model: Transformer, prompt: str) -> torch.Tensor:
    return model.embed(np.array(list(prompt.encode())[:-1])).clone()


def _same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.shape == expected.shape and bool((actual - expected).abs().max() < 1e-3)


def _same_text(decoder: str, prompt_embeds: PromptEmbeds | None = None) -> Iterator[Check]:
    """Checks that the text is the same alone, in a batch, with restarts and with another
    decoder."""
    model = _model()
    options: dict[str, Any] = {"max_tokens": 16, "temperature": 0.8, "seed": 2, "ignore_eos": True}
    options["prompt_embeds"] = prompt_embeds
    prompts = [_TEXT, _TEXT[::-1], _TEXT[3:] + "abc"]
    with _llm(model) as llm:
        alone = [llm.generate(p, decoder=decoder, **options).tokens for p in prompts]
    with _llm(model) as llm, _Restarts(llm.engine, seed=4):
        batch = llm.generate(prompts, decoder=decoder, **options)
        drafted = llm.generate(prompts, decoder=f"{decoder},decoder=prompt-lookup", **options)
        llm.engine.check_integrity()
    yield Check("a batch with restarts gives the same text", [one.tokens for one in batch] == alone)
    yield Check("drafting after it gives the same text", [one.tokens for one in drafted] == alone)


@oracle_test("fastkv")
def fastkv() -> Iterator[Check]:
    """Scores by hand; then the kept keys and values per layer and head, from a dense pass."""
    share = torch.tensor([[[4.0, 0.0, 8.0, 1.0, 1.0]], [[0.0, 4.0, 0.0, 1.0, 1.0]]]).repeat(1, 2, 1)
    share[:, 1] *= 0.5
    pooled = window_scores(share, 1, 3)
    by_hand = torch.tensor([[2.0 + 2.0, 6.0 + 2.0, 4.0 + 2.0]])  # sums 6 0 12 and 0 6 0, over 3
    yield Check("summed, averaged over neighbours, grouped", _same(pooled, by_hand), str(pooled))
    yield Check(
        "ties go to the first position",
        chosen(torch.tensor([[1.0, 2, 1, 2]]), 3).tolist() == [[0, 1, 3]],
    )
    model, window, budget = _model(), 8, 24
    layers = _after_prefill(model, FastKV(budget, propagate=0.5), _TEXT)
    rows = _rows(model, _TEXT)
    length, middle = len(rows), _DEPTH // 2 - 1
    every = torch.arange(length)
    whole = _dense(model, rows, dict.fromkeys(range(_DEPTH), every))
    token = _window(whole[3][middle], window).sum(0)
    best = sorted(
        sorted(range(length - window), key=lambda i: -token[i])[: int(0.5 * length) - window]
    )
    positions = torch.tensor([*best, *range(length - window, length)])
    seen = {layer: every if layer <= middle else positions for layer in range(_DEPTH)}
    _, keys, values, shares = _dense(model, rows, seen)
    right = 0
    for layer in range(_DEPTH):
        scores = _window(shares[layer], window)
        for head in range(2):
            order = sorted(range(scores.shape[1]), key=lambda i: -scores[head, i])  # noqa: B023
            last = range(len(keys[layer]) - window, len(keys[layer]))
            at = torch.tensor([*sorted(order[: budget - window]), *last])
            right += _same(layers[layer][0][:, head], keys[layer][at, head])
            right += _same(layers[layer][1][:, head], values[layer][at, head])
    yield Check(
        "keys and values per layer and head", right == 4 * _DEPTH, f"{right} of {4 * _DEPTH}"
    )
    yield Check("no more than the budget is cached", all(len(k) == budget for k, _ in layers))
    with _llm(model) as llm:
        plain = llm.generate(_TEXT, max_tokens=12, ignore_eos=True).tokens
        short = llm.generate(_TEXT, decoder="fastkv", max_tokens=12, ignore_eos=True).tokens
    yield Check("a prompt within the budget is unchanged", plain == short)
    yield from _same_text("fastkv:budget=24")


def _window(share: torch.Tensor, window: int) -> torch.Tensor:
    """The definition: attention of the last rows, a mean over 7 neighbours, heads in groups of
    two."""
    summed = share[:, -window:, :-window].sum(1)
    count = summed.shape[1]
    padded = torch.nn.functional.pad(summed, (3, 3))
    pooled = torch.stack([padded[:, i : i + 7].sum(1) / 7 for i in range(count)], 1)
    return torch.stack([pooled[0] + pooled[1], pooled[2] + pooled[3]])


@oracle_test("quickprefill")
def quickprefill() -> Iterator[Check]:
    """Groups of 20 rows, halved per layer; each group attends to the kept halves before it."""
    keys = torch.tensor([[[3.0]], [[1.0]], [[-2.0]], [[1.0]]])
    yield Check("the smallest norms; ties go to the first", smallest(keys, 2).tolist() == [1, 3])
    model = _model()
    found = _after_prefill(model, QuickPrefill(group=20, query=30), _TEXT)
    media, length = len(_TEXT) - 30, len(_TEXT) - 1
    expected = sum((min(20, media - start)) // 2 for start in range(0, media, 20)) + length - media
    sizes = {len(k) for k, _ in found}
    yield Check("half of every group is cached", sizes == {expected}, f"{sizes}, {expected}")
    _, dense, values, _ = _dense(
        model, _rows(model, _TEXT), dict.fromkeys(range(_DEPTH), torch.arange(length))
    )
    norms = dense[0][:20].flatten(1).norm(dim=1)
    at = torch.tensor(sorted(sorted(range(20), key=lambda i: norms[i])[:10]))
    first = all(_same(found[0][i][:10], (dense, values)[i][0][at]) for i in range(2))
    yield Check("the kept keys have the smallest norms", first)
    layers = []
    for layer in range(_DEPTH):  # the first group attends to all of itself in every layer
        norms = dense[layer][:20].flatten(1).norm(dim=1)
        at = torch.tensor(sorted(sorted(range(20), key=lambda i: norms[i])[:10]))  # noqa: B023
        layers.append((_same(found[layer][0][:10], dense[layer][at]), at.tolist()))
    yield Check("each layer selects by its own keys", all(same for same, _ in layers))
    yield Check(
        "layers keep different positions",
        len({tuple(positions_kept) for _, positions_kept in layers}) > 1,
    )
    with _llm(model) as llm:
        plain = llm.generate(_TEXT, max_tokens=12, ignore_eos=True).tokens
        whole = llm.generate(
            _TEXT, decoder="quickprefill:group=20,keep=1", max_tokens=12, ignore_eos=True
        )
    yield Check("keeping all changes nothing", plain == whole.tokens)
    same = PromptEmbeds(5, _rows(model, _TEXT)[5:30])
    with _llm(model) as llm:
        given = llm.generate("?" * 5 + _TEXT[5:], max_tokens=12, ignore_eos=True,
                             decoder="quickprefill:keep=1", prompt_embeds=same)  # fmt: skip
        read = llm.generate("?" * 5 + _TEXT[5:], max_tokens=12, ignore_eos=True)
    yield Check("embeddings of tokens are equivalent to the tokens", given.tokens == read.tokens)
    yield from _same_text("quickprefill:group=20,query=30")


@oracle_test("mustdrop")
def mustdrop() -> Iterator[Check]:
    """Merging and dropping by hand; then the positions that a dense pass with the same thresholds
    leaves."""
    grid = torch.eye(16, 20)
    grid[[0, 1, 2, 4, 5, 6, 8, 9, 10]] = torch.ones(20) + 0.01 * torch.eye(9, 20)
    rows, stays = merged(grid, 4, 0.8)
    left = [0, 3, 7, 11, 12, 13, 14, 15]
    yield Check(
        "a window of similar rows is merged", torch.nonzero(stays).flatten().tolist() == left
    )
    yield Check(
        "the merged row is the mean",
        _same(rows[0], torch.ones(20) + 0.01 / 9 * (torch.arange(20) < 9)),
    )
    yield Check("dissimilar rows stay", bool(merged(torch.eye(9), 3, 0.8)[1].all()))
    share = torch.tensor([[0.50, 0.01, 0.02, 0.00], [0.40, 0.01, 0.06, 0.00]])
    yield Check(
        "both thresholds must be met",
        dropped(share, 0.09, 0.05).tolist() == [False, True, False, True],
    )
    model, length = _model(), len(_TEXT) - 1
    generator = torch.Generator().manual_seed(1)
    media = PromptEmbeds(
        6, torch.randn(40, 64, generator=generator), torch.rand(40, generator=generator)
    )
    method = MustDrop(overall=0.03, single=0.05, key=0.1, alike=2)
    layers = _after_prefill(model, method, _TEXT, media)
    positions = _surviving(model, media, 0.03, 0.05, 4)
    state = _rows(model, _TEXT)
    state[6:46] = media.rows
    everything = torch.arange(length)
    seen, alive = {}, everything
    for layer in range(_DEPTH):
        seen[layer] = alive
        alive = positions.get(layer, alive)
    _, keys, _, _ = _dense(model, state, seen)
    right = sum(
        _same(layers[layer][0], keys[layer][torch.isin(seen[layer], alive)])
        for layer in range(_DEPTH)
    )
    yield Check(
        "some positions are dropped, some stay",
        length - 40 < len(alive) < length,
        f"{len(alive)} of {length}",
    )
    yield Check(
        "every layer ends with the surviving positions", right == _DEPTH, f"{right} of {_DEPTH}"
    )
    with _llm(model) as llm:
        options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "prompt_embeds": media}
        none = llm.generate(_TEXT, decoder="mustdrop:overall=0,alike=2", **options).tokens
        whole = llm.generate(_TEXT, decoder="quickprefill:keep=1", **options).tokens
    yield Check("dropping nothing changes nothing", none == whole)
    yield from _same_text("mustdrop:overall=0.03,single=0.05", media)


def _surviving(
    model: Transformer, media: PromptEmbeds, overall: float, single: float, keys: int
) -> dict[int, torch.Tensor]:
    """The positions left after each dropping layer, by the definition."""
    assert media.importance is not None
    rows = _rows(model, _TEXT)
    rows[media.first : media.stop] = media.rows
    ranked = sorted(range(len(media.rows)), key=lambda i: -media.importance[i])  # type: ignore[index]
    protected = {media.first + i for i in ranked[:keys]}
    alive = list(range(len(rows)))
    left: dict[int, torch.Tensor] = {}
    for layer in (0, 1, 2):  # (2, 6, 10, 14) * 6 / 32, rounded down
        seen = {i: left.get(i - 1, torch.arange(len(rows))) for i in range(layer + 1)}
        share = _dense(
            model, rows, seen | dict.fromkeys(range(layer + 1, _DEPTH), torch.tensor(alive))
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
        left[layer] = torch.tensor(alive)
    return left


def _planted_model() -> Transformer:
    """A model for which the papers' premise holds by construction: all heads attend less to
    lower-case letters, whose keys have larger norms. No layer overwrites the dimensions that encode
    this."""
    model = _model()
    weights, size = model.network.weights, 16
    table = weights.embedding.data
    table[:, 0], table[:, 1] = 0.0, 4.0
    table[97:123, 0] = 4.0
    slow = size // 2 - 1  # per head, the dimension with the lowest rotary frequency
    for layer in weights.layers:
        layer.output.weight.data[:2] = 0.0
        layer.mlp.down.weight.data[:2] = 0.0  # type: ignore[union-attr]
        for matrix, source, factor in ((layer.key, 0, -2.0), (layer.query, 1, 2.0)):
            rows = matrix.weight.data.view(-1, size, matrix.weight.in_features)
            rows[:, slow] = 0.0
            rows[:, slow, source] = factor
    return model


def _distance(decoder: Callable[[], Prefilled], samples: int, media: bool = False) -> float:
    """The mean total variation distance between the next-token distributions of the pruned and the
    whole prompt. Capitals come in runs of ten; a third of the embeddings are like capitals."""
    moved, random = 0.0, np.random.default_rng(7)
    with _llm(_planted_model()) as llm:
        for _ in range(samples):
            capitals = np.repeat(random.random(15) < 1 / 3, 10)
            prompt = random.integers(97, 123, 150) - 32 * capitals
            rows = torch.from_numpy(random.normal(size=(100, 64))).float()
            rows[:, 0], rows[:, 1] = 4.0 * torch.from_numpy(random.random(100) < 2 / 3), 4.0
            prompt_embeds = PromptEmbeds(10, rows) if media else None
            whole, thinned = (
                _next_distribution(llm, prompt.tolist(), method, prompt_embeds)
                for method in (QuickPrefill(keep=1.0), decoder())
            )
            moved += 0.5 * float(np.abs(whole - thinned).sum())
    return moved / samples


def _next_distribution(
    llm: LLM, prompt: list[int], method: Prefilled, prompt_embeds: PromptEmbeds | None
) -> np.ndarray:
    """The distribution of the token after `prompt`."""
    seen: list[np.ndarray] = []
    request = llm.request(
        prompt, decoder=method, max_tokens=1, logprobs=0, prompt_embeds=prompt_embeds
    )
    request.jobs[0].sequence.annotate = lambda logits, *_: seen.append(logits.astype(float))
    llm._run([request])
    weights = np.exp(seen[0] - seen[0].max())
    shares: np.ndarray = weights / weights.sum()
    return shares


class _RandomKept(FastKV):
    """FastKV with random scores: keeps the same number of positions, chosen at random."""

    generator = torch.Generator().manual_seed(3)

    def _scores(self, *given: Any) -> list[torch.Tensor]:
        return [torch.rand(one.shape, generator=self.generator) for one in super()._scores(*given)]


@measure("fastkv", "loss relative to a random choice of the same size", samples=12, margin=0.8)
def fastkv_loss(samples: int) -> float:
    """The claim: what the end of the prompt attends to is needed later."""
    ours = _distance(lambda: FastKV(75, propagate=0.7), samples)
    return ours / _distance(lambda: _RandomKept(75, propagate=0.7), samples)


@measure(
    "quickprefill",
    "total variation of the next token, half of the keys cached",
    samples=12,
    margin=0.5,
)
def quickprefill_loss(samples: int) -> float:
    """The claim: half of the keys, those of small norm, are nearly as good as all."""
    return _distance(lambda: QuickPrefill(group=25, keep=0.5, query=20), samples)


@measure("mustdrop", "total variation of the next token, published options", samples=12, margin=0.2)
def mustdrop_loss(samples: int) -> float:
    """The claim: positions that the text attends to little can be dropped."""
    return _distance(MustDrop, samples, media=True)


@oracle_test("gear")
def gear() -> Iterator[Check]:
    """The parts by hand and against a singular value decomposition; then the cached keys and
    values."""
    actual, groups = quantise_groups(
        torch.tensor([[0.0, 1.0, 2.2, 3.0, -3.0, 3.0, -0.9, 1.0]]), 2, 4
    )
    by_hand = torch.tensor([[0.0, 1.0, 2.0, 3.0, -3.0, 3.0, -1.0, 1.0]])
    yield Check("four levels per group", _same(actual, by_hand) and groups == 2, str(actual))
    mask = outlier_mask(torch.tensor([[5.0, 1.0, 9.0, 1.0, 3.0, 2.0]]), 0.34)
    yield Check(
        "the extremes of a vector are outliers",
        mask.tolist() == [[False, True, True] + [False] * 3],
    )
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(2, 40, 6, generator=generator) @ torch.randn(2, 6, 16, generator=generator)
    left, right = low_rank_factors(table, 4)
    error = (table - left @ right.transpose(1, 2)).norm()
    best = torch.linalg.svdvals(table)[:, 4:].norm()
    yield Check(
        "nearly the best approximation of its rank",
        float(error) < 1.2 * float(best),
        f"{error / best:.3f}",
    )
    x = torch.randn(64, 2, 16, generator=generator)
    # 2048 numbers; 32 channels with a scale, a minimum and two outliers (position and value) each;
    # per head 64 rows and 16 columns of rank 2. As 16-bit numbers they would take 4096 bytes.
    for bits, size in ((2, 512 + 128 + 640 + 256), (4, 1024 + 128 + 640 + 256)):
        taken = compress(x, keys=True, bits=bits, rank=2, sparse=0.02).num_bytes
        yield Check(f"{bits} bits take {size} bytes", taken == size, str(taken))
    reconstruct = compress(x, keys=False, bits=2, rank=0, sparse=0.2).reconstruct()
    values, back = x.flatten(1), reconstruct.flatten(1)
    exact = outlier_mask(values, 0.2)
    yield Check("outliers are exact", bool((values[exact] == back[exact]).all()))
    model, method = _model(), Gear(bits=3, rank=2, sparse=0.05)
    states = _after_gear(model, method)
    rows = _rows(model, _TEXT)
    _, keys, values, _ = _dense(model, rows, dict.fromkeys(range(_DEPTH), torch.arange(len(rows))))
    right_ones = sum(
        _same(states[layer][i], _by_parts((keys, values)[i][layer], i == 0, 3, 2, 0.05))
        for layer in range(_DEPTH)
        for i in range(2)
    )
    yield Check(
        "the prompt's keys and values equal the oracle's", right_ones == 2 * _DEPTH, f"{right_ones}"
    )
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 2, "ignore_eos": True}
    prompts, decoder = [_TEXT, _TEXT[::-1], "ab"], "gear:bits=3,buffer=16"
    with _llm(model) as llm:
        alone = [llm.generate(p, decoder=decoder, **options).tokens for p in prompts]
    with _llm(model) as llm, _Restarts(llm.engine, seed=4):
        batch = llm.generate(prompts, decoder=decoder, **options)
        llm.engine.check_integrity()
    yield Check("a batch with restarts gives the same text", [one.tokens for one in batch] == alone)


def _after_gear(model: Transformer, method: Gear) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer the keys and values after the prompt was compressed."""
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []
    compress = method._compress

    def recording(context: SequenceCache, start: int, rank: int) -> None:
        compress(context, start, rank)
        slots = torch.from_numpy(context.table.astype(np.int64))
        cache = context.pool.cache
        layers.extend((k[slots], v[slots]) for k, v in zip(cache.keys, cache.values, strict=True))

    method._compress = recording  # type: ignore[method-assign]
    with _llm(model) as llm:
        llm.generate(_TEXT, decoder=method, max_tokens=1, ignore_eos=True)
    return layers


def _by_parts(x: torch.Tensor, keys: bool, bits: int, rank: int, sparse: float) -> torch.Tensor:
    """D + L + S with loops, vector by vector; L from the codec, whose quality is tested above."""
    flat = x.flatten(1)
    vectors = flat.T if keys else flat
    result, exact = torch.empty_like(vectors), torch.zeros_like(vectors, dtype=torch.bool)
    filled = vectors.clone()
    for row, vector in enumerate(vectors.tolist()):
        count = int(sparse / 2 * len(vector) + 0.5)
        order = sorted(range(len(vector)), key=lambda i: vector[i])  # noqa: B023
        for i in [*order[:count], *order[len(vector) - count :]]:
            exact[row, i] = True
            filled[row, i] = sum(vector) / len(vector)
        for start in range(0, len(vector), 64):
            part = filled[row, start : start + 64]
            low, step = part.min(), (part.max() - part.min()) / (2**bits - 1)
            result[row, start : start + 64] = ((part - low) / step).round() * step + low
    if keys:
        result, exact, filled = result.T, exact.T, filled.T
    residual = (filled - result).view(x.shape).transpose(0, 1)
    left, right = low_rank_factors(residual, rank)
    seen = result.view(x.shape) + (left @ right.transpose(1, 2)).transpose(0, 1)
    return torch.where(exact.reshape(x.shape), x, seen)


@measure("gear", "error relative to plain 2-bit numbers of the same layout", samples=8, margin=0.9)
def gear_error(samples: int) -> float:
    """The claim: the low-rank part and the outliers recover much of the quantization error."""
    generator, ratio = torch.Generator().manual_seed(5), 0.0
    for _ in range(samples):
        x = torch.randn(128, 2, 32, generator=generator) + torch.randn(
            1, 2, 32, generator=generator
        )
        plain, ours = (
            (x - compress(x, keys=True, bits=2, rank=rank, sparse=sparse).reconstruct()).norm()
            for rank, sparse in ((0, 0.0), (4, 0.02))
        )
        ratio += float(ours / plain) / samples
    return ratio


@measure("gear", "total variation of the next token at 4 bits", samples=12, margin=0.1)
def gear_loss(samples: int) -> float:
    """The claim: 4 bits are nearly lossless."""
    return _distance(Gear, samples)
