"""Which workers give the same bits: a digest of everything that determines them, and of bits that
they have really computed.

The facts cover the content of the model's files, formats, versions, and the code of the kernels: a
library that another compiler has built, or from other sources, differs in them even where a probe
finds no other bits. Libraries of mathematics and processors can differ without a trace in the
facts, so each worker also computes a probe: a chunk of a prompt, single rows at several lengths, a
tree of drafts, and tokens drawn with top-p. Only workers with equal digests form a group, and
nothing moves between groups.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.cluster.connection import VERSION
from anydecode.engine.model_runner import ModelRunner
from anydecode.memory.prefix import BLOCK, read_slots
from anydecode.scoring.media import Encoder
from anydecode.version import __version__

#: Lengths of the probe's prompts, as far as the cache has room for them.
PROBE_LENGTHS = (16, 64, 256, 1000)
_PROBE_TOKENS = 8


def group_of(llm: LLM, encoder: Encoder) -> str:
    """The name of the group of a worker that runs `llm` and the encoder: equal for workers that
    give equal bits."""
    side = encoder.image_size
    image = np.arange(3 * side * side).astype(np.uint8).reshape(side, side, 3)
    embeddings = hashlib.sha256(encoder.encode(image).tobytes()).hexdigest()
    text = json.dumps([facts(llm, encoder), probe(llm), embeddings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def facts(llm: LLM, encoder: Encoder) -> dict[str, Any]:
    """What determines the bits of a model's rows, as far as it can be read."""
    return {
        "encoder": encoder.fingerprint,
        "protocol": VERSION,
        "version": __version__,
        "numpy": np.__version__,
        "libc": " ".join(platform.libc_ver()),
        "runners": {name: _runner_facts(one) for name, one in sorted(llm.engine.runners.items())},
    }


def probe(llm: LLM) -> str:
    """A digest of tokens, log-probabilities and cached keys and values that the model computes.
    Stored blocks are not used for it, and stay."""
    prefixes = llm.engine.runners["target"].prefixes
    spill, prefixes.spill = prefixes.spill, None
    try:
        llm.clear()
        return _computed(llm)
    finally:
        llm.clear()
        prefixes.spill = spill


def _computed(llm: LLM) -> str:
    digest = hashlib.sha256()
    spec, runner = llm.model.spec, llm.engine.runners["target"]
    if not spec.causal:
        answer = llm.generate(_probe_prompt(llm, PROBE_LENGTHS[0]), max_tokens=_PROBE_TOKENS)
        digest.update(repr(answer.tokens).encode())
        return digest.hexdigest()
    for length in PROBE_LENGTHS:
        if length + _PROBE_TOKENS > min(llm.max_length, runner.pool.num_slots):
            break
        prompt = _probe_prompt(llm, length)
        for options in _PROBES:
            answer = llm.generate(
                prompt, max_tokens=_PROBE_TOKENS, ignore_eos=True, seed=length, **options
            )
            digest.update(repr((answer.tokens, answer.logprobs)).encode())
        slots = runner.prefixes.match(prompt, (-1, None))
        digest.update(read_slots(runner.pool.cache, slots[:BLOCK]))
        digest.update(read_slots(runner.pool.cache, slots[-BLOCK:]))
    return digest.hexdigest()


#: The ways in which the probe's tokens are computed; the last one scores trees of drafts.
_PROBES: tuple[dict[str, Any], ...] = (
    {"logprobs": 5, "decoder": "autoregressive"},
    {"temperature": 1.0, "top_p": 0.9, "decoder": "autoregressive"},
    {"decoder": "prompt-lookup"},
)


def _probe_prompt(llm: LLM, length: int) -> list[int]:
    """A prompt with repetitions, which drafts copy."""
    size = llm.model.spec.vocab_size
    return [(97 + 31 * (position % 13) + position // 26) % size for position in range(length)]


def _runner_facts(runner: ModelRunner) -> dict[str, Any]:
    model: Any = runner.model
    executor = getattr(model, "executor", None)
    return {
        "model": _content(getattr(model, "path", None)),
        "dtype": str(getattr(model, "dtype", None)),
        "backend": type(executor).__name__,
        "kernels": getattr(executor, "kernels", None),
        "cache": [f"{one.dtype} {tuple(one.shape[1:])}" for one in runner.pool.cache.arrays],
    }


def _content(path: str | Path | None) -> str | None:
    """A digest of a model's files, without their names' folder and times; None without files."""
    if path is None:
        return None
    digest = hashlib.sha256()
    for file in _files(Path(path)):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with open(file, "rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for file in sorted(path.iterdir()):
        if file.is_file() and not file.name.startswith(".") and file.suffix not in (".md", ".png"):
            yield file
