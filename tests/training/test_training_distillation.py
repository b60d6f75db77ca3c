"""Distillation and the commit filter: masks, losses, and that training reduces the loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.training import checkpoint, distillation, filters
from anydecode.training.distillation import Canvases, DistillationRecipe, distil
from anydecode.training.objectives import without_mask
from anydecode.training.teachers import open_teacher
from anydecode.training.tokenizer import EOS_ID, MASK_ID, PAD_ID, build_tokenizer
from anydecode.training.transformer import Shape, Transformer

TOKENIZER = build_tokenizer()
SHAPE = Shape(TOKENIZER.get_vocab_size(), width=32, layers=2, heads=2, hidden=48)


def _model(seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(SHAPE)
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint.save_llada(tmp_path / "model", _model().state_dict(), SHAPE, TOKENIZER)
    return tmp_path / "model"


def _canvases(lengths: list[int], width: int = 32, start: int = 3) -> Canvases:
    tokens = torch.full((len(lengths), start + width), EOS_ID)
    for row, length in enumerate(lengths):
        tokens[row, : start + length - 1] = torch.arange(5, 4 + start + length)
    return Canvases(tokens, start, torch.tensor(lengths))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_diffusion_checkpoint_round_trips(folder: Path, tmp_path: Path) -> None:
    model = open_teacher(folder).model
    found = model.shape.frequencies
    assert found == pytest.approx([10_000.0 ** (-pair / 8) for pair in range(8)])
    assert model.shape == replace(SHAPE, kv_heads=SHAPE.heads, head_size=16, frequencies=found)
    for name, weight in _model().state_dict().items():
        if name == "transformer.ff_out.weight":  # these tokens get the output row of "!"
            weight[[PAD_ID, MASK_ID]] = weight[TOKENIZER.token_to_id("!")].clone()
        assert torch.equal(model.state_dict()[name], weight.bfloat16().float())


def test_teacher_mask_is_within_student_mask() -> None:
    part = _canvases([30] * 60 + [15] * 60 + [6] * 60)
    student_mask, teacher_mask = distillation.nested_masks(part, _generator())
    assert (
        not (teacher_mask & ~student_mask).any()
        and (teacher_mask.sum(-1) < student_mask.sum(-1)).all()
    )
    for row, length in enumerate(part.lengths.tolist()):
        inside = torch.arange(student_mask.shape[1]) - part.start
        assert not student_mask[row][(inside < 0) | (inside >= length)].any()
    long, middle, short = student_mask.sum(-1).split(60)
    assert 12 <= int(long.min()) and int(long.max()) <= 27
    assert int(middle.max()) <= 8 and set(short.tolist()) == {2}
    assert set(teacher_mask[120:].sum(-1).tolist()) == {1}


def test_block_halves_mask_the_rest_of_the_answer() -> None:
    part = _canvases([8, 20, 32])
    halves = distillation.block_halves(part, 8, _generator())
    assert len(halves) == 2
    (first, first_half), (second, second_half) = halves
    assert not (first_half & second_half).any()
    for row, length in enumerate(part.lengths.tolist()):
        positions = (first_half | second_half)[row].nonzero().flatten() - part.start
        begin = int(positions[0])
        assert (
            begin % 8 == 0 and begin < length and positions.tolist() == [*range(begin, begin + 8)]
        )
        assert first_half[row].sum() == second_half[row].sum() == 4
        for mask, half in ((first, first_half), (second, second_half)):
            assert mask[row, part.start + begin + 8 :].all()
            assert not mask[row, : part.start + begin].any()
            assert torch.equal(mask[row] & (first_half | second_half)[row], half[row])


def test_consistency_loss_weights_divergence_and_cross_entropy() -> None:
    student, teacher, part = _model(1), _model(2), _canvases([12, 25])
    recipe = DistillationRecipe("cd4lm")
    found = distillation.dscd(student, teacher, [part], 0.0, recipe, _generator())
    student_mask, teacher_mask = distillation.nested_masks(part, _generator())
    student_logits = without_mask(student(part.tokens.masked_fill(student_mask, MASK_ID)))
    teacher_logits = without_mask(teacher(part.tokens.masked_fill(teacher_mask, MASK_ID)))
    p, q = (
        (teacher_logits[teacher_mask] / 2).softmax(-1),
        (student_logits[teacher_mask] / 2).softmax(-1),
    )
    divergence = torch.where(p > 0, p * (p.clamp(min=1e-30) / q.clamp(min=1e-30)).log(), 0.0)
    cross_entropy = (
        -student_logits.log_softmax(-1)[student_mask]
        .gather(1, part.tokens[student_mask][:, None])
        .mean()
    )
    expected = 0.9 * 4 * divergence.sum(-1).mean().clamp(max=5) + 0.1 * cross_entropy.clamp(max=5)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    same_model = distillation.dscd(student, student, [part], 0.0, recipe, _generator())
    assert float(same_model.detach()) < float(found.detach())


def test_certainty_loss_applies_only_to_right_predictions() -> None:
    model, part = _model(3), _canvases([16])
    with torch.no_grad():
        plain = distillation.certainty(
            model, [part], DistillationRecipe("dparallel", certainty=0.0), _generator()
        )
        forced = distillation.certainty(
            model, [part], DistillationRecipe("dparallel"), _generator()
        )
    assert torch.equal(plain, forced)  # a random model has no right predictions
    right = _canvases([16])
    for mask, half in distillation.block_halves(right, 8, _generator()):
        with torch.no_grad():
            predictions = without_mask(model(right.tokens.masked_fill(mask, MASK_ID))).argmax(-1)
        right.tokens[half] = predictions[half]
        break
    with torch.no_grad():
        plain = distillation.certainty(
            model, [right], DistillationRecipe("dparallel", certainty=0.0), _generator()
        )
        forced = distillation.certainty(
            model, [right], DistillationRecipe("dparallel"), _generator()
        )
    assert float(forced) > float(plain)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", distillation.METHODS)
def test_distillation_writes_a_changed_checkpoint_reproducibly(
    method: str, folder: Path, tmp_path: Path
) -> None:
    recipe = DistillationRecipe(method, steps=3, batch=4, rate=3e-3, canvas=8)
    losses = distil(folder, tmp_path / "new", recipe)
    model, before = open_teacher(tmp_path / "new").model, open_teacher(folder).model
    head = "transformer.ff_out.weight"
    assert not torch.equal(model.state_dict()[head], before.state_dict()[head])
    assert len(losses) == 3 and distil(folder, tmp_path / "again", recipe) == losses


@pytest.mark.parametrize("method", distillation.METHODS)
def test_distillation_loss_decreases(method: str) -> None:
    student, teacher, part = _model(1), _model(2), _canvases([12, 25])
    recipe = DistillationRecipe(method)
    optimizer = torch.optim.Adam(student.parameters(), 3e-3)
    losses = []
    for _ in range(15):
        if method == "cd4lm":
            loss = distillation.dscd(student, teacher, [part], 0.5, recipe, _generator())
        elif method == "duo":
            loss = distillation.closer(student, teacher, [part], 4, _generator())
        else:
            loss = distillation.certainty(student, [part], recipe, _generator())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def test_invalid_recipes_are_rejected() -> None:
    with pytest.raises(InvalidRequestError, match="no distillation 'x'"):
        DistillationRecipe("x")
    with pytest.raises(InvalidRequestError, match="within the canvas"):
        DistillationRecipe("cd4lm", block=64)


def test_filter_examples_come_from_the_oracle(folder: Path) -> None:
    prompts = [TOKENIZER.encode(text).ids for text in ("copy Ada Ben:", "sort Mia Leo:", "1+2=")]
    with LLM(folder) as llm:
        filter_examples = filters.collect_examples(llm, prompts, 8, 4)
    assert (
        filter_examples.confidences.shape
        == filter_examples.agrees.shape
        == filter_examples.masked.shape
    )
    assert filter_examples.confidences.shape[1] == 4
    assert (filter_examples.confidences[filter_examples.masked == 0] == 1).all()
    assert ((filter_examples.confidences > 0) & (filter_examples.confidences <= 1)).all()
    assert (filter_examples.masked.sum(-1) > 0).all()
    # Every block starts with four masks, and each of the three answers has two blocks.
    assert int((filter_examples.masked.sum(-1) == 4).sum()) >= 6


def test_filter_trains_and_round_trips(tmp_path: Path, folder: Path) -> None:
    found = filters.train_filter(folder, tmp_path / "f", prompts=30, canvas=8, block=4, epochs=400)
    assert found["rows"] > 20 and 0 <= found["precision"] <= 1
    decoder = f"learn2pd:filter={tmp_path / 'f'}"
    with LLM(folder) as llm:
        answer = llm.generate("copy Ada Ben:", decoder=decoder, max_tokens=8, ignore_eos=True)
        assert len(answer.tokens) == 8
        with pytest.raises(CheckpointError, match="filter for learn2pd .*: has no tensor"):
            wrong = f"learn2pd:filter={folder / 'model.safetensors'}"
            llm.generate("a", decoder=wrong, max_tokens=8)
    with LLM("tiny-diffusion") as llm, pytest.raises(InvalidRequestError, match="another model"):
        llm.generate("a", decoder=decoder, max_tokens=8)
    with pytest.raises(InvalidRequestError, match="do not divide"):
        filters.train_filter(folder, tmp_path / "f", canvas=8, block=3)
    with pytest.raises(InvalidRequestError, match="have 8 positions; block=4 does not fit"):
        filters.train_filter("tiny-blocks", tmp_path / "f", block=4)
    with pytest.raises(InvalidRequestError, match="that have a mask token"):
        filters.train_filter("tiny-autoregressive", tmp_path / "f")


def test_a_filter_for_a_model_with_blocks_learns_from_its_blocks(tmp_path: Path) -> None:
    """Also where the prompt fills a part of the first block; answers end where a block does."""
    prompts = [TOKENIZER.encode(text).ids for text in ("copy Ada Ben:", "sort Mia Leo:", "1+2=")]
    with LLM("tiny-blocks", threads=1) as llm:
        examples = filters.collect_examples(llm, prompts, 12, 8)
    opened = [8 - len(prompt) % 8 for prompt in prompts]
    masks = examples.masked.sum(-1).tolist()
    assert all(masks.count(size) >= opened.count(size) for size in opened)
    assert max(masks) == 8 and (examples.confidences[examples.masked == 0] == 1).all()
    found = filters.train_filter(
        "tiny-blocks", tmp_path / "f", prompts=24, canvas=16, epochs=300, seed=1
    )
    assert found["precision"] >= found["agreeing"] > 0
    with LLM("tiny-blocks", threads=1) as llm:
        for options in ("", ",cache=block", ",foresee_end=false"):
            decoder = f"learn2pd:filter={tmp_path / 'f'}{options}"
            answer = llm.generate("copy Ada Ben:", decoder=decoder, max_tokens=32)
            assert answer.text.strip() == "Ada Ben", options


def test_filter_separates_high_from_low_confidence() -> None:
    """With examples in which a prediction agrees exactly if its confidence is above one half."""
    torch.manual_seed(0)
    confidence = torch.rand(400, 4)
    filter_examples = filters.FilterExamples(
        confidence, (confidence > 0.5).float(), torch.ones(400, 4)
    )
    network = filters.fit(filter_examples, torch.arange(400), 600, 3e-2, 0)
    is_final = network(torch.tensor([[0.9, 0.1, 0.8, 0.2]])).sigmoid() > 0.5
    assert is_final.tolist() == [[True, False, True, False]]
