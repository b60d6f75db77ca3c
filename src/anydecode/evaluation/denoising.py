"""For tests of diffusion decoders: scripted models whose logits anyone can recompute, denoising
written down naively, what a generation filled step by step, and what a method loses on tasks with
checkable answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anydecode.engine.llm import LLM
from anydecode.kernels.interface import Attention, KeyValues, Output, OutputSpec, Rows
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import build_model
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import EOS, MASK, ByteTokenizer, ScriptedModel
from anydecode.models.spec import LayerSpec, ModelSpec
from anydecode.scoring.noise import Noise

VOCABULARY = 259
PROMPT = (5, 6, 7)

#: From every visible token and then the position, to logits `[vocab_size]`.
Logits = Callable[[tuple[int, ...]], np.ndarray]


def dense(seed: int = 4, spread: float = 4.0) -> Logits:
    """Pseudo-random logits, of every visible token and the position. Nothing ends a text."""

    def logits(path: tuple[int, ...]) -> np.ndarray:
        row = np.random.default_rng((seed, *path)).normal(size=VOCABULARY) * spread
        row[EOS] = -30.0
        result: np.ndarray = row.astype(np.float32)
        return result

    return logits


#: Logits with confidences of all sizes.
SURE = dense(spread=9.0)


def ending() -> Logits:
    """The same, but an end of text is likely wherever the position is even."""

    def logits(path: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = SURE(path).copy()
        row[EOS] = 24.0 if path[-1] % 2 == 0 and path[-1] > 6 else -30.0
        return row

    return logits


def steady() -> Logits:
    """Logits of the position, which other tokens move a little."""
    fixed, moving = dense(seed=2, spread=3.0), dense(seed=4, spread=0.7)
    return lambda path: fixed(path[-1:]) + moving(path)


def bidirectional(
    script: Logits, *, shift: int = 0, block_size: int | None = None, **options: Any
) -> LLM:
    """An engine over these logits. `shift`: its rows predict the next position; `block_size`: rows
    see their own block of that size and those before."""
    ahead = (lambda path: script((*path[:-1], path[-1] + shift))) if shift else script
    model = ScriptedModel(ahead, causal=False, vocab_size=VOCABULARY)
    model.spec = replace(model.spec, logit_shift=shift, block_size=block_size)
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096, **options)


def softmax(row: np.ndarray, mask: int = MASK) -> np.ndarray:
    """float64; the mask token is never said."""
    scores = row.astype(np.float32).astype(np.float64)
    scores[mask] = -np.inf
    weights = np.exp(scores - scores.max())
    result: np.ndarray = weights / weights.sum()
    return result


def nats(p: np.ndarray) -> float:
    """Entropy."""
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def margin(p: np.ndarray) -> float:
    """The largest probability less the second."""
    second, first = np.sort(p)[-2:]
    return float(first - second)


@dataclass
class Moment:
    """What a published rule sees before a commit: probabilities `[vocab_size]` of each mask of the
    block, the token drawn for it, the step within the block, and how many masks the block had at
    first. `memory` is the rule's own."""

    found: dict[int, np.ndarray]
    canvas: list[int]
    block_step: int
    block_masks: int
    memory: dict[str, Any] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    step: int = 0

    def order(self, score: Callable[[np.ndarray], float] = np.max) -> list[int]:
        """The masks, best first; among equals the leftmost."""
        return sorted(self.found, key=lambda position: (-score(self.found[position]), position))

    def top(self, position: int) -> float:
        """The probability of the likeliest token there."""
        return float(self.found[position].max())

    def sure(self, position: int) -> float:
        """The probability of the token drawn there: the likeliest one at temperature 0."""
        return float(self.found[position][self.tokens[position]])


#: Which of the masks of `Moment.found` are filled.
Rule = Callable[[Moment], Seq[int]]


