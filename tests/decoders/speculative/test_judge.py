"""judge: its certificate, mistakes that the certificate rejects, its file, its rule with other
drafters, and refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapter_files import save_adapter
from anydecode import Regex, catalogue
from anydecode.api.llm import LLM
from anydecode.certification.oracles.speculative.judge import Rounds
from anydecode.certification.rounds import plain_token, rounds
from anydecode.certification.tiny_judge import (
    judged_model,
    judged_network,
    random_judge,
    with_judge,
)
from anydecode.decoders.framework import speculation
from anydecode.decoders.framework.acceptance import AcceptanceResult
from anydecode.decoders.framework.judging import JudgeAcceptance
from anydecode.decoders.speculative import judge
from anydecode.errors import AnydecodeError, InvalidRequestError, UnsupportedCombinationError
from anydecode.models.judge import Judge
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from anydecode.models.opening import open_checkpoint
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.score import Scores
from anydecode.scoring.tree import ROOT, TokenTree
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from draft_folders import assert_tensor_refused

Patch = pytest.MonkeyPatch


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("judge")


@pytest.mark.slow
@pytest.mark.parametrize("defaults", [{"size": 24}, {"threshold": 0.5}], ids=str)
def test_certificate_rejects_other_defaults(monkeypatch: Patch, defaults: dict[str, Any]) -> None:
    replace_defaults(monkeypatch, "judge", **defaults)
    assert_rejected("judge")


@pytest.mark.slow
@pytest.mark.parametrize("other", ["speculative-sampling:size=25", "typical-acceptance:size=25"])
def test_certificate_rejects_other_rules(monkeypatch: Patch, other: str) -> None:
    key, _, size = other.partition(":size=")
    entry = catalogue.entries()["judge"]
    build = replace(entry, build=lambda **_: catalogue.build(key, size=int(size)))
    monkeypatch.setitem(catalogue.entries(), "judge", build)
    assert_rejected("judge")


@pytest.mark.slow
@pytest.mark.parametrize(
    "twin",
    [
        lambda own, judge, state, draft: 1 - own(judge, state, draft),
        lambda own, judge, state, draft: 2 * judge.threshold - own(judge, state, draft),
        lambda own, judge, state, draft: own(replace(judge, bias=0.0), state, draft),
        lambda own, judge, state, draft: own(judge, state[::-1], draft),
        lambda own, judge, state, draft: own(replace(judge, draft_weights=None), state),
    ],
    ids=[
        "sign",
        "wrong side of the threshold",
        "without the bias",
        "order of the weights",
        "the target's state alone",
    ],
)
def test_certificate_rejects_other_judgements(
    monkeypatch: Patch, twin: Callable[..., float]
) -> None:
    own = Judge.__call__
    monkeypatch.setattr(
        Judge, "__call__", lambda self, state, draft=None: twin(own, self, state, draft)
    )
    assert_rejected("judge")


@pytest.mark.slow
def test_certificate_rejects_states_of_the_drafts_before(monkeypatch: Patch) -> None:
    own = speculation.draft_states

    def shifted(*given: Any) -> Any:
        states = yield from own(*given)
        return np.roll(states, 1, 0)

    monkeypatch.setattr(speculation, "draft_states", shifted)
    assert_rejected("judge")


@pytest.mark.slow
def test_certificate_rejects_the_state_before_the_draft(monkeypatch: Patch) -> None:
    """It predicts the draft, but has not read it."""
    own = Scores.last_state
    monkeypatch.setattr(Scores, "last_state", lambda self, row: own(self, row - 1))
    assert_rejected("judge")


@pytest.mark.slow
def test_certificate_rejects_the_state_after_the_draft(monkeypatch: Patch) -> None:
    own = Scores.last_state
    monkeypatch.setattr(
        Scores,
        "last_state",
        lambda self, row: own(self, min(row + 1, len(self.positions) - 1)),
    )
    assert_rejected("judge")


@pytest.mark.slow
def test_certificate_rejects_states_before_the_final_norm(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Scores, "last_state", lambda self, row: self.hidden[max(self.hidden)][row])
    assert_rejected("judge")


@pytest.mark.slow
def test_certificate_rejects_drafts_that_both_rules_must_accept(monkeypatch: Patch) -> None:
    def step(
        self: JudgeAcceptance, tree: TokenTree, scores: Scores, node: int, children: list[int]
    ) -> tuple[int | None, int]:
        accepted, token = self.standard.step(tree, scores, node, children)
        if accepted is not None:
            one = self.judge(scores.sequence)
            drafts = [None] * len(tree) if tree.draft_states is None else tree.draft_states
            state = scores.last_state(scores.after(accepted))
            if one(state, drafts[accepted]) <= one.threshold:
                return None, token
        return accepted, token

    monkeypatch.setattr(JudgeAcceptance, "step", step)
    assert_rejected("judge")


@pytest.mark.slow
def test_certificate_rejects_the_targets_token_in_place_of_the_draft(monkeypatch: Patch) -> None:
    own = JudgeAcceptance.step

    def step(
        self: JudgeAcceptance, tree: TokenTree, scores: Scores, node: int, children: list[int]
    ) -> tuple[int | None, int]:
        return own(self, tree, scores, node, children)[0], scores.sample(scores.after(node))

    monkeypatch.setattr(JudgeAcceptance, "step", step)
    assert_rejected("judge")


@pytest.mark.slow
def test_certificate_rejects_a_last_token_of_another_row(monkeypatch: Patch) -> None:
    own = JudgeAcceptance.walk

    def walk(self: JudgeAcceptance, tree: TokenTree, scores: Scores) -> AcceptanceResult:
        result = own(self, tree, scores)
        node = result.path[-2] if len(result.path) > 1 else ROOT
        result.tokens[-1] = scores.sample(scores.after(node))
        return result

    monkeypatch.setattr(JudgeAcceptance, "walk", walk)
    assert_rejected("judge")


@pytest.mark.slow
def test_certificate_rejects_methods_that_draft_otherwise(monkeypatch: Patch) -> None:
    replace_method(monkeypatch, "judge", "rsd")
    assert_rejected("judge")


@pytest.mark.slow
@pytest.mark.parametrize("reads_draft", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_of_siblings_the_judge_takes_the_surest(temperature: float, reads_draft: bool) -> None:
    oracle, num_several = Rounds(reads_draft), 0
    with judged_model(prefix_cache=False, reads_draft=reads_draft) as llm:
        trace = rounds(
            llm, "rsd:acceptance=judge", "the cat sat", 60, temperature=temperature, seed=5
        )
    for one in trace[:-1]:
        text, node = list(one.text), ROOT
        expected = []
        while True:
            children = [i for i, parent in enumerate(one.parents) if parent == node]
            token = plain_token(oracle.target.logits(text), len(text), temperature)
            same = [child for child in children if one.tokens[child] == token]
            sure = {
                child: oracle.logit([*text, one.tokens[child]])
                for child in children
                if not same and oracle.is_right([*text, one.tokens[child]], 0.7)
            }
            num_several += len(sure) > 1
            if not (same or sure):
                break
            node = same[0] if same else max(sure, key=lambda child: sure[child])
            expected.append(node)
            text.append(one.tokens[node])
        assert one.accepted == expected
    assert num_several > 0


@pytest.mark.parametrize("reads_draft", [False, True])
@pytest.mark.parametrize("key", ["speculative-sampling", "prompt-lookup"])
def test_every_drafter_takes_the_rule(key: str, reads_draft: bool) -> None:
    with judged_model(reads_draft=reads_draft) as llm:
        decoder = llm.decoder(f"{key}:acceptance=judge")
        assert decoder.exactness == "lossy" and decoder.requirements.reads_judge
        answer = llm.generate(
            "abcabcabc", decoder=decoder, max_tokens=12, ignore_eos=True, logprobs=0
        )
        assert len(answer.tokens) == 12 and None not in answer.logprobs
        llm.engine.check_integrity()


def test_without_restraint_every_draft_is_accepted_and_above_1_none() -> None:
    with judged_model() as llm:
        options: dict[str, Any] = {
            "max_tokens": 24,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": 3,
        }
        plain = llm.generate("the cat", decoder="autoregressive", **options)
        never = llm.generate("the cat", decoder="judge:threshold=1", **options)
        trace = rounds(llm, "judge:threshold=0,size=5", "the cat", 24)
    assert never.tokens == plain.tokens
    assert all(len(one.accepted) == len(one.tokens) for one in trace[:-1])


def test_forbidden_tokens_are_not_accepted() -> None:
    """Even at a threshold of 0."""
    with judged_model() as llm:
        options: dict[str, Any] = {
            "decoder": "judge:threshold=0,size=5",
            "ignore_eos": True,
            "max_tokens": 16,
        }
        free = llm.generate("the cat", **options)
        banned = {token: -np.inf for token in free.tokens}
        biased = llm.generate("the cat", logit_bias=banned, **options)
        assert biased.tokens and not set(free.tokens) & set(biased.tokens)
        held = llm.generate("the cat", constraint=Regex("[a-f]{12}"), **options)
        assert set(held.text) <= set("abcdef") and len(held.text) == 12
        llm.engine.check_integrity()


@pytest.mark.parametrize("draft", [None, judged_network(2)], ids=["target", "both"])
def test_the_file_is_read_as_it_was_written(draft: Network | None, tmp_path: Path) -> None:
    written, file = random_judge(judged_network(), draft), tmp_path / "judge.safetensors"
    written.save(file)
    read = Judge.load(file)
    assert np.array_equal(read.weights, written.weights) and read.bias == written.bias
    assert read.fingerprint == written.fingerprint
    assert read.threshold == pytest.approx(written.threshold)
    assert np.array_equal(read.draft_weights, written.draft_weights)
    assert read.draft_fingerprint == written.draft_fingerprint
    with judged_model(reads_draft=draft is not None) as llm:
        options: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
        own = llm.generate("the cat", decoder="judge", **options)
        llm.model.judge = None  # type: ignore[attr-defined]
        given = llm.generate("the cat", decoder=f"judge:head={file}", **options)
    assert own.tokens == given.tokens


def test_the_file_of_a_models_folder_is_opened(tmp_path: Path) -> None:
    checkpoint = load_checkpoint("tiny-autoregressive")
    folder = shutil.copytree(checkpoint.path, tmp_path / "model")
    random_judge(judged_network()).save(folder / "judge.safetensors")
    model, _ = open_checkpoint(load_checkpoint(folder))
    with LLM(model, tokenizer=ByteTokenizer(), draft=model) as llm:
        with pytest.raises(InvalidRequestError, match="those of another model"):
            llm.generate([1, 2], decoder="judge", max_tokens=2)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("weights", np.zeros((1, 64), np.float32)),
        ("weights", np.full(64, np.inf, np.float32)),
        ("bias", np.zeros(2, np.float32)),
        ("threshold", np.array([1.5], np.float32)),
        ("threshold", None),
        ("draft_weights", np.zeros((1, 64), np.float32)),
    ],
    ids=["shape", "inf", "biases", "above 1", "missing", "shape of the draft's"],
)
def test_bad_files_are_refused_in_one_line(
    name: str, tensor: np.ndarray | None, tmp_path: Path
) -> None:
    file = tmp_path / "judge.safetensors"
    random_judge(judged_network()).save(file)
    assert_tensor_refused(file, name, tensor, partial(judge.judge, head=file), "judge")


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "judge.safetensors"
    random_judge(judged_network()).save(file)
    with LLM(ScriptedModel(), tokenizer=ByteTokenizer(), draft=ScriptedModel()) as llm:
        for key in ("judge", "prompt-lookup:acceptance=judge"):
            with pytest.raises(UnsupportedCombinationError, match="anydecode train judge"):
                llm.generate("abc", decoder=key)
        with pytest.raises(UnsupportedCombinationError, match="needs a transformer"):
            llm.generate("abc", decoder=f"judge:head={file}")
    with judged_model() as llm:
        model: Any = llm.model
        llm.add_adapter("own", save_adapter(tmp_path / "own", 1))
        with pytest.raises(UnsupportedCombinationError, match="without adapters"):
            llm.generate("abc", decoder="judge", adapter="own")
        model.judge = replace(model.judge, fingerprint="another")
        with pytest.raises(InvalidRequestError, match="those of another model"):
            llm.generate("abc", decoder="judge")
        llm.engine.check_integrity()
    random_judge(judged_network(), judged_network(2)).save(file)
    own, other = (with_judge(judged_network(layers)) for layers in (4, 3))
    own.judge = Judge.load(file)
    with LLM(own, tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(UnsupportedCombinationError, match="reads a draft model's states"):
            llm.generate("abc", decoder="prompt-lookup:acceptance=judge")
    with LLM(own, tokenizer=ByteTokenizer(), draft=other) as llm:
        with pytest.raises(InvalidRequestError, match="those of another model"):
            llm.generate("abc", decoder="judge")
    for wrong, message in (
        ({"threshold": 1.5}, "from 0 to 1"),
        ({"acceptance": "typical"}, "'token-exact' or 'rejection'"),
        ({"head": tmp_path / "none"}, "no such file"),
    ):
        with pytest.raises(AnydecodeError, match=message):
            judge.judge(**wrong)  # type: ignore[arg-type]
