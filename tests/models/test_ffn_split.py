"""Attention and FFNs apart, for every family: the logits have the bits of the whole model."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode.certification.tiny_step3 import step3_checkpoint
from anydecode.cluster.ffn import AttentionExecutor, FfnServer
from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.library import load_library
from anydecode.models.families import load_network, spec_from_config
from anydecode.models.ffn_split import check_split, ffn_digest, micro_batches
from anydecode.models.network import Network
from anydecode.models.opening import choose_executor
from anydecode.models.transformer import Transformer
from parity_cases import first_cases, parity_module
from tiny_models import chain, checkpoint_of, hf_model, logits, make_rows, whole

BACKEND = "torch" if load_library() is None else "native"
CASES = first_cases()
OTHERS = parity_module("../engine/test_every_family").OTHERS
TEXT = [5, 17, 99, 3, 64, 11, 42, 42, 7]
#: Families with layers that are not attention with an FFN behind it.
REFUSED = {
    "arctic", "arwkv7", "BailingHybrid", "Bamba", "CodeGen", "Cohere", "Cohere2", "Cohere2Moe",
    "CohereCompass", "DeepseekV4", "Falcon", "FalconH1", "FalconMamba", "Gemma3n", "Gemma4",
    "Glm5Next", "GPTJ", "GPTNeoX", "HrmText", "HYV4", "Jamba", "kimi_k3", "KimiLinear", "Lfm2",
    "Lfm2Moe", "Lfm3", "LongcatFlash", "Mamba", "Mamba2", "MiniMax", "nanbeige", "nemotron-nas",
    "NemotronH", "OlmoHybrid", "ouro", "Phi", "phi4flash", "plamo2", "Qwen3_5", "Qwen3_5Moe",
    "Qwen3Next", "Qwen4Exp", "RecurrentGemma", "rwkv6", "rwkv6qwen2", "rwkv7", "smallthinker",
    "xLSTM", "Zamba", "Zamba2", "Zaya",
}  # fmt: skip


class Near:
    """In place of a connection: the FFNs are computed when their inputs are sent."""

    def __init__(self, server: FfnServer, cache_format: str) -> None:
        self.server, self.cache_format = server, cache_format
        self.results: deque[np.ndarray] = deque()

    def connect(self) -> str:
        return self.cache_format

    def send(self, layer: int, x: np.ndarray) -> None:
        self.results.append(self.server.compute(np.array(x), layer))

    def receive(self, layer: int, count: int) -> np.ndarray:
        return self.results.popleft()


def checkpoint(family: str) -> Any:
    if family in OTHERS:
        return OTHERS[family](0)
    return checkpoint_of(hf_model(*CASES[family][:1], **CASES[family][1]))


@pytest.mark.slow
@pytest.mark.parametrize("family", [*CASES, *OTHERS])
def test_the_bits_of_a_split_model_are_those_of_the_whole(family: str) -> None:
    make: Any = choose_executor(BACKEND, 1)

    def split(network: Any) -> Any:
        server = FfnServer(load_network(checkpoint(family)), make, b"", family)
        near: Any = Near(server, "float32")
        return AttentionExecutor(network, make, lambda facts, hidden: near, 3)

    if family in REFUSED:
        with pytest.raises(UnsupportedCombinationError, match="cannot be split") as caught:
            Transformer(load_network(checkpoint(family)), executor=split)
        assert "\n" not in str(caught.value)
        return
    found, expected = (
        logits(model, whole(chain(TEXT), model), model.new_cache(64, "float32"))
        for model in (
            Transformer(load_network(checkpoint(family)), executor=split),
            Transformer(load_network(checkpoint(family)), executor=make),
        )
    )
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "family",
    [
        one if one in ("GptOss", "DeepseekV3", "Starcoder2")
        else pytest.param(one, marks=pytest.mark.slow)
        for one in [*CASES, *OTHERS] if one not in REFUSED
    ],
)  # fmt: skip
def test_checkpoints_whose_ffns_differ_have_other_digests(family: str) -> None:
    """Where another tensor changes what the FFNs compute, another last number of it changes the
    digest. Rejects a digest of the matrices without their biases."""
    make: Any = choose_executor(BACKEND, 1)
    plain = checkpoint(family)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, load_network(plain).spec.hidden_size)).astype(np.float32)

    def with_tensor(name: str, tensor: np.ndarray) -> Network:
        return load_network(replace(plain, tensors={**plain.tensors, name: tensor}))

    def outputs(network: Network) -> list[bytes]:
        server = FfnServer(network, make, b"", family)
        return [server.compute(x, layer).tobytes() for layer in range(network.spec.num_layers)]

    digest, expected, left_out = ffn_digest(load_network(plain)), outputs(load_network(plain)), []
    num_same = 0
    for name, tensor in plain.tensors.items():
        if not isinstance(tensor, np.ndarray) or tensor.dtype != np.float32 or not tensor.size:
            continue
        other = tensor.copy()
        other.reshape(-1)[-1] += 0.25
        has_same_digest = ffn_digest(with_tensor(name, other)) == digest
        num_same += has_same_digest
        noise = rng.normal(size=tensor.shape).astype(np.float32)
        if has_same_digest and outputs(with_tensor(name, tensor + noise)) != expected:
            left_out.append(name)
    assert left_out == [] and 0 < num_same < len(plain.tensors)


def test_micro_batches_of_sequences_and_of_texts() -> None:
    table = np.arange(8, dtype=np.int32)
    causal = make_rows([1] * 6, range(6), range(6), [table], [0] * 6, range(1, 7))
    both = make_rows([1] * 6, range(6), range(6), [table], [0] * 6, [6] * 6)
    rows = np.arange(6)
    assert [list(one) for one in micro_batches(causal, rows, 3, 8)] == [[0, 1], [2, 3], [4, 5]]
    assert [list(one) for one in micro_batches(both, rows, 3, 8)] == [list(range(6))]
    assert [list(one) for one in micro_batches(causal, rows[1:3], 4, 8)] == [[1], [2]]


def test_experts_that_a_block_chooses_are_refused() -> None:
    spec = spec_from_config(step3_checkpoint().config)
    routing = spec.layers[1].routing
    assert routing is not None
    layer = replace(spec.layers[1], routing=replace(routing, block_experts=4))
    with pytest.raises(UnsupportedCombinationError, match="block together"):
        check_split(replace(spec, layers=(spec.layers[0], layer, layer)), "tiny")


def test_the_families_that_are_refused_are_tested() -> None:
    assert REFUSED <= {*CASES, *OTHERS}
