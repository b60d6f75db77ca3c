"""Online speculative decoding: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.certification.checks import Restarts
from anydecode.certification.oracles.speculative.reading_drafts import TARGET
from anydecode.certification.rounds import scripted
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.framework.speculation import SpeculationRound
from anydecode.decoders.speculative import routed_drafters
from anydecode.decoders.speculative.draft_correction import Correction
from anydecode.decoders.speculative.online_sd import OnlineDrafter
from anydecode.decoders.speculative.rejected_drafts import (
    RejectedDraft,
    WeightUpdates,
    cross_entropy,
)
from anydecode.decoders.speculative.routed_drafters import RoutedDrafter
from anydecode.errors import AnydecodeError
from anydecode.kernels.formats import DTYPES
from anydecode.kernels.gradients import Tape, Variable
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.weight_training import TrainedWeights
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("online-sd")


def test_certificate_rejects_a_drafter_that_is_never_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OnlineDrafter, "train", lambda self, model=None: None)
    assert_rejected("online-sd")


def test_certificate_rejects_examples_of_each_round_s_first_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SpeculationRound, "tested", lambda self, chain: (0, min(1, len(chain))))
    assert_rejected("online-sd")


@pytest.mark.slow
@pytest.mark.parametrize(("parameter", "value"), [("steps", 3), ("weight_rate", 0.002)])
def test_certificate_rejects_another_default(
    parameter: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_defaults(monkeypatch, "online-sd", **{parameter: value})
    assert_rejected("online-sd")


def test_certificate_rejects_a_correction_that_is_never_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OnlineDrafter, "clear", lambda self: None)
    assert_rejected("online-sd")


def test_certificate_rejects_weights_that_are_never_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainedWeights, "publish", lambda self: None)
    assert_rejected("online-sd")


def test_certificate_rejects_rows_of_the_next_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row at position p - 1 predicts the token at p."""
    logits = TrainedWeights.logits

    def shifted(self: TrainedWeights, tokens: np.ndarray, first: int) -> Any:
        return logits(self, np.concatenate([tokens[1:], tokens[-1:]]), first)

    monkeypatch.setattr(TrainedWeights, "logits", shifted)
    assert_rejected("online-sd")


def test_certificate_rejects_attention_without_its_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def detached(self: Tape, q: Variable, k: Variable, *rest: Any) -> Variable:
        return attention(self, Variable(q.data), Variable(k.data), *rest)

    attention = Tape.attention
    monkeypatch.setattr(Tape, "attention", detached)
    assert_rejected("online-sd")


@pytest.mark.slow
def test_certificate_rejects_weights_that_are_never_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightUpdates, "reset", lambda self: None)
    assert_rejected("online-sd")


def test_certificate_rejects_routing_by_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_drafters, "NUM_COMPARED", 10**6)
    assert_rejected("online-sd")


def test_certificate_rejects_the_first_of_several_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    of = RoutedDrafter.of
    monkeypatch.setattr(RoutedDrafter, "of", lambda self, runner: of(self, "draft"))
    assert_rejected("online-sd")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_routed_requests_have_the_text_of_plain_decoding(temperature: float) -> None:
    """In company, beside requests for one of the draft models, and after a preemption."""
    drafts = [tiny_model(layers=1, seed=seed) for seed in (1, 2)]
    prompts = ["the cat", "a quick zebra", "zq", "z"]
    options: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 3}
    with LLM(tiny_model(layers=2), tokenizer=ByteTokenizer(), draft=drafts) as llm:
        plain = llm.generate(prompts, decoder="autoregressive", ignore_eos=True, **options)
        with Restarts(llm.engine, 1, 0.2):
            for _ in range(2):
                drafted = llm.generate(
                    prompts, decoder="online-sd:route=true", ignore_eos=True, **options
                )
                assert [one.tokens for one in drafted] == [one.tokens for one in plain]


def test_routing_needs_several_draft_models() -> None:
    with scripted(TARGET, TARGET) as llm, pytest.raises(AnydecodeError, match="give several"):
        llm.generate("abc", decoder="online-sd:route=true")


@pytest.mark.one_in(3)  # an odd number: both backends
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_that_of_plain_decoding_while_weights_change(
    backend: str, temperature: float
) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    target, draft = (tiny_model(layers=layers, seed=layers, backend=backend) for layers in (2, 1))
    options: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 3}
    prompts = ["the cat", "a quick zebra", "zq"]
    with LLM(target, tokenizer=ByteTokenizer(), draft=draft, drafting="fixed") as llm:
        plain = llm.generate(prompts, decoder="autoregressive", ignore_eos=True, **options)
        network = draft.network
        for _ in range(2):
            drafted = llm.generate(prompts, decoder="online-sd", ignore_eos=True, **options)
            assert [one.tokens for one in drafted] == [one.tokens for one in plain]
        assert draft.network is not network  # it has been trained


def test_served_weights_have_the_format_of_the_draft_model() -> None:
    draft = tiny_model(layers=1)
    for weight in draft.network.matrices():
        weight.format, weight.data = "BF16", weight.data.astype(DTYPES["BF16"])
    trained = TrainedWeights(draft)
    for array in trained.parameters.values():
        array += 1e-4  # too little for bfloat16, which rounds it away or up
    trained.publish()
    assert {weight.format for weight in draft.network.matrices()} == {"BF16"}
    assert all(array.dtype == np.float32 for array in trained.parameters.values())


@pytest.mark.parametrize(
    ("train", "message"),
    [("weights", "train=weights needs a draft model"), ("all", "choose from auto")],
)
def test_refusals(train: str, message: str) -> None:
    with (
        scripted(TARGET, TARGET) as llm,
        pytest.raises(AnydecodeError, match=message),
    ):
        llm.generate("abc", decoder=f"online-sd:train={train}")


def test_namespaces_do_not_share_what_is_learned() -> None:
    """All namespaces have one draft model, so its weights stay as they are."""
    draft = tiny_model(layers=1, seed=4)
    network = draft.network
    with LLM(tiny_model(layers=2), tokenizer=ByteTokenizer(), draft=draft) as llm:
        for _ in range(3):
            options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
            llm.generate("the cat", decoder="online-sd", namespace="tenant", **options)
    assert draft.network is network


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
