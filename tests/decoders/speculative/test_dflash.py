"""DFlash, DSpark, P-EAGLE and PARD: the certificate, mistakes that it rejects, and exactness in
company, with a small cache, in chunks, from cached prefixes and under constraints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapter_files import save_adapter
from anydecode import JsonSchema, Regex
from anydecode.certification.oracles.speculative import dflash as oracle
from anydecode.certification.tiny import eagle_checkpoint, with_drafter
from anydecode.certification.tiny_blocks import (
    as_speculators,
    dflash_checkpoint,
    dspark_checkpoint,
    pard_checkpoint,
    peagle_checkpoint,
)
from anydecode.decoders.speculative import draft_blocks
from anydecode.decoders.speculative.draft_blocks import BlockSpan, BlockTree
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.program import NativeBackend
from anydecode.models import block_drafters
from anydecode.models.block_heads import SlotHeads, SlotStep
from anydecode.models.network import BlockConvolution, Network
from anydecode.models.states import StateWeights
from anydecode.models.transformer import Transformer
from anydecode.scoring.draft_states import DraftStates
from anydecode.scoring.sequence import Sequence
from certificates import assert_certified, assert_rejected, replace_defaults
from drafted_texts import (
    LONG,
    assert_constrained_text_of_plain_decoding,
    assert_text_of_plain_decoding,
    generate,
    num_accepted,
    only_drafter,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 8},
        "b": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 4},
    },
    "required": ["a", "b"],
}
Checkpoint = Callable[..., Any]
Patch = pytest.MonkeyPatch


def speculators_dspark(target: Network) -> Any:
    """A drafter whose head has a part of the tokens."""
    return as_speculators(dspark_checkpoint(target), target)


windowed = partial(dflash_checkpoint, window=4)
DRAFTERS: dict[str, Checkpoint] = {
    "windowed": windowed,
    "dspark": dspark_checkpoint,
    "p-eagle": peagle_checkpoint,
    "pard": pard_checkpoint,
}


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("dflash")


@pytest.mark.parametrize("defaults", [{"size": 6}, {"tree": True}, {"threshold": 0.05}], ids=str)
def test_certificate_rejects_other_defaults(monkeypatch: Patch, defaults: dict[str, Any]) -> None:
    only_drafter(monkeypatch, oracle, "DFlash")
    replace_defaults(monkeypatch, "dflash", **defaults)
    assert_rejected("dflash")


def test_certificate_rejects_a_causal_block(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "DFlash")
    original = BlockSpan.__init__

    def causal(self: BlockSpan, *given: Any, **named: Any) -> None:
        original(self, *given, **{**named, "causal_layers": (0, 1)})

    monkeypatch.setattr(BlockSpan, "__init__", causal)
    assert_rejected("dflash")


@pytest.mark.parametrize("name", ["DFlash, a window", "DFlash, causal"])
def test_certificate_rejects_a_block_that_is_not_causal(monkeypatch: Patch, name: str) -> None:
    only_drafter(monkeypatch, oracle, name)
    monkeypatch.setattr(BlockSpan, "write_rows", draft_blocks.CanvasSpan.write_rows)
    assert_rejected("dflash")


@pytest.mark.parametrize("name", ["DFlash", "DFlash of speculators"])
def test_certificate_rejects_taps_of_the_layers_before(monkeypatch: Patch, name: str) -> None:
    only_drafter(monkeypatch, oracle, name)
    taps = block_drafters._BlockDrafter._taps

    def shifted(self: Any) -> tuple[int, ...]:
        return tuple(max(0, tap - 1) for tap in taps(self))

    monkeypatch.setattr(block_drafters._BlockDrafter, "_taps", shifted)
    assert_rejected("dflash")


def test_certificate_rejects_states_of_the_position_before(monkeypatch: Patch) -> None:
    """As EAGLE reads them."""
    only_drafter(monkeypatch, oracle, "DFlash")
    project = DraftStates._project

    def shifted(self: DraftStates, taps: np.ndarray) -> np.ndarray:
        return project(self, np.concatenate([taps[:1], taps[:-1]]))

    monkeypatch.setattr(DraftStates, "_project", shifted)
    assert_rejected("dflash")


def test_certificate_rejects_a_context_without_its_norm(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "DFlash")
    project = StateWeights.project

    def plain(self: StateWeights, *given: Any) -> np.ndarray:
        norm, self.state_norm = self.state_norm, None
        states = project(self, *given)
        self.state_norm = norm
        return states

    monkeypatch.setattr(StateWeights, "project", plain)
    assert_rejected("dflash")


def test_certificate_rejects_a_context_that_is_normed_in_each_layer(monkeypatch: Patch) -> None:
    """As the layers' other inputs are."""
    only_drafter(monkeypatch, oracle, "DFlash")
    store = Network.storing_layer

    def normed(self: Network, backend: Any, x: Any, index: int) -> Any:
        norm = self.weights.layers[index].attention_norm
        store(self, backend, backend.rms_norm(x, norm, self.spec.norm_eps), index)
        return x

    monkeypatch.setattr(Network, "storing_layer", normed)
    assert_rejected("dflash")


