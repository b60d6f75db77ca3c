"""Duo-LLM's oracle: which MLPs each token would need, by trying all choices ("Duo-LLM: A Framework
for Studying Adaptive Computation in Large Language Models", arXiv:2410.10846)."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.variants import check_variant
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.interface import SkippedParts
from anydecode.kernels.routes import Guide, Route, RoutedPass
from anydecode.models.exit_files import network_of
from anydecode.models.mlp_routers import NOTHING, SMALL, MlpRouters
from anydecode.models.small_mlps import SmallMlps
from anydecode.scoring.score import DecoderAction, Decoding
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
        routed.run(rows, 0, self.first)
        for number in range(self.count):
            layer = self.first + number
            routed.run(rows, layer, layer + 1, SkippedParts(mlps=parts))
            needs = self.needs(number, routed)
            chosen = np.flatnonzero(needs)
            routed.run(chosen, layer, layer + 1, SkippedParts(mixers=parts))
            routed.count(chosen, 0, 1)
            if self.small is not None:
                others = np.flatnonzero(~needs)
                routed.states[others] += self.small(layer, routed.states[others], self.eps)
        end = self.first + self.count
        routed.run(rows, end, depth)
        routed.count(rows, depth, depth - self.count)
        routed.stop(rows, depth)

    def needs(self, number: int, routed: RoutedPass) -> np.ndarray:
        """Which rows run the MLP of the layer `first + number`, bool `[rows]`; their states are
        those behind its attention."""
        patterns = np.array([guide.pattern for guide in routed.guides], np.int64)
        return (patterns >> number & 1).astype(bool)


class RoutedPatterns(Patterns):
    """As `Patterns`, but routers choose, and write each row's pattern into its guide."""

    def __init__(self, routers: MlpRouters, small: SmallMlps | None, eps: float) -> None:
        super().__init__(routers.layers[0], len(routers.layers), small, eps)
        self.routers = routers

    def needs(self, number: int, routed: RoutedPass) -> np.ndarray:
        needs = self.routers.scores(self.first + number, routed.states) >= 0
        for row in np.flatnonzero(needs).tolist():
            routed.guides[row].pattern |= 1 << number
        return needs


