"""Every drafter under the rejection rule: samples follow the target; mistakes are noticed. And the
rules that every method offers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.certification.chi_square import (
    DRAFT_SCRIPT,
    PROMPT,
    TARGET_SCRIPT,
    VOCABULARY,
    small_llm,
)
from anydecode.certification.oracles.speculative.rejection_rules import (
    REPEATING,
    last_token_script,
    rejection_checks,
    small_diffusion_llm,
    small_drafter_llm,
    small_masked_llm,
)
from anydecode.certification.tiny import eagle3_checkpoint, eagle_checkpoint
from anydecode.certification.tiny_blocks import (
    dflash2_checkpoint,
    dflash_checkpoint,
    domino_checkpoint,
    dspark_checkpoint,
    parallelspec_checkpoint,
    pard_checkpoint,
    peagle_checkpoint,
)
from anydecode.certification.tiny_heads import (
    blockwise_checkpoint,
    chimera_checkpoint,
    clover_2_checkpoint,
    clover_checkpoint,
    falcon_checkpoint,
    hydra_checkpoint,
    medusa_checkpoint,
    mtp_checkpoint,
)
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.speculative.draft_trees import TreeDrafter
from anydecode.decoders.speculative.dyspec import DySpecDrafter
from anydecode.decoders.speculative.rsd import StochasticBeam
from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.tree import TokenTree

Patch = pytest.MonkeyPatch

DRAFT_MODEL = (
    "speculative-sampling",
    "rsd",
    "dyspec",
    "opt-tree",
    "fixed-tree",
    "eagle",
    "medusa",
    "hydra",
    "mtp",
    "specdec++",
    "eqspec-exspec",
    "longspec",
    "easyspec",
    "s2d",
    "rapid",
    "online-sd",
    "omnidraft",
)
MODEL_FREE = (
    "prompt-lookup",
    "copyspec",
    "aggressive",
    "aded",
    "lookahead",
    "suffix",
    "token-recycling",
    "stand",
    "bandit",
    "taps",
    "smartspec",
    "stree",
    "jacobi",
)
#: Methods with a draft model and a loop of their own, whose rules read no hidden states.
PARALLEL = ("pearl", "saguaro")
#: Parameters with which a method drafts in the large company of the samples.
PARAMETERS: dict[str, dict[str, Any]] = {"smartspec": {"fixed": 1.0, "per_row": 0.0}}
DIFFUSION = ("deer", "diffuspec", "specdiff-2")
MASKED = ("space", "ppd")
#: Drafters that read the target's states, by the method that drafts with them.
DRAFTERS: dict[str, tuple[str, Callable[..., Checkpoint]]] = {
    "dflash": ("dflash", dflash_checkpoint),
    "dflash, tree": ("dflash:tree=true", dflash_checkpoint),
    "dspark": ("dflash:tree=true", dspark_checkpoint),
    "dflash2": ("dflash", partial(dflash2_checkpoint, top_k=3)),
    "domino": ("dflash:tree=true", domino_checkpoint),
    "p-eagle": ("dflash:tree=true", peagle_checkpoint),
    "pard": ("dflash:tree=true", pard_checkpoint),
    "parallelspec": ("parallelspec", parallelspec_checkpoint),
    "falcon": ("falcon", falcon_checkpoint),
    "eagle-1": ("eagle", eagle_checkpoint),
    "eagle-3": ("eagle", eagle3_checkpoint),  # its head leaves a token out: its q is 0
    "eagle-3, drawn siblings": ("rsd", eagle3_checkpoint),
    "medusa": ("medusa", medusa_checkpoint),
    "hydra": ("hydra", hydra_checkpoint),
    "blockwise": ("blockwise", blockwise_checkpoint),
    "clover-2": ("clover-2", clover_2_checkpoint),
    "clover": ("clover", clover_checkpoint),
    "chimera": ("chimera", chimera_checkpoint),
    "mtp": ("mtp", mtp_checkpoint),
}
#: Methods whose rule is their idea, and `auto`, whose drafts depend on measured times.
ONE_RULE = {
    "auto",
    "lenient-sampling",
    "lud",
    "mars",
    "top-m-acceptance",
    "typical-acceptance",
}


class _SmallTokenizer(ByteTokenizer):
    vocab_size = VOCABULARY


def translating_llm() -> LLM:
    """`small_llm`, with a tokenizer of the draft model."""
    draft = ScriptedModel(DRAFT_SCRIPT, vocab_size=VOCABULARY)
    draft.tokenizer = _SmallTokenizer()  # type: ignore[attr-defined]
    target = ScriptedModel(TARGET_SCRIPT, vocab_size=VOCABULARY)
    return LLM(target, tokenizer=_SmallTokenizer(), draft=draft, cache_positions=8192)


def setting(key: str) -> tuple[Callable[[], LLM], tuple[int, ...]]:
    """The models and the prompt on which `key` drafts."""
    if key in DIFFUSION:
        return small_diffusion_llm, tuple(PROMPT)
    if key in MASKED:
        return small_masked_llm, tuple(PROMPT)
    if key == "omnidraft":
        return translating_llm, tuple(PROMPT)
    return small_llm, REPEATING if key in MODEL_FREE else tuple(PROMPT)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "key",
    [
        key if key in ("rsd", "eagle", "stand") else pytest.param(key, marks=pytest.mark.slow)
        for key in (*DRAFT_MODEL, *MODEL_FREE, *DIFFUSION, *MASKED, *PARALLEL)
    ],
)
def test_samples_follow_the_target(key: str) -> None:
    open_llm, prompt = setting(key)
    checks = rejection_checks(key, open_llm, prompt, **PARAMETERS.get(key, {}))
    failed = [one for one in checks if not one.passed]
    assert not failed


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("dspark", "falcon") else pytest.param(name, marks=pytest.mark.slow)
        for name in DRAFTERS
    ],
)
def test_samples_from_trees_of_trained_drafters_follow_the_target(name: str) -> None:
    choice, drafter = DRAFTERS[name]
    key, given = catalogue.parse(choice)
    checks = rejection_checks(
        key,
        partial(small_drafter_llm, drafter),
        (1, 0, 3),
        script=last_token_script,
        **given,
    )
    failed = [one for one in checks if not one.passed]
    assert not failed


@pytest.mark.parametrize("key", [*DRAFT_MODEL, *MODEL_FREE, *DIFFUSION, *MASKED, *PARALLEL])
def test_lossy_rules_run(key: str) -> None:
    open_llm, prompt = setting(key)
    with open_llm() as llm:
        for rule in ("typical", "top-m"):
            decoder = llm.decoder(f"{key}:acceptance={rule}")
            assert decoder.exactness == "lossy"
            answer = llm.generate(list(prompt), decoder=decoder, max_tokens=12, temperature=0.8)
            assert len(answer.tokens) == 12
        llm.engine.check_integrity()


def test_every_speculative_method_takes_a_rule_or_has_one() -> None:
    without = {
        card.key
        for card in catalogue.cards("speculative")
        if not card.use or card.key in ONE_RULE
        if "acceptance" not in {one.name for one in catalogue.parameters(card.key)}
    }
    assert without == ONE_RULE


@pytest.mark.parametrize(
    "key",
    [
        *DRAFT_MODEL,
        *MODEL_FREE,
        *DIFFUSION,
        *MASKED,
        *PARALLEL,
        "dflash",
        "mtp-future",
        "hidden-transfer",
    ],
)
def test_unknown_rules_are_refused_in_one_line(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="unknown acceptance rule 'none'") as refusal:
        catalogue.build(key, acceptance="none")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("key", [*PARALLEL, "jacobi"])
def test_rules_of_hidden_states_are_refused_by_methods_with_a_loop_of_their_own(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="token-exact or rejection or typical or top-m"):
        catalogue.build(key, acceptance="judge")


@pytest.mark.parametrize("key", ["smartspec", "stree", "bandit"])
def test_a_drafter_within_another_method_takes_no_rule_of_its_own(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="give acceptance= to the method that verifies"):
        catalogue.build(key, drafter="prompt-lookup:acceptance=rejection")


def test_a_method_that_verifies_nothing_takes_no_rule() -> None:
    with pytest.raises(InvalidRequestError, match="'mars' has no parameter 'acceptance'"):
        catalogue.build("mars", acceptance="rejection")


def assert_wrong(key: str) -> None:
    """Asserts that the samples of `key` do not follow the target."""
    open_llm, prompt = setting(key)
    assert not next(rejection_checks(key, open_llm, prompt)).passed


@pytest.mark.slow
@pytest.mark.parametrize("kind", [StochasticBeam, DySpecDrafter])
def test_siblings_that_are_chosen_but_compared_as_drawn_are_noticed(
    monkeypatch: Patch, kind: type[TreeDrafter]
) -> None:
    def new_tree(self: TreeDrafter, sequence: Any) -> GrowingTree:
        return GrowingTree(sequence, noise="none")

    monkeypatch.setattr(kind, "new_tree", new_tree)
    assert_wrong("rsd" if kind is StochasticBeam else "dyspec")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["opt-tree", "fixed-tree", "eagle"])
def test_probable_siblings_that_are_compared_as_drawn_are_noticed(
    monkeypatch: Patch, key: str
) -> None:
    pruned = GrowingTree.pruned

    def as_drawn(self: GrowingTree, nodes: Any, kind: str, has_probabilities: bool) -> Any:
        return pruned(self, nodes, "wor", True)

    monkeypatch.setattr(GrowingTree, "pruned", as_drawn)
    assert_wrong(key)


def test_a_table_whose_probabilities_are_ignored_is_noticed(monkeypatch: Patch) -> None:
    from anydecode.decoders.speculative import stand

    def even(self: Any, row: dict[int, float]) -> np.ndarray:
        dense = np.zeros(VOCABULARY)
        dense[list(row)] = 1 / len(row)
        return dense

    monkeypatch.setattr(stand._Session, "_dense", even)
    assert_wrong("stand")


def test_predictions_without_distributions_follow_the_target(monkeypatch: Patch) -> None:
    from anydecode.decoders.speculative import jacobi

    monkeypatch.setattr(jacobi, "MAX_DISTRIBUTIONS", 0)
    open_llm, prompt = setting("jacobi")
    failed = [one for one in rejection_checks("jacobi", open_llm, prompt) if not one.passed]
    assert not failed


def test_predictions_that_are_always_kept_are_noticed(monkeypatch: Patch) -> None:
    from anydecode.decoders.speculative import jacobi

    own = jacobi._distributions

    def tiny(*given: Any) -> list[np.ndarray]:
        return [1e-6 * row for row in own(*given)]

    monkeypatch.setattr(jacobi, "_distributions", tiny)
    assert_wrong("jacobi")


@pytest.mark.parametrize("key", ["specdec++", pytest.param("saguaro", marks=pytest.mark.slow)])
def test_distributions_of_the_next_position_are_noticed(monkeypatch: Patch, key: str) -> None:
    from anydecode.decoders.speculative import draft_model, saguaro, specdecpp

    def shifted(drafts: list[int], rows: list[np.ndarray]) -> TokenTree:
        return draft_model.sampled_chain(drafts, rows[1:] + rows[:1])

    owner = specdecpp if key == "specdec++" else saguaro
    monkeypatch.setattr(owner, "sampled_chain", shifted)
    assert_wrong(key)
