"""Every sampling rule written down once more: from the whole text, in float64, by sorting and
counting, with nothing kept between tokens. `certify` holds the engine against these."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from anydecode.evaluation.chi_square import Text
from anydecode.evaluation.samplers import VOCABULARY, World, oracle, softmax
from anydecode.sampling.autodeco import Heads


def _renormalised(p: np.ndarray, kept: list[int]) -> np.ndarray:
    row = np.zeros(len(p))
    row[kept] = p[kept] / p[kept].sum()
    return row


def _falling(p: np.ndarray) -> list[int]:
    return sorted(range(len(p)), key=lambda token: (-p[token], token))


def _up_to(order: list[int], p: np.ndarray, mass: float) -> list[int]:
    kept: list[int] = []
    while sum(p[token] for token in kept) < mass - 1e-9 and len(kept) < len(order):
        kept.append(order[len(kept)])
    return kept


def _tempered(world: World, said: Text) -> np.ndarray:
    return softmax(world.logits(said) / world.temperature)


@oracle("min-p", {"p": 0.15}, {"p": 0.6})
def min_p(world: World, said: Text, p: float) -> np.ndarray:
    """Every token at least p times as probable as the best."""
    chances = _tempered(world, said)
    return _renormalised(chances, [t for t in range(VOCABULARY) if chances[t] >= p * max(chances)])


@oracle("typical", {"p": 0.5}, {"p": 0.9})
def typical(world: World, said: Text, p: float) -> np.ndarray:
    """Tokens by the distance of their surprise from the entropy, until they hold the mass."""
    chances = _tempered(world, said)
    entropy = -sum(q * math.log(q) for q in chances)
    order = sorted(range(VOCABULARY), key=lambda t: (abs(-math.log(chances[t]) - entropy), t))
    return _renormalised(chances, _up_to(order, chances, p))


@oracle("eta", {"epsilon": 0.09}, {"epsilon": 0.3})
def eta(world: World, said: Text, epsilon: float) -> np.ndarray:
    """The bound is epsilon, or less where the entropy is high; the best token stays."""
    chances = _tempered(world, said)
    entropy = -sum(q * math.log(q) for q in chances)
    bound = min(epsilon, math.sqrt(epsilon) * math.exp(-entropy), max(chances))
    return _renormalised(chances, [t for t in range(VOCABULARY) if chances[t] >= bound])


@oracle("top-n-sigma", {"n": 1.0}, {"n": 1.6})
def top_n_sigma(world: World, said: Text, n: float) -> np.ndarray:
    """The bound is taken on logits: the temperature has no part in it."""
    logits = world.logits(said)
    mean = sum(logits) / VOCABULARY
    deviation = math.sqrt(sum((z - mean) ** 2 for z in logits) / VOCABULARY)
    kept = [t for t in range(VOCABULARY) if logits[t] >= max(logits) - n * deviation]
    return _renormalised(_tempered(world, said), kept)


@oracle("xtc", {"probability": 0.4, "threshold": 0.12}, {"probability": 1.0, "threshold": 0.2})
def xtc(world: World, said: Text, probability: float, threshold: float) -> np.ndarray:
    """Both outcomes of the coin, weighed."""
    chances = _tempered(world, said)
    top = [t for t in range(VOCABULARY) if chances[t] >= threshold]
    if len(top) < 2:
        return chances
    spared = min(top, key=lambda t: (chances[t], -t))
    without = _renormalised(chances, [t for t in range(VOCABULARY) if t not in top or t == spared])
    return probability * without + (1 - probability) * chances


def _steered(
    world: World, said: Text, tau: float, eta: float, cut: Callable[[np.ndarray, float], list[int]]
) -> np.ndarray:
    mu = 2 * tau
    for position, token in enumerate(said):
        surprise = -math.log2(_tempered(world, said[:position])[token])
        mu = min(max(mu - eta * (surprise - tau), 0.0), 4 * tau)
    chances = _tempered(world, said)
    return _renormalised(chances, cut(chances, mu))


def _below(chances: np.ndarray, mu: float) -> list[int]:
    kept = [t for t in range(len(chances)) if -math.log2(chances[t]) <= mu]
    return kept or _falling(chances)[:1]


def _zipf(chances: np.ndarray, mu: float) -> list[int]:
    """Version 1, from the paper's equations for the exponent and for k."""
    order = _falling(chances)
    ratios = [math.log(chances[a] / chances[b]) for a, b in zip(order, order[1:], strict=False)]
    logs = [math.log((i + 2) / (i + 1)) for i in range(len(ratios))]
    exponent = sum(t * b for t, b in zip(logs, ratios, strict=True)) / sum(t * t for t in logs)
    excess = exponent - 1
    k = (excess * 2**mu / (1 - len(chances) ** -excess)) ** (1 / exponent)
    return order[: max(1, min(len(chances), round(k)))]


@oracle(
    "mirostat",
    {"tau": 1.1, "eta": 0.4},
    {"tau": 0.8, "eta": 0.9},
    {"tau": 1.1, "eta": 0.4, "version": 1},
)
def mirostat(world: World, said: Text, tau: float, eta: float, version: int = 2) -> np.ndarray:
    """The limit of every token from the surprise of all before it."""
    return _steered(world, said, tau, eta, _below if version == 2 else _zipf)


