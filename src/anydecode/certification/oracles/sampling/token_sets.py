"""Sets of tokens by probability, for oracles: by sorting and counting, in float64."""

from __future__ import annotations

import numpy as np

from anydecode.certification.chi_square import Text
from anydecode.certification.samplers import OracleContext, softmax


def renormalized(p: np.ndarray, kept: list[int]) -> np.ndarray:
    row = np.zeros(len(p))
    row[kept] = p[kept] / p[kept].sum()
    return row


def descending(p: np.ndarray) -> list[int]:
    return sorted(range(len(p)), key=lambda token: (-p[token], token))


def up_to(order: list[int], p: np.ndarray, mass: float) -> list[int]:
    kept: list[int] = []
    while sum(p[token] for token in kept) < mass - 1e-9 and len(kept) < len(order):
        kept.append(order[len(kept)])
    return kept


def tempered(context: OracleContext, tokens: Text) -> np.ndarray:
    return softmax(context.logits(tokens) / context.temperature)
