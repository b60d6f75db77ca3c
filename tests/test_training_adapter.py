"""The block-diffusion adapter: what sees what, the loss, and that the engine loads the result."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anydecode import LLM
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.training import block_adapter, checkpoint
from anydecode.training.block_adapter import AdapterRecipe
from anydecode.training.tokenizer import EOS_ID, MASK_ID, build_tokenizer
from anydecode.training.transformer import Shape, Transformer

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


def test_a_masked_block_sees_itself_and_the_clean_blocks_before() -> None:
    seen = block_adapter.visibility(5, 2)
    masked, clean = seen[:5], seen[5:]
    assert masked[:, :5].int().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    assert masked[:, 5:].int().tolist() == [
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0],
    ]
    assert not clean[:, :5].any() and clean[0, 5:].int().tolist() == [1, 1, 0, 0, 0]
    assert clean[4, 5:].all()


def test_both_streams_together_say_what_blocks_alone_would(folder: Path) -> None:
    """The masked stream's logits are those of a pass over [clean prefix, masked block] alone."""
    model = block_adapter.open_llama(load_checkpoint(folder))
    text = torch.randint(3, SHAPE.vocab, (1, 8))
    masked = text.clone()
    masked[0, [1, 4, 6]] = MASK_ID
    with torch.no_grad():
        both = model(
            torch.cat([masked, text], dim=1),
            positions=torch.arange(8).repeat(2),
            visible=block_adapter.visibility(8, 4),
        )
        joined = torch.cat([text[:, :4], masked[:, 4:]], dim=1)
        own = torch.arange(8) // 4
        alone = model(joined, visible=own[:, None] >= own)
    assert torch.allclose(both[0, 4:8], alone[0, 4:], atol=1e-5)


def test_an_adapter_begins_as_nothing_and_learns(folder: Path, tmp_path: Path) -> None:
    source = load_checkpoint(folder)
    model = block_adapter.open_llama(source)
    tokens = torch.randint(3, SHAPE.vocab, (1, 6))
    before = model(tokens, causal=True)
    learned = block_adapter.add_low_rank(model, 4)
    assert torch.allclose(model(tokens, causal=True), before, atol=1e-6)
    assert len(learned) == 2 * 7 * SHAPE.layers
    assert all(p.requires_grad == any(p is q for q in learned) for p in model.parameters())

    recipe = AdapterRecipe(steps=60, block=4, rank=4, batch=4, rate=1e-2, longest=64)
    found = block_adapter.train_block_adapter(
        source, tmp_path / "adapter", recipe, merged=tmp_path / "merged"
    )
    assert found["steps"] == 60 and found["last"] < found["first"] - 0.5
    assert block_adapter.read_block(tmp_path / "adapter") == (4, MASK_ID)
    with LLM(folder, dtype="float32", threads=1) as llm:
        llm.add_adapter("blocks", tmp_path / "adapter")
        plain = llm.generate("copy Ada Ben:", max_tokens=6, ignore_eos=True)
        adapted = llm.generate("copy Ada Ben:", max_tokens=6, ignore_eos=True, adapter="blocks")
    assert plain.tokens != adapted.tokens

    changed = block_adapter.open_llama(load_checkpoint(folder))
    block_adapter.add_low_rank(changed, 4)
    stored = load_file(str(tmp_path / "adapter" / "adapter_model.safetensors"))
    layer = changed.blocks[1].q_proj
    stem = "base_model.model.model.layers.1.self_attn.q_proj"
    layer.down.data = stored[f"{stem}.lora_A.weight"]
    layer.up.data = stored[f"{stem}.lora_B.weight"]
    whole = block_adapter.merged_weights(changed)
    assert whole.keys() == Transformer(SHAPE).state_dict().keys()
    merged = load_file(str(tmp_path / "merged" / "model.safetensors"))
    query = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(merged[query], whole["transformer.blocks.1.q_proj.weight"].bfloat16())


def test_the_engine_denoises_blocks_as_the_objective_sees_them(
    folder: Path, tmp_path: Path
) -> None:
    """Greedy, one token a pass: the engine's choice is that of the training transformer, which sees
    the prompt's blocks and the block itself."""
    source = load_checkpoint(folder)
    recipe = AdapterRecipe(steps=3, block=4, rank=4, batch=4, rate=1e-2, longest=64)
    block_adapter.train_block_adapter(source, tmp_path / "a", recipe, merged=tmp_path / "merged")
    model = block_adapter.open_llama(
        replace(load_checkpoint(tmp_path / "merged"), config=source.config)
    )
    prompt = TOKENIZER.encode("copy Ada Ben Leo:").ids
    tokens = [*prompt, *[MASK_ID] * (8 - len(prompt))]
    assert len(prompt) == 5
    own = torch.arange(8) // 4
    while MASK_ID in tokens:
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), visible=own[:, None] >= own)[0]
        logits[:, MASK_ID] = float("-inf")
        sure, picks = logits.softmax(-1).max(-1)
        masked = [place for place, token in enumerate(tokens) if token == MASK_ID]
        best = max(masked, key=lambda place: float(sure[place]))
        tokens[best] = int(picks[best])
    with LLM(tmp_path / "merged", dtype="float32", threads=1) as llm:
        assert llm.model.spec.block_size == 4 and not llm.model.spec.causal
        found = llm.generate(prompt, max_tokens=3, ignore_eos=True, decoder="sdar:remasking=static")
    assert found.tokens == tokens[5:]


def test_texts_are_whole_blocks_and_prompts_are_never_learned() -> None:
    pairs = iter([([5, 6, 7], [8, 9]), ([5], [6, 7, 8, 9, 10]), ([1] * 99, [2])])
    recipe = AdapterRecipe(steps=1, block=4, batch=2, longest=20)
    [(tokens, answers)] = block_adapter.batches(pairs, recipe, EOS_ID)
    assert tokens.tolist()[0] == [5, 6, 7, 8, 9, EOS_ID, EOS_ID, EOS_ID]
    assert tokens.tolist()[1] == [5, 6, 7, 8, 9, 10, EOS_ID, EOS_ID]
    assert answers[0].tolist() == [False] * 3 + [True] * 5
    assert answers[1].tolist() == [False] + [True] * 7


def test_own_answers_are_mixed_with_tasks(folder: Path) -> None:
    source = load_checkpoint(folder)
    pairs = list(islice(block_adapter.mixed_pairs(source, 2, 0, tokens=4), 6))
    assert pairs[1] == pairs[5] and pairs[1] != pairs[3] and len(pairs[1][1]) <= 4
    assert source.tokenizer is not None
    assert source.tokenizer.decode(pairs[0][0])[-1] in ":="


def test_bad_requests(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="minutes or steps"):
        AdapterRecipe()
    with pytest.raises(InvalidRequestError, match="more than 0"):
        AdapterRecipe(steps=3, rank=0)
    with pytest.raises(CheckpointError, match="no block adapter"):
        block_adapter.read_block(tmp_path)
    other = replace(load_checkpoint(folder), config={"model_type": "gemma2"})
    with pytest.raises(CheckpointError, match="plain Llama"):
        block_adapter.open_llama(other)
