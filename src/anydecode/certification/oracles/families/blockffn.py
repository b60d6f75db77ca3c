"""Oracle test of blockffn (arXiv:2507.08771): logits against a dense forward pass in float64, texts
against plain decoding, and the blocks that a pass reads: exactly those that some row uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.certification.checks import (
    PROMPTS,
    Check,
    Restarts,
    equal_tokens,
    oracle_test,
)
from anydecode.certification.oracles.transformer import rms_norm, rotate, softmax
from anydecode.certification.tiny import readable_executor
from anydecode.certification.tiny_blockffn import BLOCKS, LAYERS, blockffn_checkpoint
from anydecode.kernels.host import to_host
from anydecode.kernels.interface import KeyValues, OutputSpec, Rows
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import build_model
from anydecode.models.families.table import FAMILIES
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import check_torch
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.transformer import Transformer
from anydecode.tasks.tasks import TASKS, examples

TEXT = [int(token) for token in np.random.default_rng(3).integers(97, 103, 40)]
#: Tokens of a chunk, as a pass that verifies seven drafts has.
CHUNK = 8
_STEPS = 60  # of a training


class Forward:
    """The model over a whole text, with every block, from its tensors. `weights` are those of the
    blocks in each layer after a call, `[rows, blocks]`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self.tensors: dict[str, Any] = {
            name: np.asarray(tensor, np.float64) for name, tensor in checkpoint.tensors.items()
        }
        self.weights: list[np.ndarray] = []

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits of every position."""
        get, config = self.tensors, self.config
        x = get["model.embed_tokens.weight"][list(tokens)] * config["scale_emb"]
        scale = config["scale_depth"] / config["num_hidden_layers"] ** 0.5
        self.weights = []
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            y = self._norm(x, f"{name}.input_layernorm")
            x = x + scale * self._attention(y, f"{name}.self_attn")
            y = self._norm(x, f"{name}.post_attention_layernorm")
            x = x + scale * self._blocks(y, f"{name}.mlp")
        logits = self._norm(x, "model.norm") @ get["lm_head.weight"].T
        logits = logits + get.get("lm_head.bias", 0.0)
        scaled: np.ndarray = logits / (config["hidden_size"] / config["dim_model_base"])
        return scaled

    def _norm(self, x: np.ndarray, name: str, eps: float = 1e-5) -> np.ndarray:
        return rms_norm(x, self.tensors[f"{name}.weight"], eps)

    def _blocks(self, x: np.ndarray, name: str) -> np.ndarray:
        get, config = self.tensors, self.config
        weights = np.maximum(x @ get[f"{name}.router_proj.weight"].T, 0.0)
        if config["norm_after_router"] == "rms":
            weights = self._norm(weights, f"{name}.router_norm")
        elif config["norm_after_router"] == "sum":
            weights = weights / (config["norm_scale"] * weights.sum(-1, keepdims=True) + 1e-5)
        self.weights.append(weights)
        up, down = get[f"{name}.up_proj"], get[f"{name}.down_proj"]
        if config["ffn_type"] == "block":
            inner = np.einsum("rd,bsd->rbs", x, up)
            return np.einsum(
                "rbs,bds->rd", weights[:, :, None] * inner / (1 + np.exp(-inner)), down
            )
        inner = x @ up.T
        spread = weights.repeat(config["expert_size"], 1)
        result: np.ndarray = (spread * inner / (1 + np.exp(-inner))) @ down.T
        return result

    def _attention(self, x: np.ndarray, name: str) -> np.ndarray:
        get, config = self.tensors, self.config
        heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
        nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        positions = np.arange(len(x))
        base = 10_000.0 ** (-np.arange(0, rope, 2) / rope)
        q = self._norm(x @ get[f"{name}.q_a_proj.weight"].T, f"{name}.q_a_layernorm", 1e-6)
        q = (q @ get[f"{name}.q_b_proj.weight"].T).reshape(len(x), heads, nope + rope)
        down = x @ get[f"{name}.kv_a_proj_with_mqa.weight"].T
        latent = self._norm(down[:, :rank], f"{name}.kv_a_layernorm", 1e-6)
        kv = (latent @ get[f"{name}.kv_b_proj.weight"].T).reshape(len(x), heads, -1)
        turned = rotate(down[:, None, rank:], positions, base)
        k = np.concatenate([kv[..., :nope], turned.repeat(heads, 1)], -1)
        q = np.concatenate([q[..., :nope], rotate(q[..., nope:], positions, base)], -1)
        scores = np.einsum("ihd,jhd->hij", q, k) * (nope + rope) ** -0.5
        scores = np.where(positions[:, None] >= positions, scores, -np.inf)
        mixed = np.einsum("hij,jhd->ihd", softmax(scores), kv[..., nope:])
        output: np.ndarray = mixed.reshape(len(x), -1) @ get[f"{name}.o_proj.weight"].T
        return output


@oracle_test("blockffn")
def blockffn() -> Iterator[Check]:
    """Logits, texts, and the blocks that are read."""
    family = catalogue.build("blockffn")
    yield Check("the key builds the family", FAMILIES["blockffn"] is family)
    for norm, ffn_type in (("rms", "block"), ("sum", "block_linear"), ("none", "block")):
        checkpoint = blockffn_checkpoint(norm=norm, ffn_type=ffn_type)
        expected = Forward(checkpoint).logits(TEXT)
        error = np.abs(_logits(checkpoint, len(TEXT)) - expected).max() / np.abs(expected).max()
        where = f"{ffn_type}, {norm}"
        yield Check(f"logits equal a dense pass's, {where}", error < 1e-4, f"{error:.1e}")
    yield from _sparsity(blockffn_checkpoint())
    yield from _texts(blockffn_checkpoint())
    yield from _losses()
    yield from _trained()


def chunk_sparsity(weights: np.ndarray, size: int) -> float:
    """The share of blocks that no token of a chunk uses, over all chunks of consecutive tokens.

    Args:
        weights: The blocks' weights, `[tokens, blocks]`.
        size: The number of tokens of a chunk; 1 for the sparsity of tokens.
    """
    is_used = np.lib.stride_tricks.sliding_window_view(weights != 0, size, 0).any(-1)
    return float(1 - is_used.mean())


def _run(model: Transformer, cache: KeyValues, tokens: list[int], first: int) -> np.ndarray:
    """The logits of tokens from position `first` on."""
    count = len(tokens)
    table = np.arange(first + count, dtype=np.int32)
    zeros, last = np.zeros(count, np.int32), np.full(count, LAYERS, np.int32)
    rows = Rows(
        np.array(tokens, np.int32), table[first:], table[first:], [table], zeros,
        table[first:] + 1, np.empty(0, np.int32), zeros, zeros, zeros, last,
    )  # fmt: skip
    output = model.run(rows, cache, OutputSpec(np.arange(count, dtype=np.int32)))
    return to_host(output.logits).copy()


def _logits(checkpoint: Checkpoint, count: int) -> np.ndarray:
    """The logits of the text's last `count` tokens, which are run in a pass of their own."""
    return _last(checkpoint, checkpoint, count)


