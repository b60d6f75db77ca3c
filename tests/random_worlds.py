"""Tiny models of every kind that a method may need, for random requests. Each is made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from adapter_files import save_adapter
from anydecode.api.llm import LLM
from anydecode.certification import tiny, tiny_blocks, tiny_heads, tiny_recurrent
from anydecode.certification.checks import scripted_llm
from anydecode.certification.denoising import random_model
from anydecode.certification.samplers import ToyModel
from anydecode.certification.tiny_blockffn import blockffn_checkpoint
from anydecode.certification.tiny_future import future_model
from anydecode.certification.tiny_judge import judged_model
from anydecode.certification.tiny_sambay import sambay_checkpoint
from anydecode.certification.tiny_sentence import sentence_diffusion_model
from anydecode.certification.tiny_step3 import step3_checkpoint
from anydecode.certification.tiny_transfer import transfer_model
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import build_model
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from masked_models import tiny_masked_llm
from plain_families import FAMILIES, checkpoint
from rwkv_models import rwkv_checkpoint


@dataclass(frozen=True)
class World:
    """A model with its drafters.

    Attributes:
        model: The target.
        tokenizer: Its tokenizer.
        drafts: The draft models.
        cache_formats: The formats of its key-value cache.
        has_adapters: Whether it takes the adapters of `adapters`.
    """

    model: Any
    tokenizer: Any
    drafts: tuple[Any, ...]
    has_adapters: bool = False

    @property
    def cache_formats(self) -> tuple[str | None, ...]:
        return (None, *getattr(self.model, "cache_formats", ()))

    def open(self, **options: Any) -> LLM:
        """An engine; `options` are those of `LLM`."""
        llm = LLM(
            self.model, tokenizer=self.tokenizer, draft=list(self.drafts) or "none", **options
        )
        if self.has_adapters:
            for number, path in enumerate(adapters()):
                llm.add_adapter(f"adapter {number}", path)
        return llm


@cache
def adapters() -> tuple[Path, ...]:
    """The folders of two adapters of `tiny_model`."""
    folder = Path(mkdtemp())
    return tuple(save_adapter(folder / str(seed), seed) for seed in range(2))


def _of(open_llm: Callable[[], LLM]) -> World:
    """The models of an engine."""
    with open_llm() as llm:
        runners = llm.engine.runners
        drafts = tuple(runner.pool.model for name, runner in runners.items() if name != "target")
        return World(llm.model, llm.tokenizer, drafts)


def _toy() -> World:
    draft = ScriptedModel(seed=1, noise=0.5)
    return World(ToyModel(seed=1), ByteTokenizer(), (draft,))


def _tiny(**options: Any) -> World:
    model = tiny.tiny_model(layers=2, **options)
    draft = tiny.tiny_model(layers=1, **options)
    return World(model, ByteTokenizer(), (draft,), has_adapters="hidden" not in options)


def _packed(dtype: str) -> World:
    """A model of packed weights, with another one of them as the draft model."""
    target, draft = (tiny.tiny_checkpoint(layers=layers, residual=0.3) for layers in (2, 1))
    models = [
        build_model(one, dtype, executor=choose_executor(threads=1)) for one in (target, draft)
    ]
    return World(models[0], ByteTokenizer(), (models[1],))


def _built(make: Callable[..., Checkpoint]) -> World:
    """A model of a family, with another one of it as the draft model."""
    executor = choose_executor(threads=1)
    model, draft = [build_model(make(seed=seed), executor=executor) for seed in (0, 1)]
    return World(model, ByteTokenizer(), (draft,))


_RECURRENT = {
    "mamba": tiny_recurrent.mamba_checkpoint,
    "mamba2": tiny_recurrent.mamba2_checkpoint,
    "hybrid": tiny_recurrent.hybrid_checkpoint,
    "rwkv7": partial(rwkv_checkpoint, vocab_size=ByteTokenizer.vocab_size),
    "sambay": sambay_checkpoint,
}
_HEADS = ("medusa", "hydra", "blockwise", "clover", "clover_2", "falcon", "chimera", "mtp")
_BLOCKS = ("dflash", "dspark", "dflash2", "peagle", "parallelspec", "pard")
_STATES = ("eagle", "eagle3", "early_exit", "longspec")


def _drafters() -> dict[str, Callable[..., Checkpoint]]:
    found = {name: getattr(tiny_heads, f"{name}_checkpoint") for name in _HEADS}
    found |= {name: getattr(tiny_blocks, f"{name}_checkpoint") for name in _BLOCKS}
    return found | {name: getattr(tiny, f"{name}_checkpoint") for name in _STATES}


#: What makes each world.
WORLDS: dict[str, Callable[[], World]] = {
    "scripted": _toy,
    "diffusion": partial(_of, partial(scripted_llm, causal=False)),
    "diffusion blocks": partial(_of, partial(scripted_llm, causal=False, block_size=4)),
    "diffusion drafts": partial(_of, partial(scripted_llm, draft_causal=False)),
    "fill-in": partial(_of, partial(scripted_llm, fills_in=True)),
    "tiny": _tiny,
    "tiny repeats": partial(_tiny, residual=0.15),
    "tiny short": partial(_tiny, positions=96),
    "torch": partial(_tiny, residual=0.15, backend="torch"),
    **{dtype: partial(_packed, dtype) for dtype in ("bfloat16", "int8", "int4")},
    "random diffusion": partial(_of, random_model),
    "random diffusion blocks": partial(_of, partial(random_model, block_size=4)),
    "random diffusion shift": partial(_of, partial(random_model, shift=1)),
    "tiny-diffusion": partial(_of, partial(LLM, "tiny-diffusion", draft="none")),
    "tiny-uniform": partial(_of, partial(LLM, "tiny-uniform", draft="none")),
    "tiny-blocks": partial(_of, partial(LLM, "tiny-blocks", draft="none")),
    "routed": partial(_of, tiny.routed_model),
    "routed blocks": partial(_of, partial(tiny.routed_model, True)),
    "predicting": partial(_of, tiny.predicting_model),
    "layer routed": partial(_of, tiny.layer_routed_model),
    "accelerated": partial(_of, tiny.accelerated_model),
    "future": partial(_of, future_model),
    "judged": partial(_of, judged_model),
    "judged draft": partial(_of, partial(judged_model, reads_draft=True)),
    "transfer": partial(_of, transfer_model),
    "sentence": partial(_of, sentence_diffusion_model),
    "masked": partial(_of, tiny_masked_llm),
    **{name: partial(_of, partial(tiny.with_drafter, make)) for name, make in _drafters().items()},
    "two drafters": partial(
        _of, partial(tiny.with_drafter, tiny.eagle3_checkpoint, tiny.eagle_checkpoint)
    ),
    **{name: partial(_built, make) for name, make in _RECURRENT.items()},
    "blockffn": partial(_built, blockffn_checkpoint),
    "step3": partial(_built, step3_checkpoint),
    **{name: partial(_built, partial(checkpoint, name)) for name in FAMILIES},
}


@cache
def world(name: str) -> World:
    """The world of this name."""
    return WORLDS[name]()
