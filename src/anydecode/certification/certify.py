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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.catalogue import Card
from anydecode.certification.checks import (
    BLOCKS,
    FILLS_IN,
    HEADS,
    MASKS,
    NOT_RUN,
    ORACLE_TESTS,
    PROMPTS,
    Certificate,
    Check,
    OracleTest,
    Restarts,
    equal_tokens,
    measures_of,
    scripted_llm,
)
from anydecode.certification.chi_square import distribution_fits
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.errors import AnydecodeError, InvalidRequestError, MissingPackageError
from anydecode.results_log import ResultsLog
from anydecode.sampling.preset import SamplerPreset


@cache
def load_oracle_tests() -> dict[str, OracleTest]:
    """All registered oracle tests by method key."""
    from anydecode.certification import oracles

    for module in pkgutil.walk_packages(oracles.__path__, f"{oracles.__name__}."):
        importlib.import_module(module.name)
    return ORACLE_TESTS


def certify(
    keys: Iterable[str] = (),
    *,
    model: Any = None,
    on_start: Callable[[str], None] | None = None,
    on_done: Callable[[Certificate], None] | None = None,
    results_log: ResultsLog | None = None,
) -> list[Certificate]:
    """Certify methods by key (default: the whole catalogue), or as `package:Class` for methods of
    other packages.

    Args:
        keys: Catalogue keys or `package:Class` names.
        model: A model on which the claims are tested too, in addition to the scripted models.
        on_start: Called with each key that is tested, before its test. Not called for a certificate
            that is taken from `results_log`.
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
            if on_start is not None:
                on_start(key)
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
    entry = catalogue.lookup(card.key)
    if entry is not None and entry.build is make:
        key = card.key  # a method of another package may be given as package:name
    if isinstance(built, Decoder):
        yield from guarded("claim", lambda: claim(card, make))
        needs = built.requirements
        has_draft = needs.draft_causal and not (needs.drafts_blocks or needs.drafts_exit)
        fits = not {FILLS_IN, HEADS, MASKS} & set(card.needs)
        if model is not None and fits and has_draft:
            draft = _draft_for(built, model)
            open_llm = partial(LLM, model, draft=draft)
            yield from guarded("claim on the model", lambda: claim(card, make, open_llm))
    if isinstance(built, SamplerPreset):
        from anydecode.certification.samplers import sampler_claim

        yield from guarded("claim", lambda: sampler_claim(key, make, _is_own(key)))
    if key in oracle_tests:
        yield from guarded("oracle test", oracle_tests[key])
    elif _is_own(key):
        yield Check("oracle test", False, "no oracle test is registered")
    if card.exactness == "lossy":
        measures = measures_of(key)
        for one in measures:
            yield from guarded(one.name, one.checks)
        if not measures and _is_own(key):
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

    def parse(one: dict[str, Any]) -> Certificate:
        checks = [Check(**check) for check in one["checks"]]
        return Certificate(one["key"], one["exactness"], checks)

    return {one.key: one for one in results_log.read(parse) if one.passed}


def _is_own(key: str) -> bool:
    """Whether the method belongs to this package. The code of other packages may have changed since
    it was tested."""
    entry = catalogue.lookup(key)
    return entry is not None and entry.build.__module__.partition(".")[0] == "anydecode"


def small_model(card: Card, needs: Requirements) -> tuple[str, Callable[[], LLM]]:
    """What a small model on which a method runs is called, and what opens it."""
    if HEADS in card.needs:
        return "tiny-diffusion", partial(LLM, "tiny-diffusion")
    open_llm: Callable[[], LLM]
    if needs.reads_weights:
        from anydecode.certification.denoising import random_model as open_llm
    elif needs.drafts_blocks:
        from anydecode.certification.tiny_blocks import block_drafting_model as open_llm
    elif needs.reads_exit_routers:
        from anydecode.certification.tiny import routed_model as open_llm
    elif needs.reads_exit_predictors:
        from anydecode.certification.tiny import predicting_model as open_llm
    elif needs.reads_accelerators:
        from anydecode.certification.tiny import accelerated_model as open_llm
    elif needs.reads_layer_routers:
        from anydecode.certification.tiny import layer_routed_model as open_llm
    elif needs.reads_future_masks:
        from anydecode.certification.tiny_future import future_model as open_llm
    elif needs.reads_sentence_diffusion:
        from anydecode.certification.tiny_sentence import sentence_diffusion_model as open_llm
    elif needs.reads_hidden_transfer:
        from anydecode.certification.tiny_transfer import transfer_model as open_llm
    elif needs.reads_judge:
        from anydecode.certification.tiny_judge import judged_model as open_llm
    elif needs.drafts_exit:
        from anydecode.certification.tiny import early_exit_model as open_llm
    else:
        return "scripted", partial(
            scripted_llm,
            causal=needs.causal is not False,
            fills_in=FILLS_IN in card.needs,
            draft_causal=needs.draft_causal,
            block_size=4 if BLOCKS in card.needs else None,
        )
    return "random weights", open_llm


def claim(
    card: Card, make: Callable[[], Decoder], open_llm: Callable[[], LLM] | None = None
) -> Iterator[Check]:
    """Checks of the card's exactness: equality with plain decoding if the card says token-exact (at
    temperature 0 only: greedy-exact), a chi-square test if it says distribution-exact. For every
    card: batched and restarted runs are equal to the run alone. A method whose drafts are limited
    beside other requests is also tested on the default policy, with costs at which drafts pay."""
    from anydecode.certification.oracles.speculative.company import company_checks
    from anydecode.certification.oracles.speculative.draft_chains import RecordedDrafts

    method = make()
    needs = method.requirements
    where = "model"
    if open_llm is None:
        where, open_llm = small_model(card, needs)
    length = 24 if where == "random weights" else 48
    exact = {"token-exact": (0.0, 0.8), "greedy-exact": (0.0,), "distribution-exact": (0.0,)}
    plain = exact.get(card.exactness, ())
    if where == "scripted":
        yield from distribution_claim(card, make)
    for temperature in (0.0, 0.8):
        options: dict[str, Any] = {
            "max_tokens": length,
            "temperature": temperature,
            "seed": 11,
            "ignore_eos": True,
        }
        with open_llm() as llm:
            alone = [llm.generate(p, decoder=make(), **options).tokens for p in PROMPTS]
            if temperature in plain:
                expected = [
                    llm.generate(p, decoder=method.plain, **options).tokens for p in PROMPTS
                ]
                yield equal_tokens(
                    f"equals plain decoding, {where}, T={temperature}", alone, expected
                )
        with open_llm() as llm:
            unlimited = RecordedDrafts()
            llm.resources = replace(llm.resources, draft_policy=unlimited)
            batch = llm.generate(list(PROMPTS), decoder=make(), **options)
            yield equal_tokens(
                f"batched equals alone, {where}, T={temperature}",
                [b.tokens for b in batch],
                alone,
            )
        with open_llm() as llm, Restarts(llm.engine, seed=3):
            batch = llm.generate(list(PROMPTS), decoder=make(), **options)
            yield equal_tokens(
                f"restarted at random yields, {where}, T={temperature}",
                [b.tokens for b in batch],
                alone,
            )
            llm.engine.check_integrity()
        if any(num_drafts for num_drafts, _ in unlimited.rounds):
            name = f"{where}, T={temperature}"
            yield from company_checks(name, open_llm, make(), PROMPTS, alone, **options)


def distribution_claim(card: Card, make: Callable[[], Decoder]) -> Iterator[Check]:
    """For a distribution-exact card: one chi-square test per set of sampling options."""
    if card.exactness == "distribution-exact":
        for name, result in distribution_fits(make).items():
            yield Check(f"follows the target's distribution, {name}", result.passed, str(result))


def _draft_for(decoder: Decoder, model: Any) -> Any:
    return model if "draft" in decoder.requirements.runners else None


def _find(key: str) -> tuple[Card, Callable[[], Any]]:
    if ":" not in key:
        entry = catalogue.find(key)
        return entry.card, entry.build
    module, _, name = key.partition(":")
    try:
        built = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidRequestError(f"{key!r} cannot be imported: {error}") from None
    return getattr(built, "card", Card(key, "speculative", "", "token-exact")), built
