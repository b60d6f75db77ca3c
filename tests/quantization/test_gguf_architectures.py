"""`anydecode quantize` on tiny files of many architectures, written as llama.cpp's converter names
things: what is packed is read as what it decodes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

pytest.importorskip("transformers")

from anydecode.models.loading import load_checkpoint
from anydecode.models.loading.gguf_file import GGUFFile
from anydecode.models.loading.gguf_keys import ARCHITECTURES
from anydecode.quantization.gguf import quantize_file
from parity_cases import parity_module
from tiny_models import built, chain, hf_model, logits

TOKENS = [1, 2, 3, 4, 5]
#: Cases whose metadata are those of models as narrow as theirs.
NARROW = {
    "mamba", "mamba2", "bloom", "granitehybrid", "qwen3next", "jamba", "qwen2moe", "olmoe",
    "ernie4_5-moe", "llama", "phimoe", "dbrx",
}  # fmt: skip


def cases() -> Iterator[tuple[str, Callable[[Path], Any]]]:
    """The architectures, with what writes a file `tiny.gguf` into a folder."""
    for name in ("test_gguf_families", "test_gguf_hybrids"):
        module = parity_module(name)
        for case in module.CASES.values():
            wide = {} if case.architecture in NARROW else {"hidden_size": 64}
            case = replace(case, settings={**case.settings, **wide})
            yield case.architecture, partial(converted, module, case)
    experts = parity_module("test_gguf_experts")
    for architecture, (family, settings, _) in experts.FAMILIES.items():
        wide = {} if architecture in NARROW else {"hidden_size": 64}
        yield architecture, partial(of_experts, experts, architecture, family, {**settings, **wide})
    latent = parity_module("test_gguf_deepseek")
    for name, architecture in LATENT.items():
        yield architecture, partial(latent.write, case=name)


LATENT = {
    "v3": "deepseek2", "mistral4": "mistral4", "minicpm3": "minicpm3", "deepseek32": "deepseek32",
    "glm-dsa": "glm-dsa",
}  # fmt: skip


def converted(module: Any, case: Any, folder: Path) -> None:
    module.converted(module.original(case), case, folder / "tiny.gguf")


def of_experts(
    module: Any, architecture: str, family: str, settings: dict[str, Any], folder: Path
) -> None:
    module.write(folder, architecture, hf_model(family, **settings))


#: The first case of each architecture.
CASES = dict(reversed([*cases()]))


def logits_of(path: Path) -> np.ndarray:
    found: np.ndarray = logits(built(load_checkpoint(path)), chain(TOKENS))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", CASES)
def test_packed_files_are_read_as_what_they_decode_to(architecture: str, tmp_path: Path) -> None:
    """Logits in Q4_K (in its format of small blocks) and IQ4_NL are those of the same values in
    float32, and not those of the source."""
    CASES[architecture](tmp_path)
    source = tmp_path / "tiny.gguf"
    exact = logits_of(source)
    for format, small in (("q4_k", "Q5_0"), ("iq4_nl", "IQ4_NL")):
        quantize_file(source, tmp_path / "packed.gguf", format, overwrite=True)
        quantize_file(tmp_path / "packed.gguf", tmp_path / "plain.gguf", "f32", overwrite=True)
        packed = logits_of(tmp_path / "packed.gguf")
        assert np.array_equal(packed, logits_of(tmp_path / "plain.gguf"))
        assert np.abs(packed - exact).max() > 0
        formats = {info.format for info in GGUFFile(tmp_path / "packed.gguf").tensors.values()}
        assert small in formats or architecture in {*NARROW, *LATENT.values()}


def test_most_architectures_are_walked() -> None:
    """The files of the others are written by the tests of their families."""
    known = {*ARCHITECTURES} & {*gguf.MODEL_ARCH_NAMES.values()}
    assert len(known & {*CASES}) > 0.6 * len(known)