def naive(
    script: Logits,
    length: int,
    block: int,
    rule: Rule,
    prompt: Seq[int] = PROMPT,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    tempered: bool = False,
    aligned: bool = False,
    look: Callable[[list[int], range, bool], dict[int, np.ndarray]] | None = None,
) -> tuple[list[int], list[list[int]]]:
    """Denoising in blocks of `block`, written down without any of the engine: the text, and which
    positions each pass filled.

    Every row is recomputed from the whole canvas, or by `look(canvas, block, opening)`, which gives
    logits. Blocks count from the first mask, or, `aligned`, from position 0, and then the canvas
    ends with a whole block and rows see no further than their own. `tempered`: probabilities are
    those after the temperature."""
    first, total = len(prompt), len(prompt) + length
    if aligned:
        total = -(-total // block) * block
    canvas = [*prompt, *[MASK] * (total - first)]
    filled: list[list[int]] = []
    memory: dict[str, Any] = {}
    for start in range(first // block * block if aligned else first, total, block):
        positions = range(start, min(start + block, total))
        masks = [i for i in positions if canvas[i] == MASK]
        count, step = len(masks), 0
        while masks and first + length > start:
            seen = canvas[: positions.stop] if aligned else canvas
            rows = (
                look(canvas, positions, step == 0)
                if look
                else {i: script((*seen, i)) for i in masks}
            )
            scale = temperature if tempered and temperature else 1.0
            found = {i: softmax(rows[i] / np.float32(scale)) for i in masks}
            attempt = len(filled)
            tokens = {i: _drawn(rows[i], temperature, seed, i, attempt) for i in masks}
            moment = Moment(found, list(canvas), step, count, memory, tokens, attempt)
            chosen = sorted(rule(moment))
            for i in chosen:
                canvas[i] = tokens[i]
            filled.append(chosen)
            masks = [i for i in masks if canvas[i] == MASK]
            step += 1
            if MASK not in canvas[: first + length]:
                break
    return canvas[first : first + length], filled


def _drawn(row: np.ndarray, temperature: float, seed: int, position: int, attempt: int) -> int:
    """The token of a place: argmax of logit / T + noise, the mask token left out."""
    scores = row.astype(np.float64)
    scores[MASK] = -np.inf
    if temperature:
        scores = scores / temperature + Noise(seed).gumbel(range(len(row)), position, attempt)
    return int(scores.argmax())


def steps(llm: LLM, decoder: Any, length: int, **options: Any) -> tuple[list[int], list[list[int]]]:
    """The text of a generation, and which positions each of its steps filled."""
    prompt = list(options.pop("prompt", PROMPT))
    options = {"ignore_eos": True, "max_tokens": length, **options}
    answer = llm.generate(prompt, decoder=decoder, trace=True, **options)
    return answer.tokens, [sorted(record["filled"]) for record in answer.trace]


def digest(path: tuple[int, ...]) -> int:
    """24 bits of everything in `path`, so that a float32 holds them."""
    return int.from_bytes(hashlib.blake2b(repr(path).encode(), digest_size=3).digest(), "big")


class DigestModel:
    """Implements `Model`: a bidirectional double whose second layer keeps a digest of all that a
    row saw in the first. Logits are a function of the digests in sight, so a row that was computed
    from another canvas is told from a fresh one, as in a real model."""

    def __init__(self, script: Logits, block_size: int | None = None) -> None:
        layer = LayerSpec(Attention(1, 1, 1, 1.0), None)
        self.spec = ModelSpec(
            "digests", VOCABULARY, 1, 4096, 1e-5, (layer, layer), causal=False,
            block_size=block_size,
        )  # fmt: skip
        self.name = "digests"
        self.script = script

    def new_cache(self, num_slots: int) -> KeyValues:
        """One number per slot and layer."""
        keys, values = ([torch.zeros(num_slots, 1, 1) for _ in range(2)] for _ in range(2))
        return KeyValues(keys, values)

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """One pass."""
        tokens, digests = (keys.numpy()[:, 0, 0] for keys in cache.keys)
        tokens[rows.slots] = rows.tokens
        fresh = [self._seen(rows, row, tokens) for row in range(len(rows))]
        digests[rows.slots] = [digest(path) for path in fresh]
        logits = [self.script(self._seen(rows, int(row), digests)) for row in output_spec.logits]
        answer = np.array(logits, np.float32).reshape(-1, VOCABULARY)
        return Output(torch.from_numpy(answer), {})

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Not to be asked."""
        raise NotImplementedError

    @staticmethod
    def _seen(rows: Rows, row: int, held: np.ndarray) -> tuple[int, ...]:
        table = rows.tables[rows.table[row]][: rows.prefix[row]]
        start = int(rows.tail_start[row])
        slots = np.concatenate([table, rows.tails[start : start + rows.tail_length[row]]])
        return (*held[slots[slots >= 0]].astype(int).tolist(), int(rows.positions[row]))


class Board:
    """The same model by hand: what is kept of every position, and one look at some of them."""

    def __init__(self, script: Logits) -> None:
        self.script = script
        self.tokens: dict[int, int] = {}
        self.digests: dict[int, int] = {}

    def look(
        self,
        canvas: Seq[int],
        rows: Iterable[int],
        keep: bool,
        sees: Callable[[int], int] | None = None,
    ) -> dict[int, np.ndarray]:
        """Logits at each of `rows`, computed anew from `canvas`; everything else is as it was
        kept. `sees(position)` is how many positions a row sees (default: all)."""
        rows = list(rows)
        tokens = {**self.tokens, **{position: canvas[position] for position in rows}}

        def path(held: dict[int, int], position: int) -> tuple[int, ...]:
            seen = sorted(i for i in held if i < (sees(position) if sees else len(canvas)))
            return (*(held[i] for i in seen), position)

        fresh = {position: digest(path(tokens, position)) for position in rows}
        digests = {**self.digests, **fresh}
        found = {position: self.script(path(digests, position)) for position in rows}
        if keep:
            self.tokens, self.digests = tokens, digests
        return found


def digests(script: Logits, block_size: int | None = None) -> LLM:
    """An engine over a `DigestModel`."""
    model = DigestModel(script, block_size)
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096)


def random_model(
    block_size: int | None = None, seed: int = 0, layers: int = 2, *, readable: bool = False
) -> LLM:
    """A small transformer of random weights that sees both ways, or block by block. `readable`: its
    weights are not packed for the kernels."""
    config = {
        "model_type": "sdar" if block_size else "a2d-qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "block_size": block_size,
    }
    shapes = {"embed_tokens": (VOCABULARY, 32), "lm_head": (VOCABULARY, 32), "norm": (32,)}
    for layer in (f"layers.{index}" for index in range(layers)):
        shapes |= {f"{layer}.self_attn.{name}_proj": (32, 32) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj": (16, 32) for name in "kv"}
        shapes |= {f"{layer}.self_attn.{name}_norm": (8,) for name in "qk"}
        shapes |= {f"{layer}.mlp.{name}_proj": (64, 32) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (32, 64)}
        shapes |= {f"{layer}.{name}_layernorm": (32,) for name in ("input", "post_attention")}
    draw = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = draw.normal(size=shape) * 0.5 + (len(shape) == 1)
        outer = "" if name == "lm_head" else "model."
        tensors[f"{outer}{name}.weight"] = torch.from_numpy(values.astype(np.float32))
    checkpoint = Checkpoint("random", Path("random"), config, tensors)
    executor = None if readable else choose_executor(threads=1)
    model = build_model(checkpoint, executor=executor)
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096)


def texts(
    llm: LLM, decoder: Any, samples: int, length: int = 24, **options: Any
) -> list[list[int]]:
    """What `decoder` answers to `samples` prompts of several lengths."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(97, 123, size=1 + i % 7).tolist() for i in range(samples)]
    options = {"ignore_eos": True, "max_tokens": length, **options}
    return [answer.tokens for answer in llm.generate(prompts, decoder=decoder, **options)]


def share_of_differences(found: Seq[Seq[int]], expected: Seq[Seq[int]]) -> float:
    """The share of tokens in which texts of equal length differ."""
    pairs = [
        (a, b)
        for one, other in zip(found, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return sum(a != b for a, b in pairs) / len(pairs)


#: The determined tasks and one whose tokens depend on each other, as certificates ask them.
TASKS = ("copy", "reverse", "sort", "shuffle")
STEPWISE = "llada:block=0"


@dataclass(frozen=True)
class DenoisingOutcome:
    """Means over questions: the share answered rightly, and passes and rows per answer."""

    accuracy: float
    passes: float
    rows: float


@cache
def answered(
    method: str, samples: int, tasks: tuple[str, ...] = TASKS, model: str = "tiny-diffusion"
) -> DenoisingOutcome:
    """How a shipped model answers `samples` questions of `tasks` with `method`."""
    from anydecode.evaluation.parallelbench.tasks import examples

    asked = [example for task in tasks for example in examples(task, samples // len(tasks), seed=7)]
    with LLM(model, draft="tiny-autoregressive", threads=1) as llm:
        prompts = [example.prompt for example in asked]
        answers = llm.generate(prompts, decoder=method, max_tokens=24)
    right = [e.is_right(a.text) for e, a in zip(asked, answers, strict=True)]
    return DenoisingOutcome(
        float(np.mean(right)),
        float(np.mean([a.stats.passes for a in answers])),
        float(np.mean([a.stats.rows for a in answers])),
    )


def accuracy_lost(
    method: str,
    samples: int,
    tasks: tuple[str, ...] = TASKS,
    stepwise: str = STEPWISE,
    model: str = "tiny-diffusion",
) -> float:
    """Share of questions, against one token per pass."""
    slow, fast = (answered(one, samples, tasks, model) for one in (stepwise, method))
    return slow.accuracy - fast.accuracy


def share_of_passes(
    method: str,
    samples: int,
    tasks: tuple[str, ...] = TASKS,
    stepwise: str = STEPWISE,
    model: str = "tiny-diffusion",
) -> float:
    """Passes per answer, against one token per pass."""
    slow, fast = (answered(one, samples, tasks, model) for one in (stepwise, method))
    return fast.passes / slow.passes
