"""Oracle of autodeco (AutoDeco, arXiv:2510.26697): the authors' two networks, then temperature and
nucleus; training; and the gain of trained heads on held-out text."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import Text
from anydecode.certification.oracles.sampling.token_sets import descending, renormalized, up_to
from anydecode.certification.samplers import OracleContext, oracle
from anydecode.sampling.autodeco import Heads, features
from anydecode.training.autodeco import (
    AutoDecoRecipe,
    Gain,
    HeadsModule,
    TrainingRows,
    soft_nucleus,
    train,
)
from anydecode.training.autodeco import measure as held_out_gain


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
    """The authors' two small networks in PyTorch, then temperature and nucleus."""
    import torch

    tensors = {name: torch.from_numpy(array).double() for name, array in heads.tensors().items()}

    def network(name: str, inputs: torch.Tensor) -> float:
        middle = torch.relu(
            tensors[f"{name}.mlp.0.weight"] @ inputs + tensors[f"{name}.mlp.0.bias"]
        )
        last = tensors[f"{name}.mlp.2.weight"] @ middle + tensors[f"{name}.mlp.2.bias"]
        return float(torch.sigmoid(last)[0])

    state, logits = (
        torch.from_numpy(context.state(tokens)),
        torch.from_numpy(context.logits(tokens)),
    )
    temperature = 2 * network("temp_head", state)
    p = torch.softmax(logits / temperature, 0)
    shown = [p.max(), -(p * p.log()).sum(), p.var(), p.topk(5).values.sum()]
    inputs = torch.cat([state, torch.tensor([temperature]).double(), torch.stack(shown)])
    probabilities = p.numpy()
    return renormalized(
        probabilities,
        up_to(descending(probabilities), probabilities, network("top_p_head", inputs)),
    )


class Mixed:
    """Stands in for a model: the first number of a state says which of two kinds of text it belongs
    to, the others which of 20 tokens are probable."""

    vocab_size = 20

    def __init__(self) -> None:
        drawn = np.random.default_rng(7).normal(0, 2.0, (6, self.vocab_size))
        self._head = torch.from_numpy(drawn).float()

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Logits float32 `[n, 20]`."""
        return states[:, 1:] @ self._head

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """The states unchanged."""
        return states

    def rows(self, count: int, seed: int) -> TrainingRows:
        """Tokens sampled at temperature 0.4 in one kind of text and at 1.6 in the other."""
        generator = torch.Generator().manual_seed(seed)
        kind = torch.randint(0, 2, (count, 1), generator=generator).float()
        states = torch.cat([2 * kind - 1, torch.randn(count, 6, generator=generator)], 1)
        temperature = 0.4 + 1.2 * kind
        p = torch.softmax(self.head(states) / temperature, -1)
        labels = torch.multinomial(p, 1, generator=generator)[:, 0]
        return TrainingRows(states, labels, torch.arange(count) // 20)


@cache
def learned(samples: int) -> tuple[HeadsModule, Gain]:
    """Heads trained on 3,000 tokens of `Mixed`, and their gain on held-out tokens."""
    model = Mixed()
    recipe = AutoDecoRecipe(width=16, epochs=8, batch=64, rate=1e-2)
    learner = train(model, model.rows(3000, 1), recipe)
    return learner, held_out_gain(model, model.rows(samples, 2), learner)


@oracle_test("autodeco")
def autodeco() -> Iterator[Check]:
    """The heads' inputs, the soft nucleus by hand, training, and files."""
    half = np.array([math.log(0.5), math.log(0.3), math.log(0.2)], np.float32)
    shown = features(half, 1.0)
    entropy = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2))
    variance = ((0.5 - 1 / 3) ** 2 + (0.3 - 1 / 3) ** 2 + (0.2 - 1 / 3) ** 2) / 2
    right = np.abs(shown - np.array([1.0, 0.5, entropy, variance, 1.0])).max() < 1e-6
    yield Check("the input features of (0.5, 0.3, 0.2)", bool(right), str(shown.round(4)))
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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "heads.safetensors"
        heads = random_heads()
        heads.save(path)
        state = np.array([0.3, -0.2, 0.9, 0.1], np.float32)
        again = Heads.load(path)(state, half)
    is_equal = np.allclose(again, heads(state, half), atol=2e-3)
    yield Check("saved heads can be loaded", bool(is_equal), f"{again}")
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