@register(
    Card(
        "duo-llm",
        "depth",
        paper="Duo-LLM (arXiv:2410.10846)",
        exactness="token-exact",
        summary="A study: the text of plain decoding, and for each token the choice of MLPs that"
        " predicts it best, of all choices.",
        works_with=("samplers", "batches"),
        deviations=(
            "eight layers in the middle have a choice by default; the paper's model has twelve, all"
            " with one",
            "a layer runs its MLP or none, or with `small` its MLP or a small one, not one of"
            " three; `anydecode train depth --recipe duo-llm-mlps` trains these alone, beside a"
            " frozen model",
            "every choice reads the keys and values of the full model",
            "routers learn beside a frozen model, with only the tokens of its answers routed; how"
            " their mixing is sharpened and the weight of their penalty are guesses: a temperature"
            " that falls from 1 to 0.1, and 10",
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
    `control_full_loss`. Where there are trained routers, it also has the pattern that they choose
    without the label, `routed_pattern`, and its loss, `routed_loss`.

    Args:
        layers: Layers in the middle of the model that have a choice; at most all.
        budget: How many of their MLPs the best pattern runs; None: any number.
        small: The file of `anydecode train depth --recipe duo-llm-mlps`, whose MLPs run in place of
            those that do not; None: nothing does.
        routers: The file of `anydecode train depth --recipe duo-llm`; by default that of the
            model's folder, mlp_routers.safetensors, if there is one for these layers and choices.
    """

    requirements = Requirements(attention_only=(TARGET,))

    def __init__(
        self,
        layers: int = 8,
        budget: int | None = None,
        small: str | Path | None = None,
        routers: str | Path | None = None,
    ) -> None:
        self.layers, self.budget = layers, budget
        self.small = None if small is None else SmallMlps.load(Path(small))
        self.routers = None if routers is None else MlpRouters.load(Path(routers))
        self._routes: dict[tuple[int, int], Patterns] = {}
        self._routed: dict[int, RoutedPatterns] = {}

    def prepare(self, sequence: Sequence) -> None:
        if sequence.companion_prompts or sequence.sampler.capture_layers:
            raise UnsupportedCombinationError(
                "duo-llm does not work with guidance by a second prompt or with samplers that read"
                " inner layers (DoLa)"
            )
        choice = layers_with_choice(sequence.num_layers, self.layers)
        count = len(choice)
        model = sequence.model()
        check_variant(model, SkippedParts(mlps=frozenset(choice)))
        lacks = "MLPs to replace: small MLPs and MLP routers need a transformer"
        if self.small is not None:
            self.small.check(network_of(model, lacks))
            self._check_layers("small MLPs", self.small.layers, choice)
        if self.routers is not None:
            self.routers.check(network_of(model, lacks))
            self._check_routers(self.routers, choice)
        if self.budget is not None and self.budget > count:
            raise InvalidRequestError(
                f"budget={self.budget} is more than the {count} layers that have a choice"
            )

    def _routers_of(self, model: Any, choice: range) -> MlpRouters | None:
        if self.routers is not None:
            return self.routers
        own: MlpRouters | None = getattr(model, "mlp_routers", None)
        try:
            if own is not None:
                own.check(model.network)
                self._check_routers(own, choice)
        except InvalidRequestError:
            return None
        return own

    def _check_routers(self, routers: MlpRouters, choice: range) -> None:
        """Raise InvalidRequestError unless the routers choose what this decoder tries."""
        self._check_layers("MLP routers", routers.layers, choice)
        if routers.target != (NOTHING if self.small is None else SMALL):
            given = "no small MLPs are" if self.small is None else "small MLPs are"
            raise InvalidRequestError(
                f"the MLP routers have learned {routers.target!r}, and {given} given"
            )

    def _check_layers(self, what: str, layers: list[int], choice: range) -> None:
        """Raise InvalidRequestError unless these are the layers that have a choice."""
        if layers != list(choice):
            raise InvalidRequestError(
                f"the {what} are those of layers {layers}, and with layers={self.layers} layers"
                f" {list(choice)} have a choice"
            )

    def decode(self, sequence: Sequence) -> Decoding:
        choice = layers_with_choice(sequence.num_layers, self.layers)
        first, count = choice.start, len(choice)
        model: Any = sequence.model()
        eps, routers = model.spec.norm_eps, self._routers_of(model, choice)
        made = Patterns(first, count, self.small, eps)
        route = self._routes.setdefault((first, count), made)
        routed = None
        if routers is not None:
            made = RoutedPatterns(routers, self.small, eps)
            routed = self._routed.setdefault(id(routers), made)
        num_mlps = np.array([pattern.bit_count() for pattern in range(2**count)])
        is_allowed = num_mlps == (num_mlps if self.budget is None else self.budget)
        while not sequence.finished:
            scores = yield sequence.score()
            labels = np.array([scores.sampled[-1], other_token(sequence)])
            full = losses(scores.logits[-1:], labels)[0]
            found = []
            sequence.truncate(sequence.length - 1)  # the last token runs again, in all patterns
            size = min(CHUNK, sequence.pool().num_slots - sequence.length + 1)  # as many have room
            for start in range(0, 2**count, size):
                patterns = range(start, min(start + size, 2**count))
                guides = [PatternGuide(pattern=pattern) for pattern in patterns]
                logits = yield from _run_again(sequence, route, guides)
                found.append(losses(logits, labels))
            table = np.concatenate(found)
            best, control = np.where(is_allowed[:, None], table, np.inf).argmin(0).tolist()
            of_routers: dict[str, Any] = {}
            if routed is not None:
                guide = PatternGuide()
                yield from _run_again(sequence, routed, [guide])
                of_routers = {
                    "routed_pattern": _layers(guide.pattern, choice),
                    "routed_loss": float(table[guide.pattern, 0]),
                }
            sequence.record(
                TokenTree(),
                [],
                labels[:1].tolist(),
                losses=table[:, 0].tolist(),
                full_loss=float(full[0]),
                pattern=_layers(best, choice),
                loss=float(table[best, 0]),
                control_loss=float(table[control, 1]),
                control_full_loss=float(full[1]),
                **of_routers,
            )
            sequence.emit(labels[:1].tolist())


def _run_again(
    sequence: Sequence, route: Patterns, guides: list[PatternGuide]
) -> Generator[DecoderAction, Any, np.ndarray]:
    """The logits `[guides, vocab_size]` of the text's last token, which runs once per guide and
    leaves nothing behind."""
    tokens = [sequence.all_tokens[-1]] * len(guides)
    request = sequence.extend(tokens, [ROOT] * len(guides), runner=TARGET)
    span = request.groups[0][-1]
    span.variant, span.guides = route, list(guides)
    scores = yield request
    sequence.kv_cache().discard()
    logits: np.ndarray = scores.logits
    return logits


def _layers(pattern: int, choice: range) -> list[int]:
    """The layers of a pattern."""
    return [layer for number, layer in enumerate(choice) if pattern >> number & 1]


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
