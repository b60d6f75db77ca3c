"""DEL: the exit layer and the draft length of each round follow the text (Zarch et al., "DEL:
Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding", arXiv:2504.05598).

After each round, every layer's states of the verified positions go through the head: a layer whose
most probable tokens are those of the last layer has drafted well. From the layers' rates follow the
layer and the length with the most expected tokens per layer that runs.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.depth.self_speculation import DepthSession, Drafting, SelfSpeculative
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import CHAIN_NOISE, LOGIT_RULES
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import DecoderAction, ScoreRequest, Scores
from anydecode.scoring.sequence import Sequence

#: Last positions of a prompt whose states are evidence.
PROMPT_ROWS = 32


def largest(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The most probable token of each row, and its probability."""
    top = logits.argmax(-1)
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return top, 1 / shifted.sum(-1)


class LayerRates:
    """Decaying counts of each exit: matches with the last layer, and confidences.

    Args:
        exits: Numbers of layers, ascending.
        memory: Decay of the counts per round.
    """

    def __init__(self, exits: list[int], memory: float) -> None:
        self.exits, self.memory = exits, memory
        # matches, mismatches, and the sums of the confidences of each
        self.counts = np.zeros((4, len(exits)))

    def record(self, matches: np.ndarray, confidences: np.ndarray) -> None:
        """Add evidence, both `[positions, exits]`."""
        misses = ~matches
        new = [matches, misses, matches * confidences, misses * confidences]
        self.counts = self.memory * self.counts + np.array([one.sum(0) for one in new])

    def rates(self) -> np.ndarray:
        """The share of positions at which each exit matches; 0 where there is no evidence."""
        total = self.counts[0] + self.counts[1]
        rates: np.ndarray = np.divide(
            self.counts[0], total, out=np.zeros_like(total), where=total > 0
        )
        return rates

    def threshold(self, index: int) -> float:
        """Half way between the mean confidences of matches and mismatches of an exit; 0 until both
        were seen."""
        matches, misses, sure, unsure = self.counts[:, index]
        if not matches or not misses:
            return 0.0
        return float(sure / matches + unsure / misses) / 2

    def best(self, num_layers: int, max_size: int, head: float) -> tuple[int, int]:
        """The index of the exit and the draft length with the most expected tokens per layer; ties
        go to the shorter draft, then to the earlier exit."""
        rates, found = self.rates(), (0.0, 0, 0)
        for size in range(max_size + 1):
            for index, layers in enumerate(self.exits):
                tokens = float((rates[index] ** np.arange(size + 1)).sum())
                cost = num_layers + head + size * (layers + head)
                if tokens / cost > found[0]:
                    found = (tokens / cost, index, size)
        return found[1:]


class _Session(DepthSession):
    def __init__(self, sequence: Sequence, method: Del) -> None:
        super().__init__(sequence)
        self.method, self.num_layers = method, sequence.num_layers
        self.exits = method.exits(self.num_layers)
        self.num_rounds, self.is_observed, self._round_start = -1, True, -1
        self._has_read_prompt = False
        self.rates = LayerRates(self.exits, method.memory)
        self.model: Any = sequence.model()
        self.head = head_cost(self.model) if method.head is None else method.head
        self.chosen = (0, 0)
        self.states: list[dict[int, np.ndarray]] = []  # of the drafts' rows, by layer

    def size(self) -> int:
        if self.sequence.length != self._round_start:  # else it starts again
            self.num_rounds, self._round_start = self.num_rounds + 1, self.sequence.length
        self.is_observed = self.num_rounds % self.method.every == 0
        self.plain_layers = tuple(self.exits) if self.is_observed else ()
        self.chosen = self.rates.best(self.num_layers, self.method.size, self.head)
        return self.chosen[1]

    def facts(self) -> dict[str, Any]:
        return {"layers": self.exits[self.chosen[0]], "size": self.chosen[1]}

    def prefill(self, tokens: list[int]) -> Generator[DecoderAction, Any, None]:
        if self._has_read_prompt:  # after a restart
            yield from super().prefill(tokens)
            return
        rows = min(len(tokens), PROMPT_ROWS)
        scores = yield self.sequence.score(tokens, rows=rows, hidden=tuple(self.exits))
        self._record(scores.hidden, scores.logits)
        self._has_read_prompt = True

    def draft(self, token: int, size: int) -> Drafting:
        sequence, index = self.sequence, self.chosen[0]
        sampler, position, layers = sequence.sampler.fork(), sequence.length, self.exits[index]
        threshold = self.rates.threshold(index)
        drafts: list[int] = []
        self.states = []
        while len(drafts) < size:
            hidden = tuple(one for one in self.exits if one <= layers and self.is_observed)
            scores = yield sequence.score([token], layers=(0, layers), hidden=hidden)
            self.states.append({layer: scores.hidden[layer].copy() for layer in hidden})
            row = scores.row(0)
            token = self.sample(sampler, row, position + len(drafts))
            drafts.append(token)
            _, (confidence,) = largest(row[None])
            if confidence < threshold or sequence.stops_at(token):
                break
        return drafts

    def verification(self, drafts: list[int]) -> ScoreRequest:
        layers = self.exits[self.chosen[0]]
        hidden = tuple(one for one in self.exits if one > layers and self.is_observed)
        return self.sequence.complete(drafts[-1:], hidden=hidden)

    def observe(self, drafts: list[int], num_accepted: int, scores: Scores) -> None:
        """Positions up to the first rejected draft are evidence."""
        if not self.is_observed:
            return
        rows = min(num_accepted + 1, len(drafts))
        states = {
            layer: np.concatenate([one[layer] for one in self.states[:rows]])
            if layer in self.states[0]
            else scores.hidden[layer][:rows]
            for layer in self.exits
        }
        self._record(states, scores.logits[:rows])

    def observe_plain(self, scores: Scores) -> None:
        self._record(scores.hidden, scores.logits)

    def _record(self, states: Mapping[int, np.ndarray], logits: np.ndarray) -> None:
        last = logits.argmax(-1)
        found = [largest(self.model.head(states[layer])) for layer in self.exits]
        matches = np.stack([tokens == last for tokens, _ in found], -1)
        self.rates.record(matches, np.stack([confidence for _, confidence in found], -1))


