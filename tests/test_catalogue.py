"""What a remote caller may select of the catalogue: no files, no large values, nothing built."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

import pytest

from anydecode import catalogue
from anydecode.api.methods import build_as, build_decoder
from anydecode.constraints.constraint import Constraint
from anydecode.decoders.decoder import Decoder
from anydecode.engine.schedule import Schedule
from anydecode.errors import InvalidRequestError
from anydecode.sampling.preset import SamplerPreset


def numbers(key: str) -> list[str]:
    hints = catalogue.parameters(key)
    return [one.name for one in hints if {"int", "float"} & set(one.type.split(" | "))]


@pytest.mark.parametrize("key", sorted(catalogue.entries()))
def test_cards_bound_only_parameters_that_exist_and_name_no_files(key: str) -> None:
    entry = catalogue.entries()[key]
    bounded = set(entry.card.remote)
    assert bounded <= set(inspect.signature(entry.build).parameters)
    assert not bounded & catalogue.file_parameters(key)
    assert catalogue.kind_of(key) is not None  # its kind is known before it is built


@pytest.mark.parametrize("key", sorted(catalogue.entries()))
def test_a_method_that_no_option_names_says_how_it_is_selected(key: str) -> None:
    kind = catalogue.kind_of(key)
    is_named = kind is not None and issubclass(kind, Decoder | SamplerPreset | Constraint)
    assert bool(catalogue.entries()[key].card.use) != is_named
    if not is_named:
        with pytest.raises(InvalidRequestError, match=f"'{key}' is not a decoder; it is selected"):
            catalogue.check_kind(key, "a decoder", Decoder)


@pytest.mark.parametrize("key", sorted(catalogue.entries()))
def test_defaults_are_within_the_bounds(key: str) -> None:
    entry = catalogue.entries()[key]
    for name, one in inspect.signature(entry.build).parameters.items():
        if name in entry.card.remote and one.default is not None:
            assert entry.card.remote[name].allows(one.default), name


@pytest.mark.parametrize("key", sorted(catalogue.entries()))
def test_every_number_beyond_its_bounds_is_refused(key: str) -> None:
    for name in numbers(key):
        for value in ("1e9", "-1e9", "Infinity", "NaN", "1" + "0" * 400, "true", "[1]", "x" * 999):
            with pytest.raises(InvalidRequestError) as error:
                catalogue.check_remote(f"{key}:{name}={value}")
            assert name in str(error.value) or "reads files" in str(error.value)


@pytest.mark.parametrize(
    "choice, message",
    [
        ("beam:width=4096", "'beam': width is 4096; requests to a server may set 1 to 16"),
        ("easyspec:size=4000", "size is 4000"),
        ("easyspec:sise=4", "has no parameter 'sise'; known: size, group"),
        ("learn2pd:filter=x", "filter names a file"),
        ("prefix-spill:where=x", "where names a file"),
        (
            "rsd:branching=9-9-9-9",
            "has the parameter branching: only the server's own options may use that, not requests",
        ),
        ("monitors", "reads files"),
        ("fastkv:decoder=beam:width=17", "'beam': width is 17"),
        ("fastkv:decoder=fastkv:decoder=learn2pd:filter=x", "filter names a file"),
        ("bandit:drafter=autodeco:heads=x", "heads names a file"),
        ("taps:drafters=prompt-lookup+monitors", "reads files"),
        ("taps:drafters=" + "+".join(["suffix"] * 5), "drafters is"),
        ("fastkv:decoder=nonsense", "'nonsense'"),
        ("aded:size", "name=value"),
    ],
)
def test_what_a_remote_caller_may_not_select(choice: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        catalogue.check_remote(choice)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "choice",
    [
        "beam:width=16,penalty=-1.5,early=true",
        "llada:block=null,steps=4,remasking=margin",
        "specdec++:acceptance=rejection",
        "fastkv:decoder=specdec++:size=9",
        "taps:drafters=prompt-lookup+suffix,route=false",
        "self-infill:suffix=12",
    ],
)
def test_what_a_remote_caller_may_select(choice: str) -> None:
    catalogue.check_remote(choice)


@pytest.mark.parametrize(
    "choice",
    ["fastkv:decoder=prefix-spill", "bandit:drafter=prefix-spill", "taps:drafters=prefix-spill+x"],
)
def test_a_nested_method_of_another_kind_is_not_built(
    choice: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Building it would start a thread per request."""
    monkeypatch.chdir(tmp_path)
    before = threading.active_count()
    with pytest.raises(InvalidRequestError, match="'prefix-spill' is not a"):
        catalogue.build_as(choice, "anything", object)
    assert threading.active_count() == before and not list(tmp_path.iterdir())


def test_an_undeclared_kind_is_refused() -> None:
    def build(size: Any = 1) -> Any:
        raise AssertionError("built")

    catalogue.register(catalogue.Card("x-test", "search", "no paper", "lossy"))(build)
    try:
        with pytest.raises(InvalidRequestError, match="does not declare"):
            catalogue.check_remote("x-test")
    finally:
        del catalogue.entries()["x-test"]


def test_an_unknown_method_of_a_small_kind_names_those_that_exist() -> None:
    with pytest.raises(InvalidRequestError, match="^'nope' is not a schedule; choose from fair, "):
        build_as("nope", Schedule)  # type: ignore[type-abstract]
    with pytest.raises(InvalidRequestError, match="^no decoding method is called 'nope'"):
        build_decoder("nope")
