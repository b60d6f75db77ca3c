"""Blockwise parallel decoding: its certificate, mistakes that the certificate rejects, its files,
and exactness in company, with a small cache, in chunks, from cached prefixes and under constraints.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.certification.oracles.speculative import blockwise as oracle
from anydecode.certification.tiny import tiny_network, with_drafter
from anydecode.certification.tiny_heads import blockwise_checkpoint
from anydecode.errors import CheckpointError
from anydecode.models.blockwise import BlockwiseNetwork, load_blockwise
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.step_heads import StepTransformer
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from draft_folders import (
    Change,
    changed,
    drafter_folder,
    set_keys,
    target_folder,
    tensor,
    without,
)
from drafted_texts import (
    CONDITIONS,
    LONG,
    PROMPTS,
    assert_constrained_text_of_plain_decoding,
    assert_text_of_plain_decoding,
    generate,
    num_accepted,
    only_drafter,
)

Patch = pytest.MonkeyPatch
PARTIAL = partial(blockwise_checkpoint, heads=6, modulus=9)


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("blockwise")


@pytest.mark.parametrize("size", [3, 5])
def test_certificate_rejects_other_sizes(monkeypatch: Patch, size: int) -> None:
    only_drafter(monkeypatch, oracle, "6 heads for a part of the tokens")
    replace_defaults(monkeypatch, "blockwise", size=size)
    assert_rejected("blockwise")


def test_certificate_rejects_a_tree(monkeypatch: Patch) -> None:
    """As of Medusa."""
    only_drafter(monkeypatch, oracle, "3 heads")
    replace_method(monkeypatch, "blockwise", "medusa")
    assert_rejected("blockwise")


def test_certificate_rejects_heads_that_are_one_off(monkeypatch: Patch) -> None:
    """The first head of the paper is the target itself."""
    layer = BlockwiseNetwork.step_layer
    monkeypatch.setattr(
        BlockwiseNetwork,
        "step_layer",
        lambda self, backend, x, step, at: layer(self, backend, x, max(0, step - 1), at),
    )
    assert_rejected("blockwise")


@pytest.mark.parametrize(("has_residual", "activation"), [(False, "relu"), (True, "silu")])
def test_certificate_rejects_another_layer(
    monkeypatch: Patch, has_residual: bool, activation: str
) -> None:
    def layer(self: BlockwiseNetwork, backend: Any, x: Any, step: int, index: int) -> Any:
        assert self.hidden is not None
        y = backend.activate(self.hidden.apply(backend, x), activation)
        y = self.outputs[step].apply(backend, y)
        return backend.add(x, y) if has_residual else y

    monkeypatch.setattr(BlockwiseNetwork, "step_layer", layer)
    assert_rejected("blockwise")


def test_certificate_rejects_one_step_for_all_heads(monkeypatch: Patch) -> None:
    run = StepTransformer.run

    def first(self: StepTransformer, rows: Any, *given: Any) -> Any:
        rows.inputs[:, -1] = 0
        return run(self, rows, *given)

    monkeypatch.setattr(StepTransformer, "run", first)
    assert_rejected("blockwise")


@CONDITIONS
@pytest.mark.parametrize("drafter", [blockwise_checkpoint, PARTIAL], ids=["all", "part"])
def test_the_text_is_that_of_plain_decoding(
    drafter: Callable[..., Checkpoint], options: dict[str, Any], temperature: float
) -> None:
    prompts = PROMPTS[2:4] if "backend" in options else PROMPTS
    accepted = assert_text_of_plain_decoding(
        drafter, ("blockwise", "blockwise"), options, prompts, temperature=temperature
    )
    assert min(accepted) > 5


def test_a_block_takes_one_pass_of_each_model() -> None:
    with with_drafter(blockwise_checkpoint, cache_positions=1024) as llm:
        text = generate(llm, LONG, "blockwise")
        runner = llm.engine.runners["draft"]
        assert runner.num_passes == sum(bool(one["drafted"]) for one in text.trace)
    assert len(text.tokens) / text.stats.passes > 1.3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_constraints_hold_and_the_text_is_exact(temperature: float) -> None:
    assert_constrained_text_of_plain_decoding(
        blockwise_checkpoint, "blockwise", temperature=temperature
    )


def test_the_papers_relaxed_rule_accepts_more() -> None:
    with with_drafter(blockwise_checkpoint, cache_positions=1024) as llm:
        exact, relaxed = (
            generate(llm, PROMPTS, key) for key in ("blockwise", "blockwise:acceptance=top-m")
        )
    assert num_accepted(relaxed) > num_accepted(exact)


@pytest.mark.parametrize("has_own_head", [False, True])
def test_a_folder_opens(has_own_head: bool, tmp_path: Path) -> None:
    model = target_folder(tmp_path / "target")
    with LLM(model) as llm:
        target = llm.model.network  # type: ignore[attr-defined]
        width, count = target.spec.hidden_size, target.spec.vocab_size
    random = np.random.default_rng(0)
    tensors = {
        "blockwise.hidden.weight": random.standard_normal((8, width), np.float32),
        "blockwise.hidden.bias": np.zeros(8, np.float32),
        "blockwise.output.weight": random.standard_normal((2 * width, 8), np.float32),
        "blockwise.output.bias": np.zeros(2 * width, np.float32),
        "token_map": np.arange(3, count),
    }
    if has_own_head:
        tensors["lm_head.weight"] = random.standard_normal((count - 3, width), np.float32)
    config = {"blockwise_num_heads": 2, "blockwise_hidden_size": 8, "vocab_size": count}
    checkpoint = Checkpoint("heads", Path("heads"), config, tensors)
    folder = drafter_folder(tmp_path / "heads", checkpoint, "model.safetensors")
    with LLM(model, draft=folder) as llm:
        plain, drafted = (
            llm.generate("ab", decoder=key, max_tokens=12, ignore_eos=True, trace=True)
            for key in ("autoregressive", "blockwise")
        )
    assert drafted.tokens == plain.tokens
    drafts = [token for event in drafted.trace or () for token in event["drafted"]]
    assert drafts and min(drafts) >= 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_keys(blockwise_num_heads=40), "blockwise_num_heads is 40"),
        (set_keys(blockwise_num_heads=2), "output.weight has shape"),
        (set_keys(blockwise_hidden_size=9), "has shape"),
        (without("blockwise.output.bias"), "blockwise.output.bias"),
        (tensor("token_map", np.array([1, 999])), "token_map has 2 tokens from 1 to 999"),
        (tensor("token_map", np.array([1, 1])), "2 tokens from 1 to 1, 1 of them different"),
        (tensor("lm_head.weight", np.zeros((3, 64), np.float32)), "lm_head.weight has shape"),
    ],
)
def test_malformed_files_are_refused(change: Change, message: str) -> None:
    target = tiny_network()
    checkpoint = changed(blockwise_checkpoint(target), change)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_blockwise(checkpoint, target)
    assert "\n" not in str(raised.value)