def head_cost(model: Any) -> float:
    """The products of the head as a multiple of those of a layer, the mean of all; 0 for a model
    without weights."""
    network = getattr(model, "network", None)
    if network is None:
        return 0.0
    size = sum(
        weight.out_features * weight.in_features
        for layer in network.weights.layers
        for weight in layer.matrices
    )
    head = network.weights.head
    return float(head.out_features * head.in_features * network.spec.num_layers / size)


@register(
    Card(
        "del",
        "depth",
        paper="Zarch et al. 2025, DEL: Dynamic Exit Layer (arXiv:2504.05598)",
        exactness="token-exact",
        summary="Each round's exit layer and draft length follow from how well all layers predict.",
        works_with=("constraints", "samplers", "batches", "adapters"),
        measured=(
            "0.20 times the speed of plain decoding on SmolLM2-135M-Instruct (Q4_1): it chooses"
            " plain decoding, and pays for 32.51 rows of the head per token (AMD EPYC, 2 cores;"
            " `anydecode bench depth`, docs/performance.md)",
            "0.98 times the speed of plain decoding on early-8b.Q4_0, with 35.38 rows of the head"
            " per token (random weights whose exits agree often; AMD EPYC with AVX2, 2 cores;"
            " `anydecode bench depth`, docs/performance.md)",
        ),
        deviations=(
            "the first round follows the evidence of the prompt; the released code drafts one token"
            " after the second layer",
            "a draft has at most the chosen length, and length 0 is plain decoding; in the released"
            " code the length does not limit the draft, which has at least one token",
            "the cost of a draft and of the verification includes the head by default",
            "verification samples with the target's own noise; the paper's rejection rule is"
            " acceptance='rejection'",
            CHAIN_NOISE,
            "drafting stops by the largest probability, not that of the drafted token, which is"
            " another at a temperature",
            "without mismatches or matches of an exit there is no threshold of confidence",
            "the layers' tokens are compared at the positions that were drafted from; that of a"
            " round's last draft is not, since its states of the first layers are not kept",
            "evidence of a prompt's positions from the prefix cache is missing",
        ),
        remote={
            "size": Range(0, 64),
            "memory": Range(0, 1),
            "head": Range(0, 1024),
            "interval": Range(1, 1024),
            "every": Range(1, 1024),
            "acceptance": LOGIT_RULES,
        },
    )
)
class Del(SelfSpeculative):
    """Chooses exit and draft length before each round.

    Args:
        size: Maximum draft length.
        memory: Decay of the evidence per round, above 0 and at most 1.
        head: The cost of the head, in layers; None: from the model's shapes. The paper leaves it
            out.
        interval: Layers between exits. The head reads the states of each exit, which takes most of
            the time in models with large vocabularies.
        every: One round of so many is evidence.
        acceptance: "token-exact", "rejection", "typical" or "top-m", or a rule that reads no hidden
            states.
    """

    def __init__(
        self,
        size: int = 17,
        memory: float = 0.95,
        head: float | None = None,
        interval: int = 1,
        every: int = 1,
        acceptance: str | Acceptance = "token-exact",
    ) -> None:
        super().__init__(acceptance)
        if size < 0 or not 0 < memory <= 1 or (head is not None and head < 0):
            raise InvalidRequestError("del needs size >= 0, 0 < memory <= 1 and head >= 0")
        if interval < 1 or every < 1:
            raise InvalidRequestError(
                f"del needs interval >= 1 and every >= 1, not interval={interval}, every={every}"
            )
        self.size, self.memory, self.head = size, memory, head
        self.interval, self.every = interval, every

    def exits(self, num_layers: int) -> list[int]:
        """Numbers of layers after which a draft may leave."""
        return list(range(self.interval, num_layers, self.interval))

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        exits = self.exits(sequence.num_layers)
        if not exits:
            raise InvalidRequestError(
                f"interval={self.interval} leaves no exit before the last of"
                f" {sequence.num_layers} layers"
            )
        self.check_exit(sequence, exits[-1])

    def open(self, sequence: Sequence) -> DepthSession:
        return _Session(sequence, self)
