"""step-3: its certificate, mistakes that the certificate rejects, and what cannot be split."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapter_files import save_adapter
from anydecode.api.llm import LLM
from anydecode.certification.oracles.control import step_3 as oracle
from anydecode.certification.tiny import tiny_model
from anydecode.cluster import afd
from anydecode.cluster import ffn as ffn_module
from anydecode.cluster.afd import Instance
from anydecode.cluster.control.step_3 import FfnSplit
from anydecode.cluster.ffn import AttentionExecutor, FfnClient, FfnServer, LocalFfn
from anydecode.errors import AnydecodeError, FleetError, UnsupportedCombinationError
from anydecode.kernels.interface import OutputSpec, Rows
from anydecode.kernels.library import load_library
from anydecode.models import ffn_split
from anydecode.models.families import build, load_network
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import ByteTokenizer
from certificates import assert_certified, assert_rejected, replace_class_default
from rwkv_models import rwkv_checkpoint
from server_client import Client, served

MODEL = "tiny-autoregressive"


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("step-3")


_COMPUTE = FfnServer.compute
_START = FfnServer.__init__
_RECEIVE = FfnClient.receive
_CONNECT = FfnClient.connect
_RUN = AttentionExecutor._run
_RUN_LAYERS = AttentionExecutor._run_layers
_READ = build.read_low_rank_query
_SMALLEST = afd._smallest


def _other_layer(self: FfnServer, x: np.ndarray, layer: int) -> np.ndarray:
    return _COMPUTE(self, x, max(0, layer - 1))


def _one_by_one(self: Any, x: np.ndarray, groups: list[np.ndarray], first: int, last: int) -> None:
    for layer in range(first, last):
        for group in groups:
            states = self._inner.layers(x[group], group, layer, layer + 1)
            self._ffn.send(layer, states)
            x[group] = self._ffn.receive(layer, len(group))


def _computed_twice(self: FfnServer, x: np.ndarray, layer: int) -> np.ndarray:
    self.compute(x[:1], layer) if len(x) > 1 else None
    return _COMPUTE(self, x, layer)


def _anywhere(rows: Rows, active: np.ndarray, count: int, num_slots: int) -> list[np.ndarray]:
    return [part for part in np.array_split(active, count) if len(part)]


def _whole(rows: Rows, active: np.ndarray, count: int, num_slots: int) -> list[np.ndarray]:
    return [active]


def _first_rows_alone(
    rows: Rows, active: np.ndarray, count: int, num_slots: int
) -> list[np.ndarray]:
    parts = ffn_split.micro_batches(rows, active, len(active), num_slots)
    last = parts[count - 1 :]
    return parts[: count - 1] + ([np.concatenate(last)] if last else [])


def _a_layer_late(self: Any, rows: Rows, cache: Any, output_spec: OutputSpec) -> Any:
    later = {
        depth: depth + 1 if (rows.stop[index] > depth).all() else depth
        for depth, index in output_spec.hidden.items()
    }
    hidden = {later[depth]: index for depth, index in output_spec.hidden.items()}
    output = _RUN(self, rows, cache, replace(output_spec, hidden=hidden))
    return replace(output, hidden={depth: output.hidden[later[depth]] for depth in later})


def _last_first(self: Any, x: np.ndarray, groups: list[np.ndarray], first: int, last: int) -> None:
    _RUN_LAYERS(self, x, groups, first, last)
    if len({len(group) for group in groups}) == 1:
        x[np.concatenate(groups)] = x[np.concatenate(groups[::-1])]


def _that_of_the_ffns(self: FfnClient) -> str:
    _CONNECT(self)
    return "float32"


def _accepts_all(self: FfnServer, *arguments: Any) -> None:
    _START(self, *arguments)
    self._facts = {}


def _rounded(self: FfnClient, layer: int, count: int) -> np.ndarray:
    return _RECEIVE(self, layer, count).astype(np.float16).astype(np.float32)


def _without_norm(*arguments: Any) -> None:
    _READ(*arguments)
    arguments[3].query_down_norm = np.ones_like(arguments[3].query_down_norm)


def _one_after_the_other(self: Instance, flops: float, num_bytes: float) -> float:
    return flops / self.flops + num_bytes / self.bandwidth


def _costs_with_16_bits(network: Any, name: str, context: float, size: float) -> Any:
    return afd.split_costs(network, name, context, 2)


def _costs_without_windows(network: Any, name: str, context: float, size: float) -> Any:
    shapes = [replace(layer.attention, window=None) for layer in network.spec.layers]
    layers = [
        replace(layer, attention=shape)
        for layer, shape in zip(network.spec.layers, shapes, strict=True)
    ]
    network.spec = replace(network.spec, layers=tuple(layers))
    return afd.split_costs(network, name, context, size)


def _costs_of_half_the_context(network: Any, name: str, context: float, size: float) -> Any:
    return afd.split_costs(network, name, context / 2, size)


def _one_more(fits: Callable[[int], bool]) -> int | None:
    count = _SMALLEST(fits)
    return None if count is None else count + 1


def _stays(self: LocalFfn) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "name", "mistake"),
    [
        (FfnServer, "compute", _other_layer),
        (FfnServer, "compute", _computed_twice),
        (AttentionExecutor, "_run_layers", _one_by_one),
        (ffn_module, "micro_batches", _whole),
        (oracle, "micro_batches", _anywhere),
        (oracle, "micro_batches", _whole),
        (oracle, "micro_batches", _first_rows_alone),
        (AttentionExecutor, "_run", _a_layer_late),
        (AttentionExecutor, "_run_layers", _last_first),
        (FfnClient, "connect", _that_of_the_ffns),
        (FfnServer, "__init__", _accepts_all),
        (FfnClient, "receive", _rounded),
        (build, "read_low_rank_query", _without_norm),
        (Instance, "seconds", _one_after_the_other),
        (oracle, "split_costs", _costs_of_half_the_context),
        (oracle, "split_costs", _costs_with_16_bits),
        (oracle, "split_costs", _costs_without_windows),
        (afd, "_smallest", _one_more),
    ],
    ids=[
        "the FFN of the layer before",
        "rows that are computed twice",
        "micro-batches one by one",
        "one micro-batch",
        "cuts through rows that see each other",
        "passes that are never cut",
        "micro-batches of one row beside one of the rest",
        "hidden states of the layer behind",
        "micro-batches that come back in reverse order",
        "the cache of the attention's own weights",
        "an FFN process that accepts every model",
        "hidden states in half precision",
        "queries without the weights of their norm",
        "times that do not overlap",
        "costs at half of the context",
        "costs of a cache in 16 bits",
        "costs without windows",
        "one instance too many",
    ],
)
def test_mistakes_are_rejected(
    place: Any, name: str, mistake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, mistake)
    assert_rejected("step-3")


@pytest.mark.slow
def test_another_number_of_micro_batches_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_class_default(monkeypatch, FfnSplit, "micro_batches", 2)
    assert_rejected("step-3")


@pytest.mark.slow
def test_a_process_that_stays_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalFfn, "close", _stays)
    assert_rejected("step-3")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-diffusion", "tiny-blocks"])
def test_rows_that_see_each_other_give_the_text_of_one_process(model: str) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "seed": 3}
    with LLM(model, threads=1) as llm:
        expected = [one.tokens for one in llm.generate(["a", "b"], **options)]
    with LLM(model, threads=2, split="step-3") as llm:
        assert [one.tokens for one in llm.generate(["a", "b"], **options)] == expected


@pytest.mark.slow
def test_a_server_answers_as_with_one_process() -> None:
    """Also while requests run together, and after its FFN process was killed."""
    shared: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "ignore_eos": True}
    numbers = {"enum": [7, 42, 365]}
    format = {"type": "json_schema", "json_schema": {"name": "number", "schema": numbers}}
    bodies = [
        {"prompt": "a", "temperature": 0, "max_tokens": 12},
        {"prompt": ["a", "b c", "def"], "n": 2, "seed": 3, **shared},
        {"prompt": "a", "seed": 5, "logprobs": 2, **shared},
        {"prompt": "a", "max_tokens": 12, "temperature": 0.8, "response_format": format, "seed": 1},
        *({"prompt": "x y z", "seed": seed, **shared} for seed in range(4)),
    ]
    answers = []
    method = FfnSplit()
    for split in (None, method):
        with LLM(MODEL, threads=2, split=split) as llm, served(llm) as client:

            def ask(given: dict[str, Any], client: Client = client) -> Any:
                return client.ask("/v1/completions", **given)["choices"]

            answers.append([ask(given) for given in bodies])
            if split is not None:
                (local,) = method.local
                assert local.process_id is not None
                os.kill(local.process_id, signal.SIGKILL)
            with ThreadPoolExecutor(4) as pool:
                answers.append(list(pool.map(ask, bodies)))
            streamed = client.chunks("/v1/completions", **bodies[2])
            texts = [choice["text"] for chunk in streamed for choice in chunk["choices"]]
            assert "".join(texts) == answers[0][2][0]["text"]
    assert answers[1:] == answers[:1] * 3


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("step-3:micro_batches=0", "micro_batches is 0|micro_batches=0"),
        ("step-3:address=nowhere", "address='nowhere'; allowed is HOST:PORT"),
        ("step-3:address=127.0.0.1:1", "nobody answers at 127.0.0.1:1"),
        ("nexus", "not a split of models"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    split: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYDECODE_CLUSTER_SECRET", "a secret of the tests")
    with pytest.raises(AnydecodeError, match=message) as caught:
        LLM(MODEL, split=split, threads=1)
    assert "\n" not in str(caught.value)


def test_the_file_of_the_secret_may_be_given_as_text(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("short")
    with pytest.raises(AnydecodeError, match="secret of a fleet has 5 characters"):
        LLM(MODEL, split=f"step-3:address=127.0.0.1:1,secret_file={file}", threads=1)


def test_models_that_are_no_files_and_other_options_are_refused() -> None:
    for options in ({"block": 4}, {"device": "cuda"}, {"backend": "triton"}):
        with pytest.raises(AnydecodeError, match="split="):
            LLM(MODEL, split="step-3", **options)


def test_adapters_are_refused_when_they_are_added(tmp_path: Path) -> None:
    with oracle.split_networks(tiny_model().network, tiny_model().network) as (model, _, _):
        with pytest.raises(UnsupportedCombinationError, match="adapters do not work with split="):
            model.add_adapter(save_adapter(tmp_path / "adapter", 0))


def test_layers_without_an_ffn_of_their_own_are_refused() -> None:
    network = load_network(rwkv_checkpoint(0))
    with pytest.raises(UnsupportedCombinationError, match="cannot be split"):
        FfnServer(network, choose_executor(None, 1), b"a secret of the tests", "rwkv")


def test_an_ffn_process_of_another_model_is_refused() -> None:
    with (
        pytest.raises(FleetError, match="has another model: start it with this model"),
        oracle.split_model(0, ffn_seed=1),
    ):
        pass


def test_an_ffn_process_of_another_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = load_library()
    if library is None:
        pytest.skip("needs the native kernels")

    def start(self: FfnServer, *arguments: Any) -> None:
        _START(self, *arguments)
        monkeypatch.setattr(library, "build", "that of another compiler")

    monkeypatch.setattr(FfnServer, "__init__", start)
    with (
        pytest.raises(FleetError, match="has another kernels: start it with .* build of anydecode"),
        oracle.split_model(0),
    ):
        pass


def test_a_lost_process_fails_requests_until_another_one_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
    with oracle.split_model(1) as (model, recorded, _), oracle.split_model(1) as (_, other, _):
        with LLM(model, tokenizer=ByteTokenizer(), cache_positions=256) as llm:
            expected = llm.generate("a", **options).tokens
            gone = ("127.0.0.1", 1, b"a secret of the tests")
            monkeypatch.setattr(recorded.client, "_locate", lambda: gone)
            recorded.client._drop()
            for _ in range(2):
                with pytest.raises(FleetError, match="nobody answers at 127.0.0.1:1") as caught:
                    llm.generate("a", **options)
                assert "\n" not in str(caught.value)
            monkeypatch.setattr(recorded.client, "_locate", other.client._locate)
            assert llm.generate("a", **options).tokens == expected
