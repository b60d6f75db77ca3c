"""Exits with copied keys and values pass their certificate, on a transformer and on a Mamba; other
exits, and other contents of the layers behind them, do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.oracles.depth.dynamax import routed_mamba, scanned
from anydecode.certification.tiny import add_routers, routed_model, tiny_model
from anydecode.decoders.depth.dynamax import CopiedExit, Dynamax, KeptExit
from anydecode.decoders.depth.routed_exits import RoutedExit
from anydecode.errors import AnydecodeError
from anydecode.kernels.routes import RoutedPass
from anydecode.models import mamba_blocks
from anydecode.models.exit_routers import EPS, ExitRouters, RouterStates
from anydecode.models.mamba_blocks import MambaBlocks, MambaState
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.models.small_mlps import SmallMlps
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("dynamax")


def test_another_threshold_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_defaults(monkeypatch, "dynamax", threshold=0.6)
    assert_rejected("dynamax")


def test_keys_and_values_that_are_computed_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoutedPass, "copy", RoutedPass.propagate)
    assert_rejected("dynamax")


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["no block", "not added", "without the norm"])
def test_other_blocks_of_classifiers_are_rejected(
    monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    own = SmallMlps.__call__

    def wrong(self: SmallMlps, layer: int, states: np.ndarray, eps: float) -> np.ndarray:
        if mistake == "no block":
            return np.zeros_like(states)
        if mistake == "not added":
            return own(self, layer, states, eps) - states
        return own(self, layer, states, eps + 1e6) * 1e3

    monkeypatch.setattr(SmallMlps, "__call__", wrong)
    assert_rejected("dynamax")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", ["forgets", "no window", "one memory for all exits", "not added", "no gate"]
)
def test_other_mamba_blocks_of_classifiers_are_rejected(
    monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    own, read = MambaBlocks.__call__, ExitRouters.read

    def wrong(self: MambaBlocks, exit: int, x: Any, before: MambaState, eps: float) -> Any:
        if mistake == "forgets":
            before = self.start(exit)
        elif mistake == "no window":
            before = MambaState(np.zeros_like(before.inputs), before.state)
        added, after = own(self, exit, x, before, eps)
        return (added - x if mistake == "not added" else added), after

    def shared(self: ExitRouters, exit: int, state: np.ndarray, before: RouterStates) -> float:
        for one in list(before.values()):
            before[exit] = one
        result = read(self, exit, state, before)
        for other in before:
            before[other] = before[exit]
        return result

    if mistake == "one memory for all exits":
        monkeypatch.setattr(ExitRouters, "read", shared)
    elif mistake == "no gate":
        monkeypatch.setattr(mamba_blocks, "_silu", lambda x: 0.5 * (1 + np.tanh(0.5 * x)))
    else:
        monkeypatch.setattr(MambaBlocks, "__call__", wrong)
    assert_rejected("dynamax")


MAMBA_PROMPTS = ["abc", "the cat", "q"]


def texts_and_exits(llm: LLM, prompts: list[str], decoder: str) -> list[Any]:
    """The tokens of each answer, and how many layers each token has run."""
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "trace": True}
    answers = llm.generate(prompts, decoder=decoder, **options)
    return [(one.tokens, [row["mixers"] for row in one.trace or ()]) for one in answers]


@pytest.mark.parametrize(
    ("decoder", "open_llm"),
    [("dynamax", routed_model), ("tide", routed_model), ("dynamax:state=keep", routed_mamba)],
    ids=["dynamax", "tide", "kept states"],
)
def test_classifiers_of_mamba_read_one_text_each(decoder: str, open_llm: Any) -> None:
    with open_llm("mamba") as llm:
        together = texts_and_exits(llm, MAMBA_PROMPTS, decoder)
        alone = [texts_and_exits(llm, [one], decoder)[0] for one in MAMBA_PROMPTS]
    assert together == alone


@pytest.mark.parametrize("decoder", ["dynamax", "tide"])
def test_classifiers_of_mamba_remember_the_text(
    monkeypatch: pytest.MonkeyPatch, decoder: str
) -> None:
    own = ExitRouters.read
    with routed_model("mamba") as llm:
        found = texts_and_exits(llm, MAMBA_PROMPTS, decoder)
        monkeypatch.setattr(ExitRouters, "read", lambda self, at, x, before: own(self, at, x, {}))
        assert texts_and_exits(llm, MAMBA_PROMPTS, decoder) != found


def test_a_block_of_mamba_adds_what_the_whole_text_gives() -> None:
    with routed_model("mamba") as llm:
        blocks: MambaBlocks = llm.model.exit_routers.mamba  # type: ignore[attr-defined]
    read = list(np.random.default_rng(0).standard_normal((6, len(blocks.norm[8]))))
    state = blocks.start(8)
    for length in range(1, 7):
        added, state = blocks(8, read[length - 1], state, EPS)
        np.testing.assert_allclose(added, scanned(blocks, 8, read[:length]), rtol=1e-9)


def test_exits_in_the_lower_half_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def route(self: Dynamax, model: Any, routers: ExitRouters) -> RoutedExit:
        return CopiedExit(routers, routers.exits, self.threshold)

    monkeypatch.setattr(Dynamax, "route", route)
    assert_rejected("dynamax")


@pytest.mark.slow
def test_a_mamba_whose_layers_store_nothing_behind_the_exit_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RoutedPass, "propagate", lambda *given: None)
    assert_rejected("dynamax")


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["updated", "the exit's layer kept too"])
def test_other_states_behind_the_exit_are_rejected(
    monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    if mistake == "updated":
        monkeypatch.setattr(KeptExit, "leave", RoutedExit.leave)
    else:
        own = RoutedPass.stop

        def earlier(self: RoutedPass, active: np.ndarray, layer: int) -> None:
            own(self, active, min(layer, self.num_layers - 1))

        monkeypatch.setattr(RoutedPass, "stop", earlier)
    assert_rejected("dynamax")


def test_kept_states_are_those_of_each_text() -> None:
    """Texts of a batch leave at different layers, and are those that each has alone."""
    options: dict[str, Any] = {
        "max_tokens": 30,
        "ignore_eos": True,
        "decoder": "dynamax:state=keep",
    }
    prompts = ["abc", "the cat", "q"]
    with routed_mamba() as llm:
        together = [one.tokens for one in llm.generate(prompts, **options)]
        assert together == [llm.generate(prompt, **options).tokens for prompt in prompts]


def test_layers_behind_an_exit_store_the_bits_of_the_layer_before_it() -> None:
    """Also while other requests run in the same pass, and after later tokens have run."""
    left: list[tuple[int, int]] = []
    own = CopiedExit.leave

    def recording(self: CopiedExit, routed: RoutedPass, active: np.ndarray, exit: int) -> None:
        own(self, routed, active, exit)
        left.extend((int(routed.rows.slots[row]), exit) for row in active.tolist())

    with pytest.MonkeyPatch.context() as patch, routed_model() as llm:
        patch.setattr(CopiedExit, "leave", recording)
        for prompt in ("abcabc", "the cat sat", "q"):
            request = llm.request(prompt, decoder="dynamax", max_tokens=60, ignore_eos=True)
            llm.start(request, background=False)
        llm.driver.advance(lambda: len(left) > 40)
        cache = llm.engine.runners["target"].pool.cache
        for slot, exit in left:
            for layer in range(exit, 16):
                assert np.array_equal(cache.keys[layer][slot], cache.keys[exit - 1][slot])
                assert np.array_equal(cache.values[layer][slot], cache.values[exit - 1][slot])


@pytest.mark.parametrize("open_llm", [routed_model, routed_mamba], ids=["llama", "mamba"])
def test_routers_that_never_fire_give_the_text_of_plain_decoding(open_llm: Any) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    with open_llm() as llm:
        plain = llm.generate("abc", decoder="autoregressive", **options)
        assert llm.generate("abc", decoder="dynamax:threshold=1", **options).tokens == plain.tokens
        if open_llm is routed_mamba:
            never = llm.generate("abc", decoder="dynamax:threshold=1,state=keep", **options)
            assert never.tokens == plain.tokens
        assert llm.generate("abc", decoder="dynamax", **options).tokens != plain.tokens


def test_bad_routers_and_models_are_refused_in_one_line() -> None:
    with LLM(ScriptedModel(), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(AnydecodeError, match="dynamax needs exit routers"):
            llm.generate("a", decoder="dynamax")
        with pytest.raises(AnydecodeError, match="state is 'lost'; choose from update, keep"):
            llm.generate("a", decoder="dynamax:state=lost")
    with routed_model() as llm, pytest.raises(AnydecodeError, match="layers are all recurrent"):
        llm.generate("a", decoder="dynamax:state=keep")
    model = tiny_model(layers=16)
    add_routers(model, [2, 4])
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(AnydecodeError, match="upper half"):
            llm.generate("a", decoder="dynamax")
