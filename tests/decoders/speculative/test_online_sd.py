"""Online speculative decoding: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from anydecode.decoders.speculative.draft_correction import Correction
from anydecode.decoders.speculative.online_sd import OnlineDrafter, RejectedDraft, cross_entropy
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("online-sd")


def test_certificate_rejects_a_drafter_that_is_never_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OnlineDrafter, "train", lambda self: None)
    assert_rejected("online-sd")


def test_certificate_rejects_a_correction_that_is_never_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OnlineDrafter, "clear", lambda self: None)
    assert_rejected("online-sd")


def test_training_equals_adam_of_torch() -> None:
    """Losses and parameters after 40 steps, with gradients by autograd."""
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(1)
    examples = [
        RejectedDraft(
            random.normal(size=6).astype(np.float32),
            random.normal(size=11).astype(np.float32),
            random.permutation(11)[:4],
            random.dirichlet(np.ones(4)).astype(np.float32),
        )
        for _ in range(5)
    ]
    correction = Correction(6, 11, 3, 0.05)
    down, down_bias, up, up_bias = parameters = [
        torch.tensor(correction.parameters[name], requires_grad=True)
        for name in ("down", "down_bias", "up", "up_bias")
    ]
    adam = torch.optim.Adam(parameters, 0.05)
    losses = []
    for _ in range(40):
        each = []
        for example in examples:
            x = torch.from_numpy(example.hidden)
            x = x / (x.square().mean() + 1e-6).sqrt()
            row = torch.from_numpy(example.logits) + up @ (down @ x + down_bias) + up_bias
            chosen = row.log_softmax(0)[torch.from_numpy(example.tokens)]
            each.append(-(torch.from_numpy(example.probabilities) * chosen).sum())
        loss = torch.stack(each).mean()
        losses.append(loss.item())
        adam.zero_grad()
        loss.backward()
        adam.step()
    hidden, logits = (
        np.stack([getattr(one, name) for one in examples]) for name in ("hidden", "logits")
    )
    found = correction.train(hidden, logits, cross_entropy(examples), 40)
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    for own, other in zip(correction.parameters.values(), parameters, strict=True):
        np.testing.assert_allclose(own, other.detach().numpy(), atol=1e-3)


def test_training_keeps_nothing_that_grows() -> None:
    drafter = OnlineDrafter(rank=2, rate=0.1, batch=1, steps=3)
    example = RejectedDraft(np.ones(4, np.float32), np.zeros(5, np.float32),
                            np.array([1, 2]), np.array([0.5, 0.5], np.float32))  # fmt: skip
    sizes = []
    for _ in range(20):
        drafter.add_example(example)
        drafter.train()
        sizes.append(len(pickle.dumps(vars(drafter))))
    assert max(sizes[1:]) <= sizes[1] + 16  # larger integers
