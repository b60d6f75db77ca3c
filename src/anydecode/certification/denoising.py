"""Test tools for diffusion decoders: scripted models whose logits a test can recompute, a naive
implementation of denoising, the positions that each step of a generation filled, and the loss of a
method on tasks with checkable answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.tiny import readable_executor
from anydecode.kernels.interface import Attention, KeyValues, Output, OutputSpec, Rows
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import build_model
from anydecode.models.scripted import EOS, MASK, ByteTokenizer, ScriptedModel, normal_row
from anydecode.models.spec import LayerSpec, ModelSpec
from anydecode.sampling.noise import Noise

VOCABULARY = 259
PROMPT = (5, 6, 7)

#: Maps all visible tokens followed by the position to logits `[vocab_size]`.
Logits = Callable[[tuple[int, ...]], np.ndarray]


def dense(seed: int = 4, spread: float = 4.0) -> Logits:
    """Pseudo-random logits that depend on all visible tokens and the position. The end-of-text
    token is unlikely."""

    def logits(path: tuple[int, ...]) -> np.ndarray:
        row = normal_row((seed, *path)) * spread
        row[EOS] = -30.0
        result: np.ndarray = row.astype(np.float32)
        return result

    return logits


#: Logits with confidences of all sizes.
CONFIDENT = dense(spread=9.0)


def ending() -> Logits:
    """`SURE`, but the end-of-text token is likely at even positions."""

    def logits(path: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = CONFIDENT(path).copy()
        row[EOS] = 24.0 if path[-1] % 2 == 0 and path[-1] > 6 else -30.0
        return row

    return logits


def steady(spread: float = 3.0) -> Logits:
    """Logits that depend on the position, and slightly on the other tokens."""
    fixed, moving = dense(seed=2, spread=spread), dense(seed=4, spread=0.7)
    return lambda path: fixed(path[-1:]) + moving(path)


def bidirectional(
    script: Logits,
    *,
    shift: int = 0,
    block_size: int | None = None,
    edit_tokens: tuple[int, int] | None = None,
    expand_token: int | None = None,
    **options: Any,
) -> LLM:
    """An engine over these logits.

    Args:
        script: The logits.
        shift: Row i predicts position i + `shift`.
        block_size: If given, rows attend to their own block of this size and the blocks before it.
        edit_tokens: See `ModelSpec.edit_tokens`.
        expand_token: See `ModelSpec.expand_token`.
        options: Options of the engine.
    """
    shifted = (lambda path: script((*path[:-1], path[-1] + shift))) if shift else script
    model = ScriptedModel(shifted, causal=False, vocab_size=VOCABULARY)
    model.spec = replace(
        model.spec,
        logit_shift=shift,
        block_size=block_size,
        edit_tokens=edit_tokens,
        expand_token=expand_token,
    )
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096, **options)


def softmax(row: np.ndarray, mask: int = MASK) -> np.ndarray:
    """Probabilities in float64; the mask token has probability 0."""
    scores = row.astype(np.float32).astype(np.float64)
    scores[mask] = -np.inf
    weights = np.exp(scores - scores.max())
    result: np.ndarray = weights / weights.sum()
    return result


def entropy_nats(p: np.ndarray) -> float:
    """The entropy in nats."""
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def margin(p: np.ndarray) -> float:
    """The largest probability minus the second largest."""
    second, first = np.sort(p)[-2:]
    return float(first - second)


@dataclass
class StepState:
    """The input of a published rule before positions are filled: the probabilities `[vocab_size]`
    of each masked position of the block, the token sampled for it, the step within the block, and
    the number of masked positions when the block started. `memory` is the rule's own state."""

    probabilities: dict[int, np.ndarray]
    canvas: list[int]
    block_step: int
    block_masks: int
    memory: dict[str, Any] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    step: int = 0

    def order(self, score: Callable[[np.ndarray], float] = np.max) -> list[int]:
        """The masked positions by descending score; ties go to the leftmost."""
        return sorted(
            self.probabilities,
            key=lambda position: (-score(self.probabilities[position]), position),
        )

    def max_probability(self, position: int) -> float:
        """The largest probability at `position`."""
        return float(self.probabilities[position].max())

    def confidence(self, position: int) -> float:
        """The probability of the token sampled at `position`: the most probable one at temperature
        0."""
        return float(self.probabilities[position][self.tokens[position]])


#: Returns which of the masked positions `StepState.probabilities` are filled.
UnmaskingRule = Callable[[StepState], Seq[int]]


