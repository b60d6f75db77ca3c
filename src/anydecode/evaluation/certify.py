"""Proof that a method does what its card claims, on this machine.

A certificate has two parts. The *claim* is tested in general: a token-exact method must give the
tokens of plain decoding at temperature 0 and above (a greedy-exact one at 0), alone and in a batch,
with restarts at random yields; a distribution-exact one must follow the target's distribution in a
chi-square test; a lossy one must keep within the margins of its `measure`s. A sampling rule must
have the distribution of its oracle and leave every exact decoder exact (`samplers`). The
*mechanism* is tested by what the method's own module registers with `mechanism`: its drafts,
budgets or masks against an independent oracle of the published algorithm.
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
from anydecode.catalogue import Card
from anydecode.decoders.decoder import Decoder
from anydecode.engine.engine import Engine
from anydecode.engine.llm import LLM
from anydecode.errors import AnydecodeError, InvalidRequestError, MissingPackageError
from anydecode.evaluation.chi_square import follows
from anydecode.evaluation.results_log import ResultsLog
from anydecode.models.scripted import ByteTokenizer, FillInTokenizer, ScriptedModel
from anydecode.sampling.preset import SamplerPreset

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


@dataclass(frozen=True)
class Check:
    """One thing that was tried. `detail` says what came out. `passed` is None where it could not be
    run here, and `detail` says what it needs."""

    name: str
    passed: bool | None
    detail: str = ""

    def __post_init__(self) -> None:
        if self.passed is not None:  # numpy's booleans are no JSON
            object.__setattr__(self, "passed", bool(self.passed))

    @property
    def status(self) -> str:
        """`PASSED`, `FAILED` or `NOT_RUN`."""
        return NOT_RUN if self.passed is None else PASSED if self.passed else FAILED


@dataclass(frozen=True)
class Certificate:
    """All checks of one method. It passes if every one of them did, and there were some; it fails
    if one failed; else some of them were not run."""

    key: str
    exactness: str
    checks: list[Check] = field(default_factory=list)

    @property
    def status(self) -> str:
        """`PASSED`, `FAILED` or `NOT_RUN`."""
        found = {check.status for check in self.checks} or {FAILED}
        return next(status for status in (FAILED, NOT_RUN, PASSED) if status in found)

    @property
    def passed(self) -> bool:
        return self.status == PASSED

    def to_dict(self) -> dict[str, Any]:
        """The certificate as plain JSON."""
        checks = [{**asdict(check), "status": check.status} for check in self.checks]
        return {**asdict(self), "checks": checks, "passed": self.passed, "status": self.status}


#: What a card `needs` whose method works with models that fill in the middle only.
FILLS_IN = "fill-in-the-middle model"

Mechanism = Callable[[], Iterable[Check]]
_mechanisms: dict[str, Mechanism] = {}


def mechanism(key: str) -> Callable[[Mechanism], Mechanism]:
    """Function decorator: these checks show that method `key` works as published."""

    def enter(checks: Mechanism) -> Mechanism:
        _mechanisms[key] = checks
        return checks

    return enter


@dataclass(frozen=True)
class Measure:
    """What a lossy method may lose: `run(samples)` gives a loss that must not be above `margin`."""

    name: str
    samples: int
    margin: float
    run: Callable[[int], float]

    def checks(self) -> Iterator[Check]:
        """The loss held against the margin."""
        loss = self.run(self.samples)
        detail = f"{loss:.4g}, at most {self.margin:g} allowed, over {self.samples} samples"
        yield Check(self.name, loss <= self.margin, detail)


_measures: dict[str, list[Measure]] = {}


def measure(
    key: str, name: str, *, samples: int, margin: float
) -> Callable[[Callable[[int], float]], Callable[[int], float]]:
    """Function decorator: what the lossy method `key` loses, measured over `samples`, with the
    margin fixed here, before any run."""

    def enter(run: Callable[[int], float]) -> Callable[[int], float]:
        known = [one for one in _measures.get(key, []) if one.name != name]
        _measures[key] = [*known, Measure(name, samples, margin, run)]
        return run

    return enter


@cache
def load_mechanisms() -> dict[str, Mechanism]:
    """Every registered mechanism by key."""
    from anydecode.evaluation import mechanisms

    for module in pkgutil.iter_modules(mechanisms.__path__):
        importlib.import_module(f"{mechanisms.__name__}.{module.name}")
    return _mechanisms


def certify(
    keys: Iterable[str] = (),
    *,
    model: Any = None,
    on_done: Callable[[Certificate], None] | None = None,
    results_log: ResultsLog | None = None,
) -> list[Certificate]:
    """Certify methods by key (default: the whole catalogue), or `package:Class` for a stranger's.
    The claims are tested on scripted models; on `model` too, if one is given. Certificates go into
    `results_log` as they come; our own methods that it holds as passed are not tried again."""
    chosen = list(keys) or [card.key for card in catalogue.cards()]
    for key in chosen:
        _find(key)  # a wrong key is refused before any work
    held = {} if results_log is None else _held(results_log)
    done = []
    for key in chosen:
        certificate = held.get(key) if _is_own(key) else None
        if certificate is None:
            certificate = certify_one(key, model)
            if results_log is not None:
                results_log.write(asdict(certificate))
        done.append(certificate)
        if on_done is not None:
            on_done(certificate)
    return done


def certify_one(key: str, model: Any = None) -> Certificate:
    """The certificate of one method. What a part of it raises is a check of that part."""
    card, make = _find(key)
    checks = list(guarded("runs", lambda: _checks(key, card, make, model)))
    return Certificate(key, card.exactness, checks)


def _checks(key: str, card: Card, make: Callable[[], Any], model: Any) -> Iterator[Check]:
    built = make()
    known = load_mechanisms()
    if isinstance(built, Decoder):
        yield from guarded("claim", lambda: claim(card, make))
        if model is not None and FILLS_IN not in card.needs and built.draft_causal:
            draft = _draft_for(built, model)
            opened = partial(LLM, model, draft=draft)
            yield from guarded("claim on the model", lambda: claim(card, make, opened))
    if isinstance(built, SamplerPreset):
        from anydecode.evaluation.samplers import sampler_claim

        yield from guarded("claim", lambda: sampler_claim(key, make))
    if key in known:
        yield from guarded("mechanism", known[key])
    elif ":" not in key:
        yield Check("mechanism", False, "no mechanism test is registered")
    if card.exactness == "lossy":
        measures = _measures.get(key, [])
        for one in measures:
            yield from guarded(one.name, one.checks)
        if not measures and ":" not in key:
            yield Check("measure", False, "what it may lose is not registered (`measure`)")


def guarded(name: str, part: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """The checks of one part of a certificate. An exception ends that part alone, and is a check:
    not run where a package is missing, else failed."""
    try:
        yield from part()
    except Exception as error:
        needs = missing_package(error)
        yield Check(name, None, needs) if needs else Check(name, False, one_line(error))


def missing_package(error: Exception) -> str:
    """Which package `error` asks for; empty where it is about something else."""
    if isinstance(error, MissingPackageError):
        package, install = error.package, error.install
    elif isinstance(error, ModuleNotFoundError) and error.name:
        package = install = error.name.partition(".")[0]
    else:
        return ""
    own = package == "anydecode"
    return "" if own else f"{NOT_RUN}: needs package {package} (pip install {install})"


def one_line(error: Exception) -> str:
    """What was raised; the class too, unless the message is meant for users."""
    text = " ".join(str(error).split())
    if isinstance(error, AnydecodeError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _held(results_log: ResultsLog) -> dict[str, Certificate]:
    """The certificates in `results_log` that passed."""
    try:
        kept = [
            Certificate(one["key"], one["exactness"], [Check(**check) for check in one["checks"]])
            for one in results_log.held
        ]
    except (TypeError, KeyError):
        raise results_log.foreign() from None
    return {one.key: one for one in kept if one.passed}


def _is_own(key: str) -> bool:
    """Whether the method is part of this package. Another's code may have changed meanwhile."""
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
    """A small engine over scripted models: a target, and a draft that often agrees with it.
    `draft_causal` False: a draft that sees both ways instead. `fills_in`: its tokenizer has the
    marks of models that fill in the middle."""
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
    """The card's exactness: equality with plain decoding where the card says token-exact (at
    temperature 0: greedy-exact), a chi-square test where it says distribution-exact, and equality
    with itself in other company everywhere."""
    method = make()
    causal = method.causal is not False
    where = "model" if open_llm else "scripted"
    length = 48
    fills_in = FILLS_IN in card.needs
    if open_llm is None and method.reads_weights:
        from anydecode.evaluation.denoising import random_model

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
                f"batched equals alone, {where}, T={temperature}", [b.tokens for b in batch], alone
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
    """For a distribution-exact card: one chi-square test per policy."""
    if card.exactness == "distribution-exact":
        for name, found in follows(make).items():
            yield Check(f"follows the target's distribution, {name}", found.passed, str(found))


class _Restarts:
    """Preempts a random running job before a `share` of the steps."""

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
    """Whether every answer is what was expected; else how many differ, and where first."""
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
