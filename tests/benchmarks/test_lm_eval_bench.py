"""`anydecode bench lm-eval`: metrics and errors from lm-eval's samples. tests/clients runs it."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

from anydecode.benchmarks.lm_eval_bench import Values, figures, mean_and_error, metrics_of
from anydecode.cli.bench import run_bench
from anydecode.errors import MissingPackageError


def sample(doc: int, responses: list[Any], **metrics: Any) -> dict[str, Any]:
    fields = {"doc_id": doc, "filter": "none", "metrics": list(metrics), "resps": responses}
    return fields | metrics


def test_the_error_is_that_of_the_mean() -> None:
    values = np.array([1.0, 0.0, 0.0, 1.0, 1.0])
    mean, error = mean_and_error(values, np.ones(5))
    assert (mean, error) == pytest.approx((0.6, values.std(ddof=1) / 5**0.5))
    assert math.isnan(mean_and_error(values[:1], np.ones(1))[1])


def test_weights_are_those_of_documents() -> None:
    """A document that is twice as long counts twice; equal rates have no error."""
    mean, error = mean_and_error(np.array([2.0, 4.0, 6.0]), np.array([1.0, 2.0, 3.0]))
    assert (mean, error) == pytest.approx((2.0, 0.0))
    assert mean_and_error(np.array([1.0, 4.0]), np.array([1.0, 2.0]))[0] == pytest.approx(5 / 3)
    assert mean_and_error(np.array([1.0, 4.0]), np.array([1.0, 2.0]))[1] > 0


def test_metrics_of_every_kind_of_task() -> None:
    choices = [
        sample(1, [[(-2.0, False)], [(-1.0, True)]], acc=1.0),
        sample(0, [[(-1.0, False)], [(-3.0, True)]], acc=0.0),
    ]
    assert {name: one.answers for name, one in metrics_of(choices)} == {"acc": [0, 1]}
    ((_, found),) = metrics_of(choices)
    assert found.values.tolist() == [0.0, 1.0] and found.weights.tolist() == [1.0, 1.0]
    texts = [sample(doc, [[f"text {doc}"]], exact_match=doc) for doc in range(2)]
    ((name, found),) = metrics_of(texts)
    assert name == "exact_match" and found.answers == [["text 0"], ["text 1"]]
    numbers = [sample(0, [[(-3.0, True)]], perplexity=-3.0, acc=1)]
    metrics = dict(metrics_of(numbers))
    assert metrics["nats per answer"].values.tolist() == [3.0]
    assert metrics["acc"].answers == [True]
    rolling = [sample(0, [[-8.0]], bits_per_byte=(-8.0, 4))]
    ((name, found),) = metrics_of(rolling)
    assert name == "bits per byte" and found.answers == [None]
    assert found.values.tolist() == [8.0 / math.log(2)] and found.weights.tolist() == [4.0]


def test_differences_are_those_of_the_same_documents() -> None:
    """Their error is smaller than that of the values where documents differ more than engines."""
    own, other = np.array([1.0, 5.0, 9.0]), np.array([1.1, 5.0, 9.2])
    weights = np.ones(3)
    found = figures(Values(own, weights, ["a", "b", "c"]), Values(other, weights, ["a", "b", "d"]))
    assert found["difference"] == pytest.approx((-0.1, 0.1 / 3**0.5))
    assert found["llama.cpp"][0] == pytest.approx(5.1) and found["anydecode"][1] > 2
    assert found["same answers"] == pytest.approx(2 / 3)
    alone = figures(Values(own, weights, [None] * 3), None)
    assert list(alone) == ["anydecode"]
    both = Values(own, weights, [None] * 3)
    assert figures(both, both)["same answers"] is None


def test_without_lm_eval_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingPackageError, match=r"anydecode\[eval\]"):
        run_bench("lm-eval", ["--models", "a", "--tasks", "b"])
