"""Exits by predictors over a draft's candidates pass their certificate; other exits, features and
contents of the cache do not."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM, catalogue
from anydecode.certification.certify import claim
from anydecode.certification.tiny import (
    eagle3_checkpoint,
    predicting_model,
    tiny_model,
    with_drafter,
)
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.depth import specee
from anydecode.decoders.depth.specee import CandidateGuide, PredictedExit, SpecEe
from anydecode.engine.schedule import DecodesFirst
from anydecode.errors import AnydecodeError
from anydecode.kernels.routes import Route, RoutedPass
from anydecode.models.exit_predictors import ExitPredictors
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.span import TreeSpan
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("specee")


@pytest.mark.slow
def test_another_threshold_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_defaults(monkeypatch, "specee", threshold=0.8)
    assert_rejected("specee")


@pytest.mark.parametrize(
    ("name", "value"),
    [("NEAR", ()), ("NEAR", (-1, 0, 1)), ("NUM_RECENT", 4), ("NUM_CANDIDATES", 3)],
    ids=str,
)
def test_other_schedules_and_candidates_are_rejected(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    if name == "NUM_CANDIDATES":
        features = PredictedExit.features

        def padded(self: PredictedExit, routed: RoutedPass, row: int) -> np.ndarray:
            return np.insert(features(self, routed, row), [3, 6, 9], 0.0)

        monkeypatch.setattr(PredictedExit, "features", padded)
    monkeypatch.setattr(specee, name, value)
    assert_rejected("specee")


@pytest.mark.slow
def test_exits_that_the_head_does_not_confirm_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def head(self: RoutedPass, active: np.ndarray) -> np.ndarray:
        logits = np.zeros((len(active), 259), np.float32)
        logits[0, self.guides[active[0]].candidates[0]] = 1.0
        return logits

    monkeypatch.setattr(RoutedPass, "head", head)
    assert_rejected("specee")


@pytest.mark.slow
def test_changes_since_the_first_check_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    features = PredictedExit.features

    def first(self: PredictedExit, routed: RoutedPass, row: int) -> np.ndarray:
        before = routed.guides[row].probabilities
        result = features(self, routed, row)
        if before is not None:
            routed.guides[row].probabilities = before
        return result

    monkeypatch.setattr(PredictedExit, "features", first)
    assert_rejected("specee")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["propagate", "copy"])
def test_layers_that_store_something_behind_an_exit_are_rejected(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    def store(self: RoutedPass, active: np.ndarray, layer: int) -> None:
        getattr(self, policy)(active, layer, self.num_layers)
        for row in active.tolist():
            self.guides[row].num_layers = layer

    monkeypatch.setattr(RoutedPass, "stop", store)
    monkeypatch.setattr(PredictedExit, "leaves_holes", False)
    assert_rejected("specee")


def test_later_tokens_read_nothing_of_a_token_in_the_layers_that_it_has_not_run() -> None:
    """Whatever stands in a token's slots behind its exit: the bits of later tokens stay."""
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "logprobs": 0}
    stop, num_filled = RoutedPass.stop, 0

    def filled(self: RoutedPass, active: np.ndarray, layer: int) -> None:
        nonlocal num_filled
        stop(self, active, layer)
        for row in active.tolist():
            slot = int(self.rows.slots[row])
            for behind in range(layer, self.num_layers):
                self.cache.keys[behind][slot] = 1e3
                self.cache.values[behind][slot] = np.nan
                num_filled += 1

    texts = []
    for patched in (False, True):
        with pytest.MonkeyPatch.context() as patch, predicting_model() as llm:
            if patched:
                patch.setattr(RoutedPass, "stop", filled)
            found = llm.generate(["abcabc", "the cat sat", "q"], decoder="specee", **options)
            texts.append([[(t.token, t.logprob) for t in one.logprobs] for one in found])
    assert num_filled > 100
    assert texts[0] == texts[1]


