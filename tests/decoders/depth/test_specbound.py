"""Drafts that leave at the first exit that is sure pass their certificate; other rules do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.depth import specbound
from anydecode.decoders.depth.specbound import SpecBound
from anydecode.errors import AnydecodeError, InvalidRequestError
from anydecode.models.exit_files import model_fingerprint
from anydecode.models.exit_heads import ExitHeads
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected, replace_defaults


def test_certificate() -> None:
    assert_certified("specbound")


@pytest.mark.parametrize(
    "defaults",
    [
        {"size": 7},
        {"threshold": 0.6},
        {"slope": 0.0},
        {"first": 2},
        {"interval": 2},
        {"depth": 3},
    ],
    ids=str,
)
def test_other_defaults_are_rejected(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "specbound", **defaults)
    assert_rejected("specbound")


def test_a_temperature_that_rises_with_depth_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def rising(self: Any, row: np.ndarray, layers: int) -> float:
        temperature = 1 + self.method.slope * layers / self.sequence.num_layers
        return float(1 / np.exp((row - row.max()) / temperature).sum())

    monkeypatch.setattr(specbound._Session, "_confidence", rising)
    assert_rejected("specbound")


def test_a_token_that_left_at_no_exit_and_runs_again_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def again(self: Any, drafts: list[int]) -> Any:
        if self.is_last_read:
            self.sequence.truncate(self.sequence.kv_cache().length - 1)
            last = drafts[-1] if drafts else self.sequence.all_tokens[-1]
            has_pending = bool(self.sequence.kv_cache().partials)
            return self.sequence.complete([last]) if has_pending else self.sequence.score([last])
        return self.sequence.complete(drafts[-1:])

    monkeypatch.setattr(specbound._Session, "verification", again)
    assert_rejected("specbound")


@pytest.mark.parametrize("twin", ["own", "unmoved", "next"])
def test_heads_that_are_not_used_as_trained_are_rejected(
    monkeypatch: pytest.MonkeyPatch, twin: str
) -> None:
    """The model's own head, a map without the state itself, and the head of another exit."""
    call = ExitHeads.__call__

    def wrong(self: ExitHeads, exit: int, states: np.ndarray) -> np.ndarray:
        if twin == "own":
            return states
        if twin == "unmoved":
            return call(self, exit, states) - states
        return call(self, self.exits[self.exits.index(exit) - 1], states)

    monkeypatch.setattr(ExitHeads, "__call__", wrong)
    assert_rejected("specbound")


def _heads(model: Any, exits: tuple[int, ...], scale: float = 0.1) -> ExitHeads:
    size, random = model.spec.hidden_size, np.random.default_rng(0)
    matrices = {one: scale * random.standard_normal((size, size), np.float32) for one in exits}
    offsets = {one: np.zeros(size, np.float32) for one in exits}
    return ExitHeads(matrices, offsets, model_fingerprint(model.network))


def test_heads_are_read_as_written(tmp_path: Path) -> None:
    heads = _heads(tiny_model(), (1, 3))
    heads.save(tmp_path / "heads.safetensors")
    found = ExitHeads.load(tmp_path / "heads.safetensors")
    assert found.exits == [1, 3] and found.fingerprint == heads.fingerprint
    states = np.ones((2, 64), np.float32)
    assert np.array_equal(found(3, states), heads(3, states))


def test_bad_heads_are_refused_in_one_line(tmp_path: Path) -> None:
    model = tiny_model(layers=8)
    broken = _heads(model, (1, 2))
    broken.offsets[2][0] = np.nan
    files = {
        r"heads after \[1, 2\] layers": _heads(model, (1, 2)),
        "those of another model": _heads(tiny_model(layers=7), (1, 2, 3, 4)),
        "not finite": broken,
    }
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(AnydecodeError, match="exit heads"):
            llm.generate("a", decoder=f"specbound:heads={tmp_path / 'none'}")
        for number, (message, heads) in enumerate(files.items()):
            heads.save(tmp_path / f"{number}")
            with pytest.raises(AnydecodeError, match=message):
                llm.generate("a", decoder=f"specbound:heads={tmp_path / str(number)}")
    with LLM(ScriptedModel(num_layers=4), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(AnydecodeError, match="heads are for a transformer"):
            llm.generate("a", decoder=f"specbound:heads={tmp_path / '0'}")


@pytest.mark.parametrize("has_heads", [False, True])
def test_a_pass_to_a_deeper_exit_computes_one_row_of_the_head(
    has_heads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many pending tokens go deeper."""
    model, file = tiny_model(layers=8, residual=0.1), tmp_path / "heads.safetensors"
    _heads(model, (1, 2, 3, 4), 0.01).save(file)
    counts: list[tuple[int, int]] = []
    run = model.run

    def counting(rows: Any, cache: Any, output_spec: Any) -> Any:
        if 0 < int(rows.stop.max()) < 8 and int(rows.start.min()) > 0:
            counts.append((len(rows), len(output_spec.logits)))
        return run(rows, cache, output_spec)

    monkeypatch.setattr(model, "run", counting)
    decoder = "specbound:threshold=0.5" + (f",heads={file}" if has_heads else "")
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        llm.generate("the cat sat", decoder=decoder, max_tokens=40, ignore_eos=True)
    assert max(num_rows for num_rows, _ in counts) > 1
    assert {num_logits for _, num_logits in counts} == {0 if has_heads else 1}


def test_texts_of_weights_are_those_of_plain_decoding() -> None:
    """With weights, a key that is missing in a layer would change the text."""
    model = tiny_model(layers=8, residual=0.1)
    options: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True, "seed": 3}
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        for temperature in (0.0, 0.9):
            options["temperature"] = temperature
            plain = llm.generate("the cat sat", decoder="autoregressive", **options)
            decoder = "specbound:threshold=0.2,slope=0.2,depth=7"
            found = llm.generate("the cat sat", decoder=decoder, trace=True, **options)
            assert found.tokens == plain.tokens
            assert sum(len(entry["accepted"]) for entry in found.trace or ()) > 20


def test_bad_parameters_and_models_are_refused_in_one_line() -> None:
    with LLM(ScriptedModel(num_layers=4), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(InvalidRequestError, match=r"exits \[\] of 4 layers"):
            llm.generate("a", decoder="specbound:first=3,depth=2")
        with pytest.raises(InvalidRequestError, match=r"exits .* of 4 layers"):
            llm.generate("a", decoder="specbound:depth=9")
        with pytest.raises(InvalidRequestError, match="0 <= threshold <= 1"):
            llm.generate("a", decoder="specbound:threshold=2")


def test_exits_of_a_model_of_thirty_layers() -> None:
    assert SpecBound().exits(30) == [6, 10, 14, 18]
