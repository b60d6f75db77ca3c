"""Clusters of texts by their words."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq

import numpy as np

_WORD = re.compile(r"\w\w+")
_MAX_ROUNDS = 100


def word_vectors(texts: Seq[str]) -> np.ndarray:
    """TF-IDF vectors of length 1, float64 `[texts, words]`: counts of the words of two or more
    characters, in lower case, times `1 + ln((1 + texts) / (1 + texts with the word))`. Texts
    without words are zeros."""
    words = [_WORD.findall(text.lower()) for text in texts]
    columns = {word: i for i, word in enumerate(sorted({word for one in words for word in one}))}
    counts = np.zeros((len(texts), len(columns)))
    for row, one in zip(counts, words, strict=True):
        for word in one:
            row[columns[word]] += 1
    weights = 1 + np.log((1 + len(texts)) / (1 + (counts > 0).sum(axis=0)))
    vectors: np.ndarray = counts * weights
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-300)


def k_means(points: np.ndarray, k: int, uniform: np.ndarray) -> np.ndarray:
    """The cluster of each point, int `[points]`: k-means that begins with centres drawn in
    proportion to squared distances (k-means++).

    Args:
        points: float64 `[points, dimensions]`.
        k: The number of clusters; fewer if fewer points differ.
        uniform: Random numbers between 0 and 1, float64 `[k]`.
    """
    centres = points[[int(uniform[0] * len(points))]]
    for number in uniform[1:k]:
        near = _squared_distances(points, centres).min(axis=1)
        if not near.any():
            break
        drawn = int(np.searchsorted(np.cumsum(near), number * near.sum(), side="right"))
        centres = np.vstack([centres, points[min(drawn, len(points) - 1)]])
    labels = np.full(len(points), -1)
    for _ in range(_MAX_ROUNDS):
        found = _squared_distances(points, centres).argmin(axis=1)
        if np.array_equal(found, labels):
            break
        labels = found
        centres = np.array(
            [
                points[labels == i].mean(axis=0) if np.any(labels == i) else centre
                for i, centre in enumerate(centres)
            ]
        )
    return labels


def _squared_distances(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """float64 `[points, centres]`, rounded so that equal points have distance 0."""
    distances: np.ndarray = np.square(points[:, None, :] - centres[None, :, :]).sum(axis=2)
    return distances.round(12)
