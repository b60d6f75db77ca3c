"""Oracle of scylla (arXiv:2505.07858): laws against the normal equations and against known laws,
the recommendation by its definition, and the measurements and laws of a small study."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import check_torch
from anydecode.training.recipes.scylla import ScalingRecipe

#: accepted = A + B ln(tokens) + C ln(parameters).
A, B, C = 0.5, 0.13, 0.07
GRID = [
    {"tokens": float(tokens), "parameters": 3.5e6 * layers, "layers": float(layers)}
    for layers, tokens in product((1, 2, 3), (1e4, 3e4, 1e5, 3e5))
]


def law(point: Mapping[str, float]) -> float:
    """The known law."""
    return A + B * math.log(point["tokens"]) + C * math.log(point["parameters"])


def normal_equations(
    points: Sequence[Mapping[str, float]],
    value: str = "accepted",
    variables: Sequence[str] = ("tokens", "parameters"),
) -> tuple[np.ndarray, float]:
    """The coefficients by elimination of X^T X b = X^T y, and 1 - residual / total squares."""
    x = np.array([[1, *(math.log(p[name]) for name in variables)] for p in points])
    y = np.array([p[value] for p in points])
    coefficients = np.linalg.solve(x.T @ x, x.T @ y)
    residual = sum((value - row @ coefficients) ** 2 for value, row in zip(y, x, strict=True))
    total = sum((value - y.sum() / len(y)) ** 2 for value in y)
    return coefficients, 1 - residual / total


def left_out(points: Sequence[Mapping[str, float]]) -> float:
    """The root mean square of the errors at points that a fit to the others predicts."""
    errors = []
    for number, point in enumerate(points):
        others = [other for index, other in enumerate(points) if index != number]
        b = normal_equations(others)[0]
        found = b @ [1, math.log(point["tokens"]), math.log(point["parameters"])]
        errors.append((found - point["accepted"]) ** 2)
    return math.sqrt(sum(errors) / len(errors))


@oracle_test("scylla")
def laws() -> Iterator[Check]:
    """Fits, their errors, and the recommended draft models."""
    check_torch("the training")
    from anydecode.training.scaling_law import fit_law

    recipe = catalogue.build("scylla")
    assert isinstance(recipe, ScalingRecipe)
    yield Check(
        "the default study is that of the card",
        recipe == ScalingRecipe((1, 2, 4), (8000, 16000, 32000), (1, 2, 4, 8), 4, 32000),
    )
    exact = [{**point, "accepted": law(point)} for point in GRID]
    names = ["tokens", "parameters"]
    found = fit_law(exact, "accepted", names)
    coefficients = [found.intercept, *found.slopes.values()]
    yield Check("a known law is found", np.allclose(coefficients, [A, B, C], atol=1e-9))
    yield Check("R² of a known law is 1", math.isclose(found.r_squared or 0, 1, abs_tol=1e-9))

    noise = np.random.default_rng(4).normal(0, 0.05, len(GRID))
    noisy = [
        {**point, "accepted": law(point) + error} for point, error in zip(GRID, noise, strict=True)
    ]
    found = fit_law(noisy, "accepted", names)
    expected, r_squared = normal_equations(noisy)
    coefficients = [found.intercept, *found.slopes.values()]
    yield Check(
        "noise: the coefficients solve the normal equations of least squares",
        np.allclose(coefficients, expected),
    )
    assert found.r_squared is not None and found.left_out_error is not None
    yield Check(
        "noise: R² is 1 - (residual sum of squares) / (total sum of squares)",
        found.r_squared < 0.99 and math.isclose(found.r_squared, r_squared, abs_tol=1e-9),
        f"{found.r_squared:.4f}",
    )
    yield Check(
        "noise: the error at a left-out point is that of a fit to the other points",
        math.isclose(found.left_out_error, left_out(noisy), rel_tol=1e-6),
    )
    point = {"tokens": 1e7, "parameters": 7e6}
    predicted = expected @ [1, math.log(1e7), math.log(7e6)]
    yield Check(
        "a point outside the grid is extrapolated by the logarithms",
        math.isclose(found.predict(point), predicted, rel_tol=1e-9),
    )
    yield from recommendation()
    yield from study()


def recommendation() -> Iterator[Check]:
    """The draft model of the highest predicted throughput, for each batch."""
    from anydecode.training.scaling import recommend
    from anydecode.training.scaling_law import fit_law

    points = [{**point, "accepted": law(point)} for point in GRID]
    found = fit_law(points, "accepted", ["tokens", "parameters"])
    #: Tokens per second by batch, of no draft model and of 1, 2 and 3 layers.
    measured = {1: (10.0, 16.0, 15.9, 14.0), 8: (90.0, 55.0, 50.0, 45.0)}
    speeds = [
        {"batch": float(batch), "layers": float(layers), "tokens_per_second": rate}
        for batch, rates in measured.items()
        for layers, rate in enumerate(rates)
    ]
    for planned, about in ((3e7, "predicted"), (1e12, "predicted, 5 tokens per pass at most,")):
        chosen = recommend(points, speeds, found, planned, 4)
        expected = []
        for batch, rates in measured.items():
            promised = [rates[0]]
            for layers in (1, 2, 3):
                size = 3.5e6 * layers
                now, then = (
                    law({"tokens": tokens, "parameters": size}) for tokens in (3e5, planned)
                )
                promised.append(rates[layers] * min(then, 5.0) / now)
            best = int(np.argmax(promised))
            expected.append((batch, best, round(promised[best], 2)))
        actual = [(one["batch"], one["layers"], one["tokens_per_second"]) for one in chosen]
        yield Check(
            f"the draft model of the highest {about} throughput is recommended",
            actual == expected and [layers for _, layers, _ in expected] == [1, 0],
            str(actual),
        )


def study() -> Iterator[Check]:
    """A study of draft models of 1 and 2 layers."""
    from anydecode.training.draft_model import DraftOptions
    from anydecode.training.scaling import ScalingStudy

    checkpoint = load_checkpoint("tiny-autoregressive")
    recipe = catalogue.build("scylla", layers="1-2", tokens="40-80", batches="1-2-3", size=3)
    assert isinstance(recipe, ScalingRecipe)
    settings = DraftOptions(steps=1, answers=16, tokens=8, batch=2)
    with tempfile.TemporaryDirectory() as name:
        one = ScalingStudy(checkpoint, Path(name), recipe, settings)
        one.run()
        points, speeds = one.points, one.speeds
        grid = list(product((1, 2), (40, 80)))
        is_measured = [
            point["layers"] == layers and tokens <= point["tokens"] <= tokens + 40
            for (layers, tokens), point in zip(grid, points, strict=True)
        ]
        yield Check("each draft model has learned its tokens", all(is_measured), str(points))
        config = checkpoint.config
        width, hidden = config["hidden_size"], config["intermediate_size"]
        kv_width = width * config["num_key_value_heads"] // config["num_attention_heads"]
        layer = 2 * width * (width + kv_width) + 3 * width * hidden + 2 * width
        yield Check(
            "the parameters are those of the layers and the final norm",
            all(p["parameters"] == p["layers"] * layer + width for p in points),
        )
        folders = [Path(name) / f"layers-{layers}-tokens-{tokens}" for layers, tokens in grid]
        lengths = [tokens_per_pass(folder / "draft", Path(name)) for folder in folders]
        yield Check(
            "the accepted length is the tokens per pass at temperature 0",
            np.allclose([point["accepted"] for point in points], lengths, atol=1e-3),
            " ".join(f"{length:.3f}" for length in lengths),
        )
        found = one.laws()
        expected = [("accepted", points, "accepted", ["tokens", "parameters"])]
        for layers in (0, 1, 2):
            rows = [speed for speed in speeds if speed["layers"] == layers]
            expected.append(
                (f"tokens_per_second, {layers} layers", rows, "tokens_per_second", ["batch"])
            )
        are_fits = []
        for law_name, rows, value, variables in expected:
            coefficients = [found[law_name].intercept, *found[law_name].slopes.values()]
            exact, _ = normal_equations(rows, value, variables)
            are_fits.append(
                list(found[law_name].slopes) == variables
                and np.allclose(coefficients, exact, rtol=1e-4)
            )
        yield Check(
            "the laws are of tokens and parameters, and of the batch",
            len(found) == len(are_fits) and all(are_fits),
        )


def tokens_per_pass(draft: Path, folder: Path) -> float:
    """Of greedy answers to the held-out prompts of the study in a folder, an eighth of all."""
    pairs = json.loads((folder / "answers.json").read_text())["answers"]
    with LLM("tiny-autoregressive", draft=draft) as llm:
        answers = [
            llm.generate(
                prompt, decoder="speculative-sampling:size=3", max_tokens=8, temperature=0.0
            )
            for prompt, _ in pairs[: len(pairs) // 8]
        ]
    return sum(len(one.tokens) for one in answers) / sum(one.stats.passes for one in answers)
