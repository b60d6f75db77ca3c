"""Log-linear laws of draft models (Yan et al., "Scaling Laws for Speculative Decoding",
arXiv:2505.07858): how the accepted length grows with the tokens that a draft model has learned and
with its parameters, and the throughput with the batch. Draft models of a grid are trained and
measured, the laws are fitted, and a draft model is chosen by them."""

from __future__ import annotations

from dataclasses import dataclass

from anydecode.catalogue import Card, Range, register
from anydecode.errors import InvalidRequestError, quoted


@dataclass(frozen=True)
class ScalingRecipe:
    """What is measured for the laws.

    Attributes:
        layers: Numbers of layers of the draft models, rising.
        tokens: Numbers of tokens that they learn, rising.
        batches: Numbers of requests that are decoded together, rising.
        size: Number of drafts per round.
        planned: Number of tokens for which a draft model is recommended.
    """

    layers: tuple[int, ...]
    tokens: tuple[int, ...]
    batches: tuple[int, ...]
    size: int
    planned: int


@register(
    Card(
        "scylla",
        "speculative",
        paper="Scaling Laws for Speculative Decoding (arXiv:2505.07858)",
        exactness="token-exact",
        use="anydecode train scaling --recipe scylla",
        summary="Fits log-linear laws of draft models to measurements, and recommends one by them.",
        needs=("draft model",),
        works_with=("speculative-sampling",),
        bounds={"size": Range(1, 64), "planned": Range(0, 10**12)},
        missing=("the paper's own drafters and their long pre-training are not reproduced",),
        deviations=(
            "the draft models are the first layers of the target, distilled on its answers with"
            " forward KL; the paper's are drafters with EAGLE's inputs",
            "the accepted length is the tokens per pass of the target at temperature 0; one law has"
            " the tokens and the parameters together, these without embedding and head",
            "answers are learned again where they have fewer tokens than a draft model is to learn,"
            " which may lower the accepted length; give more --answers",
            "a draft model is recommended for each batch: the one whose predicted accepted length"
            " and measured time per pass promise the highest throughput, or none",
        ),
    )
)
def scylla(
    layers: str = "1-2-4",
    tokens: str = "8000-16000-32000",
    batches: str = "1-2-4-8",
    size: int = 4,
    planned: int = 0,
) -> ScalingRecipe:
    """A study of draft models.

    Args:
        layers: Numbers of layers of the draft models, joined with "-"; at least two.
        tokens: Numbers of answer tokens that each learns; at least two.
        batches: Numbers of requests that are decoded together; at least three.
        size: Number of drafts per round.
        planned: Number of learned tokens for which a draft model is recommended. 0: the largest of
            `tokens`.
    """
    grid = _rising("layers", layers, 2), _rising("tokens", tokens, 2)
    return ScalingRecipe(*grid, _rising("batches", batches, 3), size, planned or grid[1][-1])


def _rising(name: str, text: str, min_count: int) -> tuple[int, ...]:
    """The numbers of a parameter. Raises `InvalidRequestError`."""
    parts = str(text).split("-")
    if all(part.isascii() and part.isdigit() and len(part) <= 12 for part in parts):
        numbers = [int(part) for part in parts]
        if numbers[0] >= 1 and numbers == sorted({*numbers}) and len(numbers) >= min_count:
            return tuple(numbers)
    raise InvalidRequestError(
        f"scylla: {name} is {quoted(text)}; allowed are at least {min_count} rising whole numbers"
        ' of 1 or more, joined with "-"'
    )
