"""Duo-LLM's oracle: which MLPs each token would need, by trying all choices ("Duo-LLM: A Framework
for Studying Adaptive Computation in Large Language Models", arXiv:2410.10846)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.interface import SkippedParts
from anydecode.kernels.routes import Guide, Route, RoutedPass
from anydecode.models.small_mlps import SmallMlps
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: Patterns that run in one pass.
CHUNK = 64


@dataclass(eq=False)
class PatternGuide(Guide):
    """A row's pattern: bit i says whether the MLP of the i-th layer with a choice runs."""

    pattern: int = 0


class Patterns(Route):
    """Rows run the MLPs of the layers from `first` on that their patterns have, `count` layers, and
    everything else in full. In place of the others they run small ones, if there are some."""

    def __init__(
        self, first: int, count: int, small: SmallMlps | None = None, eps: float = 0.0
    ) -> None:
        self.first, self.count, self.small, self.eps = first, count, small, eps

    def run(self, routed: RoutedPass) -> None:
        rows, depth = np.arange(len(routed.states)), routed.num_layers
        parts = frozenset(range(depth))
        patterns = np.array([guide.pattern for guide in routed.guides], np.int64)
        routed.run(rows, 0, self.first)
        for number in range(self.count):
            layer = self.first + number
            routed.run(rows, layer, layer + 1, SkippedParts(mlps=parts))
            chosen = np.flatnonzero(patterns >> number & 1)
            routed.run(chosen, layer, layer + 1, SkippedParts(mixers=parts))
            routed.count(chosen, 0, 1)
            if self.small is not None:
                others = np.flatnonzero(~patterns >> number & 1)
                routed.states[others] += self.small(layer, routed.states[others], self.eps)
        end = self.first + self.count
        routed.run(rows, end, depth)
        routed.count(rows, depth, depth - self.count)
        routed.stop(rows, depth)


@register(
    Card(
        "duo-llm",
        "depth",
        paper="Duo-LLM (arXiv:2410.10846)",
        exactness="token-exact",
        summary="A study: the text of plain decoding, and for each token the choice of MLPs that"
        " predicts it best, of all choices.",
        works_with=("samplers", "batches"),
        missing=("the trained routers, which the paper finds far from the oracle",),
        deviations=(
            "eight layers in the middle have a choice by default; the paper's model has twelve, all"
            " with one",
            "a layer runs its MLP or none, or with `small` its MLP or a small one, not one of"
            " three; `anydecode train small-mlps` trains these alone, beside a frozen model",
            "every choice reads the keys and values of the full model",
            "the label is the token that plain decoding generates",
        ),
        bounds={"layers": Range(1, 12), "budget": Range(0, 12)},
        remote={"layers": Range(1, 8), "budget": Range(0, 8)},
    )
)
class DuoLlm(Decoder):
    """Finds, for each token of plain decoding, the MLPs with which the model predicts it best.

    All 2**layers patterns of MLPs that run or do not run are scored for each token. The best one
    reads the answer: it is a bound of what a choice per token could reach, and beats the full model
    on noise too. So the trace also has the same search for a random token of the text so far.

    The trace has, per token: `losses`, nats per pattern, by its bits; `full_loss`, those of the
    full model; `pattern`, the best one of `budget` MLPs, as a list of layers, and `loss`; and, with
    that random token in the label's place, the best pattern's `control_loss` and the full model's
    `control_full_loss`.

    Args:
        layers: Layers in the middle of the model that have a choice; at most all.
        budget: How many of their MLPs the best pattern runs; None: any number.
        small: The file of `anydecode train small-mlps`, whose MLPs run in place of those that do
            not; None: nothing does.
    """

    requirements = Requirements(attention_only=(TARGET,))

    def __init__(
        self, layers: int = 8, budget: int | None = None, small: str | Path | None = None
    ) -> None:
        self.layers, self.budget = layers, budget
        self.small = None if small is None else SmallMlps.load(Path(small))
        self._routes: dict[tuple[int, int], Patterns] = {}

    def prepare(self, sequence: Sequence) -> None:
        if sequence.companion_prompts or sequence.sampler.capture_layers:
            raise UnsupportedCombinationError(
                "duo-llm does not work with guidance by a second prompt or with samplers that read"
                " inner layers (DoLa)"
            )
        choice = layers_with_choice(sequence.num_layers, self.layers)
        count = len(choice)
        network = getattr(sequence.kv_cache().pool.model, "network", None)
        if self.small is not None and network is None:
            raise UnsupportedCombinationError("small MLPs need a transformer")
        if self.small is not None and network is not None:
            self.small.check(network)
            if self.small.layers != list(choice):
                raise InvalidRequestError(
                    f"the small MLPs are those of layers {self.small.layers}, and with"
                    f" layers={self.layers} layers {list(choice)} have a choice"
                )
        if self.budget is not None and self.budget > count:
            raise InvalidRequestError(
                f"budget={self.budget} is more than the {count} layers that have a choice"
            )

    def decode(self, sequence: Sequence) -> Decoding:
        choice = layers_with_choice(sequence.num_layers, self.layers)
        first, count = choice.start, len(choice)
        eps = sequence.kv_cache().pool.model.spec.norm_eps
        made = Patterns(first, count, self.small, eps)
        route = self._routes.setdefault((first, count), made)
        num_mlps = np.array([pattern.bit_count() for pattern in range(2**count)])
        is_allowed = num_mlps == (num_mlps if self.budget is None else self.budget)
        while not sequence.finished:
            scores = yield sequence.score()
            labels = np.array([scores.sampled[-1], other_token(sequence)])
            full = losses(scores.logits[-1:], labels)[0]
            kv_cache, found = sequence.kv_cache(), []
            sequence.truncate(sequence.length - 1)  # the last token runs again, in all patterns
            token = sequence.all_tokens[-1]
            for start in range(0, 2**count, CHUNK):
                patterns = range(start, min(start + CHUNK, 2**count))
                request = sequence.extend(
                    [token] * len(patterns), [ROOT] * len(patterns), runner=TARGET
                )
                span = request.groups[0][-1]
                span.variant = route
                span.guides = [PatternGuide(pattern=pattern) for pattern in patterns]
                scores = yield request
                found.append(losses(scores.logits, labels))
                kv_cache.discard()
            table = np.concatenate(found)
            best, control = np.where(is_allowed[:, None], table, np.inf).argmin(0).tolist()
            sequence.record(
                TokenTree(),
                [],
                labels[:1].tolist(),
                losses=table[:, 0].tolist(),
                full_loss=float(full[0]),
                pattern=[first + number for number in range(count) if best >> number & 1],
                loss=float(table[best, 0]),
                control_loss=float(table[control, 1]),
                control_full_loss=float(full[1]),
            )
            sequence.emit(labels[:1].tolist())


def layers_with_choice(num_layers: int, count: int) -> range:
    """`count` layers in the middle of a model, at most all."""
    count = min(count, num_layers)
    first = (num_layers - count) // 2
    return range(first, first + count)


def losses(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The negative logarithm of each label's probability, float64 `[rows, labels]`, from logits
    `[rows, vocab_size]`."""
    x = logits.astype(np.float64)
    top = x.max(-1, keepdims=True)
    result: np.ndarray = top + np.log(np.exp(x - top).sum(-1, keepdims=True)) - x[:, labels]
    return result


def other_token(sequence: Sequence) -> int:
    """A random token of the text so far."""
    noise = sequence.noise
    random = Random(f"{noise.seed}/{noise.stream}/{sequence.length}")
    return random.choice(sequence.all_tokens)
