"""Oracle test of dglm (Lovelace et al., arXiv:2408.04220): embeddings and texts replayed from the
weights, with the classifier's gradient by differences."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.certification.oracles.transformer import softmax
from anydecode.certification.tiny_sentence import EMBEDDING_SIZE, sentence_diffusion_model
from anydecode.decoders.guidance.dglm import Dglm
from anydecode.models.network import Network, PlainMlp
from anydecode.models.sentence_diffusion import EmbeddingClassifier, SentenceDiffusion
from anydecode.sampling.noise import Noise

PROMPTS = ("the cat sat on the mat", "abcabc", "q")
LENGTH, HALF = 10, 16
#: Of the differences by which gradients are computed.
DIFFERENCE = 1e-5


def classifier(seed: int = 5) -> EmbeddingClassifier:
    """A random classifier."""
    weight = np.random.default_rng(seed).normal(size=EMBEDDING_SIZE)
    return EmbeddingClassifier(4 * weight.astype(np.float32).astype(np.float64), 0.25)


class SoftForward(Forward):
    """A pass in which the tokens -1, -2, ... are the rows of a soft prompt."""

    rows: np.ndarray

    def _embedding(self, token: int) -> np.ndarray:
        return super()._embedding(token) if token >= 0 else self.rows[-1 - token].astype(np.float64)


def embedding(network: Network, tokens: list[int]) -> np.ndarray:
    """The mean state of a BERT, of length 1."""
    weights, eps = network.weights, network.spec.norm_eps
    assert weights.position_table is not None and weights.segments is not None

    def normed(x: np.ndarray, weight: Any, bias: Any) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        result: np.ndarray = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight + bias
        return result

    def linear(x: np.ndarray, part: Any) -> np.ndarray:
        result: np.ndarray = x @ part.weight.data.astype(np.float64).T + part.bias
        return result

    x = (
        weights.embedding.data[tokens].astype(np.float64)
        + weights.position_table.data[: len(tokens)]
    )
    x = normed(x + weights.segments[0], weights.embedding_norm, weights.embedding_norm_bias)
    for layer, spec in zip(weights.layers, network.spec.layers, strict=True):
        assert spec.attention is not None and isinstance(layer.mlp, PlainMlp)
        heads = spec.attention.num_heads
        query, key, value = (
            linear(x, part).reshape(len(tokens), heads, -1)
            for part in (layer.query, layer.key, layer.value)
        )
        scores = np.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
        mixed = np.einsum("hqk,khd->qhd", softmax(scores), value).reshape(len(tokens), -1)
        x = x + linear(mixed, layer.output)
        x = normed(x, layer.attention_post_norm, layer.attention_post_norm_bias)
        inner = linear(x, layer.mlp.up)
        inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
        x = normed(x + linear(inner, layer.mlp.down), layer.mlp_post_norm, layer.mlp_post_norm_bias)
    mean = x.mean(0)
    vector: np.ndarray = mean / np.linalg.norm(mean)
    return vector


def network_output(tensors: Any, inputs: np.ndarray) -> np.ndarray:
    """The output of a residual network of two blocks."""

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        result: np.ndarray = tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"]
        return result

    h = linear("first", inputs)
    for block in ("blocks.0", "blocks.1"):
        inner = linear(f"{block}.up", h)
        h = h + linear(f"{block}.down", inner / (1 + np.exp(-inner)))
    return linear("last", h)


def waves(level: float) -> np.ndarray:
    """The sines and cosines of the level."""
    angles = [1000 * level * 10_000 ** (-i / (HALF - 1)) for i in range(HALF)]
    return np.array([*map(math.sin, angles), *map(math.cos, angles)])


def alpha_squared(time: float) -> float:
    """The cosine schedule; its logits are cut at 20."""
    share = max(math.cos(0.5 * math.pi * time) ** 2, 1e-9)
    logit = min(20.0, max(-20.0, math.log(share / max(1 - share, 1e-12))))
    return 1 / (1 + math.exp(-logit))


def gauss(noise: Noise, count: int, position: int, attempt: int) -> np.ndarray:
    """Normal numbers by Box and Muller."""
    u = noise.uniform(range(2 * count), position, attempt)
    return np.array(
        [math.sqrt(-2 * math.log(u[i])) * math.cos(2 * math.pi * u[count + i])
         for i in range(count)]
    )  # fmt: skip


def replayed_rows(
    parts: SentenceDiffusion, context: np.ndarray, seed: int, hidden: int, settings: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """The embedding and the soft prompt."""
    values = {
        "steps": 250, "sampler": "ddpm", "guidance": 0.0, "classifier": (), "without": (),
        "estimate": "loss", "prompt_scale": 1.0, "level": 0.95, "variance": 0.2, **settings,
    }  # fmt: skip
    noise, size = Noise(seed).with_purpose("search"), EMBEDDING_SIZE
    steps, scale = values["steps"], values["prompt_scale"]
    attributes = [(classifier(one), 1) for one in values["classifier"]]
    attributes += [(classifier(one), -1) for one in values["without"]]

    def velocity(z: np.ndarray, level: float) -> np.ndarray:
        with_prompt, without = (
            network_output(parts.denoiser.tensors, np.concatenate([z, c, waves(level)]))
            for c in (context, parts.unconditional)
        )
        return scale * with_prompt + (1 - scale) * without

    def loss(z: np.ndarray, level: float, points: np.ndarray) -> float:
        start = math.sqrt(level) * z - math.sqrt(1 - level) * velocity(z, level)
        x = start + math.sqrt((1 - level) / level) * points
        x = x * parts.deviation + parts.mean
        total = 0.0
        for probe, sign in attributes:
            logits = (x / np.sqrt((x * x).sum(1))[:, None]) @ probe.weight + probe.bias
            right = 1 / (1 + np.exp(-sign * logits))
            if values["estimate"] == "probability":
                total -= math.log(right.mean())
            else:
                total += math.log((1 / right).mean())  # exp(-ln p) is 1 / p
        return total

    z = gauss(noise, size, 0, 0)
    for step in range(steps):
        now, after = alpha_squared(1 - step / steps), alpha_squared(1 - (step + 1) / steps)
        alpha, sigma = math.sqrt(now), math.sqrt(1 - now)
        v = velocity(z, now)
        x, eps = alpha * z - sigma * v, sigma * z + alpha * v
        if values["guidance"]:
            points = gauss(noise, 32 * size, step, 1).reshape(32, size)
            unit = DIFFERENCE * np.eye(size)
            gradient = [
                (loss(z + h, now, points) - loss(z - h, now, points)) / (2 * DIFFERENCE)
                for h in unit
            ]
            eps = eps + values["guidance"] * sigma * np.array(gradient)
            x = (z - sigma * eps) / alpha
        if step == steps - 1:
            z = x
        elif values["sampler"] == "ddim":
            z = math.sqrt(after) * x + math.sqrt(1 - after) * eps
        else:
            ratio = now / after
            low, high = math.log((1 - after) / (1 - now) * (1 - ratio)), math.log(1 - ratio)
            spread = math.exp(values["variance"] * high + (1 - values["variance"]) * low)
            z = (z - (1 - ratio) / sigma * eps) / math.sqrt(ratio)
            z = z + math.sqrt(spread) * gauss(noise, size, step + 1, 0)
    sentence = z * parts.deviation + parts.mean
    sentence = sentence / math.sqrt(float(sentence @ sentence))
    level = values["level"]
    noisy = math.sqrt(level) * (sentence - parts.mean) / parts.deviation
    noisy = noisy + math.sqrt(1 - level) * gauss(noise, size, steps + 1, 0)
    rows = network_output(parts.prompter.tensors, np.concatenate([noisy, waves(level)]))
    return sentence, rows.reshape(-1, hidden)


def replayed_text(
    network: Network, rows: np.ndarray, prompt: str, seed: int, temperature: float
) -> list[int]:
    """The text behind a prompt and the rows."""
    forward, generated = SoftForward(network), list[int]()
    forward.rows = rows
    tokens = [*prompt.encode(), *(-1 - row for row in range(len(rows)))]
    for token in tokens:
        logits = forward.step(token)
    for position in range(len(tokens), len(tokens) + LENGTH):
        if temperature:
            logits = logits / temperature + Noise(seed).gumbel(range(len(logits)), position)
        generated.append(int(logits.argmax()))
        logits = forward.step(generated[-1])
    return generated


#: Classifiers are seeds of `classifier`.
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"steps": 12, "guidance": 30.0, "classifier": (5,)},
    {"steps": 12, "guidance": 30.0, "without": (5,), "estimate": "probability"},
    {"steps": 12, "guidance": 20.0, "classifier": (5, 6), "without": (7,)},
    {"steps": 12, "sampler": "ddim", "prompt_scale": 2.5, "guidance": 10.0, "classifier": (5,)},
    {"steps": 20, "level": 1.0, "variance": 1.0},
)


@oracle_test("dglm")
def dglm() -> Iterator[Check]:
    """The replays, and what the classifier does to the proposals."""
    with tempfile.TemporaryDirectory() as folder, sentence_diffusion_model() as llm:
        files = {seed: Path(folder) / f"{seed}.safetensors" for seed in (5, 6, 7)}
        for seed, file in files.items():
            classifier(seed).save(file)
        target: Any = llm.model
        encoder: Any = llm.engine.runners["draft"].model
        parts: SentenceDiffusion = target.sentence_diffusion
        for settings in SETTINGS:
            given = dict(settings)
            for option in {"classifier", "without"} & set(settings):
                given[option] = "+".join(str(files[seed]) for seed in settings[option])
            decoder: Any = Dglm(**given) if given else "dglm"
            method = Dglm(**given)
            wrong, error, texts = 0, 0.0, set()
            for number, prompt in enumerate(PROMPTS):
                context = embedding(encoder.network, list(prompt.encode()))
                context = (context - parts.mean) / parts.deviation
                for temperature in (0.0, 0.9):
                    seed = 11 + number
                    sentence, rows = replayed_rows(
                        parts, context, seed, target.spec.hidden_size, settings
                    )  # fmt: skip
                    noise = Noise(seed).with_purpose("search")
                    difference = method.proposal(parts, context, noise) - sentence
                    error = max(error, float(np.abs(difference).max()))
                    found = llm.generate(
                        prompt, decoder=decoder, seed=seed, temperature=temperature,
                        max_tokens=LENGTH, ignore_eos=True,
                    ).tokens  # fmt: skip
                    wrong += found != replayed_text(target.network, rows, prompt, seed, temperature)
                    texts.add(tuple(found))
            name = ", ".join(f"{key}={value}" for key, value in settings.items()) or "default"
            yield Check(f"texts equal their replay, {name}", wrong == 0, f"{wrong} of 6 differ")
            yield Check(f"embeddings equal their replay, {name}", error < 1e-4, f"{error:.1g}")
        yield from guided_checks(parts, files[5])


def guided_checks(parts: SentenceDiffusion, file: Path) -> Iterator[Check]:
    """The classifier's logits of proposals rise with the guidance, or fall if the attribute shall
    be missing."""
    context, probe = np.zeros(EMBEDDING_SIZE), classifier()
    means = []
    for method in (
        Dglm(20, guidance=60.0, without=file),
        Dglm(20),
        Dglm(20, guidance=20.0, classifier=file),
        Dglm(20, guidance=60.0, classifier=file),
    ):
        logits = [
            probe.logits(method.proposal(parts, context, Noise(seed).with_purpose("search")))
            for seed in range(20)
        ]
        means.append(float(np.mean(logits)))
    detail = " < ".join(f"{mean:.2f}" for mean in means)
    yield Check("the guidance moves the proposals", means == sorted(set(means)), detail)


@measure("dglm", "logits of the attribute lost against no guidance", samples=20, margin=-1.0)
def dglm_gain(samples: int) -> float:
    """The classifier's mean logit of proposals of the default build, less that with a guidance of
    60."""
    context, probe = np.zeros(EMBEDDING_SIZE), classifier()
    with tempfile.TemporaryDirectory() as folder, sentence_diffusion_model() as llm:
        file = Path(folder) / "classifier.safetensors"
        probe.save(file)
        target: Any = llm.model
        parts: SentenceDiffusion = target.sentence_diffusion
        means = []
        for method in (Dglm(), Dglm(guidance=60.0, classifier=file)):
            sentences = [method.proposal(parts, context, Noise(seed)) for seed in range(samples)]
            means.append(float(np.mean([probe.logits(one) for one in sentences])))
    return means[0] - means[1]
