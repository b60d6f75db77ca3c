"""Tests that a method does what its card claims, on this machine.

A certificate has two parts. The *claim* is the card's exactness, and is tested the same way for
every method: a token-exact method must generate the tokens of plain decoding at temperature 0 and
above (a greedy-exact one at 0), alone, in a batch, and with restarts at random yields; a
distribution-exact method must follow the target's distribution in a chi-square test; the loss of a
lossy method must stay within the margin of each of its `measure`s. A sampling rule must have the
distribution of its oracle and leave every exact decoder exact (`samplers`).

The *oracle test* is particular to the method and is registered with `oracle_test`: it compares the
method's drafts, budgets or masks with an oracle, an independent implementation of the published
rule.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.catalogue import Card
from anydecode.certification.chi_square import distribution_fits
from anydecode.decoders.decoder import Decoder
from anydecode.engine.engine import Engine
from anydecode.errors import AnydecodeError, InvalidRequestError, MissingPackageError
from anydecode.models.scripted import ByteTokenizer, FillInTokenizer, ScriptedModel
from anydecode.results_log import ResultsLog
from anydecode.sampling.preset import SamplerPreset

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


@dataclass(frozen=True)
class Check:
    """The result of one check. `detail` gives the measured values. `passed` is None if the check
    could not run on this machine; `detail` then says what is missing."""

    name: str
    passed: bool | None
    detail: str = ""

    def __post_init__(self) -> None:
        if self.passed is not None:  # NumPy booleans cannot be serialized as JSON
            object.__setattr__(self, "passed", bool(self.passed))

    @property
    def status(self) -> str:
        """`PASSED`, `FAILED` or `NOT_RUN`."""
        return NOT_RUN if self.passed is None else PASSED if self.passed else FAILED


@dataclass(frozen=True)
class Certificate:
    """All checks of one method. Its status is failed if a check failed or there are no checks, not
    run if a check was not run, and passed otherwise."""

    key: str
    exactness: str
    checks: list[Check] = field(default_factory=list)

    @property
    def status(self) -> str:
        """`PASSED`, `FAILED` or `NOT_RUN`."""
        statuses = {check.status for check in self.checks} or {FAILED}
        return next(status for status in (FAILED, NOT_RUN, PASSED) if status in statuses)

    @property
    def passed(self) -> bool:
        return self.status == PASSED

    def to_dict(self) -> dict[str, Any]:
        """The certificate as a JSON-serializable dictionary, with the status of each check."""
        checks = [{**asdict(check), "status": check.status} for check in self.checks]
        return {**asdict(self), "checks": checks, "passed": self.passed, "status": self.status}


#: The card's `needs` of a method that works only with models that fill in the middle.
FILLS_IN = "fill-in-the-middle model"

OracleTest = Callable[[], Iterable[Check]]
_oracle_tests: dict[str, OracleTest] = {}


def oracle_test(key: str) -> Callable[[OracleTest], OracleTest]:
    """Function decorator: registers the oracle test of method `key`."""

    def register(checks: OracleTest) -> OracleTest:
        _oracle_tests[key] = checks
        return checks

    return register


@dataclass(frozen=True)
class Measure:
    """A bound on what a lossy method may lose: `run(samples)` returns a loss, which must not exceed
    `margin`."""

    name: str
    samples: int
    margin: float
    run: Callable[[int], float]

    def checks(self) -> Iterator[Check]:
        """One check: whether the loss is within the margin."""
        loss = self.run(self.samples)
        detail = f"loss {loss:.4g}, at most {self.margin:g} allowed, over {self.samples} samples"
        yield Check(self.name, loss <= self.margin, detail)


_measures: dict[str, list[Measure]] = {}


def measure(
    key: str, name: str, *, samples: int, margin: float
) -> Callable[[Callable[[int], float]], Callable[[int], float]]:
    """Function decorator: registers a loss of the lossy method `key`. It is measured over `samples`
    samples and must not exceed `margin`, which is fixed before any run."""

    def register(run: Callable[[int], float]) -> Callable[[int], float]:
        others = [one for one in _measures.get(key, []) if one.name != name]
        _measures[key] = [*others, Measure(name, samples, margin, run)]
        return run

    return register


@cache
def load_oracle_tests() -> dict[str, OracleTest]:
    """All registered oracle tests by method key."""
    from anydecode.certification import oracles

    for module in pkgutil.iter_modules(oracles.__path__):
        importlib.import_module(f"{oracles.__name__}.{module.name}")
    return _oracle_tests


def certify(
    keys: Iterable[str] = (),
    *,
    model: Any = None,
    on_done: Callable[[Certificate], None] | None = None,
    results_log: ResultsLog | None = None,
) -> list[Certificate]:
    """Certify methods by key (default: the whole catalogue), or as `package:Class` for methods of
    other packages.

    Args:
        keys: Catalogue keys or `package:Class` names.
        model: A model on which the claims are tested too, in addition to the scripted models.
        on_done: Called with each certificate when it is complete.
        results_log: Certificates are appended to it as they are completed. This package's own
            methods that passed according to it are not tested again.

    Returns:
        One certificate per key, in the order of `keys`.

    Raises:
        InvalidRequestError: A key is unknown or cannot be imported.
    """
    chosen = list(keys) or [card.key for card in catalogue.cards()]
    for key in chosen:
        _find(key)  # an unknown key is refused before any work is done
    previous = {} if results_log is None else _passed_certificates(results_log)
    certificates = []
    for key in chosen:
        certificate = previous.get(key) if _is_own(key) else None
        if certificate is None:
            certificate = certify_one(key, model)
            if results_log is not None:
                results_log.write(asdict(certificate))
        certificates.append(certificate)
        if on_done is not None:
            on_done(certificate)
    return certificates


def certify_one(key: str, model: Any = None) -> Certificate:
    """The certificate of one method. An exception in one part of it is a failed (or not run) check
    of that part."""
    card, make = _find(key)
    checks = list(guarded("runs", lambda: _checks(key, card, make, model)))
    return Certificate(key, card.exactness, checks)


def _checks(key: str, card: Card, make: Callable[[], Any], model: Any) -> Iterator[Check]:
    built = make()
    oracle_tests = load_oracle_tests()
    if isinstance(built, Decoder):
        yield from guarded("claim", lambda: claim(card, make))
        if model is not None and FILLS_IN not in card.needs and built.draft_causal:
            draft = _draft_for(built, model)
            open_llm = partial(LLM, model, draft=draft)
            yield from guarded("claim on the model", lambda: claim(card, make, open_llm))
    if isinstance(built, SamplerPreset):
        from anydecode.certification.samplers import sampler_claim

        yield from guarded("claim", lambda: sampler_claim(key, make))
    if key in oracle_tests:
        yield from guarded("oracle test", oracle_tests[key])
    elif ":" not in key:
        yield Check("oracle test", False, "no oracle test is registered")
    if card.exactness == "lossy":
        measures = _measures.get(key, [])
        for one in measures:
            yield from guarded(one.name, one.checks)
        if not measures and ":" not in key:
            yield Check("measure", False, "no loss is registered with `measure`")


def guarded(name: str, part: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """The checks of one part of a certificate. An exception ends only that part and becomes a
    check: not run if a package is missing, failed otherwise."""
    try:
        yield from part()
    except Exception as error:
        needs = missing_package(error)
        yield Check(name, None, needs) if needs else Check(name, False, one_line(error))


def missing_package(error: Exception) -> str:
    """A message that names the package missing according to `error`; empty if the error has another
    cause."""
    if isinstance(error, MissingPackageError):
        package, install = error.package, error.install
    elif isinstance(error, ModuleNotFoundError) and error.name:
        package = install = error.name.partition(".")[0]
    else:
        return ""
    own = package == "anydecode"
    return "" if own else f"{NOT_RUN}: needs package {package} (pip install {install})"


def one_line(error: Exception) -> str:
    """The error message on one line, with the class name unless the message is meant for users."""
    text = " ".join(str(error).split())
    if isinstance(error, AnydecodeError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _passed_certificates(results_log: ResultsLog) -> dict[str, Certificate]:
    """The certificates in `results_log` that passed."""
    try:
        logged = [
            Certificate(one["key"], one["exactness"], [Check(**check) for check in one["checks"]])
            for one in results_log.entries
        ]
    except (TypeError, KeyError):
        raise results_log.format_error() from None
    return {one.key: one for one in logged if one.passed}


def _is_own(key: str) -> bool:
    """Whether the method belongs to this package. The code of other packages may have changed since
    it was tested."""
    entry = catalogue.entries().get(key)
    return entry is not None and entry.build.__module__.partition(".")[0] == "anydecode"


def scripted_llm(
    *,
    causal: bool = True,
    seed: int = 1,
    fills_in: bool = False,
    draft_causal: bool = True,
    **options: Any,
) -> LLM:
    """A small engine over scripted models: a target, and a draft model that often agrees with it.

    Args:
        causal: Whether the target's attention is causal.
        seed: Seed of both models.
        fills_in: Whether the tokenizer has fill-in-the-middle tokens.
        draft_causal: Whether the draft model's attention is causal.
        options: Options of the engine.
    """
    tokenizer = FillInTokenizer() if fills_in else ByteTokenizer()
    size = tokenizer.vocab_size
    target = ScriptedModel(vocab_size=size, seed=seed, causal=causal)
    draft = ScriptedModel(vocab_size=size, seed=seed, noise=0.5, causal=draft_causal)
    return LLM(target, tokenizer=tokenizer, draft=draft, cache_positions=4096, **options)


PROMPTS = (
    "the cat sat on the mat and the cat sat on",
    "a",
    "one two three one two three one two",
    'name: "x", name: "y", name: "',
    "aaaa bbbb aaaa bbbb aaaa",
    "zq",
)


def claim(
    card: Card, make: Callable[[], Decoder], open_llm: Callable[[], LLM] | None = None
) -> Iterator[Check]:
    """Checks of the card's exactness: equality with plain decoding if the card says token-exact (at
    temperature 0 only: greedy-exact), a chi-square test if it says distribution-exact. For every
    card: batched and restarted runs are equal to the run alone."""
    method = make()
    causal = method.causal is not False
    where = "model" if open_llm else "scripted"
    length = 48
    fills_in = FILLS_IN in card.needs
    if open_llm is None and method.reads_weights:
        from anydecode.certification.denoising import random_model

        where, open_llm = "random weights", partial(random_model, readable=True)
        length = 24
    open_llm = open_llm or (
        lambda: scripted_llm(causal=causal, fills_in=fills_in, draft_causal=method.draft_causal)
    )
    exact = {"token-exact": (0.0, 0.8), "greedy-exact": (0.0,), "distribution-exact": (0.0,)}
    plain = exact.get(card.exactness, ())
    if where == "scripted":
        yield from distribution_claim(card, make)
    for temperature in (0.0, 0.8):
        options = {"max_tokens": length, "temperature": temperature, "seed": 11, "ignore_eos": True}
        with open_llm() as llm:
            alone = [llm.generate(p, decoder=make(), **options).tokens for p in PROMPTS]
            if temperature in plain:
                expected = [
                    llm.generate(p, decoder=method.plain, **options).tokens for p in PROMPTS
                ]
                yield _equal(f"equals plain decoding, {where}, T={temperature}", alone, expected)
        with open_llm() as llm:
            decoder = make()
            batch = llm.generate(list(PROMPTS), decoder=decoder, **options)
            yield _equal(
                f"batched equals alone, {where}, T={temperature}",
                [b.tokens for b in batch],
                alone,
            )
        with open_llm() as llm, _Restarts(llm.engine, seed=3):
            batch = llm.generate(list(PROMPTS), decoder=make(), **options)
            yield _equal(
                f"restarted at random yields, {where}, T={temperature}",
                [b.tokens for b in batch],
                alone,
            )
            llm.engine.check_integrity()


def distribution_claim(card: Card, make: Callable[[], Decoder]) -> Iterator[Check]:
    """For a distribution-exact card: one chi-square test per set of sampling options."""
    if card.exactness == "distribution-exact":
        for name, result in distribution_fits(make).items():
            yield Check(f"follows the target's distribution, {name}", result.passed, str(result))


class _Restarts:
    """Context manager: preempts a random running sequence before a `share` of the engine's
    steps."""

    def __init__(self, engine: Engine, seed: int, share: float = 0.25) -> None:
        self.engine = engine
        self.share = share
        self.random = random.Random(seed)
        self.step = engine.step
        self.left = 200

    def __enter__(self) -> _Restarts:
        self.engine.step = self._step  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.step = self.step  # type: ignore[method-assign]

    def _step(self) -> None:
        if self.engine.running and self.left and self.random.random() < self.share:
            self.left -= 1
            self.engine.preempt(self.random.choice(self.engine.running))
        self.step()


def _equal(name: str, got: list[list[int]], expected: list[list[int]]) -> Check:
    """Whether all outputs are equal to the expected ones; if not, how many differ and where the
    first one does."""
    wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
    if not wrong:
        return Check(name, True, f"{len(got)} prompts, {sum(map(len, got))} tokens")
    a, b = got[wrong[0]], expected[wrong[0]]
    position = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
    return Check(
        name, False, f"{len(wrong)} of {len(got)} prompts differ; first at token {position}"
    )


def _draft_for(decoder: Decoder, model: Any) -> Any:
    return model if "draft" in decoder.runners else None


def _find(key: str) -> tuple[Card, Callable[[], Any]]:
    if ":" not in key:
        if key not in catalogue.entries():
            catalogue.build(key)
        entry = catalogue.entries()[key]
        return entry.card, entry.build
    module, _, name = key.partition(":")
    try:
        built = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidRequestError(f"{key!r} cannot be imported: {error}") from None
    return getattr(built, "card", Card(key, "speculative", "", "token-exact")), built
