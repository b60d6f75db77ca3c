"""Layers that prompts choose pass their certificate; other choices do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.tiny import layer_routed_model, tiny_model
from anydecode.decoders.depth.first_router import FirstRouter, RoutedPrompt
from anydecode.engine.schedule import DecodesFirst
from anydecode.errors import AnydecodeError
from anydecode.kernels.routes import RoutedPass
from anydecode.models.layer_routers import LayerRouters
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected, replace_defaults

LONG = [(7 * i) % 251 for i in range(400)]


def test_certificate() -> None:
    assert_certified("first-router")


@pytest.mark.parametrize(
    "defaults", [{"threshold": 0.4}, {"pooling": "last"}, {"pooling": "majority"}], ids=str
)
def test_other_defaults_are_rejected(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "first-router", **defaults)
    assert_rejected("first-router")


def test_a_mean_of_logits_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(self: RoutedPrompt, layer: int, states: np.ndarray) -> bool:
        return bool(self.routers.scores(layer, states).mean() >= 0)

    monkeypatch.setattr(RoutedPrompt, "needs", needs)
    assert_rejected("first-router")


def test_prompts_that_run_all_layers_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers that decide on the full model's states, and tokens that skip what they say."""

    def run(self: RoutedPrompt, routed: RoutedPass) -> None:
        rows = np.arange(len(routed.guides))
        for layer in range(routed.num_layers):
            for row in rows.tolist():
                skipped = routed.guides[row].skipped
                own = [one for one in rows if routed.guides[one].skipped is skipped]
                is_routed = layer in self.routers.layers and layer not in skipped
                if is_routed and not self.needs(layer, routed.states[own]):
                    skipped.append(layer)
            routed.run(rows, layer, layer + 1)
        routed.stop(rows, routed.num_layers)

    monkeypatch.setattr(RoutedPrompt, "run", run)
    assert_rejected("first-router")


def test_tokens_that_run_all_layers_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FirstRouter, "variant", lambda *given: None)
    assert_rejected("first-router")


def test_a_long_prompt_decides_as_a_whole() -> None:
    """Also where passes have fewer rows than it has tokens."""
    options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "trace": True}
    with layer_routed_model() as llm:
        whole = llm.generate(LONG, decoder="first-router", **options)
    with layer_routed_model(schedule=DecodesFirst(row_budget=16)) as llm:
        parts = llm.generate([LONG, "abc", LONG], decoder="first-router", **options)
    assert whole.tokens == parts[0].tokens == parts[2].tokens
    assert whole.trace is not None and whole.trace[0]["mixers"] < 12


def test_layers_that_are_skipped_store_nothing() -> None:
    with layer_routed_model() as llm:
        llm.generate("abcabc", decoder="first-router", max_tokens=20, ignore_eos=True)
        cache = llm.engine.runners["target"].pool.cache
        used = [bool(np.any(keys)) for keys in cache.keys]
    assert not all(used) and used[0] and used[11]


def test_a_threshold_of_0_gives_the_text_of_plain_decoding() -> None:
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    with layer_routed_model() as llm:
        plain = llm.generate("abc", decoder="autoregressive", **options).tokens
        assert llm.generate("abc", decoder="first-router:threshold=0", **options).tokens == plain
        assert llm.generate("abc", decoder="first-router", **options).tokens != plain


def test_bad_routers_and_models_are_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "routers.safetensors"
    with layer_routed_model() as llm:
        own: LayerRouters = llm.model.layer_routers  # type: ignore[attr-defined]
        own.save(file)
        options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
        found = llm.generate("a", decoder=f"first-router:routers={file}", **options)
        assert found.tokens == llm.generate("a", decoder="first-router", **options).tokens
        with pytest.raises(AnydecodeError, match="choose from mean, majority, last"):
            llm.generate("a", decoder="first-router:pooling=max")
    with LLM(ScriptedModel(), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(AnydecodeError, match="needs layer routers"):
            llm.generate("a", decoder="first-router")
        with pytest.raises(AnydecodeError, match="needs a transformer"):
            llm.generate("a", decoder=f"first-router:routers={file}")
    with LLM(tiny_model(layers=4), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(AnydecodeError, match="another model"):
            llm.generate("a", decoder=f"first-router:routers={file}")
        (tmp_path / "broken").write_text("no tensors")
        with pytest.raises(AnydecodeError, match="layer routers"):
            llm.generate("a", decoder=f"first-router:routers={tmp_path / 'broken'}")
