"""Distillations and the commit filter: their masks, their losses, and that they learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.training import checkpoint, distillation, filters
from anydecode.training.distillation import Canvases, Plan, distil
from anydecode.training.objectives import without_mask
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


def test_a_diffusion_checkpoint_is_read_back(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = checkpoint.load_llada(folder)
    assert model.shape == SHAPE and tokenizer.to_str() == TOKENIZER.to_str()
    for name, weight in _model().state_dict().items():
        if name == "transformer.ff_out.weight":  # what is never predicted is as unlikely as "!"
            weight[[PAD_ID, MASK_ID]] = weight[TOKENIZER.token_to_id("!")].clone()
        assert torch.equal(model.state_dict()[name], weight.bfloat16().float())
    with pytest.raises(CheckpointError, match="no masked-diffusion checkpoint"):
        checkpoint.load_llada(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mask_token_id": 7}))
    with pytest.raises(CheckpointError, match="special tokens"):
        checkpoint.load_llada(folder)


def test_the_teachers_mask_lies_within_the_students() -> None:
    part = _canvases([30] * 60 + [15] * 60 + [6] * 60)
    wide, narrow = distillation.nested_masks(part, _generator())
    assert not (narrow & ~wide).any() and (narrow.sum(-1) < wide.sum(-1)).all()
    for row, length in enumerate(part.lengths.tolist()):
        inside = torch.arange(wide.shape[1]) - part.start
        assert not wide[row][(inside < 0) | (inside >= length)].any()
    long, middle, short = wide.sum(-1).split(60)
    assert 12 <= int(long.min()) and int(long.max()) <= 27
    assert int(middle.max()) <= 8 and set(short.tolist()) == {2}
    assert set(narrow[120:].sum(-1).tolist()) == {1}


def test_a_block_is_masked_by_halves_with_all_behind_it() -> None:
    part = _canvases([8, 20, 32])
    halves = distillation.block_halves(part, 8, _generator())
    assert len(halves) == 2
    (first, counted), (second, others) = halves
    assert not (counted & others).any()
    for row, length in enumerate(part.lengths.tolist()):
        positions = (counted | others)[row].nonzero().flatten() - part.start
        begin = int(positions[0])
        assert (
            begin % 8 == 0 and begin < length and positions.tolist() == [*range(begin, begin + 8)]
        )
        assert counted[row].sum() == others[row].sum() == 4
        for mask, half in ((first, counted), (second, others)):
            assert mask[row, part.start + begin + 8 :].all()
            assert not mask[row, : part.start + begin].any()
            assert torch.equal(mask[row] & (counted | others)[row], half[row])


def test_the_consistency_loss_weighs_agreement_and_truth() -> None:
    student, teacher, part = _model(1), _model(2), _canvases([12, 25])
    plan = Plan("cd4lm")
    found = distillation.dscd(student, teacher, [part], 0.0, plan, _generator())
    wide, narrow = distillation.nested_masks(part, _generator())
    guess = without_mask(student(part.tokens.masked_fill(wide, MASK_ID)))
    known = without_mask(teacher(part.tokens.masked_fill(narrow, MASK_ID)))
    p, q = (known[narrow] / 2).softmax(-1), (guess[narrow] / 2).softmax(-1)
    apart = torch.where(p > 0, p * (p.clamp(min=1e-30) / q.clamp(min=1e-30)).log(), 0.0)
    truth = -guess.log_softmax(-1)[wide].gather(1, part.tokens[wide][:, None]).mean()
    expected = 0.9 * 4 * apart.sum(-1).mean().clamp(max=5) + 0.1 * truth.clamp(max=5)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    alike = distillation.dscd(student, student, [part], 0.0, plan, _generator())
    assert float(alike.detach()) < float(found.detach())


def test_certainty_is_forced_only_where_the_guess_is_right() -> None:
    model, part = _model(3), _canvases([16])
    with torch.no_grad():
        plain = distillation.certainty(
            model, [part], Plan("dparallel", certainty=0.0), _generator()
        )
        forced = distillation.certainty(model, [part], Plan("dparallel"), _generator())
    assert torch.equal(plain, forced)  # a random model has nothing right here
    right = _canvases([16])
    for mask, half in distillation.block_halves(right, 8, _generator()):
        with torch.no_grad():
            guesses = without_mask(model(right.tokens.masked_fill(mask, MASK_ID))).argmax(-1)
        right.tokens[half] = guesses[half]
        break
    with torch.no_grad():
        plain = distillation.certainty(
            model, [right], Plan("dparallel", certainty=0.0), _generator()
        )
        forced = distillation.certainty(model, [right], Plan("dparallel"), _generator())
    assert float(forced) > float(plain)


@pytest.mark.parametrize("method", distillation.METHODS)
def test_distillation_writes_a_changed_checkpoint_reproducibly(
    method: str, folder: Path, tmp_path: Path
) -> None:
    plan = Plan(method, steps=3, batch=4, rate=3e-3, canvas=8)
    losses = distil(folder, tmp_path / "new", plan)
    model, _ = checkpoint.load_llada(tmp_path / "new")
    before, _ = checkpoint.load_llada(folder)
    head = "transformer.ff_out.weight"
    assert not torch.equal(model.state_dict()[head], before.state_dict()[head])
    assert len(losses) == 3 and distil(folder, tmp_path / "again", plan) == losses


@pytest.mark.parametrize("method", distillation.METHODS)
def test_what_is_minimised_falls(method: str) -> None:
    student, teacher, part = _model(1), _model(2), _canvases([12, 25])
    plan = Plan(method)
    optimizer = torch.optim.Adam(student.parameters(), 3e-3)
    losses = []
    for _ in range(15):
        if method == "cd4lm":
            loss = distillation.dscd(student, teacher, [part], 0.5, plan, _generator())
        else:
            loss = distillation.certainty(student, [part], plan, _generator())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def test_bad_plans_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no distillation 'x'"):
        Plan("x")
    with pytest.raises(InvalidRequestError, match="within the canvas"):
        Plan("cd4lm", block=64)


def test_lessons_are_what_the_oracle_saw() -> None:
    model = _model()
    prompts = [TOKENIZER.encode(text).ids for text in ("copy Ada Ben:", "sort Mia Leo:", "1+2=")]
    seen = filters.lessons(model, prompts, 8, 4)
    assert seen.confidences.shape == seen.agrees.shape == seen.masked.shape
    assert seen.confidences.shape[1] == 4
    assert (seen.confidences[seen.masked == 0] == 1).all()
    assert ((seen.confidences > 0) & (seen.confidences <= 1)).all()
    assert (seen.masked.sum(-1) > 0).all()
    # Every block begins with four masks, and there are two of them to each of three answers.
    assert int((seen.masked.sum(-1) == 4).sum()) >= 6


def test_a_filter_learns_what_confidence_means_and_comes_back(tmp_path: Path, folder: Path) -> None:
    found = filters.train_filter(folder, tmp_path / "f", prompts=30, canvas=8, block=4, epochs=400)
    assert found["rows"] > 20 and 0 <= found["precision"] <= 1
    network = filters.load_filter(tmp_path / "f")
    assert network.hidden.in_features == 4
    with safe_open(str(tmp_path / "f"), framework="pt") as stored:
        assert json.loads(stored.metadata()["learn2pd"]) == {"block": 4}
    with pytest.raises(CheckpointError, match="no Learn2PD filter"):
        filters.load_filter(folder / "model.safetensors")
    with pytest.raises(InvalidRequestError, match="do not divide"):
        filters.train_filter(folder, tmp_path / "f", canvas=8, block=3)


def test_a_filter_separates_sure_from_unsure() -> None:
    """On lessons where a guess agrees exactly when its confidence is above one half."""
    torch.manual_seed(0)
    sure = torch.rand(400, 4)
    seen = filters.Lessons(sure, (sure > 0.5).float(), torch.ones(400, 4))
    network = filters.fit(seen, torch.arange(400), 600, 3e-2, 0)
    guessed = network(torch.tensor([[0.9, 0.1, 0.8, 0.2]])).sigmoid() > 0.5
    assert guessed.tolist() == [[True, False, True, False]]
