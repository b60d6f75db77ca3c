"""The block-diffusion adapter: attention mask, loss, and loading by the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

from anydecode import LLM
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.kernels.torch_arrays import as_tensor
from anydecode.models.loading import load_checkpoint
from anydecode.models.tokenizers import HFTokenizer
from anydecode.training import block_adapter, checkpoint
from anydecode.training.block_adapter import AdapterRecipe
from anydecode.training.tokenizer import EOS_ID, MASK_ID, build_tokenizer
from anydecode.training.transformer import Shape, Transformer, stream_mask
from gguf_models import plain

TOKENIZER = build_tokenizer()
SHAPE = Shape(TOKENIZER.get_vocab_size(), width=32, layers=2, heads=4, hidden=48, kv_heads=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = Transformer(SHAPE)
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.2)
    checkpoint.save_llama(tmp_path / "base", model.state_dict(), SHAPE, TOKENIZER)
    return tmp_path / "base"


def test_masked_block_attends_to_itself_and_earlier_clean_blocks() -> None:
    streams = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    positions = torch.tensor([0, 1, 2, 1, 2, 3, 1, 2, 3])
    seen = stream_mask(streams, positions, 2).int().tolist()
    assert seen[:3] == [[1, 1, 0] + [0] * 6] * 2 + [[1, 1, 1] + [0] * 6]
    assert seen[3:6] == [
        [0, 0, 0, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0, 0],
    ]
    assert seen[6:] == [[*row[:3], *[0] * 3, *row[3:6]] for row in seen[3:6]]


def loss_block_by_block(
    model: Transformer, text: list[int], masked: list[int], block: int, shift: int
) -> float:
    """The summed loss of the masked positions, each block in its own pass over the clean text
    before it."""
    total = 0.0
    for start in range(0, len(text), block):
        stop = start + block
        noised = [MASK_ID if start <= at and at in masked else text[at] for at in range(stop)]
        own = torch.arange(stop) // block
        logits = model(torch.tensor([noised]), visible=own[:, None] >= own)[0]
        logits[:, MASK_ID] = float("-inf")
        for at in range(start, stop):
            if at in masked:
                total -= float(logits[at - shift].log_softmax(-1)[text[at]])
    return total


@pytest.mark.parametrize("shift", [False, True])
def test_loss_of_one_pass_equals_loss_block_by_block(
    folder: Path, shift: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = block_adapter.open_llama(load_checkpoint(folder))
    texts = block_adapter.TextBatch(
        torch.randint(3, SHAPE.vocab, (2, 12)), torch.arange(12).repeat(2, 1) > 4
    )
    recipe = AdapterRecipe(steps=1, block=4, copies=2, shift=shift)
    seen: list[torch.Tensor] = []
    embed = model.transformer["wte"].forward
    monkeypatch.setattr(
        model.transformer["wte"], "forward", lambda ids: seen.append(ids) or embed(ids)
    )
    with torch.no_grad():
        found, count = block_adapter.block_loss(model, texts, recipe, MASK_ID, torch.Generator())
        [rows] = seen
        assert rows.shape == (2, 8 + 2 * 8)  # no clean rows of the last block, no masked ones of
        expected, wrong = 0.0, 0.0  # the first, which has no answer
        for row, text in zip(rows.tolist(), texts.tokens.tolist(), strict=True):
            assert row[:8] == text[:8]
            for copy in (row[8:16], row[16:]):
                masked = [4 + at for at, token in enumerate(copy) if token == MASK_ID]
                expected += loss_block_by_block(model, text, masked, 4, int(shift))
                wrong += loss_block_by_block(model, text, masked, 4, int(not shift))
    assert count == int((rows == MASK_ID).sum()) > 8
    assert float(found) == pytest.approx(expected, rel=1e-4)
    assert float(found) != pytest.approx(wrong, rel=1e-2)


@pytest.mark.slow
def test_adapter_starts_at_zero_and_trains(folder: Path, tmp_path: Path) -> None:
    source = load_checkpoint(folder)
    model = block_adapter.open_llama(source)
    tokens = torch.randint(3, SHAPE.vocab, (1, 6))
    before = model(tokens, causal=True)
    trainable = block_adapter.add_low_rank(model, 4)
    assert torch.allclose(model(tokens, causal=True), before, atol=1e-6)
    assert len(trainable) == 2 * 7 * SHAPE.layers
    assert all(p.requires_grad == any(p is q for q in trainable) for p in model.parameters())

    recipe = AdapterRecipe(steps=60, block=4, rank=4, batch=4, rate=2e-2, longest=64)
    run = block_adapter.train_block_adapter(
        source, tmp_path / "adapter", recipe, merged=tmp_path / "merged"
    )
    first, last = (entry["held_out"]["tasks"] for entry in run.history if "held_out" in entry)
    assert run.step == 60 and last < first - 0.5
    with LLM(folder, dtype="float32", threads=1) as llm:
        llm.add_adapter("blocks", tmp_path / "adapter")
        unadapted = llm.generate("copy Ada Ben:", max_tokens=6, ignore_eos=True)
        adapted = llm.generate("copy Ada Ben:", max_tokens=6, ignore_eos=True, adapter="blocks")
    assert unadapted.tokens != adapted.tokens

    with run.using_weights(run.best_weights) as best:
        whole = block_adapter.merged_weights(best)
    assert whole.keys() == Transformer(SHAPE).state_dict().keys()
    merged = load_file(str(tmp_path / "merged" / "model.safetensors"))
    stored = {name: as_tensor(tensor) for name, tensor in source.tensors.items()}
    query = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(merged[query], whole["transformer.blocks.1.q_proj.weight"].bfloat16())
    assert not torch.equal(merged[query], stored[query])
    norm = "model.layers.1.input_layernorm.weight"
    assert torch.equal(merged[norm], stored[norm])


def test_block_sizes_double_during_the_training(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    loss = block_adapter.block_loss

    def recording(model: Transformer, texts: Any, recipe: AdapterRecipe, *rest: Any) -> Any:
        assert texts.tokens.shape[1] % recipe.block == 0
        if torch.is_grad_enabled():
            sizes.append(recipe.block)
        else:
            assert recipe.block == 8, "held-out texts are in blocks of the last size"
        return loss(model, texts, recipe, *rest)

    monkeypatch.setattr(block_adapter, "block_loss", recording)
    recipe = AdapterRecipe(steps=6, block=8, first_block=2, rank=2, batch=1, longest=64)
    out = tmp_path / "adapter"
    block_adapter.train_block_adapter(load_checkpoint(folder), out, recipe, merged=tmp_path / "m")
    assert sizes == [2, 2, 4, 4, 8, 8]
    assert json.loads((out / "block.json").read_text())["block_size"] == 8
    with LLM(tmp_path / "m", threads=1) as llm:
        decoder = "bacd-tccf:coarse=8,fine=2,cache=block"
        assert len(llm.generate("1+2=", decoder=decoder, max_tokens=9, ignore_eos=True).tokens) == 9
    assert [AdapterRecipe(steps=1, block=8).block_at(share) for share in (0.0, 1.0)] == [8, 8]
    for first in (3, 16, 0):
        with pytest.raises(InvalidRequestError, match=f"first_block={first} does not double"):
            AdapterRecipe(steps=1, block=8, first_block=first)


def test_adapter_folder_opens_as_a_model(folder: Path, tmp_path: Path) -> None:
    """Its folder, opened as a model, has merged weights and the attention mask that it was trained
    with."""
    source = load_checkpoint(folder)
    recipe = AdapterRecipe(steps=8, block=4, rank=4, batch=4, rate=2e-2, longest=64, shift=True)
    merged = tmp_path / "merged"
    block_adapter.train_block_adapter(source, tmp_path / "a", recipe, merged=merged)
    adapted, written = load_checkpoint(tmp_path / "a"), load_checkpoint(merged)
    assert adapted.tokenizer is not None and adapted.tokenizer.mask_id == MASK_ID
    assert {*adapted.tensors} == {*written.tensors}
    for name, tensor in written.tensors.items():
        assert np.allclose(plain(adapted.tensors[name]), plain(tensor), atol=0.02), name
    query = "model.layers.0.self_attn.q_proj.weight"
    assert not np.allclose(plain(source.tensors[query]), plain(written.tensors[query]))
    for path in (tmp_path / "a", merged):
        with LLM(path, threads=1) as llm:
            spec = llm.model.spec
            assert (spec.block_size, spec.logit_shift, spec.causal) == (4, 1, False)
            assert llm.generate("copy Ada Ben:", max_tokens=6, ignore_eos=True).stats.passes > 0


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("adapter_config.json", {"r": 4, "lora_alpha": 8}, "does not name a base model"),
        ("block.json", {"block_size": 4}, "does not describe a supported block-diffusion model"),
        (
            "block.json",
            {"block_size": 0, "mask_token_id": 1},
            "does not describe a supported block-diffusion model",
        ),
    ],
)
def test_broken_adapters_are_rejected(
    folder: Path, tmp_path: Path, file: str, content: dict[str, int], problem: str
) -> None:
    recipe = AdapterRecipe(steps=1, block=4, rank=4, batch=1)
    block_adapter.train_block_adapter(load_checkpoint(folder), tmp_path / "a", recipe)
    (tmp_path / "a" / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=problem):
        load_checkpoint(tmp_path / "a")


def test_resumed_run_equals_an_uninterrupted_one(folder: Path, tmp_path: Path) -> None:
    source = load_checkpoint(folder)
    recipe = AdapterRecipe(steps=6, block=4, rank=2, batch=3, copies=2)
    whole = block_adapter.train_block_adapter(source, tmp_path / "whole", recipe)

    def interrupt(done: float, loss: float) -> None:
        if done >= 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        block_adapter.train_block_adapter(source, tmp_path / "cut", recipe, report=interrupt)
    run = block_adapter.AdapterRun(source, tmp_path / "cut", recipe)
    assert run.step == 3
    run.train()
    assert run.step == 6 and run.history[-1]["held_out"] == whole.history[-1]["held_out"]
    for one, other in zip(run.trainable, whole.trainable, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(InvalidRequestError, match="another rank"):
        block_adapter.AdapterRun(source, tmp_path / "cut", replace(recipe, rank=3))


@pytest.mark.slow
def test_training_starts_from_an_adapter(folder: Path, tmp_path: Path) -> None:
    source, first, second = load_checkpoint(folder), tmp_path / "first", tmp_path / "second"
    recipe = AdapterRecipe(steps=40, block=4, rank=2, batch=4, rate=2e-2, longest=64)
    last = block_adapter.train_block_adapter(source, first, recipe)
    assert last.best == last.history[-1]["held_out"]["tasks"] < last.history[0]["held_out"]["tasks"]

    wider = replace(recipe, steps=3, rank=3)
    run = block_adapter.train_block_adapter(source, second, wider, start=first)
    begin = run.history[0]["held_out"]["tasks"]
    assert begin == pytest.approx(last.best, abs=0.02)  # its matrices were rounded to bfloat16
    assert run.best < last.history[0]["held_out"]["tasks"] - 0.3
    resumed = block_adapter.AdapterRun(source, second, wider, start=first)
    assert resumed.step == 3, "a run is resumed from its own state"
    for one, other in zip(run.trainable, resumed.trainable, strict=True):
        assert torch.equal(one, other)

    config = json.loads((first / "adapter_config.json").read_text())
    (first / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1e-9}))
    unadapted = block_adapter.AdapterRun(source, tmp_path / "zero", wider, start=first)
    losses = last.history[0]["held_out"]
    assert unadapted.evaluate() == pytest.approx(losses), "the scale is that of its config"


@pytest.mark.slow
def test_start_of_another_kind_is_refused(folder: Path, tmp_path: Path) -> None:
    source, first = load_checkpoint(folder), tmp_path / "first"
    recipe = AdapterRecipe(steps=1, block=4, rank=2, batch=1, longest=64)
    block_adapter.train_block_adapter(source, first, recipe)
    for other, problem in (
        ({"block": 8}, "its block_size is 4, that of the run is 8"),
        ({"shift": True}, "its right_shift_logits is False, that of the run is True"),
        ({"rank": 1}, "another model or of a rank above that of the run, 1"),
    ):
        with pytest.raises(InvalidRequestError, match=problem):
            block_adapter.AdapterRun(source, tmp_path / "b", replace(recipe, **other), start=first)
    with pytest.raises(InvalidRequestError, match="its mask_token_id is"):
        block_adapter.AdapterRun(source, tmp_path / "b", recipe, EOS_ID, start=first)


@pytest.mark.parametrize("shift", [False, True])
def test_engine_denoises_as_the_training_transformer(
    folder: Path, tmp_path: Path, shift: bool
) -> None:
    """Greedy, one token per pass: the engine chooses as the training transformer, which attends to
    the blocks of the prompt and to the block itself."""
    source = load_checkpoint(folder)
    recipe = AdapterRecipe(steps=3, block=4, rank=4, batch=4, rate=1e-2, longest=64, shift=shift)
    block_adapter.train_block_adapter(source, tmp_path / "a", recipe, merged=tmp_path / "merged")
    model = block_adapter.open_llama(
        replace(load_checkpoint(tmp_path / "merged"), config=source.config)
    )
    prompt = TOKENIZER.encode("copy Ada Ben Leo:").ids
    tokens = [*prompt, *[MASK_ID] * (12 - len(prompt))]
    assert len(prompt) == 5
    own = torch.arange(12) // 4
    while MASK_ID in tokens:
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), visible=own[:, None] >= own)[0]
        logits[:, MASK_ID] = float("-inf")
        confidence, predictions = logits.softmax(-1).max(-1)
        block = tokens.index(MASK_ID) // 4
        masked = [at for at, token in enumerate(tokens) if token == MASK_ID and at // 4 == block]
        best = max(masked, key=lambda position: float(confidence[position - shift]))
        tokens[best] = int(predictions[best - shift])
    with LLM(tmp_path / "merged", dtype="float32", threads=1) as llm:
        assert llm.model.spec.block_size == 4 and not llm.model.spec.causal
        found = llm.generate(prompt, max_tokens=7, ignore_eos=True, decoder="sdar:remasking=static")
    assert found.tokens == tokens[5:]


def test_texts_are_whole_blocks_and_prompts_are_not_trained() -> None:
    pairs = [([5, 6, 7], [8, 9]), ([5], [6, 7, 8, 9, 10]), ([1] * 29, [2])]
    recipe = AdapterRecipe(steps=1, block=4)
    first, second = block_adapter.micro_batches(pairs, recipe, EOS_ID)
    assert first.tokens.tolist()[0] == [5, 6, 7, 8, 9, EOS_ID, EOS_ID, EOS_ID]
    assert first.tokens.tolist()[1] == [5, 6, 7, 8, 9, 10, EOS_ID, EOS_ID]
    assert first.answer[0].tolist() == [False] * 3 + [True] * 5
    assert first.answer[1].tolist() == [False] + [True] * 7
    assert second.tokens.shape == (1, 32) and second.answer.sum() == 3


def test_own_answers_are_mixed_with_tasks() -> None:
    recipe = AdapterRecipe(steps=1, batch=8, longest=30)
    own = [([7] * 12, [8] * 4), ([7] * 40, [9])]
    wrapped = HFTokenizer(TOKENIZER)
    pairs = block_adapter.step_pairs(wrapped, own, recipe, 0)
    assert len(pairs) == 8 and pairs.count(own[0]) == 2
    assert pairs == block_adapter.step_pairs(wrapped, own, recipe, 0)
    assert pairs != block_adapter.step_pairs(wrapped, own, recipe, 1)
    assert all(wrapped.decode(one)[-1] in ":=" for one, _ in pairs if one != own[0][0])


def test_command_trains_an_adapter_and_prints_its_loss(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from anydecode.cli.main import run

    out, plot = tmp_path / "out", tmp_path / "curve.svg"
    arguments = ["train", "block-adapter", "--model", str(folder), "--steps", "2", "--batch", "2"]
    with pytest.raises(SystemExit) as ended:
        run([*arguments, "--shift", "--copies", "2", "--out", str(out), "--plot", str(plot)])
    assert not ended.value.code
    captured = capsys.readouterr()
    assert captured.out.strip() == str(out) and "nats per masked token" in captured.err
    assert "held-out tasks" in plot.read_text()
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 16
    assert json.loads((out / "block.json").read_text())["right_shift_logits"] is True


def test_invalid_requests_are_rejected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="minutes or steps"):
        AdapterRecipe()
    with pytest.raises(InvalidRequestError, match="more than 0"):
        AdapterRecipe(steps=3, rank=0)
    with pytest.raises(InvalidRequestError, match="no dtype"):
        AdapterRecipe(steps=3, dtype="int8")
    other = replace(load_checkpoint(folder), config={"model_type": "gemma2"})
    with pytest.raises(CheckpointError, match="plain Llama"):
        block_adapter.open_llama(other)
