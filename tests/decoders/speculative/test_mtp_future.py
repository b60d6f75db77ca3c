"""mtp-future: its certificate, mistakes that the certificate rejects, its files, and exactness in
company, with a small cache, in chunks, under guidance, constraints and adapters."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from anydecode import Regex
from anydecode.api.llm import LLM
from anydecode.certification.oracles.speculative import mtp_future as oracle
from anydecode.certification.rounds import rounds
from anydecode.certification.tiny_future import future_masks, future_model, future_network
from anydecode.decoders.framework.acceptance import TokenExact
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative import mtp_future, space
from anydecode.decoders.speculative.mask_groups import MaskDrafter
from anydecode.errors import AnydecodeError, InvalidRequestError
from anydecode.models.future_masks import FILE_NAME, NORM_EPS, FutureMasks, SamplerLayer
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.score import Scores
from anydecode.scoring.tree import TokenTree
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from draft_folders import assert_tensor_refused
from drafted_texts import (
    CONDITIONS,
    NUMBERS,
    PROMPTS,
    SAMPLERS,
    assert_constrained_texts_of_plain_decoding,
    assert_texts_and_logprobs_of_plain_decoding,
    assert_texts_of_plain_decoding,
    generate,
)

Patch = pytest.MonkeyPatch
Drafter = mtp_future.FutureDrafter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("mtp-future")


@pytest.mark.parametrize("defaults", [{"masks": 3}, {"linear": True}], ids=str)
def test_certificate_rejects_another_default(monkeypatch: Patch, defaults: dict[str, Any]) -> None:
    replace_defaults(monkeypatch, "mtp-future", **defaults)
    assert_rejected("mtp-future")


def test_certificate_rejects_other_methods(monkeypatch: Patch) -> None:
    replace_method(monkeypatch, "mtp-future", "prompt-lookup")
    assert_rejected("mtp-future")


def test_certificate_rejects_rows_of_masks_without_the_adapter(monkeypatch: Patch) -> None:
    own = Drafter.add_mask

    def add_mask(self: Any, sequence: Any, tree: TokenTree, parent: int, number: int) -> int:
        node = own(self, sequence, tree, parent, number)
        tree.adapters[node] = -1
        return node

    monkeypatch.setattr(Drafter, "add_mask", add_mask)
    assert_rejected("mtp-future")


def test_certificate_rejects_candidates_with_the_adapter(monkeypatch: Patch) -> None:
    """The text is then no longer that of the model as it is."""
    own = Drafter.draft

    def draft(self: Any, sequence: Any, masks: Any, size: int) -> Any:
        tree, counts = own(self, sequence, masks, size)
        index = self.parts(sequence).adapter_of(sequence.model())
        tree.adapters = dict.fromkeys(range(len(tree)), index)
        return tree, counts

    monkeypatch.setattr(Drafter, "draft", draft)
    assert_rejected("mtp-future")


def test_certificate_rejects_masks_in_another_order(monkeypatch: Patch) -> None:
    own = Drafter.add_mask

    def add_mask(self: Any, sequence: Any, tree: Any, parent: int, number: int) -> int:
        return own(self, sequence, tree, parent, self.num_masks - 1 - number)

    monkeypatch.setattr(Drafter, "add_mask", add_mask)
    assert_rejected("mtp-future")


def test_certificate_rejects_candidates_that_do_not_depend_on_each_other(
    monkeypatch: Patch,
) -> None:
    own = Drafter.logits

    def logits(self: Any, sequence: Any, sampler: Any, mask: Any, last: int) -> np.ndarray:
        return own(self, sequence, sampler, mask, sequence.all_tokens[-1])

    monkeypatch.setattr(Drafter, "logits", logits)
    assert_rejected("mtp-future")


def test_certificate_rejects_candidates_of_the_models_own_head(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Drafter, "logits", lambda self, sequence, sampler, mask, last: mask.logits)
    assert_rejected("mtp-future")


def test_certificate_rejects_the_state_before_the_norm(monkeypatch: Patch) -> None:
    def state(self: Scores, row: int) -> np.ndarray:
        return np.asarray(self.hidden[self.sequence.num_layers][row])

    monkeypatch.setattr(Scores, "last_state", state)
    assert_rejected("mtp-future")


def test_certificate_rejects_the_state_before_the_embedding(monkeypatch: Patch) -> None:
    own = FutureMasks.head_inputs
    monkeypatch.setattr(
        FutureMasks, "head_inputs", lambda self, embedding, state: own(self, state, embedding)
    )
    assert_rejected("mtp-future")


def test_certificate_rejects_a_head_without_its_second_layer(monkeypatch: Patch) -> None:
    def head_inputs(self: Any, embedding: np.ndarray, state: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.first.apply(np.concatenate([embedding, state]))
        return found

    monkeypatch.setattr(FutureMasks, "head_inputs", head_inputs)
    assert_rejected("mtp-future")


def test_certificate_rejects_a_head_with_another_activation(monkeypatch: Patch) -> None:
    def apply(self: SamplerLayer, x: np.ndarray) -> np.ndarray:
        y = np.maximum(self.weight @ x + self.bias, 0)
        normed: np.ndarray = (y - y.mean()) / np.sqrt(y.var() + np.float32(NORM_EPS))
        return normed * self.norm + self.norm_bias

    monkeypatch.setattr(SamplerLayer, "apply", apply)
    assert_rejected("mtp-future")


def test_certificate_rejects_noise_of_another_position(monkeypatch: Patch) -> None:
    own = space.draft_candidates

    def found(sequence: Any, sampler: Any, row: Any, position: int, draw: Any) -> Any:
        return own(sequence, sampler, row, position - 1, draw)

    monkeypatch.setattr(space, "draft_candidates", found)
    assert_rejected("mtp-future")


@pytest.mark.slow
def test_certificate_rejects_best_candidates_compared_as_drawn(monkeypatch: Patch) -> None:
    monkeypatch.setattr(space, "draft_candidates", partial(space.draft_candidates, has_noise=False))
    failed = [one.name for one in oracle.mtp_future() if not one.passed]
    assert "mtp-future: with the rejection rule samples follow the target" in failed


@pytest.mark.slow
def test_certificate_rejects_masks_without_use(monkeypatch: Patch) -> None:
    """One more than the paper's behind each group."""
    own = Drafter.add_mask

    def add_mask(self: Any, sequence: Any, tree: TokenTree, parent: int, number: int) -> int:
        node = own(self, sequence, tree, parent, number)
        if number == self.num_masks - 1:
            own(self, sequence, tree, node, 0)
        return node

    monkeypatch.setattr(Drafter, "add_mask", add_mask)
    failed = {one.name for one in oracle.mtp_future() if not one.passed}
    assert failed and all("passes have the masks' rows" in name for name in failed), failed


