"""Oracles of the sampling rules: independent implementations over the whole text, in float64, by
sorting and counting, without state between tokens. `certify` compares the engine with them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from anydecode.certification.chi_square import Text
from anydecode.certification.samplers import VOCABULARY, OracleContext, oracle, softmax
from anydecode.sampling.autodeco import Heads


def _renormalized(p: np.ndarray, kept: list[int]) -> np.ndarray:
    row = np.zeros(len(p))
    row[kept] = p[kept] / p[kept].sum()
    return row


def _descending(p: np.ndarray) -> list[int]:
    return sorted(range(len(p)), key=lambda token: (-p[token], token))


def _up_to(order: list[int], p: np.ndarray, mass: float) -> list[int]:
    kept: list[int] = []
    while sum(p[token] for token in kept) < mass - 1e-9 and len(kept) < len(order):
        kept.append(order[len(kept)])
    return kept


def _tempered(context: OracleContext, tokens: Text) -> np.ndarray:
    return softmax(context.logits(tokens) / context.temperature)


@oracle("min-p", {"p": 0.15}, {"p": 0.6})
def min_p(context: OracleContext, tokens: Text, p: float) -> np.ndarray:
    """Every token at least p times as probable as the most probable one."""
    probabilities = _tempered(context, tokens)
    return _renormalized(
        probabilities, [t for t in range(VOCABULARY) if probabilities[t] >= p * max(probabilities)]
    )


@oracle("typical", {"p": 0.5}, {"p": 0.9})
def typical(context: OracleContext, tokens: Text, p: float) -> np.ndarray:
    """Tokens by the distance of their surprisal from the entropy, until they hold the mass."""
    probabilities = _tempered(context, tokens)
    entropy = -sum(q * math.log(q) for q in probabilities)
    order = sorted(range(VOCABULARY), key=lambda t: (abs(-math.log(probabilities[t]) - entropy), t))
    return _renormalized(probabilities, _up_to(order, probabilities, p))


@oracle("eta", {"epsilon": 0.09}, {"epsilon": 0.3})
def eta(context: OracleContext, tokens: Text, epsilon: float) -> np.ndarray:
    """The bound is epsilon, or lower where the entropy is high; the most probable token stays."""
    probabilities = _tempered(context, tokens)
    entropy = -sum(q * math.log(q) for q in probabilities)
    bound = min(epsilon, math.sqrt(epsilon) * math.exp(-entropy), max(probabilities))
    return _renormalized(probabilities, [t for t in range(VOCABULARY) if probabilities[t] >= bound])


@oracle("top-n-sigma", {"n": 1.0}, {"n": 1.6})
def top_n_sigma(context: OracleContext, tokens: Text, n: float) -> np.ndarray:
    """The bound is on logits, so the temperature has no effect on it."""
    logits = context.logits(tokens)
    mean = sum(logits) / VOCABULARY
    deviation = math.sqrt(sum((z - mean) ** 2 for z in logits) / VOCABULARY)
    kept = [t for t in range(VOCABULARY) if logits[t] >= max(logits) - n * deviation]
    return _renormalized(_tempered(context, tokens), kept)


@oracle("xtc", {"probability": 0.4, "threshold": 0.12}, {"probability": 1.0, "threshold": 0.2})
def xtc(context: OracleContext, tokens: Text, probability: float, threshold: float) -> np.ndarray:
    """The mixture of both outcomes of the coin."""
    probabilities = _tempered(context, tokens)
    top = [t for t in range(VOCABULARY) if probabilities[t] >= threshold]
    if len(top) < 2:
        return probabilities
    spared = min(top, key=lambda t: (probabilities[t], -t))
    without = _renormalized(
        probabilities, [t for t in range(VOCABULARY) if t not in top or t == spared]
    )
    return probability * without + (1 - probability) * probabilities


def _mirostat(
    context: OracleContext,
    tokens: Text,
    tau: float,
    eta: float,
    cut: Callable[[np.ndarray, float], list[int]],
) -> np.ndarray:
    mu = 2 * tau
    for position, token in enumerate(tokens):
        surprise = -math.log2(_tempered(context, tokens[:position])[token])
        mu = min(max(mu - eta * (surprise - tau), 0.0), 4 * tau)
    probabilities = _tempered(context, tokens)
    return _renormalized(probabilities, cut(probabilities, mu))


def _below(probabilities: np.ndarray, mu: float) -> list[int]:
    kept = [t for t in range(len(probabilities)) if -math.log2(probabilities[t]) <= mu]
    return kept or _descending(probabilities)[:1]


def _zipf(probabilities: np.ndarray, mu: float) -> list[int]:
    """Version 1, from the paper's equations for the exponent and for k."""
    order = _descending(probabilities)
    ratios = [
        math.log(probabilities[a] / probabilities[b])
        for a, b in zip(order, order[1:], strict=False)
    ]
    logs = [math.log((i + 2) / (i + 1)) for i in range(len(ratios))]
    exponent = sum(t * b for t, b in zip(logs, ratios, strict=True)) / sum(t * t for t in logs)
    excess = exponent - 1
    k = (excess * 2**mu / (1 - len(probabilities) ** -excess)) ** (1 / exponent)
    return order[: max(1, min(len(probabilities), round(k)))]


