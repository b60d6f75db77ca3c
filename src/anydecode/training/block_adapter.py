"""A low-rank adapter that makes an autoregressive model denoise blocks.

The objective is block diffusion's (Arriola et al., BD3-LM, arXiv:2503.09573): the masked text and
the clean one go through together, a masked block sees itself and the clean blocks before it. Only
LoRA matrices learn (Hu et al., arXiv:2106.09685): without the adapter the model is what it was.
Row i predicts token i, or, with `shift`, token i + 1, as it did before; the first token of a block
is then predicted by the clean block before. A token that texts do not use stands for the mask.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.evaluation.parallelbench.tasks import TASKS, examples, lengths, make_example
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families.config import head_dim, text_config
from anydecode.models.loading.llada import INNER_NAMES
from anydecode.models.tokenizer import Tokenizer
from anydecode.models.tokenizers import HFTokenizer
from anydecode.training.checkpoint import (
    llama_name,
    load_state,
    save_block_llama,
    save_json,
    save_state,
)
from anydecode.training.transformer import Shape, Transformer

#: Mask rates are drawn from here: at the ends little is learned (BD3-LM's clipped schedules).
RATES = (0.3, 0.8)
#: How many of a step's texts are answers of the model itself, where there are any.
OWN_SHARE = 0.25
#: Texts that go through the model together: few, so that they are of like lengths.
_PART = 8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Pair = tuple[list[int], list[int]]


@dataclass(frozen=True)
class AdapterRecipe:
    """How an adapter is trained. One of `minutes` and `steps` is the budget; `dtype` is what the
    frozen weights and the passes are computed in."""

    minutes: float | None = None
    steps: int | None = None
    block: int = 8
    rank: int = 16
    batch: int = 8
    rate: float = 1e-3
    longest: int = 160
    seed: int = 0
    copies: int = 1
    shift: bool = False
    dtype: str = "float32"
    average: float = 0.98
    save_seconds: float = 300.0

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise InvalidRequestError("training takes either minutes or steps")
        sizes = (self.rank, self.block, self.batch, self.copies)
        if (self.minutes or self.steps or 0) <= 0 or min(sizes) < 1:
            raise InvalidRequestError("minutes or steps, rank, block, ... must be more than 0")
        if self.dtype not in DTYPES:
            raise InvalidRequestError(f"no dtype {self.dtype!r} here: {', '.join(DTYPES)}")


@dataclass(frozen=True)
class Texts:
    """`tokens[count, length]`, whole blocks; `answer` says which of them may be masked."""

    tokens: torch.Tensor
    answer: torch.Tensor


class LowRankLinear(nn.Module):
    """A frozen matrix and what is added to it: x A^T B^T, scaled by alpha / rank = 2."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    @property
    def merged(self) -> torch.Tensor:
        """The matrix with what is added to it."""
        return (self.frozen.weight + 2.0 * self.up @ self.down).detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down, up = self.down.to(x), self.up.to(x)
        changed: torch.Tensor = self.frozen(x) + 2.0 * ((x @ down.T) @ up.T)
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


def visibility(streams: torch.Tensor, positions: torch.Tensor, block: int) -> torch.Tensor:
    """bool `[rows, rows]`: what each row sees, by its stream (0: the clean text, else a masked
    copy) and its place. A masked block sees itself and the clean blocks before; a clean block, the
    clean ones up to it."""
    own = positions // block
    before, same = own[:, None] > own, own[:, None] == own
    one = streams[:, None] == streams
    return torch.where(streams == 0, before | (same & one), same & one)


