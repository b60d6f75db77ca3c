"""Checks and certificates, the registries of oracle tests and measures, and what checks share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from anydecode.api.llm import LLM
from anydecode.engine.engine import Engine
from anydecode.models.scripted import ByteTokenizer, FillInTokenizer, ScriptedModel

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
#: The card's `needs` of a method that works only with models whose blocks are known.
BLOCKS = "block-diffusion model"
#: The card's `needs` of a method that works only with the model that its heads were trained for.
HEADS = "trained heads"
#: The card's `needs` of a method that works only with models that were trained with mask tokens.
MASKS = "mask token"
OracleTest = Callable[[], Iterable[Check]]
#: The registered oracle tests by method key.
ORACLE_TESTS: dict[str, OracleTest] = {}


def oracle_test(key: str) -> Callable[[OracleTest], OracleTest]:
    """Function decorator: registers the oracle test of method `key`."""

    def register(checks: OracleTest) -> OracleTest:
        ORACLE_TESTS[key] = checks
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


#: The registered measures by method key.
MEASURES: dict[str, list[Measure]] = {}


def measures_of(key: str) -> list[Measure]:
    """The registered measures of the method `key`."""
    return MEASURES.get(key, [])


def measure(
    key: str, name: str, *, samples: int, margin: float
) -> Callable[[Callable[[int], float]], Callable[[int], float]]:
    """Function decorator: registers a loss of the lossy method `key`. It is measured over `samples`
    samples and must not exceed `margin`, which is fixed before any run."""

    def register(run: Callable[[int], float]) -> Callable[[int], float]:
        others = [one for one in measures_of(key) if one.name != name]
        MEASURES[key] = [*others, Measure(name, samples, margin, run)]
        return run

    return register


def scripted_llm(
    *,
    causal: bool = True,
    seed: int = 1,
    fills_in: bool = False,
    draft_causal: bool = True,
    block_size: int | None = None,
    drafting: Any = "fixed",
    **options: Any,
) -> LLM:
    """A small engine over scripted models: a target, and a draft model that often agrees with it.

    Args:
        causal: Whether the target's attention is causal.
        seed: Seed of both models.
        fills_in: Whether the tokenizer has fill-in-the-middle tokens.
        draft_causal: Whether the draft model's attention is causal.
        block_size: The size of the target's blocks, if it is a block-diffusion model.
        drafting: That of the engine. By default a request beside others drafts as much as one
            alone, so that both show the whole method.
        options: Options of the engine.
    """
    tokenizer = FillInTokenizer() if fills_in else ByteTokenizer()
    size = tokenizer.vocab_size
    target = ScriptedModel(vocab_size=size, seed=seed, causal=causal)
    target.spec = replace(target.spec, block_size=block_size)
    draft = ScriptedModel(vocab_size=size, seed=seed, noise=0.5, causal=draft_causal)
    return LLM(
        target, tokenizer=tokenizer, draft=draft, cache_positions=4096, drafting=drafting, **options
    )


PROMPTS = (
    "the cat sat on the mat and the cat sat on",
    "a",
    "one two three one two three one two",
    'name: "x", name: "y", name: "',
    "aaaa bbbb aaaa bbbb aaaa",
    "zq",
)


class Restarts:
    """Context manager: preempts a random running sequence before a `share` of the engine's
    steps."""

    def __init__(self, engine: Engine, seed: int, share: float = 0.25) -> None:
        self.engine = engine
        self.share = share
        self.random = random.Random(seed)
        self.step = engine.step
        self.left = 200

    def __enter__(self) -> Restarts:
        self.engine.step = self._step  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.step = self.step  # type: ignore[method-assign]

    def _step(self) -> None:
        if self.engine.running and self.left and self.random.random() < self.share:
            self.left -= 1
            self.engine.preempt(self.random.choice(self.engine.running))
        self.step()


def equal_tokens(name: str, got: list[list[int]], expected: list[list[int]]) -> Check:
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
