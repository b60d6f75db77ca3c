"""Distillation of draft models: its certificate, and mistakes that it rejects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from anydecode import catalogue
from anydecode.errors import InvalidRequestError
from anydecode.training import divergences, draft_model
from certificates import assert_certified, assert_rejected, replace_defaults

divergence = divergences.divergence


def reversed_kl(name: str, target: Any, draft: Any, beta: float) -> Any:
    """Forward KL for reverse KL, and the other way round."""
    names = {"forward-kl": "reverse-kl", "reverse-kl": "forward-kl"}
    return divergence(names.get(name, name), target, draft, beta)


def doubled_tv(name: str, target: Any, draft: Any, beta: float) -> Any:
    """The sum of |p - q|, without 1/2."""
    return divergence(name, target, draft, beta) * (2 if name == "tv" else 1)


def other_mixture(name: str, target: Any, draft: Any, beta: float) -> Any:
    """The Jensen-Shannon divergence with the weights of the two models exchanged."""
    return divergence(name, target, draft, 1 - beta)


def without_the_weights_gradient(name: str, target: Any, draft: Any, beta: float) -> Any:
    """Reverse KL whose probabilities of the draft model are constants."""
    if name != "reverse-kl":
        return divergence(name, target, draft, beta)
    log_q = draft.log_softmax(-1)
    return (log_q.detach().exp() * (log_q - target.log_softmax(-1))).sum(-1)


def half_rejected(target: Any, draft: Any) -> Any:
    """1 minus the sum of |p - q|."""
    return 1 - 2 * divergence("tv", target, draft)


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("distillspec")


@pytest.mark.parametrize(
    "mistake", [reversed_kl, doubled_tv, other_mixture, without_the_weights_gradient]
)
def test_certificate_rejects_other_losses(
    mistake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergences, "divergence", mistake)
    assert_rejected("distillspec")


def test_certificate_rejects_another_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergences, "acceptance", half_rejected)
    assert_rejected("distillspec")


@pytest.mark.slow
@pytest.mark.parametrize(
    "defaults", [{"warmup": 1.0}, {"warmup": 0.0}, {"on_policy": 0.5}, {"beta": 0.1}], ids=str
)
def test_certificate_rejects_other_defaults(
    defaults: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_defaults(monkeypatch, "distillspec", **defaults)
    assert_rejected("distillspec")


def tokens_only(self: Any) -> float:
    """The tokens of the answers are learned in both parts."""
    rows, _ = self.step_rows()
    return self._learn(draft_model.draft_loss(self.draft, self.target, rows, "cross-entropy"))


def default_weight(self: Any) -> float:
    """Without the weight of the mixture that is given."""
    rows, objective = self.step_rows()
    return self._learn(draft_model.draft_loss(self.draft, self.target, rows, objective))


def no_training(self: Any) -> float:
    rows, objective = self.step_rows()
    loss = draft_model.draft_loss(self.draft, self.target, rows, objective, self.recipe.draft.beta)
    self.step += 1
    return float(loss.detach())


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [tokens_only, default_weight, no_training])
def test_certificate_rejects_other_steps(
    mistake: Callable[..., float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model.DraftModelRun, "_update", mistake)
    assert_rejected("distillspec")


def samples_of_the_target(self: Any, rows: list[Any], random: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(random.getrandbits(63))
    prompts = [prompt for prompt, _ in rows]
    given = self.recipe.tokens, self.tokenizer.eos_ids, generator
    answers = draft_model.sample_answers(self.target, prompts, *given)
    return list(zip(prompts, answers, strict=True))


def answers_of_the_target(self: Any, rows: list[Any], random: Any) -> list[Any]:
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [answers_of_the_target, samples_of_the_target])
def test_certificate_rejects_the_targets_answers_for_its_own(
    mistake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model.DraftModelRun, "_own_answers", mistake)
    assert_rejected("distillspec")


def mean_over_tokens(draft: Any, target: Any, pairs: Any, objective: str, beta: float = 0.5) -> Any:
    """Long answers weigh more than short ones."""
    tokens, row, column = draft_model.answer_rows(pairs)
    p, q = (one(tokens, causal=True, output_rows=(row, column)) for one in (target, draft))
    return divergence(objective, p, q, beta).mean()


@pytest.mark.slow
def test_certificate_rejects_a_mean_over_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "draft_loss", mean_over_tokens)
    assert_rejected("distillspec")


@pytest.mark.slow
def test_certificate_rejects_answers_at_another_temperature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    multinomial = torch.multinomial

    def cooled(probabilities: Any, count: int, *, generator: Any) -> Any:
        return multinomial(probabilities.pow(1.5), count, generator=generator)

    monkeypatch.setattr(torch, "multinomial", cooled)
    assert_rejected("distillspec")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("distillspec:divergence=kl", "choose from forward-kl, reverse-kl, jsd, tv"),
        ("distillspec:divergence=cross-entropy", "choose from forward-kl"),
        ("distillspec:data=student", "choose from target, fixed"),
        ("distillspec:beta=0", "0 < beta < 1"),
        ("distillspec:beta=1", "0 < beta < 1"),
        ("distillspec:on_policy=1.5", "from 0 to 1"),
        ("distillspec:warmup=-1", "from 0 to 1"),
        ("distillspec:layers=0", "layers is 0; allowed are 1 to 1024"),
        ("distillspec:layers=many", "layers takes"),
    ],
)
def test_bad_parameters_are_refused(choice: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as error:
        catalogue.build_as(choice, "a recipe", draft_model.DraftRecipe)
    assert "\n" not in str(error.value)
