"""Drafters of every kind are refused, in one line with both sizes, by a target of another
vocabulary, hidden size or, if their files tell it, number of layers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anydecode import LLM
from anydecode.certification.tiny import longspec_checkpoint
from anydecode.errors import CheckpointError, UnsupportedCombinationError
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from draft_folders import changed, drafter_folder, set_keys, target_folder, without
from fuzz.drafters import DECODERS, write_drafters
from gguf_models import HIDDEN, LAYERS, VOCAB

Folders = dict[str, Path]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Drafters by layout; PARD's are models of their own, which need no states."""
    pytest.importorskip("torch")  # writes one file
    root = tmp_path_factory.mktemp("drafters")
    model, found = write_drafters(root)
    own = longspec_checkpoint(load_network(load_checkpoint(model)))
    own = changed(own, set_keys(vocab_size=VOCAB))
    found["longspec"] = drafter_folder(root / "longspec", own, "model.safetensors")
    del found["pard"]
    return found


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("targets")
    return {
        f"{key} {size}": target_folder(root / f"{key}-{size}", **{key: size})
        for key, sizes in {
            "vocab_size": (VOCAB - 7, VOCAB + 7),
            "hidden_size": (HIDDEN - 32, HIDDEN + 32),
            "num_hidden_layers": (LAYERS - 1, LAYERS + 2),
        }.items()
        for size in sizes
    }


def refusal(target: Path, drafter: Path) -> str:
    with pytest.raises(CheckpointError) as refused, LLM(target, draft=drafter, threads=1):
        pass
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("layout", [*(one for one in DECODERS if one != "pard"), "longspec"])
def test_sizes_that_do_not_fit_are_named(layout: str, drafters: Folders, targets: Folders) -> None:
    for key, own in (("vocab_size", VOCAB), ("hidden_size", HIDDEN)):
        for name, target in targets.items():
            if not name.startswith(key):
                continue
            numbers = {
                int(number) for number in re.findall(r"\d+", refusal(target, drafters[layout]))
            }
            # Where two states are concatenated, the message may have the shape of their matrix.
            assert {own, 2 * own, 3 * own} & numbers and int(name.split()[1]) in numbers


@pytest.mark.parametrize("layout", ["dflash", "dspark"])
def test_the_number_of_layers_of_the_target_is_checked_where_a_config_has_it(
    layout: str, drafters: Folders, targets: Folders
) -> None:
    for size in (LAYERS - 1, LAYERS + 2):
        message = refusal(targets[f"num_hidden_layers {size}"], drafters[layout])
        assert f"num_target_layers is {LAYERS}; allowed is {size}, as the target's" in message


def test_heads_without_tensors_of_tokens_need_the_number_in_their_config(
    drafters: Folders, tmp_path: Path
) -> None:
    """Wrong twin: with no list of tokens, nothing else tells the vocabulary."""
    whole = load_checkpoint(drafters["blockwise"])
    for change, message in (
        (set_keys(), f"vocab_size is {VOCAB}; allowed is {VOCAB + 7}, as the target's"),
        (set_keys(vocab_size=None), "the config lacks 'vocab_size'"),
    ):
        heads = changed(changed(whole, without("token_map")), change)
        folder = drafter_folder(tmp_path / str(len(message)), heads, "model.safetensors")
        target = target_folder(tmp_path / f"{len(message)}-target", vocab_size=VOCAB + 7)
        assert message in refusal(target, folder)


def test_a_draft_model_without_some_of_the_tokens_is_refused(tmp_path: Path) -> None:
    """The tokenizer has 26 tokens; the heads of both models may have more rows."""
    target = target_folder(tmp_path / "target")
    options = {"max_tokens": 2, "ignore_eos": True}
    for size, is_refused in ((20, True), (VOCAB - 7, False)):
        draft = target_folder(tmp_path / f"draft-{size}", vocab_size=size)
        with LLM(target, draft=draft, threads=1) as llm:
            assert llm.generate([5, 6], decoder="auto", **options).draft_models == (
                [] if is_refused else [draft.name]
            )
            if not is_refused:
                continue
            with pytest.raises(
                UnsupportedCombinationError, match="it has 20 tokens, the target 26"
            ):
                llm.generate([5, 6], decoder="speculative-sampling", **options)