def test_certificate_rejects_a_context_that_goes_through_the_layers(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "DFlash")
    monkeypatch.setattr(Network, "storing_layer", Network.layer)
    assert_rejected("dflash")


def test_certificate_rejects_context_keys_without_rotation(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "DFlash")

    def unrotated(self: Network, backend: Any, x: Any, index: int) -> Any:
        spec, weights = self.spec.layers[index], self.weights.layers[index]
        shape = spec.attention
        assert shape is not None and weights.key is not None and weights.value is not None
        k = weights.key.apply(backend, x)
        k = backend.rms_norm(k, weights.key_norm, self.spec.norm_eps, shape.num_kv_heads)
        backend.store(k, weights.value.apply(backend, x), index, shape)
        return x

    monkeypatch.setattr(Network, "storing_layer", unrotated)
    assert_rejected("dflash")


def test_certificate_rejects_a_context_of_the_new_tokens_only(monkeypatch: Patch) -> None:
    """What earlier rounds have stored is part of the context."""
    only_drafter(monkeypatch, oracle, "DSpark")
    store = Sequence.store_context

    def fresh(self: Sequence, runner: str) -> Any:
        kv_cache = self.kv_cache(runner)
        kv_cache.evict(range(kv_cache.length))
        return store(self, runner)

    monkeypatch.setattr(Sequence, "store_context", fresh)
    assert_rejected("dflash")


def test_certificate_rejects_a_block_that_starts_with_a_mask(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "DFlash")
    original = BlockSpan.__init__

    def masked(
        self: BlockSpan, kv_cache: Any, tokens: list[int], *given: Any, **named: Any
    ) -> None:
        original(self, kv_cache, [tokens[-1]] * len(tokens), *given, **named)

    monkeypatch.setattr(BlockSpan, "__init__", masked)
    assert_rejected("dflash")


@pytest.mark.parametrize("name", ["DSpark, recurrent", "Domino"])
def test_certificate_rejects_a_recurrence_that_forgets(monkeypatch: Patch, name: str) -> None:
    only_drafter(monkeypatch, oracle, name)
    step = SlotHeads.step

    def forgetful(self: SlotHeads, token: int, hidden: Any, state: Any, *given: Any) -> SlotStep:
        return step(self, token, hidden, None, *given)

    monkeypatch.setattr(SlotHeads, "step", forgetful)
    assert_rejected("dflash")


@pytest.mark.parametrize("name", ["DSpark", "DFlash2"])
def test_certificate_rejects_a_bias_of_the_texts_last_token(monkeypatch: Patch, name: str) -> None:
    """The bias depends on the token before the slot, which is drafted."""
    only_drafter(monkeypatch, oracle, name)
    step = SlotHeads.step
    monkeypatch.setattr(SlotHeads, "step", lambda self, token, *given: step(self, 97, *given))
    assert_rejected("dflash")


def test_certificate_rejects_sublayers_whose_outputs_are_not_convolved(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "DFlash2")
    monkeypatch.setattr(BlockConvolution, "of_outputs", lambda self, backend, y, kernels: y)
    assert_rejected("dflash")


