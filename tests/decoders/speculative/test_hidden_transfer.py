"""hidden-transfer: its certificate, mistakes that the certificate rejects, its file, and exactness
in company, with a small cache, in chunks, under guidance and constraints."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapter_files import save_adapter
from anydecode import Regex
from anydecode.api.llm import LLM
from anydecode.certification.oracles.speculative import hidden_transfer as oracle
from anydecode.certification.rounds import rounds
from anydecode.certification.tiny_future import future_masks
from anydecode.certification.tiny_transfer import transfer_maps, transfer_model, transfer_network
from anydecode.decoders.framework import rejection
from anydecode.decoders.speculative import hidden_transfer, ppd
from anydecode.errors import AnydecodeError, InvalidRequestError
from anydecode.kernels.routes import RoutedPass
from anydecode.models.hidden_transfer import HiddenTransfer
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.span import TreeSpan
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


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("hidden-transfer")


def test_certificate_rejects_another_default(monkeypatch: Patch) -> None:
    replace_defaults(monkeypatch, "hidden-transfer", size=9)
    assert_rejected("hidden-transfer")


def test_certificate_rejects_other_methods(monkeypatch: Patch) -> None:
    replace_method(monkeypatch, "hidden-transfer", "token-recycling")
    assert_rejected("hidden-transfer")


def test_certificate_rejects_states_of_another_layer(monkeypatch: Patch) -> None:
    own = HiddenTransfer.run

    def run(self: HiddenTransfer, routed: RoutedPass) -> None:
        own(replace(self, layers=tuple(layers + 1 for layers in self.layers)), routed)

    monkeypatch.setattr(HiddenTransfer, "run", run)
    assert_rejected("hidden-transfer")


def test_certificate_rejects_the_maps_of_another_number(monkeypatch: Patch) -> None:
    own = HiddenTransfer.run
    monkeypatch.setattr(
        HiddenTransfer, "run", lambda self, routed: own(replace(self, maps=self.maps[::-1]), routed)
    )
    assert_rejected("hidden-transfer")


def test_certificate_rejects_states_of_the_last_token_of_the_text(monkeypatch: Patch) -> None:
    """In place of those of the candidate before."""
    own = HiddenTransfer.guides

    def guides(self: Any, num_tokens: int, tokens: Any, parents: Any) -> Any:
        found = own(self, num_tokens, tokens, parents)
        found[num_tokens - 1].states = {}
        for one in found:
            one.source = one.source and found[num_tokens - 1]
        return found

    monkeypatch.setattr(HiddenTransfer, "guides", guides)
    assert_rejected("hidden-transfer")


def test_certificate_rejects_states_of_the_pseudo_state_before(monkeypatch: Patch) -> None:
    own = HiddenTransfer.guides

    def guides(self: Any, num_tokens: int, tokens: Any, parents: Any) -> Any:
        found = own(self, num_tokens, tokens, parents)
        for guide, parent in zip(found[num_tokens:], parents, strict=True):
            if guide.number:
                guide.source = found[num_tokens + parent]
                guide.source.states = {}
        return found

    monkeypatch.setattr(HiddenTransfer, "guides", guides)
    assert_rejected("hidden-transfer")


def test_certificate_rejects_trees_of_assumed_accuracies(monkeypatch: Patch) -> None:
    monkeypatch.setattr(hidden_transfer, "by_rank", lambda found: ppd.by_rank(ppd.ACCURACIES))
    assert_rejected("hidden-transfer")


def test_certificate_rejects_noise_of_another_position(monkeypatch: Patch) -> None:
    own = ppd.draft_candidates

    def found(sequence: Any, sampler: Any, row: Any, position: int, **options: Any) -> Any:
        return own(sequence, sampler, row, position - 1, **options)

    monkeypatch.setattr(ppd, "draft_candidates", found)
    assert_rejected("hidden-transfer")


def test_certificate_rejects_tokens_that_skip_a_layer(monkeypatch: Patch) -> None:
    """The text is then no longer that of the model."""
    own = RoutedPass.run

    def run(self: Any, active: Any, first: int, last: int, variant: Any = None) -> None:
        own(self, active, first, last - (last == self.num_layers), variant)

    monkeypatch.setattr(RoutedPass, "run", run)
    assert_rejected("hidden-transfer")


@pytest.mark.slow
def test_certificate_rejects_pseudo_states_at_another_position(monkeypatch: Patch) -> None:
    own = TreeSpan.write_rows

    def write_rows(self: TreeSpan, rows: Any, at: int, count: int) -> None:
        own(self, rows, at, count)
        rows.positions[at : at + count] += np.array(self.tokens) < 0

    monkeypatch.setattr(TreeSpan, "write_rows", write_rows)
    assert_rejected("hidden-transfer")


@pytest.mark.slow
def test_certificate_rejects_tokens_of_the_target_after_a_rejection(monkeypatch: Patch) -> None:
    """In place of those of the residual."""
    own = rejection.rejection_steps

    def steps(p: np.ndarray, *given: Any) -> Any:
        for chance, _ in own(p, *given):
            yield chance, p

    monkeypatch.setattr(rejection, "rejection_steps", steps)
    failed = [one.name for one in oracle.hidden_transfer() if not one.passed]
    assert failed == ["hidden-transfer: with the rejection rule samples follow the target"]


@pytest.mark.slow
@CONDITIONS
def test_the_text_is_that_of_plain_decoding(options: dict[str, Any], temperature: float) -> None:
    if "backend" in options:
        pytest.importorskip("torch")
    decoders = "hidden-transfer", "hidden-transfer:size=14"
    with transfer_model(**{"cache_positions": 2048, **options}) as llm:
        accepted = assert_texts_of_plain_decoding(llm, decoders, temperature=temperature)
    assert min(accepted) > 15


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_short_texts_are_those_of_plain_decoding(temperature: float) -> None:
    prompts = ["the cat", "a quick zebra", "zq"]
    with transfer_model() as llm:
        accepted = assert_texts_and_logprobs_of_plain_decoding(
            llm, "hidden-transfer", prompts, temperature=temperature, max_tokens=16
        )
    assert accepted > 5


def test_what_a_prompt_stores_serves_other_methods() -> None:
    with transfer_model() as llm:
        prompt = "the quick brown fox jumps over the lazy dog and the cat. "
        for key in ("hidden-transfer", "autoregressive"):
            answer = generate(llm, prompt, key, max_tokens=4)
        assert answer.stats.num_cached_tokens > 20


def test_texts_beside_rows_with_an_adapter() -> None:
    """Of mtp-future, in the same pass."""
    with transfer_model() as llm:
        model: Any = llm.model
        model.future_masks = future_masks(model.network)
        expected = generate(llm, "the cat", "autoregressive", max_tokens=12).tokens
        requests = [
            llm.request("the cat", decoder=key, max_tokens=12, seed=3, ignore_eos=True)
            for key in ("hidden-transfer", "mtp-future", "hidden-transfer:size=3")
        ]
        for one in requests:
            llm.start(one, background=False)
        llm.driver.advance(lambda: all(one.done for one in requests))
        llm.engine.check_integrity()
    assert [one.generation().tokens for one in requests] == [expected] * 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_with_an_adapter(tmp_path: Path, temperature: float) -> None:
    """Alone and beside the same request without the adapter."""
    options: dict[str, Any] = {"max_tokens": 16, "temperature": temperature, "seed": 3}
    with transfer_model() as llm:
        llm.add_adapter("own", save_adapter(tmp_path / "own", 1))
        expected = [
            llm.generate("the cat", adapter=name, decoder="autoregressive", **options).tokens
            for name in ("own", None)
        ]
        assert expected[0] != expected[1]
        alone = llm.generate("the cat", adapter="own", decoder="hidden-transfer", **options)
        assert alone.tokens == expected[0] and alone.stats.rows > 32  # with drafts
        requests = [
            llm.request("the cat", adapter=name, decoder="hidden-transfer", **options)
            for name in ("own", None)
        ]
        for one in requests:
            llm.start(one, background=False)
        llm.driver.advance(lambda: all(one.done for one in requests))
        llm.engine.check_integrity()
    assert [one.generation().tokens for one in requests] == expected


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_constraints_hold_and_the_text_is_exact(temperature: float) -> None:
    with transfer_model() as llm:
        assert_constrained_texts_of_plain_decoding(
            llm, "hidden-transfer", (NUMBERS, Regex("[a-l]{20}")), temperature=temperature
        )


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@SAMPLERS
def test_the_text_is_exact_with_samplers(options: dict[str, Any], temperature: float) -> None:
    with transfer_model(cache="int8") as llm:
        accepted = assert_texts_and_logprobs_of_plain_decoding(
            llm, "hidden-transfer", PROMPTS[:2], temperature=temperature, **options
        )
    assert accepted > 1


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["typical", "top-m"])
def test_lossy_rules_accept_drafts(rule: str) -> None:
    with transfer_model() as llm:
        key = f"hidden-transfer:acceptance={rule}"
        trace = rounds(llm, key, "the cat", temperature=0.8)
    assert sum(len(one.accepted) for one in trace) > 5


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    written, file = transfer_maps(transfer_network()), tmp_path / "maps.safetensors"
    written.save(file)
    read = HiddenTransfer.load(file)
    assert np.array_equal(read.maps, written.maps)
    assert np.array_equal(read.accuracies, written.accuracies)
    assert (read.layers, read.fingerprint) == (written.layers, written.fingerprint)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("maps", np.zeros((3, 64, 63), np.float32)),
        ("maps", np.full((3, 64, 64), np.nan, np.float32)),
        ("layers", np.array([2, 1, 1])),
        ("layers", np.array([1, 1])),
        ("accuracies", np.full((3, 2), 0.6, np.float32)),
        ("accuracies", None),
    ],
    ids=["shape", "nan", "falling", "count", "shares", "missing"],
)
def test_bad_files_are_refused_in_one_line(
    name: str, tensor: np.ndarray | None, tmp_path: Path
) -> None:
    file = tmp_path / "maps.safetensors"
    transfer_maps(transfer_network()).save(file)
    load = partial(hidden_transfer.hidden_transfer, maps=file)
    assert_tensor_refused(file, name, tensor, load, "maps of hidden states")


def test_models_without_maps_are_refused_in_one_line(tmp_path: Path) -> None:
    maps, file = transfer_maps(transfer_network()), tmp_path / "maps.safetensors"
    maps.save(file)
    with LLM(ScriptedModel(), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(AnydecodeError, match="needs trained maps"):
            llm.generate("abc", decoder="hidden-transfer")
        with pytest.raises(AnydecodeError, match="needs a transformer"):
            llm.generate("abc", decoder=f"hidden-transfer:maps={file}")
    with transfer_model() as llm:
        model: Any = llm.model
        for wrong, message in (
            (partial(replace, fingerprint="another"), "those of another model"),
            (partial(replace, layers=(1, 2, 5)), "do not fit"),
        ):
            model.hidden_transfer = wrong(maps)
            with pytest.raises(InvalidRequestError, match=message):
                llm.generate("abc", decoder="hidden-transfer")