@oracle("dry", {"multiplier": 1.2, "base": 1.5, "allowed": 1})
def dry(world: World, said: Text, multiplier: float, base: float, allowed: int) -> np.ndarray:
    """For each token, every earlier place it stood at is compared with the end of the text."""
    text = [*world.prompt, *said]
    logits = world.logits(said).copy()
    for token in range(VOCABULARY):
        longest = 0
        for position in (i for i in range(1, len(text)) if text[i] == token):
            length = 0
            while length < position and text[position - 1 - length] == text[len(text) - 1 - length]:
                length += 1
            longest = max(longest, length)
        if longest >= allowed:
            logits[token] -= multiplier * base ** (longest - allowed)
    return softmax(logits / world.temperature)


@oracle("momentum", {"alpha": 0.2, "k": 4}, {"alpha": 0.5, "k": 3})
def momentum(world: World, said: Text, alpha: float, k: int) -> np.ndarray:
    """The longest n-gram, of at most five tokens, that would end in a token and stood there
    before; its length is the resistance."""
    text = [*world.prompt, *said]
    chances = softmax(world.logits(said))
    worth = {}
    for token in _falling(chances)[:k]:
        depth = 0
        for length in range(1, 6):
            gram = [*text[len(text) - length + 1 :], token]
            positions = range(len(text) - length + 1)
            if any(text[i : i + length] == gram for i in positions):
                depth = length
        worth[token] = chances[token] - alpha * depth
    row = np.zeros(VOCABULARY)
    row[max(worth, key=lambda token: (worth[token], -token))] = 1.0
    return row


@oracle("dola", {"layers": "0+1+2+3"}, {"layers": "high"})
def dola(world: World, said: Text, layers: str) -> np.ndarray:
    """The layer of the largest Jensen-Shannon divergence; tokens below a tenth of the best go."""
    last = softmax(world.logits(said))

    def divergence(q: np.ndarray) -> float:
        middle = (last + q) / 2
        parts = ((last, middle), (q, middle))
        return 0.5 * sum(float((a * np.log(a / b)).sum()) for a, b in parts)

    named = [2, 3] if layers == "high" else [int(layer) for layer in layers.split("+")]
    early = max((softmax(world.early(said, layer)) for layer in named), key=divergence)
    scores = np.where(last >= 0.1 * max(last), np.log(last) - np.log(early), -np.inf)
    return softmax(scores / world.temperature)


@oracle("top-w", {"entropy": 0.9, "mass": 1.2}, {"entropy": 2.2, "mass": 1.0})
def top_w(world: World, said: Text, entropy: float, mass: float) -> np.ndarray:
    """The alternation, with the best set found among all subsets."""
    chances = _tempered(world, said)
    table = world.model.embeddings.astype(np.float64)
    rows = (table - table.mean(0)) / table.std(0)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    kept = _up_to(_falling(chances), chances, 0.999)
    subsets = [
        [t for t in range(VOCABULARY) if bits >> t & 1] for bits in range(1, 1 << VOCABULARY)
    ]
    for _ in range(9):
        distance = np.array([1 - max(float(rows[t] @ rows[j]) for j in kept) for t in range(6)])
        potential = entropy * np.log(chances) - 0.6 * distance

        def value(chosen: list[int], potential: np.ndarray = potential) -> float:
            held = chances[chosen]
            total = float(held.sum())
            mean = float((held * potential[chosen]).sum()) / total
            return mean + (mass - entropy) * math.log(total)

        better = max(subsets, key=lambda chosen: (round(value(chosen), 9), len(chosen)))
        if sorted(better) == sorted(kept):
            break
        kept = better
    return _renormalised(chances, kept)


def random_heads(hidden_size: int = 4, width: int = 5) -> Heads:
    """Heads of random numbers, for a toy; the nucleus mostly holds several tokens."""
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
def autodeco(world: World, said: Text, heads: Heads) -> np.ndarray:
    """The authors' two small networks in torch, then temperature and nucleus."""
    import torch

    tensors = {name: torch.from_numpy(array).double() for name, array in heads.tensors().items()}

    def network(name: str, inputs: torch.Tensor) -> float:
        middle = torch.relu(
            tensors[f"{name}.mlp.0.weight"] @ inputs + tensors[f"{name}.mlp.0.bias"]
        )
        last = tensors[f"{name}.mlp.2.weight"] @ middle + tensors[f"{name}.mlp.2.bias"]
        return float(torch.sigmoid(last)[0])

    state, logits = torch.from_numpy(world.state(said)), torch.from_numpy(world.logits(said))
    temperature = 2 * network("temp_head", state)
    p = torch.softmax(logits / temperature, 0)
    shown = [p.max(), -(p * p.log()).sum(), p.var(), p.topk(5).values.sum()]
    inputs = torch.cat([state, torch.tensor([temperature]).double(), torch.stack(shown)])
    chances = p.numpy()
    return _renormalised(chances, _up_to(_falling(chances), chances, network("top_p_head", inputs)))
