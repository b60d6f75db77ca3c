"""Diffusion guided language modeling (Lovelace et al., "Diffusion Guided Language Modeling",
arXiv:2408.04220).

A diffusion model proposes the embedding of a continuation, led by a classifier of embeddings if one
is given. A soft prompt that is made of the embedding follows the prompt, and the language model
continues it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.branches import emit_from
from anydecode.decoders.framework.pooled_states import encoded, pooled_state
from anydecode.errors import (
    ContextLengthError,
    InvalidRequestError,
    UnsupportedCombinationError,
)
from anydecode.models.pooling import Pooling
from anydecode.models.sentence_diffusion import (
    EmbeddingClassifier,
    SentenceDiffusion,
    level_features,
)
from anydecode.sampling.noise import Noise
from anydecode.scoring.score import ActionResult, Call, DecoderAction, Decoding
from anydecode.scoring.sequence import DRAFT, TARGET, Sequence
from anydecode.scoring.state import StateKey

#: How many points around a predicted embedding the classifier reads.
NUM_POINTS = 32
#: The logarithm of the ratio of signal and noise is at most this, and at least its negative.
MAX_LOG_RATIO = 20.0
#: Random numbers of a step, by their attempt: of its noise, and of the points.
_STEP, _POINTS = 0, 1
#: The token in the place of a row of the soft prompt.
_SOFT = -1
SAMPLERS, ESTIMATES = ("ddpm", "ddim"), ("loss", "probability")
_STATE: StateKey[np.ndarray] = StateKey("dglm", "soft_prompt")


def signal_level(time: float) -> float:
    """The share of the signal's variance at `time`, from 0 (no noise) to 1: the cosine schedule."""
    level = max(math.cos(time * math.pi / 2) ** 2, 1e-9)
    ratio = math.log(level) - math.log(max(1 - level, 1e-12))
    return 1 / (1 + math.exp(-min(max(ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO)))


@register(
    Card(
        "dglm",
        "alignment",
        paper="Diffusion Guided Language Modeling (arXiv:2408.04220)",
        exactness="lossy",
        summary="A diffusion model, which a classifier may lead, proposes the embedding of a"
        " continuation, and the model writes it behind a soft prompt.",
        needs=("parts of dglm, trained for the model", "draft model: the sentence encoder"),
        works_with=("constraints", "penalties", "samplers", "logprobs", "batches"),
        deviations=(
            "the denoiser and the generator of soft prompts are residual networks of linear layers;"
            " the paper's are transformers over parts of the embedding",
            "the denoiser is trained on evenly distributed times, without weights of the losses and"
            " without an average of its weights",
            "the language model is adapted by low-rank matrices, which are merged, not as a whole,"
            " and learns the continuations, but not the prompts",
            "all parts are trained at once, on few texts",
        ),
        bounds={"guidance": Range(0, 1e6), "prompt_scale": Range(-1000, 1000)},
        remote={
            "steps": Range(1, 1000),
            "sampler": Words(SAMPLERS),
            "guidance": Range(0, 1000),
            "estimate": Words(ESTIMATES),
            "prompt_scale": Range(0, 10),
            "level": Range(0, 1),
            "variance": Range(0, 1),
        },
    )
)
class Dglm(Decoder):
    """Writes a continuation behind a soft prompt made of a proposed embedding.

    `anydecode train dglm` trains a model with the parts that this needs, and `anydecode train
    classifier` a classifier. The draft model is the sentence encoder that they were trained with.

    The diffusion model starts from noise and reads the embedding of the prompt. With a classifier,
    each step predicts the embedding, draws 32 points around it, and moves the predicted noise by
    `guidance` times the gradient of the classifier's loss at these points; the gradients of several
    classifiers are added. The proposal is made noisy again, as the generator of soft prompts has
    learned to read it.

    Args:
        steps: Number of steps of the diffusion model.
        sampler: "ddpm", or "ddim", which adds no noise.
        guidance: The weight of the classifiers: above 0 if there are any, else 0.
        classifier: The file of the classifier whose attribute the text shall have; several are
            joined with "+".
        without: The file of a classifier whose attribute the text shall not have; several are
            joined with "+".
        estimate: The loss at several points: "loss", the logarithm of the mean of its exponentials,
            as in the authors' code, or "probability", the negative logarithm of the mean
            probability.
        prompt_scale: The weight of the prompt (classifier-free guidance): 1 is the prediction with
            the prompt, 0 that without.
        level: The share of the proposal's variance that is kept when it is made noisy.
        variance: The variance of the noise of a step of "ddpm", from 0, the smallest, to 1, the
            largest.
    """

    requirements = Requirements(
        runners=(DRAFT,),
        draft_causal=False,
        can_translate_vocab=True,
        reads_sentence_diffusion=True,
        attention_only=(TARGET,),
    )

    def __init__(
        self,
        steps: int = 250,
        sampler: str = "ddpm",
        guidance: float = 0.0,
        classifier: str | Path | None = None,
        without: str | Path | None = None,
        estimate: str = "loss",
        prompt_scale: float = 1.0,
        level: float = 0.95,
        variance: float = 0.2,
    ) -> None:
        if steps < 1 or sampler not in SAMPLERS or estimate not in ESTIMATES:
            raise InvalidRequestError(
                f"dglm needs steps of at least 1, a sampler of {', '.join(SAMPLERS)} and an"
                f" estimate of {', '.join(ESTIMATES)}, not {steps}, {sampler!r} and {estimate!r}"
            )
        if guidance < 0 or not 0 <= level <= 1 or not 0 <= variance <= 1:
            raise InvalidRequestError(
                "dglm needs guidance of at least 0, and level and variance from 0 to 1, not"
                f" {guidance:g}, {level:g} and {variance:g}"
            )
        is_guided = classifier is not None or without is not None
        if guidance and not is_guided:
            raise InvalidRequestError(
                "dglm has guidance but no classifier: `anydecode train classifier` makes one, and"
                " dglm:classifier=FILE reads it"
            )
        if is_guided and not guidance:
            raise InvalidRequestError(
                "dglm has a classifier but no guidance: give guidance= above 0, such as 20"
            )
        self.steps, self.sampler, self.guidance = steps, sampler, guidance
        self.estimate, self.prompt_scale = estimate, prompt_scale
        self.level, self.variance = level, variance
        #: The files, their classifiers, and 1 for an attribute that the text shall have, -1 for one
        #: that it shall not have.
        self.classifiers = [
            (file, EmbeddingClassifier.load(file), sign)
            for files, sign in ((classifier, 1), (without, -1))
            for file in _files(files)
        ]

    def prepare(self, sequence: Sequence) -> None:
        if sequence.companion_prompts:
            raise UnsupportedCombinationError("dglm does not work with a second prompt")
        model: Any = sequence.model()
        encoder: Any = sequence.model(DRAFT)
        parts = _parts(model)
        parts.check(model.network)
        if not encoder.spec.is_encoder:
            raise UnsupportedCombinationError(
                f"dglm needs a sentence encoder as the draft model; {encoder.name} is none"
            )
        size = encoder.spec.hidden_size
        trained = [("the model", parts.embedding_size)]
        trained += [
            (f"the classifier {file}", len(one.weight)) for file, one, _ in self.classifiers
        ]
        for name, expected in trained:
            if size != expected:
                raise InvalidRequestError(
                    f"dglm: the encoder's embeddings have {size} numbers, but {name} was trained"
                    f" for embeddings of {expected}: use the encoder that it was trained with"
                )
        num_rows = parts.num_rows(model.spec.hidden_size)
        longest = min(model.spec.max_positions, sequence.pool().num_slots)
        if sequence.length + num_rows + sequence.remaining > longest:
            raise ContextLengthError(
                f"dglm adds {num_rows} positions to the prompt of {len(sequence.prompt)} tokens and"
                f" max_tokens of {sequence.remaining}, and the context has {longest}: lower"
                " max_tokens"
            )

    def decode(self, sequence: Sequence) -> Decoding:
        model: Any = sequence.model()
        parts = _parts(model)
        if _STATE not in sequence.state:
            context = yield from _prompt_embedding(sequence)
            noise, size = sequence.noise, model.spec.hidden_size
            call = Call(lambda: self.soft_prompt(parts, context, noise, size), math.inf)
            yield call
            if call.error is not None:
                raise call.error
            sequence.state[_STATE] = call.result
        rows = sequence.state[_STATE]
        prompt, kv_cache = sequence.prompt, sequence.kv_cache()
        kv_cache.truncate(min(kv_cache.length, len(prompt)))
        if kv_cache.length < len(prompt):
            yield sequence.score(prompt[kv_cache.length :], logits=False)
        branch = sequence.fork()
        branch.prompt = [*prompt, *[_SOFT] * len(rows)]
        branch.compute_logprobs = None
        scores = yield branch.score([_SOFT] * len(rows), embeddings=rows)
        yield from emit_from(branch, sequence, None if sequence.tokens else scores)
        branch.release()

    def soft_prompt(
        self, parts: SentenceDiffusion, context: np.ndarray, noise: Noise, hidden_size: int
    ) -> np.ndarray:
        """The soft prompt of a sampled embedding, float32 `[rows, hidden_size]`.

        Args:
            parts: What was trained for the model.
            context: The normed embedding of the prompt, float64 `[embedding_size]`.
            noise: The random numbers of the text.
            hidden_size: That of the model.
        """
        noise = noise.with_purpose("search")
        sentence = self.proposal(parts, context, noise)
        fresh = noise.normal(parts.embedding_size, self.steps + 1, _STEP)
        noisy = math.sqrt(self.level) * parts.normed(sentence)
        noisy = noisy + math.sqrt(1 - self.level) * fresh
        return parts.soft_prompt(noisy, self.level, hidden_size)

    def proposal(self, parts: SentenceDiffusion, context: np.ndarray, noise: Noise) -> np.ndarray:
        """A sampled embedding of length 1, float64 `[embedding_size]`. Arguments as for
        `soft_prompt`."""
        size = parts.embedding_size
        state = noise.normal(size, 0, _STEP)
        for step in range(self.steps):
            level = signal_level(1 - step / self.steps)
            following = signal_level(1 - (step + 1) / self.steps)
            start, added = self._predicted(parts, state, context, level, noise, step)
            if step + 1 == self.steps:
                state = start
            elif self.sampler == "ddim":
                state = math.sqrt(following) * start + math.sqrt(1 - following) * added
            else:
                ratio = level / following
                smallest = (1 - following) / (1 - level) * (1 - ratio)
                spread = (1 - ratio) ** self.variance * smallest ** (1 - self.variance)
                state = (state - (1 - ratio) / math.sqrt(1 - level) * added) / math.sqrt(ratio)
                state = state + math.sqrt(spread) * noise.normal(size, step + 1, _STEP)
        return parts.sentence(state)

    def _predicted(
        self,
        parts: SentenceDiffusion,
        state: np.ndarray,
        context: np.ndarray,
        level: float,
        noise: Noise,
        step: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The embedding and the noise of which `state` is predicted to be made."""
        signal, spread = math.sqrt(level), math.sqrt(1 - level)
        features, size = level_features(level), len(state)
        velocity, pull_backs = np.zeros(size), []
        for weight, prompt in (
            (self.prompt_scale, context),
            (1 - self.prompt_scale, parts.unconditional),
        ):
            if weight:
                inputs = np.concatenate([state, prompt, features])
                outputs, pull_back = parts.denoiser.linearized(inputs)
                velocity = velocity + weight * outputs
                pull_backs.append((weight, pull_back))
        start = signal * state - spread * velocity
        added = spread * state + signal * velocity
        if not self.classifiers:
            return start, added
        points = noise.normal(NUM_POINTS * size, step, _POINTS).reshape(NUM_POINTS, size)
        by_start = self._gradient(parts, start + spread / signal * points)
        by_velocity = -spread * by_start
        by_state = signal * by_start
        for weight, pull_back in pull_backs:
            by_state = by_state + weight * pull_back(by_velocity)[:size]
        added = added + self.guidance * spread * by_state
        return (state - spread * added) / signal, added

    def _gradient(self, parts: SentenceDiffusion, points: np.ndarray) -> np.ndarray:
        """The gradient of the sum of the classifiers' losses at `points`, normed embeddings
        `[points, embedding_size]`, by all of them moved alike, `[embedding_size]`."""
        raw = points * parts.deviation + parts.mean
        lengths = np.linalg.norm(raw, axis=1, keepdims=True)
        sentences = raw / lengths
        by_sentence = np.zeros_like(sentences)
        for _, classifier, sign in self.classifiers:
            logits = sign * classifier.logits(sentences)
            losses = np.logaddexp(0, -logits)
            exponents = losses if self.estimate == "loss" else -losses
            shares = np.exp(exponents - exponents.max())
            shares /= shares.sum()
            slopes = -sign * np.exp(-np.logaddexp(0, logits))  # of the losses by the raw logits
            by_sentence += (shares * slopes)[:, None] * classifier.weight
        inward = (by_sentence * sentences).sum(1, keepdims=True) * sentences
        gradient: np.ndarray = ((by_sentence - inward) / lengths * parts.deviation).sum(0)
        return gradient


def _files(choice: str | Path | None) -> list[Path]:
    """The files that a parameter names."""
    if choice is None:
        return []
    if isinstance(choice, Path) or os.path.isfile(choice):
        return [Path(choice)]
    names = choice.split("+")
    if not all(names):
        raise InvalidRequestError(
            f"dglm needs names of files that are joined with '+', not {choice!r}"
        )
    return [Path(name) for name in names]


def _parts(model: Any) -> SentenceDiffusion:
    """What was trained for the model."""
    parts: SentenceDiffusion | None = getattr(model, "sentence_diffusion", None)
    if parts is None:
        raise UnsupportedCombinationError(
            "dglm needs a model that was trained for it: `anydecode train dglm` makes one"
        )
    return parts


def _prompt_embedding(
    sequence: Sequence,
) -> Generator[DecoderAction, ActionResult, np.ndarray]:
    """The normed embedding of the prompt, float64 `[embedding_size]`."""
    encoder: Any = sequence.model(DRAFT)
    parts = _parts(sequence.model())
    pooling = encoder.pooling or Pooling()
    text = pooling.prompt(None) + sequence.tokenizers[TARGET].decode(sequence.prompt)
    longest = encoder.spec.max_positions
    tokens = encoded(sequence.tokenizers[DRAFT], text, longest)
    if not tokens:
        return parts.unconditional
    state = yield from pooled_state(sequence, DRAFT, tokens, pooling)
    return parts.normed(pooling.vector(state))