@oracle(
    "mirostat",
    {"tau": 1.1, "eta": 0.4},
    {"tau": 0.8, "eta": 0.9},
    {"tau": 1.1, "eta": 0.4, "version": 1},
)
def mirostat(
    context: OracleContext, tokens: Text, tau: float, eta: float, version: int = 2
) -> np.ndarray:
    """The limit on each token follows from the surprisal of all tokens before it."""
    return _mirostat(context, tokens, tau, eta, _below if version == 2 else _zipf)


@oracle("dry", {"multiplier": 1.2, "base": 1.5, "allowed": 1})
def dry(
    context: OracleContext, tokens: Text, multiplier: float, base: float, allowed: int
) -> np.ndarray:
    """For each token, the text before each earlier occurrence is compared with the end of the
    text."""
    text = [*context.prompt, *tokens]
    logits = context.logits(tokens).copy()
    for token in range(VOCABULARY):
        longest = 0
        for position in (i for i in range(1, len(text)) if text[i] == token):
            length = 0
            while length < position and text[position - 1 - length] == text[len(text) - 1 - length]:
                length += 1
            longest = max(longest, length)
        if longest >= allowed:
            logits[token] -= multiplier * base ** (longest - allowed)
    return softmax(logits / context.temperature)


@oracle("momentum", {"alpha": 0.2, "k": 4}, {"alpha": 0.5, "k": 3})
def momentum(context: OracleContext, tokens: Text, alpha: float, k: int) -> np.ndarray:
    """The longest n-gram, of at most five tokens, that would end in a token and occurred before;
    its length is the penalty."""
    text = [*context.prompt, *tokens]
    probabilities = softmax(context.logits(tokens))
    values = {}
    for token in _descending(probabilities)[:k]:
        depth = 0
        for length in range(1, 6):
            gram = [*text[len(text) - length + 1 :], token]
            positions = range(len(text) - length + 1)
            if any(text[i : i + length] == gram for i in positions):
                depth = length
        values[token] = probabilities[token] - alpha * depth
    row = np.zeros(VOCABULARY)
    row[max(values, key=lambda token: (values[token], -token))] = 1.0
    return row


@oracle("dola", {"layers": "0+1+2+3"}, {"layers": "high"})
def dola(context: OracleContext, tokens: Text, layers: str) -> np.ndarray:
    """The layer of the largest Jensen-Shannon divergence; tokens below a tenth of the best are
    excluded."""
    last = softmax(context.logits(tokens))

    def divergence(q: np.ndarray) -> float:
        middle = (last + q) / 2
        parts = ((last, middle), (q, middle))
        return 0.5 * sum(float((a * np.log(a / b)).sum()) for a, b in parts)

    candidates = [2, 3] if layers == "high" else [int(layer) for layer in layers.split("+")]
    early = max((softmax(context.early(tokens, layer)) for layer in candidates), key=divergence)
    scores = np.where(last >= 0.1 * max(last), np.log(last) - np.log(early), -np.inf)
    return softmax(scores / context.temperature)


@oracle("top-w", {"entropy": 0.9, "mass": 1.2}, {"entropy": 2.2, "mass": 1.0})
def top_w(context: OracleContext, tokens: Text, entropy: float, mass: float) -> np.ndarray:
    """The alternating optimization, with the best set found among all subsets."""
    probabilities = _tempered(context, tokens)
    table = context.model.embeddings.astype(np.float64)
    rows = (table - table.mean(0)) / table.std(0)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    kept = _up_to(_descending(probabilities), probabilities, 0.999)
    subsets = [
        [t for t in range(VOCABULARY) if bits >> t & 1] for bits in range(1, 1 << VOCABULARY)
    ]
    for _ in range(9):
        distance = np.array([1 - max(float(rows[t] @ rows[j]) for j in kept) for t in range(6)])
        potential = entropy * np.log(probabilities) - 0.6 * distance

        def value(chosen: list[int], potential: np.ndarray = potential) -> float:
            selected = probabilities[chosen]
            total = float(selected.sum())
            mean = float((selected * potential[chosen]).sum()) / total
            return mean + (mass - entropy) * math.log(total)

        better = max(subsets, key=lambda chosen: (round(value(chosen), 9), len(chosen)))
        if sorted(better) == sorted(kept):
            break
        kept = better
    return _renormalized(probabilities, kept)


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
def autodeco(context: OracleContext, tokens: Text, heads: Heads) -> np.ndarray:
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
    return _renormalized(
        probabilities,
        _up_to(_descending(probabilities), probabilities, network("top_p_head", inputs)),
    )
