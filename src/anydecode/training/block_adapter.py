"""A low-rank adapter that makes an autoregressive model denoise blocks.

The objective is block diffusion's (Arriola et al., BD3-LM, arXiv:2503.09573): the masked text and
the clean one go through together, a masked block sees itself and the clean blocks before it. Only
LoRA matrices learn (Hu et al., arXiv:2106.09685): without the adapter the model is what it was.
Logits stay in place: row i predicts token i. A token that texts do not use stands for the mask.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.evaluation.parallelbench.tasks import TASKS, examples
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families.config import head_dim, text_config
from anydecode.models.loading.llada import INNER_NAMES
from anydecode.models.tokenizer import Tokenizer
from anydecode.models.tokenizers import HFTokenizer
from anydecode.training.checkpoint import (
    llama_name,
    save_block_llama,
    save_json,
)
from anydecode.training.transformer import Shape, Transformer

#: Mask rates are drawn from here: at the ends little is learned (BD3-LM's clipped schedules).
RATES = (0.3, 0.8)
_LONGEST = 160
Pair = tuple[list[int], list[int]]


@dataclass(frozen=True)
class AdapterRecipe:
    """How an adapter is trained. One of `minutes` and `steps` is the budget."""

    minutes: float | None = None
    steps: int | None = None
    block: int = 8
    rank: int = 16
    batch: int = 8
    rate: float = 1e-3
    longest: int = _LONGEST
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise InvalidRequestError("training takes either minutes or steps")
        if (self.minutes or self.steps or 0) <= 0 or self.rank < 1 or self.block < 1:
            raise InvalidRequestError("minutes or steps, rank and block must be more than 0")


class LowRankLinear(nn.Module):
    """A frozen matrix and what is added to it: x A^T B^T, scaled by alpha / rank = 2."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / math.sqrt(rank))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    @property
    def merged(self) -> torch.Tensor:
        """The matrix with what is added to it."""
        return (self.frozen.weight + 2.0 * self.up @ self.down).detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.frozen(x) + 2.0 * ((x @ self.down.T) @ self.up.T)
        return changed


def open_llama(checkpoint: Checkpoint) -> Transformer:
    """A checkpoint of Llama's family, in whatever format its weights are, in float32 for training.

    Raises `CheckpointError` for other families.
    """
    config = text_config(checkpoint.config)
    if config["model_type"] != "llama" or config.get("rope_scaling"):
        raise CheckpointError(f"{checkpoint.name}: adapters are trained for plain Llama models")
    shape = Shape(
        vocab=int(config["vocab_size"]),
        width=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=int(config["num_attention_heads"]),
        hidden=int(config["intermediate_size"]),
        max_positions=min(int(config["max_position_embeddings"]), 2048),
        rope_theta=float(config.get("rope_theta") or 10_000.0),
        norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        kv_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
        head_size=head_dim(config),
    )
    model = Transformer(shape)
    for name, parameter in model.named_parameters():
        stored = llama_name(name)
        if stored not in checkpoint.tensors and stored == "lm_head.weight":
            stored = "model.embed_tokens.weight"
        found = checkpoint.tensors[stored]
        values = dequantize(found) if isinstance(found, Weight) else found
        parameter.data.copy_(values.float())
        parameter.requires_grad_(False)
    return model.eval()


def add_low_rank(model: Transformer, rank: int) -> list[nn.Parameter]:
    """Put an adapter beside every matrix of the layers; returns what learns."""
    learned: list[nn.Parameter] = []
    for layer in model.blocks:
        for name in INNER_NAMES:
            if not name.endswith("norm"):
                adapted = LowRankLinear(getattr(layer, name), rank)
                setattr(layer, name, adapted)
                learned += [adapted.down, adapted.up]
    return learned


def visibility(length: int, block: int) -> torch.Tensor:
    """bool `[2 * length, 2 * length]`: what each position of [masked text, clean text] sees. A
    masked block sees itself and the clean blocks before; a clean block, the clean ones up to it."""
    own = torch.arange(length) // block
    before, same = own[:, None] > own, own[:, None] == own
    masked = torch.cat([same, before], dim=1)
    clean = torch.cat([torch.zeros_like(same), before | same], dim=1)
    return torch.cat([masked, clean])