class _Leaving(PredictedExit):
    """Every row leaves at its first check."""

    def features(self, routed: RoutedPass, row: int) -> np.ndarray:
        return np.zeros(12)


class _States(Decoder):
    """Reads the states of one prompt behind some layers, in a pass with or without a route."""

    def __init__(self, route: Route | None, exits: Seq[int]) -> None:
        self.route, self.exits = route, exits
        self.hidden: dict[int, np.ndarray] = {}

    def decode(self, sequence: Sequence) -> Decoding:
        guides = []
        if self.route is not None:
            guides = [
                CandidateGuide(candidates=np.arange(259), checked=frozenset({one} - {16}))
                for one in self.exits
            ]
        options: dict[str, Any] = {"rows": "all", "hidden": (0, 3, 7, 16)}
        scores = yield sequence.score(variant=self.route, guides=guides, **options)
        self.hidden = {layers: one.copy() for layers, one in scores.hidden.items()}
        sequence.emit([0])


def test_states_behind_inner_layers_are_those_of_a_pass_without_exits() -> None:
    """Up to the layer where a row leaves, whose state stands for the later ones."""
    exits = [16, 5, 16, 2]
    with predicting_model() as llm:
        model: Any = llm.model
        leaving = _Leaving(model, model.exit_predictors, threshold=-1.0)
        full, routed = _States(None, exits), _States(leaving, exits)
        for reader in (full, routed):
            llm.generate([97, 98, 99, 100], decoder=reader, max_tokens=1)
    for row, exit in enumerate(exits):
        for layers in (0, 3, 7, 16):
            found = routed.hidden[layers][row]
            if layers <= exit and all(one >= layers for one in exits[:row]):
                assert np.array_equal(found, full.hidden[layers][row])
            if layers > exit:
                assert np.array_equal(found, routed.hidden[16][row])


def test_candidates_of_a_drafter_that_reads_inner_layers() -> None:
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    with with_drafter(eagle3_checkpoint, layers=16, residual=0.3) as llm:
        with predicting_model() as other:
            llm.model.exit_predictors = other.model.exit_predictors  # type: ignore[attr-defined]
        plain = llm.generate("abcabc", decoder="autoregressive", **options).tokens
        assert llm.generate("abcabc", decoder="specee:threshold=1", **options).tokens == plain
        alone = [llm.generate(one, decoder="specee", **options).tokens for one in ("abcabc", "q")]
        batch = llm.generate(["abcabc", "q"], decoder="specee", **options)
        assert [one.tokens for one in batch] == alone
        assert alone[0] != plain


def test_predictors_that_never_fire_give_the_text_of_plain_decoding() -> None:
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    with predicting_model() as llm:
        plain = llm.generate("abc", decoder="autoregressive", **options)
        assert llm.generate("abc", decoder="specee:threshold=1", **options).tokens == plain.tokens
        assert llm.generate("abc", decoder="specee", **options).tokens != plain.tokens


def test_predictors_of_a_file_replace_those_of_the_model(tmp_path: Path) -> None:
    file = tmp_path / "predictors.safetensors"
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    with predicting_model() as llm:
        own: Any = llm.model.exit_predictors  # type: ignore[attr-defined]
        own.save(file)
        assert ExitPredictors.load(file).always == own.always
        found = llm.generate("abc", decoder="specee", **options).tokens
        llm.model.exit_predictors = None  # type: ignore[attr-defined]
        again = llm.generate("abc", decoder=f"specee:predictors={file}", **options).tokens
        assert found == again