def test_certificate_rejects_a_convolution_over_blocks_that_begin_with_a_mask(
    monkeypatch: Patch,
) -> None:
    """Then every row is the first one of its block."""
    only_drafter(monkeypatch, oracle, "DFlash2")
    own = NativeBackend.block_convolution
    monkeypatch.setattr(
        NativeBackend, "block_convolution", lambda self, *given: own(self, *given[:3], -5)
    )
    assert_rejected("dflash")


def test_certificate_rejects_a_correction_of_tokens_that_have_none(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "Domino, shifted")
    step = SlotHeads.step

    def corrected(self: SlotHeads, *given: Any) -> SlotStep:
        *first, slot, logits = given
        return step(self, *first, slot + 1, logits)

    monkeypatch.setattr(SlotHeads, "step", corrected)
    assert_rejected("dflash")


def test_certificate_rejects_drafts_without_confidence(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "DSpark")
    monkeypatch.setattr(SlotHeads, "_confidence", lambda self, previous, hidden: 1.0)
    assert_rejected("dflash")


def test_certificate_rejects_a_best_first_tree_without_siblings(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "DFlash")
    key = "dflash:size=9,tree=true,threshold=0"
    checks = oracle._compare("DFlash", key, 9, None, 0.0)
    assert all(check.passed for check in checks)
    original = BlockTree.__init__

    def chained(
        self: BlockTree, sequence: Any, scores: Any, is_chain: bool, low: float, has_noise: bool
    ) -> None:
        original(self, sequence, scores, True, low, has_noise)

    monkeypatch.setattr(BlockTree, "__init__", chained)
    assert not all(check.passed for check in oracle._compare("DFlash", key, 9, None, 0.0))


@pytest.mark.parametrize("name", ["P-EAGLE", "PARD"])
def test_certificate_rejects_mask_tokens_at_one_position(monkeypatch: Patch, name: str) -> None:
    only_drafter(monkeypatch, oracle, name)
    span = draft_blocks.causal_span

    def together(kv_cache: Any, positions: np.ndarray, tokens: np.ndarray) -> Any:
        return span(kv_cache, np.full_like(positions, positions[0]), tokens)

    monkeypatch.setattr(draft_blocks, "causal_span", together)
    assert_rejected("dflash")


def test_certificate_rejects_the_texts_last_token_as_mask(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "PARD")
    span = draft_blocks.causal_span

    def repeated(kv_cache: Any, positions: np.ndarray, tokens: np.ndarray) -> Any:
        return span(kv_cache, positions, np.full_like(tokens, 97))

    monkeypatch.setattr(draft_blocks, "causal_span", repeated)
    assert_rejected("dflash")


def test_certificate_rejects_mask_tokens_without_their_state(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "P-EAGLE")
    monkeypatch.setattr(
        Transformer,
        "mask_states",
        lambda self, count: np.zeros((count, self.spec.hidden_size), np.float32),
    )
    assert_rejected("dflash")


