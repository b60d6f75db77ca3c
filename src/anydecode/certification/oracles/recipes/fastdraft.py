"""Oracle of fastdraft (arXiv:2411.11055): the shape of the draft model, what each part of a run
learns and with which loss, and the decoding with the draft model."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.recipes.draft_texts import (
    TARGET,
    Pair,
    distributions,
    drafted_text,
    log_loss,
    opened,
)
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from anydecode.models.opening import check_torch
from anydecode.training.recipes.draft_recipe import DraftRecipe


def surprise(network: Network, pairs: Sequence[Pair]) -> float:
    """By how many standard deviations the logarithms of the probabilities of the answers' tokens
    differ in sum from what samples at temperature 1 have."""
    total = variance = 0.0
    for prompt, answer in pairs:
        rows = distributions(network, [*prompt, *answer][:-1])[len(prompt) - 1 :]
        for p, token in zip(rows, answer, strict=True):
            logs = np.log(p)
            mean = float(p @ logs)
            total += logs[token] - mean
            variance += float(p @ logs**2) - mean**2
    return total / math.sqrt(variance)


@oracle_test("fastdraft")
def pretrained() -> Iterator[Check]:
    """A run of two parts."""
    check_torch("the training")
    from anydecode.training.draft_model import DraftModelRun, DraftOptions, draft_loss

    checkpoint = load_checkpoint(TARGET)
    default = catalogue.build("fastdraft")
    assert isinstance(default, DraftRecipe)
    yield Check(
        "the default build is that of the card",
        (default.layers, default.width, default.pretraining) == (4, 256, 0.5),
    )
    recipe = catalogue.build("fastdraft", layers=2, width=96)
    assert isinstance(recipe, DraftRecipe)
    with tempfile.TemporaryDirectory() as name:
        texts = Path(name) / "texts.txt"
        texts.write_text("copy Ada Ben Carl: Ada Ben Carl\nreverse Dan Eve: Eve Dan\n")
        settings = DraftOptions(
            steps=6, answers=64, tokens=12, batch=2, rate=1e-2, draft=recipe, seed=2
        )
        run = DraftModelRun(checkpoint, Path(name) / "run", settings, texts=texts)
        run.measure()
        config = load_checkpoint(run.draft_folder).config
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
        shape = [config[name] for name in names]
        expected = [2, 96, 256, checkpoint.config["vocab_size"]]  # 8/3 of 96
        yield Check(
            "the draft model has the given layers and width, and MLPs 8/3 as wide",
            shape == expected,
            str(shape),
        )
        yield Check("the embedding is the head", config["tie_word_embeddings"])
        assert checkpoint.tokenizer is not None
        lines = texts.read_text().splitlines()
        encoded = [checkpoint.tokenizer.encode(line, special=False) for line in lines]
        rows, _ = run.step_rows()
        network = opened(run.draft_folder)
        for part, pairs in (("texts", rows), ("answers", run.pairs[:3])):
            loss = float(draft_loss(run.draft, run.target, pairs, "cross-entropy").detach())
            exact = log_loss(network, pairs)
            yield Check(
                f"the loss of {part} is that of their tokens",
                math.isclose(loss, exact, rel_tol=2e-3),
                f"{loss:.5f} {exact:.5f}",
            )
        z = surprise(opened(TARGET), run.pairs)
        yield Check(
            "the answers are the target's samples at temperature 1",
            abs(z) < 3,
            f"{z:.2f} standard deviations from the mean",
        )
        learned, found = [], []

        def observe(*_: object) -> None:
            if run.step in (0, 3, 6):
                run.save()
                draft = opened(run.draft_folder)
                found.append([log_loss(draft, part) for part in (rows, run.pairs[:8])])
            learned.append(run.step_rows())

        observe()
        run.train(observe)
        yield Check(
            "the first half learns the texts",
            all(
                name == "cross-entropy" and not prompt and answer in encoded
                for texts, name in learned[:3]
                for prompt, answer in texts
            ),
        )
        yield Check(
            "the second half learns the target's answers",
            all(
                name == "cross-entropy" and pair in run.pairs
                for pairs, name in learned[3:6]
                for pair in pairs
            ),
        )
        first, middle, last = found
        yield Check(
            "training lowers the loss of texts, then that of answers",
            middle[0] < first[0] and last[1] < middle[1],
            str(found),
        )
        yield drafted_text(run.draft_folder, [prompt for prompt, _ in run.pairs[:3]], max_tokens=12)