def block_loss(
    model: Transformer,
    texts: Texts,
    recipe: AdapterRecipe,
    mask: int,
    generator: torch.Generator,
) -> tuple[torch.Tensor, int]:
    """The summed loss of the masked tokens of `texts`, and their number: each block is masked at a
    rate of its own, in each of `recipe.copies` noisings, which share one pass over the clean text.

    Only rows that matter are computed: no masked ones before the answers, and no clean ones of the
    last block, which nobody sees.
    """
    block, tokens, answer = recipe.block, texts.tokens, texts.answer
    count, length = tokens.shape
    begin = int(answer.any(0).int().argmax()) // block * block
    position = torch.arange(begin, length)
    low, high = RATES
    rates = torch.rand(recipe.copies, count, (length - begin) // block, generator=generator)
    spread = (low + (high - low) * rates).repeat_interleave(block, dim=-1)
    masked = texts.answer[:, begin:] & (torch.rand(spread.shape, generator=generator) < spread)
    if not masked.any():
        masked = answer[:, begin:].expand_as(masked)
    noised = tokens[:, begin:].masked_fill(masked, mask)
    shown = length - block
    streams = torch.cat(
        [torch.zeros(shown), torch.arange(1, recipe.copies + 1).repeat_interleave(len(position))]
    ).long()
    positions = torch.cat([torch.arange(shown), position.repeat(recipe.copies)])
    copy, row, at = masked.nonzero(as_tuple=True)
    said = shown + copy * len(position) + at
    if recipe.shift:  # what predicts the first of a block stands in the clean block before
        first = (at + begin) % block == 0
        said = torch.where(first, at + begin - 1, said - 1)
    with sdpa_kernel(SDPBackend.MATH):  # the fused one is slow backwards on so few rows
        logits = model(
            torch.cat([tokens[:, :shown], *noised], dim=1),
            chosen=(row, said),
            positions=positions,
            visible=visibility(streams, positions, block),
        ).float()
    logits[:, mask] = float("-inf")
    targets = tokens[:, begin:].expand_as(masked)[masked]
    return functional.cross_entropy(logits, targets, reduction="sum"), len(targets)


def task_pair(tokenizer: Tokenizer, random: Random) -> Pair:
    """A training example of the task generator."""
    while True:
        task = random.choice(list(TASKS))
        example = make_example(task, random.choice(lengths(task)), random)
        if not example.is_held_out:
            return _encoded(tokenizer, example.prompt, example.answer)


def step_pairs(
    tokenizer: Tokenizer, own: Sequence[Pair], recipe: AdapterRecipe, step: int
) -> list[Pair]:
    """The texts of a step, shortest first; they depend on the seed and the step only."""
    random = Random(f"{recipe.seed}/adapter/{step}")
    pairs: list[Pair] = []
    while len(pairs) < recipe.batch:
        is_own = bool(own) and len(pairs) < OWN_SHARE * recipe.batch
        prompt, answer = random.choice(own) if is_own else task_pair(tokenizer, random)
        if len(prompt) + len(answer) < recipe.longest:
            pairs.append((prompt, answer))
    return sorted(pairs, key=_length)


def own_pairs(checkpoint: Checkpoint, count: int, seed: int, tokens: int = 48) -> list[Pair]:
    """What the model itself says, greedily, to what it itself asks behind its chat template."""
    from anydecode.engine.llm import LLM
    from anydecode.training.autodeco import own_prompts

    with LLM(checkpoint.path, threads=torch.get_num_threads()) as llm:
        return _answered(llm, own_prompts(llm, count, seed), tokens)


def shipped_pairs(checkpoint: Checkpoint, tokens: int = 48) -> list[Pair]:
    """What the model says, greedily, to every second prompt of the package: held out."""
    from anydecode.engine.llm import LLM
    from anydecode.evaluation.prompts import PROMPTS

    with LLM(checkpoint.path, threads=torch.get_num_threads()) as llm:
        chat = llm.tokenizer.render_chat
        asked = [chat([{"role": "user", "content": prompt.text}]) for prompt in PROMPTS[::2]]
        return _answered(llm, [llm.encode(text, special=False) for text in asked], tokens)


def _answered(llm: Any, prompts: Sequence[list[int]], tokens: int) -> list[Pair]:
    pairs: list[Pair] = []
    for start in range(0, len(prompts), 8):
        asked = [list(prompt) for prompt in prompts[start : start + 8]]
        said = llm.generate(asked, max_tokens=tokens, decoder="autoregressive")
        pairs += [(prompt, answer.tokens) for prompt, answer in zip(asked, said, strict=True)]
    return pairs


def _encoded(tokenizer: Tokenizer, prompt: str, answer: str) -> Pair:
    return tokenizer.encode(prompt), tokenizer.encode(answer, special=False)


def parts(pairs: Sequence[Pair], recipe: AdapterRecipe, end: int) -> list[Texts]:
    """Texts that go through the model together: a few of like lengths, if `pairs` are in order."""
    groups: list[list[Pair]] = []
    for pair in pairs:
        group = groups[-1] if groups else []
        if group and len(group) < _PART and _length(pair) <= 2 * _length(group[0]):
            group.append(pair)
        else:
            groups.append([pair])
    return [_padded(group, recipe.block, end) for group in groups]


def _padded(pairs: Sequence[Pair], block: int, end: int) -> Texts:
    """Each text is ended by `end` up to a common number of blocks. A few ends behind the first are
    learned, as many as the text's last block has."""
    length = -(-(max(map(_length, pairs)) + 1) // block) * block
    tokens = torch.full((len(pairs), length), end)
    answers = torch.zeros(len(pairs), length, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(pairs):
        text = prompt + answer
        tokens[row, : len(text)] = torch.tensor(text)
        answers[row, len(prompt) : -(-(len(text) + 1) // block) * block] = True
    return Texts(tokens, answers)


def _length(pair: Pair) -> int:
    return len(pair[0]) + len(pair[1])


class Run:
    """The training of an adapter in a folder, which it can be taken up from again. It learns from
    the tasks, and from `own` answers of the model itself; `base` is what its model is called.

    `state.pt` is what is needed to go on, `log.json` the history; the adapter in the folder has the
    averaged weights that did best on held-out texts so far.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: Path,
        recipe: AdapterRecipe,
        mask: int | None = None,
        own: int = 0,
        base: str | None = None,
    ) -> None:
        tokenizer = checkpoint.tokenizer
        if tokenizer is None or not tokenizer.eos_ids:
            raise CheckpointError(
                f"{checkpoint.name}: training needs a tokenizer with an end of text"
            )
        self.tokenizer, self.folder, self.recipe = tokenizer, folder, recipe
        self.base, self.end = base or str(checkpoint.path), min(tokenizer.eos_ids)
        self.mask = spare_token(tokenizer) if mask is None else mask
        state = load_state(folder / "state.pt")
        if state is None:
            self.own = own_pairs(checkpoint, own, recipe.seed) if own else []
            self.held_out = {"tasks": held_out_pairs(tokenizer, recipe.seed)}
            if own:
                self.held_out["shipped prompts"] = shipped_pairs(checkpoint)
        torch.manual_seed(recipe.seed)
        self.model = open_llama(checkpoint)
        self.learned = add_low_rank(self.model, recipe.rank)
        for name, buffer in [*self.model.named_buffers(), *self.model.named_parameters()]:
            if not name.endswith((".down", ".up")):
                buffer.data = buffer.data.to(DTYPES[recipe.dtype])
        self.average = [weight.detach().clone() for weight in self.learned]
        self.kept = self.average
        self.optimizer = torch.optim.AdamW(
            self.learned, recipe.rate, (0.9, 0.98), weight_decay=0.01
        )
        self.step, self.seconds, self.best = 0, 0.0, math.inf
        self.history: list[dict[str, Any]] = []
        if state is not None:
            self._restore(state)

    @property
    def progress(self) -> float:
        """The share of the budget that is spent."""
        if self.recipe.minutes is not None:
            return min(1.0, self.seconds / (60 * self.recipe.minutes))
        return min(1.0, self.step / (self.recipe.steps or 1))

    def train(self, report: Callable[[float, float], None] = lambda *_: None) -> None:
        """Train until the budget is spent; `report(share of the budget, loss)` after every step.
        Ctrl-C saves too."""
        if not self.step:
            self.save()
        mark, saved = time.monotonic(), self.seconds
        losses: list[float] = []
        try:
            while self.progress < 1.0:
                losses.append(self._update())
                now = time.monotonic()
                self.seconds, mark = self.seconds + now - mark, now
                if self.step % 10 == 0:
                    self._note(loss=_mean(losses[-10:]))
                if self.seconds - saved > self.recipe.save_seconds:
                    self.save()
                    mark, saved = time.monotonic(), self.seconds
                report(self.progress, losses[-1])
        finally:
            self.save()

    def _update(self) -> float:
        recipe = self.recipe
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + self.step)
        pairs = step_pairs(self.tokenizer, self.own, recipe, self.step)
        total, number = 0.0, 0
        self.optimizer.zero_grad(set_to_none=True)
        for texts in parts(pairs, recipe, self.end):
            loss, count = block_loss(self.model, texts, recipe, self.mask, generator)
            loss.backward()  # type: ignore[no-untyped-call]
            total, number = total + float(loss.detach()), number + count
        for weight in self.learned:
            assert weight.grad is not None
            weight.grad /= number
        nn.utils.clip_grad_norm_(self.learned, 1.0)
        for group in self.optimizer.param_groups:
            warm = min(1.0, (self.step + 1) / 20)
            falling = 0.02 + 0.49 * (1 + math.cos(math.pi * self.progress))
            group["lr"] = recipe.rate * warm * falling
        self.optimizer.step()
        self.step += 1
        kept = min(recipe.average, self.step / (self.step + 10))
        for average, weight in zip(self.average, self.learned, strict=True):
            average.lerp_(weight.detach(), 1 - kept)
        return total / number

    def _note(self, **values: Any) -> None:
        self.history.append({"step": self.step, "seconds": round(self.seconds, 1), **values})

    @torch.no_grad()
    def look(self) -> dict[str, float]:
        """The loss per masked token of held-out texts, always with the same masks."""
        found, recipe = {}, replace(self.recipe, copies=1)
        for name, pairs in self.held_out.items():
            generator = torch.Generator().manual_seed(0)
            chosen = sorted((p for p in pairs if _length(p) < recipe.longest), key=_length)
            sums = [
                block_loss(self.model, texts, recipe, self.mask, generator)
                for texts in parts(chosen, recipe, self.end)
            ]
            found[name] = sum(float(one) for one, _ in sums) / sum(number for _, number in sums)
        return found

    def save(self) -> None:
        """Look at the averaged weights, write them if they are the best, and the state."""
        with self.holding(self.average):
            found = self.look()
            self._note(held_out=found)
            if _mean([*found.values()]) < self.best:
                self.best = _mean([*found.values()])
                self.kept = [weight.clone() for weight in self.average]
                save_adapter(self.folder, self.model, self.recipe, self.mask, self.base)
        save_json(self.folder / "log.json", self.log())
        tensors = {
            "learned": [weight.data for weight in self.learned],
            "average": self.average,
            "kept": self.kept,
        }
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        state = {**tensors, "optimizer": self.optimizer.state_dict(), **numbers}
        save_state(self.folder / "state.pt", state)

    @contextmanager
    def holding(self, weights: Sequence[torch.Tensor]) -> Iterator[Transformer]:
        """The model with these weights in place of those that learn."""
        present = [weight.data for weight in self.learned]
        try:
            for weight, other in zip(self.learned, weights, strict=True):
                weight.data = other
            yield self.model
        finally:
            for weight, own in zip(self.learned, present, strict=True):
                weight.data = own

    def log(self) -> dict[str, Any]:
        """Recipe, size and history as plain JSON."""
        size = sum(weight.numel() for weight in self.learned)
        return {
            "model": self.base,
            "recipe": asdict(self.recipe),
            "parameters": size,
            "own": len(self.own),
            "history": self.history,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        if [one.shape for one in state["learned"]] != [one.shape for one in self.learned]:
            raise InvalidRequestError(f"{self.folder} holds a run of another rank or model")
        for name in _NUMBERS:
            setattr(self, name, state[name])
        for weight, stored in zip(self.learned, state["learned"], strict=True):
            weight.data.copy_(stored)
        self.average, self.kept = state["average"], state["kept"]
        self.optimizer.load_state_dict(state["optimizer"])


_NUMBERS = ("step", "seconds", "best", "history", "own", "held_out", "mask")


def train_block_adapter(
    checkpoint: Checkpoint,
    out: Path,
    recipe: AdapterRecipe,
    mask: int | None = None,
    own: int = 0,
    report: Callable[[float, float], None] = lambda *_: None,
    merged: Path | None = None,
    base: str | None = None,
) -> Run:
    """Train an adapter for `checkpoint`, or go on training the one in the folder `out`; write to
    `merged`, if given, a block-diffusion model that has the best one in its weights."""
    tokenizer = checkpoint.tokenizer
    if merged is not None and not isinstance(tokenizer, HFTokenizer):
        raise CheckpointError(f"{checkpoint.name}: its tokenizer cannot be written")
    run = Run(checkpoint, out, recipe, mask, own, base)
    run.train(report)
    if merged is not None and isinstance(tokenizer, HFTokenizer):
        with run.holding(run.kept) as model:
            weights = merged_weights(model)
        block = {"block_size": recipe.block, "right_shift_logits": recipe.shift}
        save_block_llama(merged, weights, model.shape, tokenizer, run.mask, block)
    return run


def held_out_pairs(tokenizer: Tokenizer, seed: int, count: int = 2) -> list[Pair]:
    """So many examples of every task that training does not see."""
    return [
        _encoded(tokenizer, one.prompt, one.answer)
        for task in TASKS
        for one in examples(task, count, seed=seed + 1)
    ]


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


def save_adapter(
    out: Path, model: Transformer, recipe: AdapterRecipe, mask: int, base: str
) -> None:
    """`adapter_config.json` and `adapter_model.safetensors` in PEFT's layout, in bfloat16;
    `block.json` has what a block-diffusion model's config says besides."""
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(model.blocks):
        for name, target in INNER_NAMES.items():
            if not name.endswith("norm"):
                adapted = getattr(layer, name)
                stem = f"base_model.model.model.layers.{number}.{target}"
                for part, weight in (("A", adapted.down), ("B", adapted.up)):
                    kept = weight.detach().to(torch.bfloat16).contiguous()
                    tensors[f"{stem}.lora_{part}.weight"] = kept
    save_file(tensors, str(out / "adapter_model.safetensors"), metadata={"format": "pt"})
    modules = [target.split(".")[1] for name, target in INNER_NAMES.items() if "norm" not in name]
    config = {
        "base_model_name_or_path": base,
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": recipe.rank,
        "lora_alpha": 2 * recipe.rank,
        "target_modules": sorted(modules),
        "bias": "none",
    }
    save_json(out / "adapter_config.json", config)
    block = {"block_size": recipe.block, "mask_token_id": mask, "right_shift_logits": recipe.shift}
    save_json(out / "block.json", block)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
