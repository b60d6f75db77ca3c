"""Certificates of one method, for its own tests."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import catalogue
from anydecode.certification.certify import certify_one, claim, load_oracle_tests
from anydecode.certification.checks import Check, measures_of
from anydecode.certification.denoising import benchmark_results
from anydecode.certification.samplers import sampler_claim
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework import rejection
from anydecode.errors import MissingPackageError
from anydecode.sampling.preset import SamplerPreset
from anydecode.sampling.sampler import Sampler

load_oracle_tests()  # registers the measures, whichever test runs first


def assert_certified(key: str) -> None:
    """Asserts that the method `key` has a passing certificate of at least two checks."""
    certificate = certify_one(key)
    failed = [check for check in certificate.checks if not check.passed]
    if certificate.status == "not run":
        pytest.skip("; ".join(f"{check.name}: {check.detail}" for check in failed))
    assert certificate.passed, failed
    assert len(certificate.checks) >= 2


def assert_rejected(key: str) -> None:
    """Asserts that the certificate of `key` notices the mistake that a test has made in it.

    Runs the oracle test, the measures and the claim, up to the first failed check. An exception is
    no rejection; where a package is missing, the test is skipped.
    """
    try:
        is_rejected = any(check.passed is False for check in _checks(key))
    except MissingPackageError as error:
        pytest.skip(str(error))
    assert is_rejected, f"{key} passes with the mistake"


def _checks(key: str) -> Iterator[Check]:
    entry = catalogue.entries()[key]
    yield from load_oracle_tests()[key]()
    benchmark_results.cache_clear()
    try:
        for one in measures_of(key):
            yield from one.checks()
    finally:  # the results of the mistake are not those of the method
        benchmark_results.cache_clear()
    built = entry.build()
    if isinstance(built, Decoder):
        yield from claim(entry.card, entry.build)
    if isinstance(built, SamplerPreset):
        yield from sampler_claim(key, entry.build)


def replace_method(monkeypatch: pytest.MonkeyPatch, key: str, other: str) -> None:
    """Makes the method `key` do what the method `other` does, with its default parameters."""
    entry = catalogue.entries()[key]
    build = replace(entry, build=lambda **_: catalogue.build(other))
    monkeypatch.setitem(catalogue.entries(), key, build)


def replace_defaults(monkeypatch: pytest.MonkeyPatch, key: str, **defaults: Any) -> None:
    """Makes the method `key` use other defaults for these parameters."""
    entry = catalogue.entries()[key]

    @wraps(entry.build)
    def build(**given: Any) -> Any:
        return entry.build(**{**defaults, **given})

    monkeypatch.setitem(catalogue.entries(), key, replace(entry, build=build))


def replace_class_default(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, value: Any
) -> None:
    """Makes `value` the default of the parameter `name` of a class, however it is built."""
    made = kind.__init__
    signature = inspect.signature(made)

    def build(self: Any, *given: Any, **named: Any) -> None:
        if name not in signature.bind_partial(self, *given, **named).arguments:
            named[name] = value
        made(self, *given, **named)

    monkeypatch.setattr(kind, "__init__", build)


def ignore_parameter(monkeypatch: pytest.MonkeyPatch, key: str, name: str) -> None:
    """Makes the method `key` use the default of its parameter `name`."""
    entry = catalogue.entries()[key]

    @wraps(entry.build)
    def build(**given: Any) -> Any:
        given.pop(name, None)
        return entry.build(**given)

    monkeypatch.setitem(catalogue.entries(), key, replace(entry, build=build))


def leave_samplers_unmoved(monkeypatch: pytest.MonkeyPatch, modules: Collection[str]) -> None:
    """Makes copies of a sampler that these modules take ignore what they are advanced by."""
    fork = Sampler.fork

    def unmoved(self: Sampler) -> Sampler:
        copied = fork(self)
        if Path(sys._getframe(1).f_code.co_filename).stem in modules:
            monkeypatch.setattr(copied, "advance", lambda token: None)
        return copied

    monkeypatch.setattr(Sampler, "fork", unmoved)


#: Mistakes in the rejection rule: from the target's distribution p, the draft's q and a draft to
#: the acceptance probability and the weights of the tokens that may follow a rejection.
WRONG_RULES: dict[str, Callable[[np.ndarray, np.ndarray, int], tuple[float, np.ndarray]]] = {
    "all drafts": lambda p, q, token: (1.0, p),
    "more probable drafts": lambda p, q, token: (float(p[token] >= q[token]), np.maximum(p - q, 0)),
    "drafts by q / p": lambda p, q, token: (
        min(1.0, q[token] / max(p[token], 1e-9)),
        np.maximum(p - q, 0),
    ),
    "tokens of p after a rejection": lambda p, q, token: (min(1.0, p[token] / q[token]), p),
}


def replace_rejection_rule(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes the rejection rule that of `WRONG_RULES`."""

    def steps(p: np.ndarray, q: Any, kind: str, tokens: Iterable[int], *rest: Any) -> Iterator[Any]:
        for token in tokens:
            given = np.ones(len(p)) if q is None else np.maximum(q, 1e-9)
            probability, residual = WRONG_RULES[name](p, given, token)
            p = residual / residual.sum() if residual.any() else p
            yield probability, p

    monkeypatch.setattr(rejection, "rejection_steps", steps)
