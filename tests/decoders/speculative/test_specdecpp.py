"""SpecDec++: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.certification.rounds import blurred, rounds, scripted, wordy
from anydecode.certification.tiny import eagle_checkpoint, with_drafter
from anydecode.certification.tiny_heads import hydra_checkpoint, mtp_checkpoint
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative import acceptance_head, specdecpp
from anydecode.decoders.speculative.specdecpp import StopThreshold
from anydecode.models.scripted import ScriptedModel
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method

Patch = pytest.MonkeyPatch


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("specdec++")


@pytest.mark.parametrize("defaults", [{"bound": 0.65}, {"min_drafts": 1}, {"size": 19}], ids=str)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "specdec++", **defaults)
    assert_rejected("specdec++")


def test_certificate_rejects_speculative_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "specdec++", "speculative-sampling")
    assert_rejected("specdec++")


def test_certificate_rejects_a_chain_that_ends_one_draft_late_or_before_the_last_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = StopThreshold.__call__
    seen: list[bool] = []

    def late(self: StopThreshold, *given: object) -> bool:
        seen.append(call(self, *given))
        return len(seen) > 1 and seen[-2] and self.num_drafts > 1

    monkeypatch.setattr(StopThreshold, "__call__", late)
    assert_rejected("specdec++")


def test_certificate_rejects_predictions_for_the_verified_token(monkeypatch: Patch) -> None:
    """The first pass reads tokens that are verified already."""
    call = StopThreshold.__call__

    def eager(self: StopThreshold, *given: Any) -> bool:
        if self.head is not None and not self.num_drafts:
            self.all_accepted_probability *= float(self.head(self.states[-1]))
        return call(self, *given)

    monkeypatch.setattr(StopThreshold, "__call__", eager)
    assert_rejected("specdec++")


def test_certificate_rejects_labels_of_the_target_alone(monkeypatch: Patch) -> None:
    propose = specdecpp._Session.propose

    def without(self: Any, size: int) -> Any:
        tree = yield from propose(self, size)
        self._probabilities = [1.0] * len(self._probabilities)
        return tree

    monkeypatch.setattr(specdecpp._Session, "propose", without)
    assert_rejected("specdec++")


def test_certificate_rejects_states_before_the_drafts(monkeypatch: Patch) -> None:
    """The state must be that of the pass that has read the draft."""
    propose = specdecpp._Session.propose

    def shifted(self: Any, size: int) -> Any:
        tree = yield from propose(self, size)
        self._states.insert(0, self._states[0])
        return tree

    monkeypatch.setattr(specdecpp._Session, "propose", shifted)
    assert_rejected("specdec++")


def test_certificate_rejects_a_head_that_is_never_trained(monkeypatch: Patch) -> None:
    monkeypatch.setattr(acceptance_head.OnlineHead, "train", lambda self: None)
    assert_rejected("specdec++")


@pytest.mark.parametrize(("name", "value"), [("STEPS", 15), ("STEPS", 32), ("BATCH", 64)])
def test_certificate_rejects_more_or_less_training(
    monkeypatch: Patch, name: str, value: int
) -> None:
    monkeypatch.setattr(acceptance_head, name, value)
    assert_rejected("specdec++")


def test_certificate_rejects_rejections_that_count_once(monkeypatch: Patch) -> None:
    monkeypatch.setattr(acceptance_head, "REJECTION_WEIGHT", 1.0)
    assert_rejected("specdec++")


@pytest.mark.one_in(2)  # each drafter, and both temperatures
@pytest.mark.parametrize("drafter", [eagle_checkpoint, hydra_checkpoint, mtp_checkpoint])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafters_that_read_states_have_a_head_too(drafter: Any, temperature: float) -> None:
    with with_drafter(drafter, cache_positions=1024) as llm:
        decoder = llm.decoder("specdec++")
        assert isinstance(decoder, Speculative)
        options: dict[str, Any] = {"max_tokens": 40, "seed": 3, "temperature": temperature}
        for _ in range(3):
            plain, drafted = (
                llm.generate(["a quick zebra", "the cat"], decoder=key, ignore_eos=True, **options)
                for key in ("autoregressive", decoder)
            )
            assert [one.tokens for one in drafted] == [one.tokens for one in plain]
        assert decoder.drafter.online.head is not None  # type: ignore[attr-defined]
        assert decoder.num_bytes > 1000


def test_without_a_rate_nothing_is_learned() -> None:
    with with_drafter(eagle_checkpoint, cache_positions=1024) as llm:
        decoder = llm.decoder("specdec++:rate=0")
        for _ in range(3):
            llm.generate("a quick zebra", decoder=decoder, max_tokens=40, ignore_eos=True)
        assert not decoder.drafter.online.examples  # type: ignore[union-attr]


def test_training_equals_adam_of_torch() -> None:
    """Losses and parameters after 30 steps, with gradients by autograd."""
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(1)
    states = random.normal(size=(7, 6)).astype(np.float32)
    labels = random.uniform(size=7).astype(np.float32)
    head = acceptance_head.AcceptanceHead(6, 0.02)
    own = {name: torch.tensor(x, requires_grad=True) for name, x in head.parameters.items()}
    adam, losses = torch.optim.Adam(own.values(), 0.02), []
    y = torch.from_numpy(labels)
    for _ in range(30):
        x = torch.from_numpy(states)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        for _ in range(3):
            x = x + torch.nn.functional.silu(x @ own["block"].T + own["block_bias"])
        logs = (x @ own["output"].T + own["output_bias"]).log_softmax(-1)
        loss = -(6 * (1 - y) * logs[:, 0] + y * logs[:, 1]).sum() / (6 * (1 - y) + y).sum()
        losses.append(loss.item())
        adam.zero_grad()
        loss.backward()
        adam.step()
    np.testing.assert_allclose(head.train(states, labels, 30), losses, rtol=1e-4)
    for name, value in head.parameters.items():
        np.testing.assert_allclose(value, own[name].detach().numpy(), atol=1e-3)


def test_a_model_without_hidden_states_drafts_by_its_probabilities(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ScriptedModel, "has_hidden", False, raising=False)
    with scripted(wordy(), blurred(wordy())) as llm:
        decoder = llm.decoder("specdec++")
        for _ in range(2):
            trace = rounds(llm, decoder, "abcabcabd")
        assert not decoder.drafter.online.examples  # type: ignore[union-attr]
        assert any(one.tokens for one in trace)
