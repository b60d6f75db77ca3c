"""Shared fixtures: the sources on the path of child processes, and the default model."""

from __future__ import annotations

import gc
import os
import re
import secrets
import ssl
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
import pytest

try:
    import torch
except ImportError:
    pass
else:
    # Triton reads this when it is first imported, which any library may do.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")

# A loaded machine makes no test wrong, and every run tests the same cases: `make fuzz` looks for
# new ones.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_MODEL = "smollm2-135m-instruct"


#: The functions of `certificates.py` that tests call to run a certificate, or to check that it
#: fails for a method with a fault, and what the names of tests begin with that do so otherwise.
#: These are many, and check in trials what the other tests of their method check in one case.
CERTIFY = ("assert_certified", "assert_rejected")
CERTIFICATES = ("test_certificate", "test_other_defaults_are_rejected")

#: The folders whose tests all run without torch too, as do those of no folder: what they test
#: opens models, and chooses kernels, by whether torch is installed. Of each other file one test
#: shows that the modules which it tests are imported and run without torch.
CORE = ("api", "cli", "engine", "integrations")


def runs_certificate(item: pytest.Item) -> bool:
    """Whether a test runs a certificate."""
    if item.name.startswith(CERTIFICATES):
        return True
    function = getattr(item, "function", None)
    called = getattr(getattr(function, "__code__", None), "co_names", ())
    found = [function.__globals__.get(name) for name in CERTIFY if name in called]
    return any(one.__module__ == "certificates" for one in found if one)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make test-core`, and that of CI on slow machines."""
    parser.addoption("--part", default="1/1", help="part I/N of the selected tests (1/1: all)")
    parser.addoption(
        "--core",
        action="store_true",
        help=f"the fast tests of {', '.join(CORE)}, and the first of each other file",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave modules and collected tests, a million objects that stay, out of garbage collection:
    it would take a fifth of the time of collecting the tests, and later a second each time. What
    the tests make is looked at less often than by default."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


def part_of(config: pytest.Config) -> tuple[int, int]:
    """The part of the tests that `--part` names, from 0 on, and the number of parts."""
    text = config.getoption("part")
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if found is None or int(found[1]) > int(found[2]):
        raise pytest.UsageError(f"--part is I/N with 1 <= I <= N, not {text}")
    return int(found[1]) - 1, int(found[2])


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say that tests are left out."""
    index, count = part_of(config)
    return f"part {index + 1} of {count} of the tests" if count > 1 else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse names of tests that hold an address, since parallel runs compare them across
    processes; before tests are selected, mark certificates as slow, and the cases that `one_in`
    leaves out."""
    num_cases: Counter[Any] = Counter()
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"Pass ids=, this differs by process: {item.nodeid}")
        if runs_certificate(item):
            item.add_marker("slow")
        if marker := item.get_closest_marker("one_in"):
            test = item.nodeid.partition("[")[0]
            if num_cases[test] % marker.args[0]:
                item.add_marker("slow")
            num_cases[test] += 1
    if config.getoption("core"):
        items[:] = core_tests(items)
    index, count = part_of(config)
    items[:] = [one for one in items if zlib.crc32(one.nodeid.encode()) % count == index]


def core_tests(items: list[pytest.Item]) -> list[pytest.Item]:
    """The fast tests of `--core`."""
    kept = []
    seen: set[Path] = set()
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("clients"):
            continue
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        if folder in CORE or folder == item.path.name or item.path not in seen:
            kept.append(item)
        seen.add(item.path)
    return kept


@pytest.fixture(scope="session", autouse=True)
def sources_on_path() -> None:
    """Child processes import the sources under test rather than an installed package."""
    os.environ["PYTHONPATH"] = str(ROOT / "src")


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Iterator[None]:
    """HTTP clients share one TLS context, which none uses: each would read the certificates of all
    authorities, for 0.1 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(autouse=True)
def repeatable_seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed have the same ones in every run of a test."""
    monkeypatch.setattr(secrets, "randbits", Random(request.node.nodeid).getrandbits)


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The path of the default model, pulled once, or of the copy that `ANYDECODE_TEST_MODEL`
    names."""
    named = os.environ.get("ANYDECODE_TEST_MODEL")
    if named:
        return Path(named)
    from anydecode.models.loading import pull

    return pull(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return ROOT


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The matplotlib figures that were written to files, in order."""
    from matplotlib.figure import Figure

    written: list[Any] = []
    save = Figure.savefig

    def record(figure: Any, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        written.append(figure)

    monkeypatch.setattr(Figure, "savefig", record)
    return written