@pytest.mark.slow
@CONDITIONS
def test_the_text_is_that_of_plain_decoding(options: dict[str, Any], temperature: float) -> None:
    if "backend" in options:
        pytest.importorskip("torch")
    decoders = "mtp-future", "mtp-future:masks=3,linear=true"
    with future_model(**{"cache_positions": 2048, **options}) as llm:
        accepted = assert_texts_of_plain_decoding(llm, decoders, temperature=temperature)
    assert min(accepted) > 15


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_short_texts_are_those_of_plain_decoding(temperature: float) -> None:
    prompts = ["the cat", "a quick zebra", "zq"]
    with future_model() as llm:
        accepted = assert_texts_and_logprobs_of_plain_decoding(
            llm, "mtp-future", prompts, temperature=temperature, max_tokens=16
        )
    assert accepted > 5


def test_texts_beside_requests_with_other_methods_and_adapters(tmp_path: Path) -> None:
    """Rows of one pass with three adapters."""
    other = future_masks(future_network(), seed=5)
    folder = write_folder(tmp_path / "other", other)
    with future_model() as llm:
        llm.add_adapter("other", folder)
        expected = {
            name: generate(llm, "the cat", "autoregressive", adapter=name).tokens
            for name in (None, "other")
        }
        assert expected[None] != expected["other"]
        requests = [
            llm.request(
                "the cat", decoder=key, adapter=name, max_tokens=40, seed=3, ignore_eos=True
            )
            for key in ("mtp-future", "autoregressive", "prompt-lookup")
            for name in expected
        ]
        for one in requests:
            llm.start(one, background=False)
        llm.driver.advance(lambda: all(one.done for one in requests))
        llm.engine.check_integrity()
    assert [one.generation().tokens for one in requests] == [*expected.values()] * 3


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_constraints_hold_and_the_text_is_exact(temperature: float) -> None:
    with future_model() as llm:
        assert_constrained_texts_of_plain_decoding(
            llm, "mtp-future", (NUMBERS, Regex("[a-z]{20}")), temperature=temperature
        )


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@SAMPLERS
def test_the_text_is_exact_with_samplers(options: dict[str, Any], temperature: float) -> None:
    with future_model(cache="int8") as llm:
        accepted = assert_texts_and_logprobs_of_plain_decoding(
            llm, "mtp-future", PROMPTS[:2], temperature=temperature, **options
        )
    assert accepted > 1


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["typical", "top-m"])
def test_lossy_rules_accept_drafts(rule: str) -> None:
    with future_model() as llm:
        trace = rounds(llm, f"mtp-future:acceptance={rule}", "the cat", temperature=0.8)
    assert sum(len(one.accepted) for one in trace) > 5


