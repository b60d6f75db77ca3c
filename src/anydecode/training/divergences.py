"""Divergences of a draft model's distributions from the target's (Zhou et al., DistillSpec,
arXiv:2310.08461, section 4): p is the target's distribution, q the draft model's."""

from __future__ import annotations

import math

import torch


def divergence(
    name: str, target: torch.Tensor, draft: torch.Tensor, beta: float = 0.5
) -> torch.Tensor:
    """The divergence at each row, in nats; `[rows]`. "tv" is between 0 and 1.

    Args:
        name: "forward-kl": KL(p || q). "reverse-kl": KL(q || p). "jsd": beta KL(p || m) +
            (1 - beta) KL(q || m), m = beta p + (1 - beta) q. "tv": half the sum of |p - q|.
        target: Logits of p, `[rows, vocab]`.
        draft: Logits of q, `[rows, vocab]`.
        beta: See above.
    """
    log_p, log_q = target.log_softmax(-1), draft.log_softmax(-1)
    if name == "forward-kl":
        return _kl(log_p, log_q)
    if name == "reverse-kl":
        return _kl(log_q, log_p)
    if name == "tv":
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    assert name == "jsd", name
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of each row."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def acceptance(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """The probability that a token drawn from q is accepted by rejection sampling, `[rows]`: the
    sum of min(p, q), which is 1 minus the total variation distance."""
    return torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1)