def naive(
    script: Logits,
    length: int,
    block: int,
    rule: UnmaskingRule,
    prompt: Seq[int] = PROMPT,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    tempered: bool = False,
    aligned: bool = False,
    forward: Callable[[list[int], range, bool], dict[int, np.ndarray]] | None = None,
) -> tuple[list[int], list[list[int]]]:
    """A naive implementation of denoising in blocks of `block`, independent of the engine.

    All rows are recomputed from the whole canvas, unless `forward` is given.

    Args:
        script: Logits of the model.
        length: Number of tokens to generate.
        block: Block size. Blocks start at the first masked position, or at position 0 if `aligned`.
        rule: Selects the positions that a step fills.
        prompt: Tokens before the first masked position.
        temperature: Sampling temperature.
        seed: Seed of the sampling noise.
        tempered: Whether the rule's probabilities are those after the temperature.
        aligned: Whether the canvas ends with a whole block and rows attend to nothing after their
            block.
        forward: Returns the logits of the block's positions; called as `forward(canvas, block,
            is_first_step)`.

    Returns:
        The generated tokens, and the positions that each step filled.
    """
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
                forward(canvas, positions, step == 0)
                if forward
                else {i: script((*seen, i)) for i in masks}
            )
            scale = temperature if tempered and temperature else 1.0
            probabilities = {i: softmax(rows[i] / np.float32(scale)) for i in masks}
            attempt = len(filled)
            tokens = {i: _sampled_token(rows[i], temperature, seed, i, attempt) for i in masks}
            state = StepState(probabilities, list(canvas), step, count, memory, tokens, attempt)
            chosen = sorted(rule(state))
            for i in chosen:
                canvas[i] = tokens[i]
            filled.append(chosen)
            masks = [i for i in masks if canvas[i] == MASK]
            step += 1
            if MASK not in canvas[: first + length]:
                break
    return canvas[first : first + length], filled


def _sampled_token(
    row: np.ndarray, temperature: float, seed: int, position: int, attempt: int
) -> int:
    """The token at a position: argmax of logit / T + noise, without the mask token."""
    scores = row.astype(np.float64)
    scores[MASK] = -np.inf
    if temperature:
        scores = scores / temperature + Noise(seed).gumbel(range(len(row)), position, attempt)
    return int(scores.argmax())


def steps(llm: LLM, decoder: Any, length: int, **options: Any) -> tuple[list[int], list[list[int]]]:
    """The generated tokens, and the positions that each step filled."""
    prompt = list(options.pop("prompt", PROMPT))
    options = {"ignore_eos": True, "max_tokens": length, **options}
    answer = llm.generate(prompt, decoder=decoder, trace=True, **options)
    return answer.tokens, [sorted(record["filled"]) for record in answer.trace]


def digest(path: tuple[int, ...]) -> int:
    """A 24-bit hash of `path`; float32 represents it exactly."""
    return int.from_bytes(hashlib.blake2b(repr(path).encode(), digest_size=3).digest(), "big")


class DigestModel:
    """Implements `Model`: a bidirectional test double. Its second layer caches a digest of
    everything that a row attended to in the first layer, and logits are a function of the digests
    attended to. A cached row of an older canvas thus differs from a recomputed one, as in a real
    model."""

    def __init__(self, script: Logits, block_size: int | None = None) -> None:
        layer = LayerSpec(Attention(1, 1, 1, 1.0), None)
        self.spec = ModelSpec(
            "digests", VOCABULARY, 1, 4096, 1e-5, (layer, layer), causal=False,
            block_size=block_size,
        )  # fmt: skip
        self.name = "digests"
        self.script = script

    def new_cache(self, num_slots: int) -> KeyValues:
        """A cache of one number per slot and layer."""
        keys, values = (
            [np.zeros((num_slots, 1, 1), np.float32) for _ in range(2)] for _ in range(2)
        )
        return KeyValues(keys, values)

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """One forward pass."""
        tokens, digests = (keys[:, 0, 0] for keys in cache.keys)
        tokens[rows.slots] = rows.tokens
        fresh = [self._seen(rows, row, tokens) for row in range(len(rows))]
        digests[rows.slots] = [digest(path) for path in fresh]
        logits = [self.script(self._seen(rows, int(row), digests)) for row in output_spec.logits]
        answer = np.array(logits, np.float32).reshape(-1, VOCABULARY)
        return Output(answer, {})

    def head(self, hidden: np.ndarray) -> np.ndarray:
        """Not supported."""
        raise NotImplementedError

    @staticmethod
    def _seen(rows: Rows, row: int, values: np.ndarray) -> tuple[int, ...]:
        table = rows.tables[rows.table[row]][: rows.prefix[row]]
        start = int(rows.tail_start[row])
        slots = np.concatenate([table, rows.tails[start : start + rows.tail_length[row]]])
        return (*values[slots[slots >= 0]].astype(int).tolist(), int(rows.positions[row]))


