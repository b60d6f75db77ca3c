"""Sampling on the device: argmax, argmax with Gumbel noise, and top-k.

Ties go to the lowest id. The noise is that of `scoring.noise`: Philox4x32-10 (Salmon et al., SC
2011) at key `seed` and counter (token >> 2, position, stream, attempt), word `token & 3`.
"""

# Kernels are typed by Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anydecode.kernels.cuda.available import COMPILED, part_of_kernel

_BLOCK = 4096
_NO_TOKEN = tl.constexpr(2**31 - 1)


@part_of_kernel
def _uniform(word):
    return (word.to(tl.float64) + 0.5) * 2.3283064365386962890625e-10  # 2^-32


@triton.jit
def _noisy_kernel(logits_ptr, inverse_ptr, noise_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """logit * inverse temperature + Gumbel noise in float64, for one block of Philox counters."""
    row = tl.program_id(0).to(tl.int64)
    inverse_temperature = tl.load(inverse_ptr + row)
    seed = tl.load(noise_ptr + row * 4)
    stream = tl.load(noise_ptr + row * 4 + 1).to(tl.uint32)
    position = tl.load(noise_ptr + row * 4 + 2).to(tl.uint32)
    attempt = tl.load(noise_ptr + row * 4 + 3).to(tl.uint32)
    counter = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zeros = tl.full((BLOCK,), 0, tl.uint32)
    first, second, third, fourth = tl.philox(
        seed, counter.to(tl.uint32), zeros + position, zeros + stream, zeros + attempt
    )
    for word_index in tl.static_range(4):
        word = first
        if word_index == 1:
            word = second
        if word_index == 2:
            word = third
        if word_index == 3:
            word = fourth
        token = counter.to(tl.int64) * 4 + word_index
        noise = -tl.log(-tl.log(_uniform(word)))
        logit = tl.load(logits_ptr + row * size + token, mask=token < size, other=0.0)
        score = logit.to(tl.float64)
        if inverse_temperature != 0.0:
            score = score * inverse_temperature + noise
        tl.store(out_ptr + row * size + token, score, mask=token < size)


@triton.jit
def _top_kernel(
    scores_ptr, ids_ptr, out_scores_ptr, out_ids_ptr, size, blocks,
    COUNT: tl.constexpr, IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The COUNT largest scores of one block of one row, in descending order."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    scores = tl.load(scores_ptr + row * size + at, mask=inside, other=float("-inf"))
    ids = at
    if IDS:
        ids = tl.load(ids_ptr + row * size + at, mask=inside, other=_NO_TOKEN)
    ids = tl.where(inside, ids, _NO_TOKEN)
    out = (row * blocks + block) * COUNT
    for rank in tl.static_range(COUNT):
        maximum = tl.max(scores, 0)
        token = tl.min(tl.where(scores == maximum, ids, _NO_TOKEN), 0)
        tl.store(out_scores_ptr + out + rank, maximum)
        tl.store(out_ids_ptr + out + rank, token)
        taken = ids == token
        scores = tl.where(taken, float("-inf"), scores)
        ids = tl.where(taken, _NO_TOKEN, ids)


def top(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest scores of each row of `[n, size]`, in descending order.

    Returns:
        Scores and int32 ids, both `[n, count]`.

    Raises:
        ValueError: `count` is not from 1 to `size`.
    """
    rows, size = scores.shape
    if not 1 <= count <= size:
        raise ValueError(f"count is {count}; allowed is 1 to {size}")
    ids: torch.Tensor | None = None
    block = max(_BLOCK, triton.next_power_of_2(2 * count))
    while True:
        blocks = triton.cdiv(size, block)
        top_scores = torch.empty(rows, blocks * count, dtype=scores.dtype, device=scores.device)
        top_ids = torch.empty(rows, blocks * count, dtype=torch.int32, device=scores.device)
        if rows:
            _top_kernel[(rows, blocks)](
                scores, scores if ids is None else ids, top_scores, top_ids, size, blocks,
                COUNT=count, IDS=ids is not None, BLOCK=block, **COMPILED,
        )  # fmt: skip
        if blocks == 1:
            return top_scores, top_ids
        scores, ids, size = top_scores, top_ids, blocks * count


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The argmax int32 `[n]` of each row of float32 `[n, vocab_size]`, ties to the lowest id."""
    return top(logits, 1)[1][:, 0]


def gumbel(logits: torch.Tensor, inverse: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Sample a token per row: the argmax of logit * inverse temperature + Gumbel noise.

    Args:
        logits: float32 `[n, vocab_size]`.
        inverse: Inverse temperatures float64 `[n]`; 0 for a row without noise.
        noise: int64 `[n, 4]`: seed (its 64 bits), stream, position, attempt.

    Returns:
        Token ids int32 `[n]`.
    """
    rows, size = logits.shape
    scores = torch.empty(rows, size, dtype=torch.float64, device=logits.device)
    if rows:
        _noisy_kernel[(rows, triton.cdiv(size, 4 * 1024))](
            logits,
            inverse,
            noise,
            scores,
            size,
            BLOCK=1024,
            **COMPILED,
        )
    return argmax(scores)
