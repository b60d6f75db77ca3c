"""Oracle of autodeco (AutoDeco, arXiv:2510.26697): the authors' two networks, then temperature and
nucleus; training; and the gain of trained heads on held-out text."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import Text
from anydecode.certification.oracles.sampling.token_sets import descending, renormalized, up_to
from anydecode.certification.samplers import OracleContext, oracle, softmax
from anydecode.models.opening import check_torch
from anydecode.sampling.autodeco import Heads, features

if TYPE_CHECKING:
    from anydecode.training.autodeco import Gain, HeadsModule, TrainingRows


def random_heads(hidden_size: int = 4, width: int = 5) -> Heads:
    """Heads with random weights for a toy model; the nucleus mostly has several tokens."""
    draw = np.random.default_rng(2).normal
    tensors = {
        f"{name}.mlp.{part}": np.asarray(draw(size=shape), np.float32)
        for name, inputs in (("temp_head", hidden_size), ("top_p_head", hidden_size + 5))
        for part, shape in (
            ("0.weight", (width, inputs)),
            ("0.bias", (width,)),
            ("2.weight", (1, width)),
            ("2.bias", (1,)),
        )
    }
    tensors["top_p_head.mlp.2.bias"][:] = 3.0
    return Heads.of(tensors)


@oracle("autodeco", {"heads": random_heads()})
def autodeco_probabilities(context: OracleContext, tokens: Text, heads: Heads) -> np.ndarray:
    """The authors' two small networks, then temperature and nucleus."""
    tensors = {name: array.astype(np.float64) for name, array in heads.tensors().items()}

    def network(name: str, inputs: np.ndarray) -> float:
        part = f"{name}.mlp"
        middle = tensors[f"{part}.0.weight"] @ inputs + tensors[f"{part}.0.bias"]
        last = tensors[f"{part}.2.weight"] @ middle.clip(0) + tensors[f"{part}.2.bias"]
        return float(1 / (1 + np.exp(-last[0])))

    state = context.state(tokens)
    temperature = 2 * network("temp_head", state)
    p = softmax(context.logits(tokens) / temperature)
    shown = [p.max(), -(p * np.log(p)).sum(), p.var(ddof=1), np.sort(p)[-5:].sum()]
    nucleus = network("top_p_head", np.array([*state, temperature, *shown]))
    return renormalized(p, up_to(descending(p), p, nucleus))


class Mixed:
    """Stands in for a model: the first number of a state says which of two kinds of text it belongs
    to, the others which of 20 tokens are probable."""

    vocab_size = 20

    def __init__(self) -> None:
        self._head = np.random.default_rng(7).normal(0, 2.0, (6, self.vocab_size))

    def head(self, states: np.ndarray) -> np.ndarray:
        """Logits float32 `[n, 20]`."""
        return (states[:, 1:] @ self._head).astype(np.float32)

    def normed(self, states: np.ndarray) -> np.ndarray:
        """The states unchanged."""
        return states

    def rows(self, count: int, seed: int) -> TrainingRows:
        """Tokens sampled at temperature 0.4 in one kind of text and at 1.6 in the other."""
        import torch

        from anydecode.training.autodeco import TrainingRows

        random = np.random.default_rng(seed)
        kind = random.integers(0, 2, (count, 1))
        states = np.concatenate([2 * kind - 1, random.normal(size=(count, 6))], 1)
        states = states.astype(np.float32)
        logits = self.head(states) / (0.4 + 1.2 * kind)
        labels = (logits + random.gumbel(size=logits.shape)).argmax(1)
        texts = np.arange(count) // 20
        return TrainingRows(*(torch.from_numpy(array) for array in (states, labels, texts)))


@cache
def learned(samples: int) -> tuple[HeadsModule, Gain]:
    """Heads trained on 3,000 tokens of `Mixed`, and their gain on held-out tokens."""
    check_torch("training autodeco's heads")
    from anydecode.training.autodeco import AutoDecoRecipe, train
    from anydecode.training.autodeco import measure as held_out_gain

    model = Mixed()
    recipe = AutoDecoRecipe(width=16, epochs=8, batch=64, rate=1e-2)
    learner = train(model, model.rows(3000, 1), recipe)
    return learner, held_out_gain(model, model.rows(samples, 2), learner)


@oracle_test("autodeco")
def autodeco() -> Iterator[Check]:
    """The heads' inputs, files, the soft nucleus by hand, and training."""
    half = np.array([math.log(0.5), math.log(0.3), math.log(0.2)], np.float32)
    shown = features(half, 1.0)
    entropy = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2))
    variance = ((0.5 - 1 / 3) ** 2 + (0.3 - 1 / 3) ** 2 + (0.2 - 1 / 3) ** 2) / 2
    right = np.abs(shown - np.array([1.0, 0.5, entropy, variance, 1.0])).max() < 1e-6
    yield Check("the input features of (0.5, 0.3, 0.2)", bool(right), str(shown.round(4)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "heads.safetensors"
        heads = random_heads()
        heads.save(path)
        state = np.array([0.3, -0.2, 0.9, 0.1], np.float32)
        again = Heads.load(path)(state, half)
    is_equal = np.allclose(again, heads(state, half), atol=2e-3)
    yield Check("saved heads can be loaded", bool(is_equal), f"{again}")
    check_torch("training autodeco's heads")
    import torch

    from anydecode.training.autodeco import soft_nucleus

    row, every = torch.from_numpy(half).expand(3, 3), torch.arange(3)
    top_p = torch.full((3, 1), 0.6, requires_grad=True)
    log_q = soft_nucleus(row, every, top_p)
    weights = np.array([0.5, 0.3 * math.exp(-30 * 0.2), 0.2 * math.exp(-30 * 0.4)])
    actual = log_q.detach().exp().numpy()
    close = np.abs(actual - weights / weights.sum()).max() < 1e-5
    yield Check("the soft nucleus of 0.6", bool(close), str(actual.round(5)))
    (gradient,) = torch.autograd.grad(log_q[1], top_p)
    slope = float(gradient[1])
    yield Check(
        "the edge of the soft nucleus has a gradient", slope > 0, f"d ln q / d p = {slope:.2f}"
    )
    learner, _ = learned(2000)
    probe = torch.zeros(2, 7)
    probe[:, 0] = torch.tensor([-1.0, 1.0])
    cool, hot = learner.temperature(probe).detach().flatten().tolist()
    detail = f"{cool:.2f} and {hot:.2f}, sampled at 0.4 and 1.6"
    yield Check("each kind of text gets its temperature", cool < 0.8 < 1.1 < hot, detail)


@measure(
    "autodeco", "nats per token relative to the best fixed temperature", samples=2000, margin=-0.03
)
def autodeco_claim(samples: int) -> float:
    """Heads fit held-out text better than any fixed temperature does (below 0: better)."""
    gain = learned(samples)[1]
    return gain.heads - gain.fixed