class DigestCache:
    """The cache of a `DigestModel` by hand: the tokens and digests of all positions, and forward
    passes over some of them."""

    def __init__(self, script: Logits) -> None:
        self.script = script
        self.tokens: dict[int, int] = {}
        self.digests: dict[int, int] = {}

    def forward(
        self,
        canvas: Seq[int],
        rows: Iterable[int],
        keep: bool,
        num_visible: Callable[[int], int] | None = None,
    ) -> dict[int, np.ndarray]:
        """Logits at each of `rows`, recomputed from `canvas`; other positions use their cached
        values. `keep` stores the recomputed values in the cache. `num_visible(position)` is the
        number of positions that a row attends to (default: all)."""
        rows = list(rows)
        tokens = {**self.tokens, **{position: canvas[position] for position in rows}}

        def path(cached: dict[int, int], position: int) -> tuple[int, ...]:
            seen = sorted(
                i for i in cached if i < (num_visible(position) if num_visible else len(canvas))
            )
            return (*(cached[i] for i in seen), position)

        fresh = {position: digest(path(tokens, position)) for position in rows}
        digests = {**self.digests, **fresh}
        logits = {position: self.script(path(digests, position)) for position in rows}
        if keep:
            self.tokens, self.digests = tokens, digests
        return logits


def digests(script: Logits, block_size: int | None = None) -> LLM:
    """An engine over a `DigestModel`."""
    model = DigestModel(script, block_size)
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096)


def random_model(
    block_size: int | None = None, seed: int = 0, layers: int = 2, shift: int = 0
) -> LLM:
    """A small transformer with random weights and bidirectional or block-causal attention; row i
    predicts position i + `shift`. Its weights can be read whatever the backend."""
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
        "right_shift_logits": bool(shift),
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
        tensors[f"{outer}{name}.weight"] = values.astype(np.float32)
    checkpoint = Checkpoint("random", Path("random"), config, tensors)
    model = build_model(checkpoint, executor=readable_executor())
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096)


def texts(
    llm: LLM, decoder: Any, samples: int, length: int = 24, **options: Any
) -> list[list[int]]:
    """The tokens that `decoder` generates for `samples` prompts of several lengths."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(97, 123, size=1 + i % 7).tolist() for i in range(samples)]
    options = {"ignore_eos": True, "max_tokens": length, **options}
    return [answer.tokens for answer in llm.generate(prompts, decoder=decoder, **options)]


def share_of_differences(actual: Seq[Seq[int]], expected: Seq[Seq[int]]) -> float:
    """The share of tokens that differ between texts of equal length."""
    pairs = [
        (a, b)
        for one, other in zip(actual, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return sum(a != b for a, b in pairs) / len(pairs)


#: The tasks of the measures: those with one right answer, and one whose tokens depend on each
#: other.
TASKS = ("copy", "reverse", "sort", "shuffle")
STEPWISE = "llada:block=0"


@dataclass(frozen=True)
class DenoisingOutcome:
    """Means over questions: the share answered correctly, and passes and rows per answer."""

    accuracy: float
    passes: float
    rows: float


@cache
def benchmark_results(
    method: str, samples: int, tasks: tuple[str, ...] = TASKS, model: str = "tiny-diffusion"
) -> DenoisingOutcome:
    """Results of a shipped model on `samples` questions of `tasks` with `method`."""
    from anydecode.tasks.tasks import examples

    questions = [
        example for task in tasks for example in examples(task, samples // len(tasks), seed=7)
    ]
    with LLM(model, draft="tiny-autoregressive", threads=1) as llm:
        prompts = [example.prompt for example in questions]
        answers = llm.generate(prompts, decoder=method, max_tokens=24, seed=7)
    right = [e.is_right(a.text) for e, a in zip(questions, answers, strict=True)]
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
    """Accuracy of decoding one token per pass minus the accuracy of `method`."""
    slow, fast = (benchmark_results(one, samples, tasks, model) for one in (stepwise, method))
    return slow.accuracy - fast.accuracy


def passes_ratio(
    method: str,
    samples: int,
    tasks: tuple[str, ...] = TASKS,
    stepwise: str = STEPWISE,
    model: str = "tiny-diffusion",
) -> float:
    """Passes per answer of `method`, divided by those of decoding one token per pass."""
    slow, fast = (benchmark_results(one, samples, tasks, model) for one in (stepwise, method))
    return fast.passes / slow.passes