#: The options of the engine, the temperature, and the drafter of the fast test.
CONDITIONS: dict[str, tuple[dict[str, Any], float, str]] = {
    "preempted": ({"cache_positions": 420}, 0.8, "windowed"),
    "chunked": ({"row_budget": 16}, 0.0, "dspark"),
    "torch": ({"row_budget": 64, "backend": "torch"}, 0.8, "windowed"),
    "uncached": ({"prefix_cache": False}, 0.8, "p-eagle"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("drafter", "options", "temperature"),
    [
        pytest.param(
            drafter,
            options,
            temperature,
            id=f"{name}-{condition}",
            marks=[] if name == fast or condition == "preempted" else [pytest.mark.slow],
        )
        for name, drafter in DRAFTERS.items()
        for condition, (options, temperature, fast) in CONDITIONS.items()
    ],
)
def test_the_text_is_that_of_plain_decoding(
    drafter: Checkpoint, options: dict[str, Any], temperature: float
) -> None:
    request: dict[str, Any] = {"temperature": temperature}
    if "backend" in options:
        request["max_tokens"] = 12
    accepted = assert_text_of_plain_decoding(
        drafter, ("dflash", "dflash:tree=true"), options, **request
    )
    assert min(accepted) > 3


@pytest.mark.parametrize("backend", ["torch", None])
def test_the_backends_draft_the_same(backend: str | None) -> None:
    if backend is not None:
        pytest.importorskip("torch")
    _assert_equals_oracle("DFlash, a window", backend=backend)


def _assert_equals_oracle(name: str, **options: Any) -> None:
    """Asserts that a drafter drafts what the oracle does, with these options of the engine."""
    with with_drafter(oracle.DRAFTERS[name], cache_positions=1024, **options) as llm:
        network = llm.model.network  # type: ignore[attr-defined]
        drafting = oracle.make_drafting(name, network)
        _, *trace = oracle.rounds(llm, "dflash", oracle.PROMPTS[0], 12)
    for one in trace:
        assert set(one.paths) == oracle.drafted(drafting, one.text, 0.0, 7, 1, 0.1)


def test_drafts_of_a_context_in_chunks_are_those_of_a_whole_one() -> None:
    _assert_equals_oracle("DSpark", row_budget=16)


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=list(DRAFTERS))
def test_cached_prefixes_leave_the_drafts_as_they_are(drafter: Checkpoint) -> None:
    """The drafter's context of a prefix is found with the target's cache."""
    prompt = LONG + "one"
    with with_drafter(drafter, cache_positions=2048) as llm:
        first, second = (generate(llm, prompt, "dflash") for _ in range(2))
        assert llm.engine.runners["draft"].prefixes.num_hits
        assert second.stats.num_cached_tokens > len(prompt) // 2
    drafts = [[event["drafted"] for event in one.trace[1:]] for one in (first, second)]
    assert drafts[1] == drafts[0] and any(drafts[0])


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=list(DRAFTERS))
def test_a_prefix_that_only_the_target_knows_is_left_out(drafter: Checkpoint) -> None:
    with with_drafter(drafter, cache_positions=2048) as llm:
        plain = generate(llm, LONG, "autoregressive")
        drafted = generate(llm, LONG, "dflash")
        assert drafted.stats.num_cached_tokens > len(LONG) // 2
        assert not llm.engine.runners["draft"].prefixes.num_hits
        llm.engine.check_integrity()
    assert drafted.tokens == plain.tokens
    assert num_accepted([drafted]) > 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("decoder", ["dflash", "dflash:tree=true"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "drafter", [dflash_checkpoint, speculators_dspark], ids=["dflash", "dspark"]
)
def test_constraints_hold_and_the_text_is_exact(
    drafter: Checkpoint, temperature: float, decoder: str
) -> None:
    constraints = (JsonSchema(SCHEMA), Regex("[0-9]{3,9}\\n?x"))
    assert_constrained_text_of_plain_decoding(
        drafter, decoder, constraints, temperature=temperature, seed=4
    )


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.3}, {"top_p": 0.8, "min_p": 0.05}])
def test_samplers_keep_the_text(options: dict[str, Any]) -> None:
    with with_drafter(dspark_checkpoint, cache_positions=1024) as llm:
        plain, drafted = (
            generate(llm, "zq", key, temperature=0.8, **options)
            for key in ("autoregressive", "dflash:tree=true")
        )
    assert drafted.tokens == plain.tokens
    assert num_accepted([drafted]) > 3


@pytest.mark.parametrize(
    ("drafter", "decoder"), [(dspark_checkpoint, "dflash"), (eagle_checkpoint, "eagle")]
)
def test_drafters_serve_a_target_with_an_adapter(
    drafter: Checkpoint, decoder: str, tmp_path: Path
) -> None:
    """They have no adapter themselves, and read the states of the adapted target."""
    options = {"temperature": 0.8, "adapter": "a"}
    with with_drafter(drafter, cache_positions=1024) as llm:
        llm.add_adapter("a", save_adapter(tmp_path / "a", 1))
        plain, drafted = (
            generate(llm, "zq", key, **options) for key in ("autoregressive", decoder)
        )
        other = generate(llm, "zq", "autoregressive", temperature=0.8)
    assert drafted.tokens == plain.tokens != other.tokens
    assert any(event["drafted"] for event in drafted.trace)


