"""Recurrent layers give the same bits however a text is divided into passes, whichever states are
kept, and along the paths of a tree as along chains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.build import local_variants
from anydecode.kernels.host import to_host
from anydecode.kernels.interface import OutputSpec
from anydecode.kernels.library import Library, load_library
from anydecode.kernels.library_cache import built_library
from anydecode.kernels.native import NativeExecutor
from anydecode.kernels.recurrent import PassStates, StatePool
from anydecode.models.network import Network
from anydecode.models.opening import choose_executor
from anydecode.models.transformer import Transformer
from rwkv_models import rwkv_checkpoint
from tiny_models import built, chain, hf_model, logits, make_rows, own_model, whole

# Of the slow backend, which shares the code that keeps states, a model of each kind of recurrence.
FAST = ("lfm2", "mamba2", "qwen3.5")
BACKENDS = ["torch", *(["native"] if load_library() is not None else [])]
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "qwen3.5": (
        "Qwen3_5",
        {
            "full_attention_interval": 3,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 8,
        },
    ),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 12, "state_size": 16, "n_groups": 2}),
    "mamba": ("Mamba", {"intermediate_size": 75}),
    "falcon mamba": ("FalconMamba", {"intermediate_size": 128, "state_size": 12}),
    "falcon h1": ("FalconH1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16}),
    "granite": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 72,
        },
    ),
    "rwkv7": ("", {}),
    "recurrent gemma": (
        "RecurrentGemma",
        {"num_hidden_layers": 4, "attention_window_size": 9, "lru_width": 36},
    ),
}
TOKENS = [int(token) for token in np.random.default_rng(5).integers(3, 130, 40)]


@pytest.fixture(
    params=[
        pytest.param(
            (name, backend),
            id=f"{name} {backend}",
            marks=[pytest.mark.slow] if backend == "torch" and name not in FAST else [],
        )
        for name in MODELS
        for backend in BACKENDS
    ],
    scope="module",
)
def model(request: Any) -> Transformer:
    name, backend = request.param
    if backend == "torch":
        pytest.importorskip("torch")
    return random_model(name, choose_executor(backend, threads=2))


def random_model(name: str, executor: Any) -> Transformer:
    family, settings = MODELS[name]
    if name == "rwkv7":
        return built(rwkv_checkpoint(), executor=executor)
    return own_model(hf_model(family, **settings), executor=executor)


def new_cache(model: Transformer, max_states: int | None = None, interval: int = 8) -> Any:
    """A cache for 128 positions, with few states if `max_states` says so."""
    cache = model.new_cache(128)
    if cache.states is not None:
        cache.states = StatePool(model.spec.recurrences, max_states, interval)
    return cache


def in_parts(model: Transformer, cache: Any, sizes: list[int], slots: Any = None) -> np.ndarray:
    """Logits of every token, computed in passes of `sizes` rows."""
    slots = np.arange(128)[::-1].copy() if slots is None else slots
    found, first = [], 0
    for size in sizes:
        rows = chain(TOKENS[first : first + size], first, slots[: first + size])
        found.append(logits(model, whole(rows, model), cache).copy())
        first += size
    return np.concatenate(found)


SIZES = {"decode": [1] * 40, "mixed": [7, 1, 1, 20, 11], "two": [33, 7]}


def with_models(*values: Any, fast: Any) -> Any:
    """All pairs of a model and one of `values`. Those of the slow backend are slow tests but for
    the models `FAST` with the values `fast`."""
    pairs = [
        pytest.param(
            (name, backend),
            value,
            id=f"{name} {backend}-{value}",
            marks=[]
            if backend == "native" or (name in FAST and value in fast)
            else [pytest.mark.slow],
        )
        for name in MODELS
        for backend in BACKENDS
        for value in values
    ]
    return pytest.mark.parametrize(("model", "value"), pairs, indirect=["model"])


@pytest.mark.one_in(4)
@with_models(
    *((sizes, max_states) for sizes in SIZES for max_states in (None, 1, 3)),
    fast=[("decode", 1), ("mixed", 3), ("two", None)],
)
def test_chunks_and_kept_states_leave_the_bits_alone(
    model: Transformer, value: tuple[str, int | None]
) -> None:
    sizes, max_states = value
    whole_text = in_parts(model, new_cache(model), [40])
    found = in_parts(model, new_cache(model, max_states), SIZES[sizes])
    assert np.array_equal(found, whole_text)


def test_a_shared_prefix_continues_with_the_same_bits(model: Transformer) -> None:
    cache = new_cache(model)
    expected = in_parts(model, cache, [40])
    slots = np.concatenate([np.arange(128)[::-1][:13], np.arange(40)])
    rows = chain(TOKENS[13:40], 13, slots[:40])
    assert np.array_equal(logits(model, whole(rows, model), cache), expected[13:])


def test_a_slot_that_was_freed_has_no_state(model: Transformer) -> None:
    cache = new_cache(model)
    in_parts(model, cache, [40])
    expected = in_parts(model, new_cache(model), [10, 30])
    if cache.states is not None:
        cache.states.forget(np.arange(128))
        assert cache.states.num_states == 0
    # The same slots, for another order of positions.
    slots = np.random.default_rng(0).permutation(128)
    assert np.array_equal(in_parts(model, cache, [10, 30], slots), expected)


TREES = {
    "narrow": [-1, -1, 0, 0, 1, 2, 4, 6],
    "wide": [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 8, 6, 4, 4],
}


@pytest.mark.one_in(4)
@with_models(*TREES, fast=["narrow"])
def test_nodes_of_a_tree_have_the_bits_of_their_paths(model: Transformer, value: str) -> None:
    parents = TREES[value]
    count = len(parents)
    tokens = [9, 12, *range(40, 38 + count)]
    cache, base = new_cache(model), 11
    in_parts(model, cache, [base])
    slots = np.arange(128)[::-1].copy()
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    trunk = base + 2
    rows = make_rows(
        [*TOKENS[base:trunk], *tokens],
        [base, base + 1, *(trunk + len(path) - 1 for path in paths)],
        [*slots[base:trunk], *range(count)],
        [slots[:trunk]],
        [0] * (count + 2),
        [base + 1, *[trunk] * (count + 1)],
        [[], [], *paths],
    )
    found = logits(model, whole(rows, model), cache)
    for node, path in enumerate(paths):
        text = TOKENS[:trunk] + [tokens[member] for member in path]
        alone = logits(model, whole(chain(text), model), new_cache(model))
        assert np.array_equal(found[2 + node], alone[-1])
    # The nodes of an accepted path are positions from now on.
    path = paths[6]
    table = np.concatenate([slots[:trunk], path]).astype(np.int32)
    rows = chain([77], len(table), np.append(table, 20))
    text = TOKENS[:trunk] + [tokens[member] for member in path] + [77]
    alone = logits(model, whole(chain(text), model), new_cache(model))
    assert np.array_equal(logits(model, whole(rows, model), cache)[0], alone[-1])


@with_models(None, 1, 2, fast=[None, 2])
def test_rows_that_go_on_from_an_early_layer_have_the_same_bits(
    model: Transformer, value: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows exit after one layer and go on beside a further row, again and again."""
    expected = in_parts(model, new_cache(model), [40])
    cache, lengths = new_cache(model, value, interval=64), []
    in_parts(model, cache, [7])
    slots, scan = np.arange(128)[::-1].copy(), PassStates.scan

    def measured(states: PassStates, active: Any) -> Any:
        lengths.append(len(scan(states, active).slots))
        return scan(states, active)

    monkeypatch.setattr(PassStates, "scan", measured)
    for first in range(7, 37, 3):
        hidden = []
        for position in (first, first + 1):
            rows = whole(chain([TOKENS[position]], position, slots[: position + 1]), model)
            rows.stop[:] = 1
            spec = OutputSpec(np.empty(0, np.int32), {1: np.zeros(1, np.int32)})
            hidden.append(to_host(model.run(rows, cache, spec).hidden[1])[0].copy())
        rows = whole(chain([-1, -1, TOKENS[first + 2]], first, slots[: first + 3]), model)
        rows.start[:2] = 1
        rows.inputs = np.stack([*hidden, np.zeros_like(hidden[0])])
        spec = OutputSpec(np.arange(3, dtype=np.int32))
        found = to_host(model.run(rows, cache, spec).logits)
        assert np.array_equal(found, expected[first : first + 3])
    if cache.states is not None and value is None:
        assert max(lengths) <= 2 * (cache.states.lead + 3), "states of early exits are not kept"


