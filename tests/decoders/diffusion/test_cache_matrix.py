"""Every method with a choice of caches, with every cache, on models of every kind: the text of a
batch with restarts is that of each request alone, and exact caches change nothing; or the cache is
refused in one line that says why."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from anydecode import LLM, catalogue
from anydecode.certification.checks import Restarts
from anydecode.certification.denoising import random_model
from anydecode.decoders.diffusion.learn2pd import model_facts
from anydecode.decoders.diffusion.named_caches import BLOCKWISE_CACHES
from anydecode.errors import AnydecodeError
from anydecode.models.scripted import MASK

PROMPTS = [[5, 6, 7], [9], [80, 81, 82, 83, 84]]
KEYS = sorted(
    card.key
    for card in catalogue.cards("diffusion")
    if "cache" in inspect.signature(catalogue.find(card.key).build).parameters
)
#: Methods whose blocks may be parts of those of a model.
IN_PARTS = {
    "cd4lm", "creditdecoding", "diffusion-cfg", "dparallel", "eb-sampler", "fast-dllm", "llada",
    "localleap",
}  # fmt: skip
REVISING = {"diffusion-gemma", "duo", "gidd", "p2", "remdm", "remedi"}
DRAFTING = {"freedave", "ssd"}
#: What makes the methods change tokens, predict several blocks and draft on so short texts.
PARAMETERS = {
    "bacd-tccf": "coarse=4,fine=4",
    "gidd": "steps=4,corrections=4",
    "remdm": "eta=0.3",
    "freedave": "drafts=3",
    "diffusion-gemma": "steps=4",
}
KINDS = ("whole", "shifted", "blocks", "shifted blocks", "causal context")
BLOCK = 4


def opened(kind: str) -> LLM:
    """A small random transformer."""
    has_blocks = kind not in ("whole", "shifted")
    llm = random_model(BLOCK if has_blocks else None)
    changes: dict[str, Any] = {"logit_shift": int("shifted" in kind)}
    changes["has_causal_context"] = kind == "causal context"
    llm.model.spec = replace(llm.model.spec, **changes)
    return llm


@cache
def filter_file(folder: Path, size: int) -> Path:
    """A random filter of learn2pd for these models, which have the same embeddings."""
    random, path = np.random.default_rng(0), folder / f"filter-{size}"
    shapes = {"weight": (size, size), "bias": (size,)}
    tensors = {
        f"{layer}.{name}": random.normal(size=shape).astype(np.float32)
        for layer in ("hidden", "output")
        for name, shape in shapes.items()
    }
    with opened("whole") as llm:
        described = {"block": size, "model": model_facts(llm.model, MASK)}
    save_file(tensors, path, metadata={"learn2pd": json.dumps(described)})
    return path


def refusal(key: str, cache: str, kind: str) -> str | None:
    """What the message says where a method refuses a cache, or a cache a model."""
    has_blocks = kind not in ("whole", "shifted")
    if key == "fast-dllm-v2":
        if cache not in ("none", "dual"):
            return "what is cached of the open one must be one of none, dual"
        return None if has_blocks else "open it with block="
    if cache == "hierarchical" and key not in IN_PARTS:
        return "does not fill the blocks of a model in parts of equal size"
    if key in REVISING and cache in ("window", "elastic"):
        return "passes of such a cache compute masks"
    if key in DRAFTING and cache in ("vicinity", "window", "elastic"):
        return "refreshes such a cache can score only one"
    if key in ("ete", "wino") and cache not in ("none", "block"):
        return "passes of such a cache compute no more"
    if cache in ("block", "hierarchical") and not has_blocks and key != "bacd-tccf":
        return "open it with block="
    if key == "wino" and "shifted" in kind:
        return "shifted logits"
    if key == "lrd" and cache == "elastic":
        return "passes of such a cache read tokens"
    if cache == "window" and has_blocks:
        return "rows of this one see blocks of 4"
    return None


def texts(llm: LLM, decoder: str, prompts: list[list[int]]) -> list[list[int]]:
    options: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    return [one.tokens for one in llm.generate(prompts, decoder=decoder, **options)]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", KEYS)
def test_a_cache_works_or_is_refused_with_the_reason(
    key: str, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    given = [PARAMETERS[key]] if key in PARAMETERS else []
    if key == "learn2pd":
        size = 8 if kind in ("whole", "shifted") else BLOCK
        given.append(f"filter={filter_file(tmp_path_factory.getbasetemp(), size)}")
    found = {}
    for name in BLOCKWISE_CACHES:
        decoder = f"{key}:{','.join([*given, f'cache={name}'])}"
        message = refusal(key, name, kind)
        with opened(kind) as llm:
            if message is not None:
                with pytest.raises(AnydecodeError, match=message) as caught:
                    texts(llm, decoder, PROMPTS[:1])
                assert "\n" not in str(caught.value)
                continue
            found[name] = [texts(llm, decoder, [prompt])[0] for prompt in PROMPTS]
            with Restarts(llm.engine, seed=1, share=0.4):
                assert texts(llm, decoder, PROMPTS) == found[name], name
            llm.engine.check_integrity()
    if "block" in found and key != "bacd-tccf":  # whose blocks take the place of the model's
        assert found["block"] == found["none"]
