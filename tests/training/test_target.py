"""A target in torch: states and texts are those of the model, by transformers' implementation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from anydecode.certification.chi_square import fit  # noqa: E402
from anydecode.certification.tiny import tiny_network  # noqa: E402
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError  # noqa: E402
from anydecode.models.families import load_network  # noqa: E402
from anydecode.models.loading import load_checkpoint  # noqa: E402
from anydecode.models.network import GatedMlp, Network  # noqa: E402
from anydecode.training.drafters import RECIPES, find_recipe  # noqa: E402
from anydecode.training.target import TorchTarget, Turn, check_plain, open_target  # noqa: E402

TEXTS = [[5, 9, 30, 2, 39], [7, 8, 9]]


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.fixture(scope="module")
def target(model: Path) -> TorchTarget:
    checkpoint = load_checkpoint(model)
    assert checkpoint.tokenizer is not None
    return TorchTarget(load_network(checkpoint), checkpoint.tokenizer, "cpu", num_slots=3)


def logits_of(reference: Any, text: list[int]) -> Any:
    """The logits behind each token of a text."""
    with torch.no_grad():
        return reference(torch.tensor([text])).logits[0]


def test_states_are_those_of_the_layers(reference: Any, target: TorchTarget) -> None:
    for text in TEXTS:
        with torch.no_grad():
            expected = reference(torch.tensor([text]), output_hidden_states=True).hidden_states
        found = target.states(torch.tensor([[*text, 0, 0]]), [0, 2, 5])
        for states, number in zip(found, (0, 2, 5, 6), strict=True):
            scale = expected[number].abs().max()
            error = (states[:, : len(text)] - expected[number]).abs().max() / scale
            assert error < 0.03
        wrong = target.states(torch.tensor([[*text]]), [3])[0]
        assert (wrong - expected[2]).abs().max() / expected[2].abs().max() > 0.03


def test_greedy_texts_are_the_most_probable_tokens(reference: Any, target: TorchTarget) -> None:
    """More texts than slots, of different lengths: a slot takes the next text where one ends."""
    turns = [Turn([*TEXTS[i % 2], i], 4 + i % 3, 0.0) for i in range(8)]
    for turn, text in zip(turns, target.write(turns, [set()], 0), strict=True):
        size = len(turn.given)
        assert text[:size] == turn.given and len(text) == size + turn.max_tokens
        rows = logits_of(reference, text)[size - 1 : -1]
        chosen = rows[torch.arange(len(rows)), torch.tensor(text[size:])]
        # In bfloat16, the second of two nearly equal logits may be the larger one.
        assert (rows.amax(-1) - chosen).max() < 0.02 * rows.std()


def test_texts_end_behind_their_ends(target: TorchTarget) -> None:
    turns = [Turn(TEXTS[i % 2], 40, 1.0, i % 2) for i in range(20)]
    ends = [{3, 30}, set(range(8, 40))]
    written = target.write(turns, ends, 1)
    is_cut = False
    for turn, text in zip(turns, written, strict=True):
        *before, last = text[len(turn.given) :]
        assert not ends[turn.ends].intersection(before)
        assert last in ends[turn.ends] or len(before) == 39
        is_cut |= len(before) < 39
    assert is_cut


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_p"), [(9.0, 1.0), (14.0, 0.6)])
def test_samples_follow_the_distribution(
    reference: Any, target: TorchTarget, temperature: float, top_p: float
) -> None:
    count = 4000
    target.num_slots = 500
    texts = target.write([Turn(TEXTS[0], 1, temperature)] * count, [set()], 2, top_p)
    target.num_slots = 3
    p = (logits_of(reference, TEXTS[0])[-1] / temperature).softmax(-1).double().numpy()
    order = np.argsort(-p)
    kept = order[: np.searchsorted(p[order].cumsum(), top_p) + 1]
    p = np.where(np.isin(np.arange(len(p)), kept), p, 0.0)

    def fits(p: np.ndarray) -> bool:
        expected = {(token,): float(share) for token, share in enumerate(p / p.sum())}
        return fit([(text[-1],) for text in texts], expected).passed

    assert fits(p)
    assert not fits(p**1.3) and not fits(p**0.7)  # other temperatures


def test_texts_beyond_the_positions_are_refused(target: TorchTarget) -> None:
    with pytest.raises(InvalidRequestError, match="256 positions: give fewer --tokens"):
        target.write([Turn([1, 2], 255, 0.0)], [set()], 0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_everything_of_a_drafter_moves_to_the_device(recipe: str, model: Path) -> None:
    network = load_network(load_checkpoint(model))
    learner = find_recipe(recipe)(network, [1, 2, 3], find_recipe(recipe).default_depth, 0)
    learner.to("meta")
    for module in learner.modules():
        tensors = [*module.parameters(), *module.buffers()]
        for value in vars(module).values():
            held = value.keywords.values() if isinstance(value, partial) else [value]
            tensors += [one for one in held if isinstance(one, torch.Tensor)]
        assert all(tensor.is_meta for tensor in tensors)


@pytest.mark.slow
def test_prompts_are_chats(target: TorchTarget) -> None:
    prompts = target.prompts(10, 3)
    assert prompts
    for prompt in prompts:
        text = target.tokenizer.decode(prompt)
        assert text.startswith("u") and text.endswith("b")
        assert len(text) > 8 and text.count("b") == 1  # the end of a turn stands once
    assert prompts == target.prompts(10, 3) != target.prompts(10, 4)


def test_other_targets_and_devices_are_refused(model: Path) -> None:
    network = tiny_network(layers=2)
    network.spec = replace(network.spec, logit_scale=2.0)
    with pytest.raises(UnsupportedCombinationError, match="models of the kind of Llama"):
        check_plain(network)
    checkpoint = load_checkpoint(model)
    network = load_network(checkpoint)
    layer = network.weights.layers[1]
    assert layer.output is not None and isinstance(layer.mlp, GatedMlp)
    ones = np.ones(64, np.float32)
    biased = [
        replace(layer, output=replace(layer.output, bias=ones)),
        replace(layer, mlp=replace(layer.mlp, down=replace(layer.mlp.down, bias=ones))),
        replace(layer, query_norm=ones),
    ]
    for other in biased:
        layers = [other, *network.weights.layers[1:]]
        with pytest.raises(UnsupportedCombinationError, match="models of the kind of Llama"):
            check_plain(Network(network.spec, replace(network.weights, layers=layers)))
    with pytest.raises(UnsupportedCombinationError, match="models of the kind of Llama"):
        check_plain(Network(network.spec, replace(network.weights, head_bias=ones[:40])))
    check_plain(network)
    with pytest.raises(InvalidRequestError, match="has no tokenizer"):
        open_target(network, None, "m", "cpu")
    for device in ("gpu", "cuda:77"):
        with pytest.raises(InvalidRequestError, match=f"device '{device}': "):
            open_target(network, checkpoint.tokenizer, "m", device)