@pytest.mark.parametrize("size", [0, 1, 20])
def test_blocks_have_at_most_the_drafters_slots(size: int) -> None:
    """Its first row predicts nothing (DFlash)."""
    with with_drafter(dflash_checkpoint, cache_positions=512) as llm:
        if not size:
            with pytest.raises(InvalidRequestError, match="allowed are 1 to 1024"):
                llm.generate("x", decoder="dflash:size=0")
            return
        drafted = generate(llm, "x", f"dflash:size={size},threshold=0", max_tokens=8)
    lengths = {len(event["drafted"]) for event in drafted.trace[1:]}
    assert lengths == {min(size, 7)}


def test_a_full_cache_ends_no_answer() -> None:
    """The block needs slots behind the text."""
    with with_drafter(dspark_checkpoint, cache_positions=64) as llm:
        plain = generate(llm, "x" * 20, "autoregressive", max_tokens=99)
        drafted = generate(llm, "x" * 20, "dflash", max_tokens=99)
    assert drafted.tokens == plain.tokens and drafted.finish_reason == plain.finish_reason


@pytest.mark.parametrize("decoder", ["speculative-sampling", "opt-tree", "auto"])
def test_a_parallel_draft_model_also_drafts_token_by_token(decoder: str) -> None:
    """It is a whole language model."""
    with with_drafter(pard_checkpoint, cache_positions=512) as llm:
        plain, drafted = (generate(llm, "zq", key) for key in ("autoregressive", decoder))
    assert drafted.tokens == plain.tokens
    assert any(event["drafted"] for event in drafted.trace)


@pytest.mark.parametrize(("kind", "most"), [("pard", 12), ("pard2", 15)])
def test_parallel_draft_models_draft_as_many_tokens_as_published(kind: str, most: int) -> None:
    with with_drafter(partial(pard_checkpoint, kind=kind), cache_positions=512) as llm:
        drafted = generate(llm, "x", "dflash:size=20,threshold=0", max_tokens=8)
    assert {len(event["drafted"]) for event in drafted.trace} == {most}


@pytest.mark.parametrize("decoder", ["eagle", "speculative-sampling", "pearl", "opt-tree"])
def test_methods_that_draft_token_by_token_refuse(decoder: str) -> None:
    with (
        with_drafter(dflash_checkpoint, cache_positions=256) as llm,
        pytest.raises(UnsupportedCombinationError, match="use decoder 'dflash'") as refused,
    ):
        llm.generate("x", decoder=decoder, max_tokens=4)
    assert "\n" not in str(refused.value)


def test_other_drafters_are_refused() -> None:
    with (
        with_drafter(eagle_checkpoint, cache_positions=256) as llm,
        pytest.raises(UnsupportedCombinationError, match="drafts blocks") as refused,
    ):
        llm.generate("x", decoder="dflash", max_tokens=4)
    assert "\n" not in str(refused.value)


def test_an_invalid_threshold_is_refused() -> None:
    with (
        with_drafter(dflash_checkpoint, cache_positions=256) as llm,
        pytest.raises(InvalidRequestError, match="threshold is 2"),
    ):
        llm.generate("x", decoder="dflash:threshold=2", max_tokens=4)


@pytest.mark.parametrize("rule", ["token-exact", "rejection"])
def test_drafts_of_the_rejection_rule_depend_on_the_text_alone(rule: str) -> None:
    """The rule for chosen drafts is exact for any drafts that no sample's noise has chosen."""
    drafts: dict[int, set[tuple[int, ...]]] = {}  # by the first token, with which the text differs
    with with_drafter(dflash_checkpoint, cache_positions=2048) as llm:
        for seed in range(24):
            key = f"dflash:threshold=0,acceptance={rule}"
            found = generate(llm, "zq", key, temperature=0.3, seed=seed, max_tokens=4)
            assert len(found.tokens) == 4
            second = found.trace[1]
            drafts.setdefault(found.tokens[0], set()).add(tuple(second["drafted"]))
    assert () not in set.union(*drafts.values())
    assert all(len(one) == 1 for one in drafts.values()) == (rule == "rejection")
