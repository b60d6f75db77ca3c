"""Elastic-Cache (Nguyen-Tri, Ranjan and Shen, "Attention Is All You Need for KV Cache in Diffusion
LLMs", arXiv:2510.14973).

Each pass computes only the next masks, with the cache policy of `elastic_policy.py`.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.elastic_policy import ElasticCachePolicy
from anydecode.decoders.diffusion.stops import EndOfText
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking
from anydecode.decoders.diffusion.window_diffusion import FirstMasks
from anydecode.errors import InvalidRequestError


@register(
    Card(
        "elastic-cache",
        "diffusion",
        paper="Attention Is All You Need for KV Cache in Diffusion LLMs (arXiv:2510.14973)",
        exactness="lossy",
        summary="Computes the next masks; other rows only in layers after attention has drifted.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "the rows of a pass run through all layers before the drift test, and a refresh runs in"
            " a second pass: the results are the same as with a test within the pass, but more rows"
            " are computed",
            "rows that run through some layers only are counted as whole rows",
            "attention weights are averaged over heads; before the first test of a token, they come"
            " from its cached hidden states",
            "if the canvas is cut or extended, all rows are computed again",
            "of equally confident masks below the threshold, only the leftmost is unmasked",
            "if the kernels have packed the weights, the queries of the drift test are computed"
            " from the file's weights, and always without adapters",
        ),
        remote={"window": Range(1, 4096), "threshold": Range(0, 1), "drift": Range(0, 1)},
    )
)
def elastic_cache(
    window: int = 16, threshold: float = 0.9, drift: float = 0.9, mask: int | None = None
) -> Denoiser:
    """Denoises with an adaptive cache.

    Args:
        window: How many masks, from the first on, are computed in every pass.
        threshold: Masks with at least this confidence are unmasked.
        drift: If the cosine of the tracked token's attention with that of the pass before is below
            this, all later layers are computed for every position (0: never; above 1: always from
            the second layer on).
        mask: The mask token (default: the tokenizer's).
    """
    if window < 1:
        raise InvalidRequestError(f"elastic-cache needs window >= 1, not window={window}")
    return Denoiser(
        FirstMasks(window),
        unmask=ThresholdUnmasking(threshold),
        cache=ElasticCachePolicy(drift),
        stop=EndOfText(),
        mask=mask,
    )