def block_loss(
    model: Transformer,
    tokens: torch.Tensor,
    answer: torch.Tensor,
    mask: int,
    block: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """The mean loss of the masked tokens of `tokens[batch, length]`, of which `answer` may be
    masked: each block at a rate of its own."""
    count, length = tokens.shape
    blocks = -(-length // block)
    low, high = RATES
    rates = low + (high - low) * torch.rand(count, blocks, generator=generator)
    spread = rates.repeat_interleave(block, dim=1)[:, :length]
    masked = answer & (torch.rand(count, length, generator=generator) < spread)
    if not masked.any():
        masked = answer
    both = torch.cat([tokens.masked_fill(masked, mask), tokens], dim=1)
    logits = model(
        both,
        chosen=torch.cat([masked, torch.zeros_like(masked)], dim=1),
        positions=torch.arange(length).repeat(2),
        visible=visibility(length, block),
    )
    forbidden = torch.zeros(logits.shape[-1]).index_fill_(0, torch.tensor([mask]), float("-inf"))
    return functional.cross_entropy(logits + forbidden, tokens[masked])


def pairs_of_tasks(tokenizer: Tokenizer, seed: int) -> Iterator[Pair]:
    """Training examples of the task generator, without end."""
    random = Random(f"{seed}/adapter")
    for number in range(1 << 30):
        task = random.choice(list(TASKS))
        [example] = examples(task, 1, seed=seed + number, held_out=False)
        yield (
            tokenizer.encode(example.prompt),
            tokenizer.encode(example.answer, special=False),
        )


def mixed_pairs(checkpoint: Checkpoint, own: int, seed: int, tokens: int = 64) -> Iterator[Pair]:
    """The task generator's examples, and in turn with them `own` answers of the model itself to
    this package's prompts (sampled at temperature 0.8), over and over."""
    assert checkpoint.tokenizer is not None
    answers: list[Pair] = []
    if own:
        from anydecode.engine.llm import LLM
        from anydecode.evaluation.prompts import PROMPTS

        with LLM(checkpoint.path) as llm:
            for number in range(own):
                text = PROMPTS[number % len(PROMPTS)].text
                if llm.tokenizer.chat_template is not None:
                    text = llm.tokenizer.render_chat([{"role": "user", "content": text}])
                prompt = llm.encode(text, special=False)[-(_LONGEST - tokens - 1) :]
                options = {"max_tokens": tokens, "temperature": 0.8, "seed": seed + number}
                answers.append((prompt, llm.generate(prompt, **options).tokens))
    place = 0
    for pair in pairs_of_tasks(checkpoint.tokenizer, seed):
        yield pair
        if answers:
            yield answers[place % len(answers)]
            place += 1


def batches(
    pairs: Iterator[Pair], recipe: AdapterRecipe, end: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Texts, each ended by `end` up to a common length, and which of their tokens are answers. A
    few ends behind the first are learned, as many as the last block may have."""
    while True:
        rows: list[Pair] = []
        for prompt, answer in pairs:
            if len(prompt) + len(answer) < recipe.longest:
                rows.append((prompt, answer))
            if len(rows) == recipe.batch:
                break
        if not rows:
            return
        longest = max(len(prompt) + len(answer) for prompt, answer in rows) + 1
        length = -(-longest // recipe.block) * recipe.block
        tokens = torch.full((len(rows), length), end)
        answers = torch.zeros(len(rows), length, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(rows):
            text = prompt + answer
            tokens[row, : len(text)] = torch.tensor(text)
            last = -(-(len(text) + 1) // recipe.block) * recipe.block
            answers[row, len(prompt) : last] = True
        yield tokens, answers


def train_block_adapter(
    checkpoint: Checkpoint,
    out: Path,
    recipe: AdapterRecipe,
    mask: int | None = None,
    pairs: Iterator[Pair] | None = None,
    report: Callable[[float, float], None] = lambda *_: None,
    merged: Path | None = None,
) -> dict[str, Any]:
    """Train an adapter for `checkpoint` on `pairs` (default: the task generator's), and write it to
    the folder `out` in PEFT's layout; to `merged`, if given, a block-diffusion model that has it in
    its weights. `report(share of the budget, loss)`."""
    tokenizer = checkpoint.tokenizer
    if tokenizer is None or not tokenizer.eos_ids:
        raise CheckpointError(f"{checkpoint.name}: training needs a tokenizer with an end of text")
    mask = spare_token(tokenizer) if mask is None else mask
    torch.manual_seed(recipe.seed)
    model = open_llama(checkpoint)
    learned = add_low_rank(model, recipe.rank)
    optimizer = torch.optim.AdamW(learned, recipe.rate, (0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(recipe.seed)
    texts = batches(pairs or pairs_of_tasks(tokenizer, recipe.seed), recipe, min(tokenizer.eos_ids))
    began, done = time.monotonic(), 0.0
    losses: list[float] = []
    while done < 1.0:
        tokens, answer = next(texts)
        for group in optimizer.param_groups:
            warm = min(1.0, (len(losses) + 1) / 20)
            group["lr"] = recipe.rate * warm * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))
        loss = block_loss(model, tokens, answer, mask, recipe.block, generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if recipe.steps is not None:
            done = len(losses) / recipe.steps
        else:
            done = (time.monotonic() - began) / (60 * (recipe.minutes or 1.0))
        report(min(done, 1.0), losses[-1])
    save_adapter(out, model, recipe, mask)
    if merged is not None:
        if not isinstance(tokenizer, HFTokenizer):
            raise CheckpointError(f"{checkpoint.name}: its tokenizer cannot be written")
        weights = merged_weights(model)
        save_block_llama(merged, weights, model.shape, tokenizer, mask, recipe.block)
    return {"steps": len(losses), "first": _mean(losses[:20]), "last": _mean(losses[-20:])}


def merged_weights(model: Transformer) -> dict[str, torch.Tensor]:
    """A state dict as `Transformer` has it without adapters."""
    adapted = {name: m for name, m in model.named_modules() if isinstance(m, LowRankLinear)}
    weights = {
        name: weight
        for name, weight in model.state_dict().items()
        if name.rpartition(".")[0].removesuffix(".frozen") not in adapted
    }
    return weights | {f"{name}.weight": module.merged for name, module in adapted.items()}


def spare_token(tokenizer: Tokenizer) -> int:
    """The tokenizer's mask, or the last special token that ends nothing and begins nothing."""
    if tokenizer.mask_id is not None:
        return tokenizer.mask_id
    taken = {*tokenizer.eos_ids, tokenizer.bos_id}
    for token in reversed(range(tokenizer.vocab_size)):
        if tokenizer.is_special(token) and token not in taken:
            return token
    raise InvalidRequestError("this tokenizer has no special token to spare: give a mask token")


def save_adapter(out: Path, model: Transformer, recipe: AdapterRecipe, mask: int) -> None:
    """`adapter_config.json` and `adapter_model.safetensors`; `block.json` says how to decode."""
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(model.blocks):
        for name, target in INNER_NAMES.items():
            if not name.endswith("norm"):
                adapted = getattr(layer, name)
                stem = f"base_model.model.model.layers.{number}.{target}"
                tensors[f"{stem}.lora_A.weight"] = adapted.down.detach().contiguous()
                tensors[f"{stem}.lora_B.weight"] = adapted.up.detach().contiguous()
    save_file(tensors, str(out / "adapter_model.safetensors"), metadata={"format": "pt"})
    modules = [target.split(".")[1] for name, target in INNER_NAMES.items() if "norm" not in name]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": recipe.rank,
        "lora_alpha": 2 * recipe.rank,
        "target_modules": sorted(modules),
        "bias": "none",
    }
    save_json(out / "adapter_config.json", config)
    save_json(out / "block.json", {"block_size": recipe.block, "mask_token_id": mask})


def read_block(folder: Path) -> tuple[int, int]:
    """The block size and the mask token of an adapter that `save_adapter` wrote."""
    try:
        content = json.loads((folder / "block.json").read_text("utf-8"))
        return int(content["block_size"]), int(content["mask_token_id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: no block adapter: {error}") from None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
