"""The kernels give the same bits with every instruction set, compiler and C library: digests of
logits and sampled texts equal those stored here, which every machine that runs the tests checks."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import portable_bits
from anydecode.kernels import build, portable
from anydecode.kernels.build import local_variants
from anydecode.kernels.library import Library, exponentials, gumbel, load_library
from anydecode.kernels.library_cache import built_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="needs the native kernels")

DIGESTS = {
    "text in float32": "fb22c9bdbdfc1260",
    "text in bfloat16": "fb0335a69f92c946",
    "text in float16 cache": "395ba0a1205413e2",
    "text in int8": "aac26f9532ac0fc4",
    "text in int4": "53b5151e824cde1d",
    "products": "0ee47b85299671cf",
    "products of bitsandbytes": "b1318a382daf4afc",
    "samples": "06a7e9f04153493a",
    "RWKV-7": "94223c6267220aec",
    "soft caps": "766892d5ebff0a66",
    "sinks and experts": "ba73bf69a7597888",
    "latent attention": "43ca953f6485930b",
    "biases by distance": "cf179097f1b691d6",
    "layer norms": "956e119dc71e5cc3",
    "growing queries": "fa34b6592aaa5563",
    "Mamba": "ac88e10dad43ad95",
    "Mamba 2": "fcc104d923301535",
    "gated delta": "258e7aec3ace8974",
    "linear recurrent unit": "06f131433e82340a",
}


@pytest.fixture(params=[*local_variants(), "scalar"])
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each variant that this machine runs; it is in use for the whole process."""
    path = built_library()
    assert path is not None
    yield Library(path, request.param).variant
    Library(path)


@pytest.mark.one_in(2)  # each variant and each format
@pytest.mark.parametrize("stored", portable_bits.STORED)
def test_sampled_texts_have_the_stored_digest(variant: str, stored: str) -> None:
    assert portable_bits.texts(stored) == DIGESTS[f"text in {stored}"]


def test_products_and_samples_have_the_stored_digest(variant: str) -> None:
    for name, formats in portable_bits.PRODUCTS.items():
        assert portable_bits.products(formats) == DIGESTS[name]
    assert portable_bits.samples() == DIGESTS["samples"]


@pytest.mark.parametrize("name", ["RWKV-7", *portable_bits.FAMILIES])
def test_logits_have_the_stored_digest(variant: str, name: str) -> None:
    assert portable_bits.family(name) == DIGESTS[name]


def digests_of(library: Path, variant: str) -> dict[str, str]:
    """The digests that a process with this library finds."""
    done = subprocess.run(
        [sys.executable, portable_bits.__file__, str(library)],
        env={**os.environ, "ANYDECODE_VARIANT": variant},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    assert found.pop("variant") == variant
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcc", "clang", "zig"])
def test_every_compiler_gives_the_stored_digests(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    compiler = [sys.executable, "-m", "ziglang", "cc"] if name == "zig" else [name]
    if shutil.which(compiler[0]) is None or (name == "zig" and find_spec("ziglang") is None):
        pytest.skip(f"needs {name}")
    variants = local_variants()[:1]
    library = build.compile_library(tmp_path / "lib.so", compiler, variants=variants)
    for variant in (*variants, "scalar"):
        assert digests_of(library, variant) == DIGESTS


def test_another_last_bit_has_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one number of one weight."""

    def changed(shape: tuple[int, ...], seed: int) -> np.ndarray:
        found = numbers(shape, seed)
        if seed == 5:
            found.flat[0] = np.nextafter(found.flat[0], np.float32(2))
        return found

    numbers = portable_bits.numbers
    monkeypatch.setattr(portable_bits, "numbers", changed)
    assert portable_bits.family("RWKV-7") != DIGESTS["RWKV-7"]


def test_what_a_library_has_set_for_small_numbers_changes_nothing() -> None:
    """torch can let the processor take numbers below the normal ones for zero."""
    torch = pytest.importorskip("torch")
    x = portable_bits.numbers((300,), 1) * np.float32(200)
    expected = portable_bits.small_gates(x)
    assert np.count_nonzero(expected)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        assert np.array_equal(portable_bits.small_gates(x), expected)
        assert np.float32(1e-38) * np.float32(0.1) == 0  # the mode of this thread is as before
    finally:
        torch.set_flush_denormal(False)


def in_ulps(found: np.ndarray, expected: list[Decimal]) -> float:
    """The largest error in units in the last place."""
    pairs = zip(found.tolist(), expected, strict=True)
    return max(float(abs(Decimal(one) - right)) / math.ulp(float(right)) for one, right in pairs)


def test_logarithms_and_exponentials_match_decimals() -> None:
    uniform = (portable_bits.words((300,), 1) + 0.5) * 2.0**-32
    near = 1 - uniform * 2.0**-30
    wide = np.ldexp(uniform, np.arange(-150, 150) * 6)
    for x in (uniform, near, wide):
        assert in_ulps(portable.log(x), [Decimal(one).ln() for one in x.tolist()]) < 3
    for x in (uniform, -uniform * 700, uniform * 700):
        assert in_ulps(portable.exp(x), [Decimal(one).exp() for one in x.tolist()]) < 2
    assert portable.log(1.0) == 0 and portable.exp(0.0) == 1
    assert portable.exp(-709.0) == 0 and portable.exp(710.0) == np.inf
    powers = portable.power(2.0, np.arange(-20.0, 20.0))
    assert np.allclose(powers, np.ldexp(1.0, np.arange(-20, 20)), rtol=1e-14, atol=0)
    soft = portable.softplus(np.array([-700.0, -40.0, 0.0, 40.0]))
    assert np.allclose(soft, np.logaddexp(0, [-700.0, -40.0, 0.0, 40.0]), rtol=1e-15, atol=0)


def test_noise_has_the_same_bits_in_the_kernels_and_in_numpy() -> None:
    uniform = (portable_bits.words((5000,), 3) + 0.5) * 2.0**-32
    assert np.array_equal(gumbel(uniform), -portable.log(-portable.log(uniform)))


def test_exponentials_match_float64() -> None:
    for count in (1, 7, 8, 9, 1000):
        scores = portable_bits.numbers((count,), count) * np.float32(50)
        weights, total = exponentials(scores)
        expected = np.exp((scores - scores.max()).astype(np.float64))
        assert np.allclose(weights, expected, rtol=1e-6, atol=1e-37)
        assert total == pytest.approx(weights.sum(dtype=np.float64), rel=1e-14)


def test_rotations_are_those_of_float64() -> None:
    """Each cosine and sine is the rounded one, also of positions in the millions."""
    positions = np.concatenate([np.arange(3000), np.arange(10**7 - 3000, 10**7)])
    frequencies = portable.power(500000.0, -np.arange(32) / 32).astype(np.float32)
    cosines, sines = portable_bits.rotations(positions, frequencies)
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    assert np.array_equal(cosines, np.cos(angles).astype(np.float32))
    assert np.array_equal(sines, np.sin(angles).astype(np.float32))