def test_bad_predictors_and_models_are_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "predictors.safetensors"
    with LLM(ScriptedModel(), tokenizer=ByteTokenizer(), draft=ScriptedModel()) as llm:
        with pytest.raises(AnydecodeError, match="needs exit predictors"):
            llm.generate("a", decoder="specee")
    with predicting_model() as llm:
        llm.model.exit_predictors.save(file)  # type: ignore[attr-defined]
    with LLM(ScriptedModel(), tokenizer=ByteTokenizer(), draft=ScriptedModel()) as llm:
        with pytest.raises(AnydecodeError, match="needs a transformer"):
            llm.generate("a", decoder=f"specee:predictors={file}")
    model = tiny_model(layers=4)
    with LLM(model, tokenizer=ByteTokenizer(), draft=tiny_model()) as llm:
        with pytest.raises(AnydecodeError, match="another model"):
            llm.generate("a", decoder=f"specee:predictors={file}")
        (tmp_path / "broken").write_text("no tensors")
        with pytest.raises(AnydecodeError, match="exit predictors"):
            llm.generate("a", decoder=f"specee:predictors={tmp_path / 'broken'}")


@pytest.mark.slow
def test_trees_are_the_same_in_batches_and_after_restarts() -> None:
    """Also with a row budget below the size of a tree."""
    card = catalogue.find("specee").card
    checks = list(claim(card, partial(SpecEe, size=6)))
    assert len(checks) == 4 and all(check.passed for check in checks)
    options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "decoder": "specee:size=6"}
    with predicting_model() as llm:
        whole = llm.generate(["abcabc", "q"], **options)
    with predicting_model(schedule=DecodesFirst(row_budget=3)) as llm:
        small = llm.generate(["abcabc", "q"], **options)
    assert [one.tokens for one in whole] == [one.tokens for one in small]


@pytest.mark.slow
@pytest.mark.parametrize("is_alone", [False, True], ids=["root and leaf", "alone"])
def test_paths_that_leave_before_all_of_their_tokens_may_are_rejected(
    monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    whole = specee.paths_of

    def split(guides: list[CandidateGuide]) -> list[list[int]]:
        if is_alone:
            return [[row] for row in range(len(guides))]
        return [[path[0], path[-1]] for path in whole(guides)]

    monkeypatch.setattr(specee, "paths_of", split)
    assert_rejected("specee")


@pytest.mark.slow
def test_trees_whose_kept_tokens_have_no_holes_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    complete = TreeSpan.complete

    def forgetful(self: TreeSpan, hidden: np.ndarray | None, count: int) -> None:
        complete(self, hidden, count)
        if self.kv_cache.pending is not None:
            self.kv_cache.pending.num_layers = None

    monkeypatch.setattr(TreeSpan, "complete", forgetful)
    assert_rejected("specee")


@pytest.mark.slow
def test_trees_whose_tokens_do_not_count_as_recent_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = PredictedExit.checked

    def early(self: PredictedExit, past: list[int]) -> frozenset[int]:
        return checked(self, past[:5])

    monkeypatch.setattr(PredictedExit, "checked", early)
    assert_rejected("specee")


@pytest.mark.slow
def test_trees_of_another_width_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_defaults(monkeypatch, "specee", width=1)
    assert_rejected("specee")


def test_trees_with_predictors_that_never_fire_give_the_text_of_plain_decoding() -> None:
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    with predicting_model() as llm:
        plain = llm.generate("abc", decoder="autoregressive", **options).tokens
        found = llm.generate("abc", decoder="specee:threshold=1,size=5", **options)
        assert found.tokens == plain
        with pytest.raises(AnydecodeError, match="width is 0; allowed are 1 to"):
            llm.generate("abc", decoder="specee:size=5,width=0", **options)


def test_trees_of_a_drafter_that_reads_inner_layers() -> None:
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    with with_drafter(eagle3_checkpoint, layers=16, residual=0.3) as llm:
        with predicting_model() as other:
            llm.model.exit_predictors = other.model.exit_predictors  # type: ignore[attr-defined]
        plain = llm.generate("abcabc", decoder="autoregressive", **options).tokens
        found = llm.generate("abcabc", decoder="specee:threshold=1,size=6", **options).tokens
        assert found == plain
        alone = [
            llm.generate(one, decoder="specee:size=6", **options).tokens for one in ("abcabc", "q")
        ]
        batch = llm.generate(["abcabc", "q"], decoder="specee:size=6", **options)
        assert [one.tokens for one in batch] == alone