def test_a_batch_has_the_bits_of_single_sequences(model: Transformer) -> None:
    cache = new_cache(model, max_states=2)
    first, second = TOKENS[:9], TOKENS[20:33]
    tables = [np.arange(9), np.arange(50, 63)]
    rows = make_rows(
        first + second,
        [*range(9), *range(13)],
        [*tables[0], *tables[1]],
        tables,
        [0] * 9 + [1] * 13,
        [*range(1, 10), *range(1, 14)],
    )
    found = logits(model, whole(rows, model), cache)
    for tokens, part in ((first, found[:9]), (second, found[9:])):
        alone = logits(model, whole(chain(tokens), model), new_cache(model))
        assert np.array_equal(part, alone)


def test_rows_that_do_not_see_every_position_are_refused(model: Transformer) -> None:
    table = np.array([0, -1, 2], np.int32)
    evicted = make_rows([5], [2], [2], [table], [0], [3])
    ahead = make_rows([5, 6], [0, 1], [0, 1], [np.array([0, 1])], [0, 0], [2, 2])
    unstored = make_rows([5], [0], [-1], [np.array([0])], [0], [1])
    refused = [evicted, unstored]
    if new_cache(model).states is not None:  # convolutions do not read later positions
        refused.append(ahead)
    for rows in refused:
        with pytest.raises(UnsupportedCombinationError, match="every earlier position"):
            logits(model, whole(rows, model), new_cache(model))


@pytest.mark.parametrize(
    "name", ["lfm2", "mamba2", "falcon mamba", "qwen3.5", "rwkv7", "recurrent gemma"]
)
def test_every_variant_of_the_native_kernels_has_the_same_bits(name: str) -> None:
    path = built_library()
    if path is None:
        pytest.skip("the native kernels are not available here")
    found = {}
    try:
        for variant in (*local_variants(), "scalar"):
            try:
                library = Library(path, variant)
            except InvalidRequestError:  # not on this machine
                continue

            def execute(network: Network, library: Library = library) -> NativeExecutor:
                return NativeExecutor(
                    network.weights.embedding,
                    network.spec.vocab_size,
                    network.spec.num_layers,
                    network.layer,
                    network.head,
                    threads=2,
                    library=library,
                )

            model = random_model(name, execute)
            found[variant] = in_parts(model, new_cache(model), [33, 7])
    finally:
        Library(path)  # the variant is that of the process
    assert all(np.array_equal(rows, found["scalar"]) for rows in found.values())