def test_a_smaller_budget_has_fewer_candidates() -> None:
    sizes = {False: ((1, 0), (2, 0), (5, 1), (99, 2)), True: ((1, 0), (3, 1), (4, 2))}
    with future_model() as llm:
        for is_linear, cases in sizes.items():
            for size, expected in cases:
                drafter = Drafter(2, is_linear, None, TokenExact())
                trace = rounds(llm, Speculative(drafter, size), "the cat", 8)
                assert max(len(one.tokens) for one in trace) == expected


def test_the_adapter_of_a_file_is_freed_with_its_decoder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "masks", future_masks(future_network()))
    with future_model() as llm:
        model: Any = llm.model
        model.future_masks = None
        for _ in range(2):
            decoder = mtp_future.mtp_future(parts=folder)
            for prompt in ("the cat", "the dog"):
                llm.generate(prompt, decoder=decoder, max_tokens=4)
            del decoder
        llm.engine.check_integrity()
        gc.collect()
        assert [len(one) for one in model.network.adapters] == [0, 0]


def write_folder(folder: Path, parts: FutureMasks) -> Path:
    """The folder of masks with their adapter."""
    folder.mkdir()
    parts.save(folder / FILE_NAME)
    tensors = {}
    for name, one in parts.factors.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = one.down
        tensors[f"base_model.model.{name}.lora_B.weight"] = one.up
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 1.4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = future_masks(future_network())
    read = FutureMasks.load(write_folder(tmp_path / "masks", written))
    assert np.array_equal(read.masks, written.masks)
    for name in ("first", "second"):
        for one, other in zip(getattr(read, name), getattr(written, name), strict=True):
            assert np.array_equal(one, other)
    for name, factors in written.factors.items():
        assert np.array_equal(read.factors[name].up, factors.up)
        assert read.factors[name].scale == pytest.approx(factors.scale)
    assert read.fingerprint == written.fingerprint


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("masks", np.zeros((2, 3), np.float32)),
        ("masks", np.zeros((33, 64), np.float32)),
        ("masks", np.full((2, 64), np.nan, np.float32)),
        ("first.weight", np.zeros((64, 64), np.float32)),
        ("second.norm.bias", np.full(64, np.inf, np.float32)),
        ("second.bias", None),
    ],
)
def test_bad_files_are_refused_in_one_line(
    name: str, tensor: np.ndarray | None, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "masks", future_masks(future_network()))
    load = partial(mtp_future.mtp_future, parts=folder)
    assert_tensor_refused(folder / FILE_NAME, name, tensor, load, "mask tokens")


def test_models_without_masks_are_refused_in_one_line(tmp_path: Path) -> None:
    parts = future_masks(future_network())
    with LLM(ScriptedModel(), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(AnydecodeError, match="needs trained mask tokens"):
            llm.generate("abc", decoder="mtp-future")
        folder = write_folder(tmp_path / "masks", parts)
        with pytest.raises(AnydecodeError, match="needs a transformer"):
            llm.generate("abc", decoder=f"mtp-future:parts={folder}")
    with future_model() as llm:
        model: Any = llm.model
        with pytest.raises(InvalidRequestError, match="has learned 4"):
            llm.generate("abc", decoder="mtp-future:masks=5")
        model.future_masks = replace(parts, fingerprint="another")
        with pytest.raises(InvalidRequestError, match="those of another model"):
            llm.generate("abc", decoder="mtp-future")


def test_states_are_read_of_drafters_that_need_them_only() -> None:
    assert Drafter.reads_states and not MaskDrafter.reads_states
