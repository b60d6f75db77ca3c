"""Oracle of scylla (arXiv:2505.07858): laws against the normal equations and against known laws,
and the recommendation by its definition."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
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


def normal_equations(points: Sequence[Mapping[str, float]]) -> tuple[np.ndarray, float]:
    """The coefficients by elimination of X^T X b = X^T y, and 1 - residual / total squares."""
    x = np.array([[1, math.log(p["tokens"]), math.log(p["parameters"])] for p in points])
    y = np.array([p["accepted"] for p in points])
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
    # No torch is needed to fit, but the study trains models.
    from anydecode.training.scaling_law import fit_law

    recipe = catalogue.build("scylla")
    assert isinstance(recipe, ScalingRecipe)
    yield Check(
        "the default grid is three sizes by three numbers of tokens",
        (recipe.layers, recipe.tokens) == ((1, 2, 4), (8000, 16000, 32000)),
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
    yield Check("noise: the coefficients are least squares", np.allclose(coefficients, expected))
    assert found.r_squared is not None and found.left_out_error is not None
    yield Check(
        "noise: R² is 1 minus the share of the squares that is left",
        found.r_squared < 0.99 and math.isclose(found.r_squared, r_squared, abs_tol=1e-9),
        f"{found.r_squared:.4f}",
    )
    yield Check(
        "noise: the error at left-out points is that of fits to the others",
        math.isclose(found.left_out_error, left_out(noisy), rel_tol=1e-6),
    )
    point = {"tokens": 1e7, "parameters": 7e6}
    predicted = expected @ [1, math.log(1e7), math.log(7e6)]
    yield Check(
        "a point outside the grid is extrapolated by the logarithms",
        math.isclose(found.predict(point), predicted, rel_tol=1e-9),
    )
    yield from recommendation()


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
    chosen = recommend(points, speeds, found, 3e7)
    expected = []
    for batch, rates in measured.items():
        promised = [rates[0]]
        for layers in (1, 2, 3):
            size = 3.5e6 * layers
            now, then = (law({"tokens": tokens, "parameters": size}) for tokens in (3e5, 3e7))
            promised.append(rates[layers] * then / now)
        best = int(np.argmax(promised))
        expected.append((batch, best, round(promised[best], 2)))
    actual = [(one["batch"], one["layers"], one["tokens_per_second"]) for one in chosen]
    yield Check(
        "the draft model of the highest predicted throughput is recommended",
        actual == expected and [layers for _, layers, _ in expected] == [1, 0],
        str(actual),
    )