def _last(first: Checkpoint, second: Checkpoint, count: int) -> np.ndarray:
    """The same, run by the second model on the cache of the first."""
    models = [build_model(one, executor=readable_executor()) for one in (first, second)]
    cache, begin = models[0].new_cache(64, "float32"), len(TEXT) - count
    if begin:
        _run(models[0], cache, TEXT[:begin], 0)
    return _run(models[1], cache, TEXT[begin:], begin)


def _without(checkpoint: Checkpoint, unused: list[np.ndarray]) -> Checkpoint:
    """The checkpoint with NaN in place of the blocks `unused` of each layer."""
    tensors = dict(checkpoint.tensors)
    for layer, blocks in enumerate(unused):
        for part in ("up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.{part}"
            poisoned = np.array(tensors[name])
            poisoned[blocks] = np.nan
            tensors[name] = poisoned
    return replace(checkpoint, tensors=tensors)


def _sparsity(checkpoint: Checkpoint) -> Iterator[Check]:
    """What no row of a pass uses is not read: it may be anything."""
    oracle = Forward(checkpoint)
    oracle.logits(TEXT)
    token, chunk = (
        float(np.mean([chunk_sparsity(weights, size) for weights in oracle.weights]))
        for size in (1, CHUNK)
    )
    yield Check(
        "few blocks are used", token > 0.7 and 0.2 < chunk < token, f"{token:.2f}, {chunk:.2f}"
    )
    for count in (1, CHUNK):
        used = [(weights[-count:] != 0).any(0) for weights in oracle.weights]
        unused = [np.flatnonzero(~layer) for layer in used]
        # The first pass, of the other tokens, reads blocks too: it is run by the whole model.
        whole = _logits(checkpoint, count)
        poisoned = _last(checkpoint, _without(checkpoint, unused), count)
        yield Check(
            f"a pass over {count} rows reads only the blocks that they use",
            np.array_equal(whole, poisoned),
            f"{sum(layer.sum() for layer in used)} of {LAYERS * BLOCKS} blocks",
        )
        needed = [np.flatnonzero(layer)[-1:] for layer in used[:1]]
        broken = _last(checkpoint, _without(checkpoint, needed), count)
        yield Check(f"and a pass over {count} rows reads these", bool(np.isnan(broken).any()))
    together = _logits(checkpoint, CHUNK)
    model = build_model(checkpoint, executor=readable_executor())
    cache, begin = model.new_cache(64, "float32"), len(TEXT) - CHUNK
    _run(model, cache, TEXT[:begin], 0)
    alone = np.concatenate(
        [_run(model, cache, TEXT[row : row + 1], row) for row in range(begin, len(TEXT))]
    )
    yield Check("rows have the same bits together as alone", np.array_equal(alone, together))


def _texts(checkpoint: Checkpoint) -> Iterator[Check]:
    def open_llm() -> LLM:
        model = build_model(checkpoint, executor=readable_executor())
        return LLM(model, tokenizer=ByteTokenizer(), cache_positions=2048)

    for temperature in (0.0, 0.8):
        options: dict[str, Any] = {
            "max_tokens": 24, "temperature": temperature, "seed": 11, "ignore_eos": True,
        }  # fmt: skip
        with open_llm() as llm:
            plain = [llm.generate(p, decoder="autoregressive", **options).tokens for p in PROMPTS]
        for decoder in ("autoregressive", "suffix", "multi-step"):
            with open_llm() as llm:
                found = llm.generate(list(PROMPTS), decoder=decoder, **options)
                yield equal_tokens(
                    f"batched, {decoder}, T={temperature}", [one.tokens for one in found], plain
                )
        with open_llm() as llm, Restarts(llm.engine, seed=3):
            found = llm.generate(list(PROMPTS), decoder="suffix", **options)
            yield equal_tokens(f"restarted, T={temperature}", [one.tokens for one in found], plain)


def _losses() -> Iterator[Check]:
    """The losses of the training, by loops over chunks, tokens and blocks."""
    check_torch("the training of blocks")
    import torch

    from anydecode.training.blockffn import BlockRecipe, chunk_loss, locality_loss, unused_share

    recipe = BlockRecipe(steps=1)
    factors = recipe.chunk_weight, recipe.locality_weight
    yield Check("both losses count by default", (recipe.chunk, *factors) == (CHUNK, 1.0, 0.05))
    scores = np.random.default_rng(6).normal(0, 0.02, (2, 11, 5))
    scores[..., 0] = np.abs(scores[..., 0])  # every token uses a block
    used = np.maximum(scores, 0)
    chances, crossed, unused = [], [], []
    for text, raw in zip(used, scores, strict=True):
        for block in range(5):
            for first in (0, 4):
                absent = 1.0
                for token in range(first, first + 4):
                    absent *= 1 - text[token, block] / text[token].sum() + 1e-5
                chances.append(1 - absent)
            for token in range(10):
                here, there = 1 / (1 + np.exp(-100 * raw[token : token + 2, block]))
                crossed.append(-there * np.log(here) - (1 - there) * np.log(1 - here))
        unused.append(chunk_sparsity(text, 4))
    for name, found, expected in (
        ("the chunk loss is the chance that a chunk uses a block",
         chunk_loss(torch.from_numpy(used), 4), np.mean(chances)),
        ("the locality loss compares neighbours", locality_loss(torch.from_numpy(scores)),
         np.mean(crossed)),
        ("unused blocks are counted over all chunks",
         unused_share(torch.from_numpy(used), 4), np.mean(unused)),
    ):  # fmt: skip
        yield Check(name, abs(float(found) - expected) < 1e-9, f"{float(found):.4f}")


def _trained() -> Iterator[Check]:
    """Two short trainings, with the losses and without."""
    from anydecode.training.blockffn import BlockRecipe, BlockRun, BlockShape
    from anydecode.training.tokenizer import build_tokenizer

    vocab = build_tokenizer().get_vocab_size()
    shape = BlockShape(vocab, 64, 2, 4, 16, 16, nope=8, rope=8, query_rank=32, rank=24)
    shares = []
    plain = BlockRecipe(steps=_STEPS, chunk_weight=0.0, locality_weight=0.0)
    for recipe in (plain, BlockRecipe(steps=_STEPS)):
        with TemporaryDirectory() as folder:
            run = BlockRun(Path(folder), recipe, shape)
            run.train()
            shares.append(_unused(load_checkpoint(run.model_folder)))
    detail = f"{shares[1]:.3f}, without the losses {shares[0]:.3f}"
    yield Check("chunks leave more blocks unused", shares[1] > shares[0] + 0.1, detail)


def _unused(checkpoint: Checkpoint) -> float:
    """The share of blocks that chunks of examples leave unused, by the dense pass."""
    forward, shares = Forward(checkpoint), []
    assert checkpoint.tokenizer is not None
    for task in TASKS:
        for example in examples(task, 2, seed=3):
            tokens = checkpoint.tokenizer.encode(f"{example.prompt}{example.answer}")
            if len(tokens) >= CHUNK:
                forward.logits(tokens)
                shares += [chunk_sparsity(weights, CHUNK) for weights in forward.weights]
    return float(np.mean(shares))
