"""Training of the small models: data, objectives, checkpoints that the engine loads, and resumed
runs.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.loading import resolve
from anydecode.models.loading.names import base_model_name
from anydecode.tasks.tasks import NAMES, TASKS, examples
from anydecode.training import checkpoint, denoising, objectives
from anydecode.training.data import PADDING_WEIGHT, Batch, batches
from anydecode.training.diffusion import STAGES, DiffusionRecipe, DiffusionRun
from anydecode.training.teachers import open_teacher
from anydecode.training.tokenizer import EOS_ID, MASK_ID, OWN_TOKENS, PAD_ID, build_tokenizer
from anydecode.training.transformer import Shape, Transformer

TOKENIZER = build_tokenizer()
SHAPE = Shape(TOKENIZER.get_vocab_size(), width=32, layers=2, heads=2, hidden=48)


def _model(seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(SHAPE)
    for weight in model.parameters():  # larger than at initialisation, so that predictions differ
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


def test_every_name_digit_and_separator_is_one_token_and_the_tokenizer_is_reproducible() -> None:
    assert all(len(TOKENIZER.encode(f" {name}").ids) == 1 for name in NAMES)
    assert len(TOKENIZER.encode("json name Ada age 31:").ids) == 7
    assert TOKENIZER.to_str() == build_tokenizer.__wrapped__().to_str()
    assert [TOKENIZER.id_to_token(i) for i in (PAD_ID, EOS_ID, MASK_ID)] == [
        "<|pad|>",
        "<|endoftext|>",
        "<|mdm_mask|>",
    ]


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_round_trips(text: str) -> None:
    if "<|" not in text:
        assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_batches_depend_on_seed_and_step_and_weight_answers() -> None:
    first, again, other = (batches(TOKENIZER, 20, 5, step) for step in (1, 1, 2))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert not all(
        a.tokens.shape == b.tokens.shape and torch.equal(a.tokens, b.tokens)
        for a, b in zip(first, other, strict=True)
    )
    assert sum(len(batch.tokens) for batch in first) == 20
    for batch in first:
        for tokens, weights in zip(batch.tokens.tolist(), batch.weights.tolist(), strict=True):
            end = tokens.index(EOS_ID)
            start = weights.index(1.0)
            assert 0 < start < end and set(tokens[end:]) == {EOS_ID}
            assert set(weights[:start]) == {0.0} and set(weights[start : end + 1]) == {1.0}
            assert all(weight == pytest.approx(PADDING_WEIGHT) for weight in weights[end + 1 :])


def test_masks_are_complementary_in_the_answer() -> None:
    answer = torch.arange(40).repeat(400, 1) >= 10
    first, second = objectives.complementary_masks(answer, torch.Generator().manual_seed(0))
    assert not (first & ~answer).any() and not (second & ~answer).any()
    whole = (first ^ second).eq(answer).all(-1)
    assert 0.6 < whole.float().mean() < 0.9  # the others are masked block by block
    for one, two in zip(first[~whole][:, 10:], second[~whole][:, 10:], strict=True):
        kinds = (one.int() + two.int()).tolist()  # 0 before the block, 1 in it, 2 after it
        assert kinds == sorted(kinds)
    rates = first[whole][:, 10:].float().mean(-1)
    assert rates.mean() == pytest.approx(0.5, abs=0.05) and rates.std() > 0.2


def test_losses_are_weighted_means_over_predicted_tokens() -> None:
    model = _model()
    tokens = torch.tensor([[5, 6, 7, 8, EOS_ID, EOS_ID]])
    weights = torch.tensor([[0.0, 0.0, 1.0, 1.0, 1.0, 0.1]])
    loss, total = objectives.causal_loss(model, Batch(tokens, weights))
    logits = objectives.without_mask(model(tokens, causal=True))[0].log_softmax(-1)
    logits = logits.detach()
    expected = -sum(float(weights[0, i] * logits[i - 1, tokens[0, i]]) for i in range(2, 6))
    assert float(total) == pytest.approx(3.1)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)

    seed = torch.Generator().manual_seed(3)
    masks = objectives.complementary_masks(weights > 0, torch.Generator().manual_seed(3))
    loss, total = objectives.diffusion_loss(model, Batch(tokens, weights), seed)
    expected, mass = 0.0, 0.0
    for mask in masks:
        logits = objectives.without_mask(model(tokens.masked_fill(mask, MASK_ID)))[0]
        for i in mask[0].nonzero().flatten().tolist():
            expected -= float(weights[0, i] * logits[i].log_softmax(-1)[tokens[0, i]])
            mass += float(weights[0, i])
    assert float(total) == pytest.approx(mass)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert math.isinf(float(objectives.without_mask(torch.zeros(SHAPE.vocab))[MASK_ID]))


def test_uniform_noise_is_learned_from_all_tokens_of_the_answer() -> None:
    """Also where there is no noise, and with random tokens in place of masks."""
    model = _model()
    tokens = torch.tensor([[5, 6, 7, 8, EOS_ID, EOS_ID]])
    weights = torch.tensor([[0.0, 0.0, 1.0, 1.0, 1.0, 0.1]])
    seed = torch.Generator().manual_seed(3)
    loss, total = objectives.uniform_loss(model, Batch(tokens, weights), seed)
    again = torch.Generator().manual_seed(3)
    masks = objectives.complementary_masks(weights > 0, again)
    drawn = torch.randint(SHAPE.vocab - 1, (2, 6), generator=again)
    expected = 0.0
    for mask, noise in zip(masks, drawn, strict=True):
        canvas = [
            int(token) if not hidden else int(other) + (int(other) >= MASK_ID)
            for token, hidden, other in zip(tokens[0], mask[0], noise, strict=True)
        ]
        logits = objectives.without_mask(model(torch.tensor([canvas])))[0].log_softmax(-1)
        expected -= sum(float(weights[0, i] * logits[i, tokens[0, i]]) for i in range(2, 6))
    assert float(total) == pytest.approx(2 * 3.1)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)


def test_random_tokens_are_all_but_the_mask() -> None:
    drawn = objectives.random_tokens((4000,), 9, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == {*range(9)} - {MASK_ID}


def test_denoising_of_random_tokens_ends_with_the_most_probable() -> None:
    model, prompt = _model(), [7, 8, 9]
    [answer] = denoising.denoise_uniform(model, [prompt], 5, 1, seed=4)
    start = objectives.random_tokens((1, 5), SHAPE.vocab, torch.Generator().manual_seed(4))
    logits = objectives.without_mask(model(torch.tensor([[*prompt, *start[0].tolist()]])))
    assert answer == logits[0, 3:].argmax(-1).tolist()
    [longer] = denoising.denoise_uniform(model, [prompt], 5, 6, seed=4)
    assert len(longer) == 5 and longer != answer


def test_a_model_of_random_tokens_is_trained_and_decoded(tmp_path: Path) -> None:
    recipe = DiffusionRecipe(steps=6, batch=6, warmup=2, checks=1, noise="uniform")
    run = DiffusionRun(tmp_path, recipe, SHAPE)
    run.train()
    assert json.loads((tmp_path / "log.json").read_text())["recipe"]["noise"] == "uniform"
    with LLM(run.checkpoint, threads=1) as llm:
        for decoder in ("duo:steps=4", "diffusion-gemma:steps=4"):
            answer = llm.generate("copy Ada Ben:", decoder=decoder, max_tokens=8, ignore_eos=True)
            assert len(answer.tokens) == 8 and MASK_ID not in answer.tokens
    with pytest.raises(InvalidRequestError, match="choose from mask, uniform"):
        DiffusionRecipe(steps=1, noise="gaussian")


def test_causal_attention_excludes_later_tokens() -> None:
    model, tokens = _model(), torch.randint(3, SHAPE.vocab, (1, 12))
    changed = tokens.clone()
    changed[0, 8] = 3 if tokens[0, 8] != 3 else 4
    same = model(tokens, causal=True)[0, :8], model(changed, causal=True)[0, :8]
    assert torch.allclose(*same, atol=1e-6)
    assert not torch.allclose(model(tokens)[0, :8], model(changed)[0, :8], atol=1e-3)


def test_threshold_sets_the_passes_of_denoising() -> None:
    model, prompts = _model(), [[7, 8, 9], [10, 11]]
    slow, passes = denoising.denoise(model, prompts, 6, 1.1)
    assert passes == 6 and all(len(answer) == 6 and MASK_ID not in answer for answer in slow)
    fast, passes = denoising.denoise(model, prompts, 6, 0.0)
    assert passes == 1
    logits = objectives.without_mask(model(torch.tensor([[7, 8, 9, *[MASK_ID] * 6]])))
    assert fast[0] == logits[0, 3:].argmax(-1).tolist()


def test_engine_loads_an_autoregressive_checkpoint(tmp_path: Path) -> None:
    model = _model()
    checkpoint.save_llama(tmp_path, model.state_dict(), SHAPE, TOKENIZER)
    rounded = {name: w.bfloat16().float() for name, w in model.state_dict().items()}
    model.load_state_dict(rounded)
    prompt = TOKENIZER.encode("reverse Ada Ben Carl:").ids
    [expected] = denoising.continue_greedily(model, [prompt], 8)
    with LLM(tmp_path, dtype="float32", threads=1) as llm:
        found = llm.generate(prompt, max_tokens=8)
    assert found.tokens == expected[: len(found.tokens)] and found.tokens


def test_engine_loads_a_diffusion_checkpoint_and_decodes_the_same(tmp_path: Path) -> None:
    model = _model()
    checkpoint.save_llada(tmp_path, model.state_dict(), SHAPE, TOKENIZER)
    teacher = open_teacher(tmp_path)
    model, special = teacher.model, teacher.special
    assert special == OWN_TOKENS
    prompts = [teacher.tokenizer.encode(text) for text in ("reverse Ada Ben Carl:", "1+2=")]
    expected, passes = denoising.denoise(model, prompts, 10, 1.1)
    with LLM(tmp_path, dtype="float32", threads=1) as llm:
        assert not llm.model.spec.causal and llm.tokenizer.mask_id == MASK_ID
        found = llm.generate(prompts, max_tokens=10, ignore_eos=True, decoder="llada:block=0")
    assert [answer.tokens for answer in found] == expected
    assert [answer.stats.passes for answer in found] == [passes, passes]


def test_resumed_run_reaches_the_same_weights(tmp_path: Path) -> None:
    recipe = DiffusionRecipe(steps=8, batch=6, warmup=2, checks=0)
    whole = DiffusionRun(tmp_path / "whole", recipe, SHAPE)
    whole.train()
    assert whole.stage == 1 and whole.step == 8

    def stop(run: DiffusionRun) -> None:
        if run.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DiffusionRun(tmp_path / "cut", recipe, SHAPE).train(stop)
    again = DiffusionRun(tmp_path / "cut", recipe, SHAPE)
    assert again.step == 5 and again.stage == 1
    again.train()
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name])
        assert torch.equal(whole.average[name], again.average[name])
    for stage in STAGES:
        config = json.loads((tmp_path / "cut" / stage / "config.json").read_text())
        assert config["model_type"] == {"autoregressive": "llama", "diffusion": "llada"}[stage]
    with pytest.raises(InvalidRequestError, match="another shape"):
        DiffusionRun(tmp_path / "cut", recipe)


def test_training_reduces_the_loss(tmp_path: Path) -> None:
    run = DiffusionRun(
        tmp_path, DiffusionRecipe(steps=24, batch=8, warmup=2, rate=1e-2, checks=0), SHAPE
    )
    losses: list[float] = []
    run.train(lambda run: losses.append(float(run.model.transformer["ff_out"].weight.std())))
    recorded = [entry["loss"] for entry in run.history if "loss" in entry]
    assert recorded and recorded[-1] < math.log(SHAPE.vocab) - 0.5
    assert losses[-1] != losses[0]


@pytest.mark.parametrize("budget", [{}, {"minutes": 1.0, "steps": 1}, {"steps": 0}])
def test_budget_is_either_minutes_or_steps(budget: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match="minutes or steps"):
        DiffusionRecipe(**budget)  # type: ignore[arg-type]


def test_accuracy_reads_answers_up_to_eos() -> None:
    questions = list(examples("copy", 2, length=3))
    answers = [TOKENIZER.encode(example.answer).ids for example in questions]
    padded = [answers[0] + [EOS_ID, 50, EOS_ID], answers[1][:-1]]
    assert denoising.accuracy(questions, padded, TOKENIZER) == 0.5


@pytest.mark.slow
def test_command_trains_and_writes_the_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from anydecode.cli.main import run

    out, plot = tmp_path / "run", tmp_path / "curve.svg"
    arguments = ["train", "diffusion", "--batch", "3", "--threads", "1", "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        run([*arguments, "--steps", "2", "--plot", str(plot), "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(out / "diffusion") and set(found["accuracy"]) == {*TASKS, "all"}
    assert "loss per token" in plot.read_text()
    with pytest.raises(SystemExit) as ended:
        run([*arguments, "--steps", "0"])
    assert ended.value.code == 2 and "more than 0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.model
def test_bundled_adapter_denoises(default_model_path: Path, tmp_path: Path) -> None:
    folder = resolve("smollm2-135m-blocks")
    assert (folder / "README.md").is_file() and base_model_name(folder) == "smollm2-135m-instruct"
    copy = shutil.copytree(folder, tmp_path / "adapter")
    config = json.loads((copy / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(default_model_path)  # the path differs between machines
    (copy / "adapter_config.json").write_text(json.dumps(config))
    questions = list(examples("replace-random", 6, seed=5, length=3))
    with LLM(copy, threads=1) as llm:
        assert not llm.model.spec.causal
        answers = llm.generate([e.prompt for e in questions], max_tokens=32, decoder="sdar")
    right = [e.is_right(answer.text) for e, answer in zip(questions, answers, strict=True)]
    assert sum(right) >= 1


@pytest.mark.parametrize(
    "name",
    [
        "tiny-diffusion",
        "tiny-autoregressive",
        "tiny-blocks",
        pytest.param("tiny-uniform", marks=pytest.mark.slow),
    ],
)
def test_bundled_models_load_by_name_and_answer(name: str) -> None:
    folder = resolve(name)
    assert "assets" in folder.parts and (folder / "README.md").is_file()
    assert sum(file.stat().st_size for file in folder.parent.rglob("*.*")) < 24_000_000
    decoders = {"tiny-diffusion": "fast-dllm", "tiny-blocks": "sdar", "tiny-uniform": "duo"}
    decoder = decoders.get(name, "autoregressive")
    questions = list(examples("copy", 12, seed=5))
    with LLM(name, threads=1) as llm:
        answers = llm.generate([e.prompt for e in questions], max_tokens=32, decoder=decoder)
        assert llm.model.spec.causal == (name == "tiny-autoregressive")
    right = [e.is_right(answer.text) for e, answer in zip(questions, answers, strict=True)]
    assert sum(right) >= (6 if name == "tiny-uniform" else 10)
