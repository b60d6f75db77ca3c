"""A low-rank adapter with which an autoregressive model denoises blocks.

The objective is that of block diffusion (Arriola et al., BD3-LM, arXiv:2503.09573): masked and
clean text share one pass; a masked block attends to itself and to the clean blocks before it. Only
LoRA matrices are trained (Hu et al., arXiv:2106.09685): without the adapter the model is unchanged.
Row i predicts token i or, with `shift`, token i + 1 as before; the first token of a block is then
predicted by the clean block before it. A token that texts do not use is the mask token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families.config import text_config
from anydecode.models.families.values import head_dim
from anydecode.models.files import read_json
from anydecode.models.loading.llada import INNER_NAMES
from anydecode.models.lora import Factors, read_factors
from anydecode.models.tokenizer import Tokenizer
from anydecode.models.tokenizers import HFTokenizer
from anydecode.tasks.tasks import TASKS, examples, lengths, make_example
from anydecode.training.checkpoint import (
    llama_name,
    load_state,
    save_block_llama,
    save_json,
    save_state,
    write_adapter,
)
from anydecode.training.run import LossRun, check_budget
from anydecode.training.transformer import Shape, Transformer, stream_mask

#: Range of the mask rates. Few masks teach little (BD3-LM's clipped schedules); a block is decoded
#: from masks alone, so that about a fifth of the blocks are masked entirely.
MASK_RATES = (0.4, 1.0)
#: Fraction of a step's texts that are answers of the model itself, if there are any.
OWN_FRACTION = 0.25
#: Maximum number of texts per forward pass: few, so that their lengths are similar.
_MICRO_BATCH = 8
#: alpha / rank, the factor of the low-rank updates.
_SCALE = 2.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Pair = tuple[list[int], list[int]]


@dataclass(frozen=True)
class AdapterRecipe:
    """How an adapter is trained. One of `minutes` and `steps` is the budget; `dtype` is the format
    of the frozen weights and of the computation.

    With `first_block`, blocks have that size at first, and it doubles until it is `block`, each
    size for an equal part of the budget (progressive block size extension; Lu et al.,
    arXiv:2602.09555).
    """

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
    first_block: int | None = None

    def __post_init__(self) -> None:
        check_budget(self)
        sizes = (self.rank, self.block, self.batch, self.copies)
        if (self.minutes or self.steps or 0) <= 0 or min(sizes) < 1:
            raise InvalidRequestError(
                "minutes or steps, rank, block, batch and copies must be more than 0"
            )
        if self.first_block is not None and self.block not in _doubled(
            self.first_block, self.block
        ):
            raise InvalidRequestError(
                f"first_block={self.first_block} does not double to block={self.block}"
            )
        if self.dtype not in DTYPES:
            raise InvalidRequestError(
                f"no dtype {self.dtype!r} for training: choose from {', '.join(DTYPES)}"
            )

    def block_at(self, progress: float) -> int:
        """The block size when this fraction of the budget is spent."""
        sizes = _doubled(self.first_block or self.block, self.block)
        return sizes[min(int(progress * len(sizes)), len(sizes) - 1)]


def _doubled(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... up to last."""
    sizes = [first]
    while 0 < 2 * sizes[-1] <= last:
        sizes.append(2 * sizes[-1])
    return sizes


@dataclass(frozen=True)
class TextBatch:
    """`tokens[count, length]`, whole blocks; `answer`, of the same shape, is True where tokens may
    be masked."""

    tokens: torch.Tensor
    answer: torch.Tensor


class LowRankLinear(nn.Module):
    """A frozen matrix with a trainable low-rank update: x A^T B^T, scaled by alpha / rank."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    @property
    def merged(self) -> torch.Tensor:
        """The matrix with the update added."""
        return (self.frozen.weight + _SCALE * self.up @ self.down).detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down, up = self.down.to(x), self.up.to(x)
        output: torch.Tensor = self.frozen(x) + _SCALE * ((x @ down.T) @ up.T)
        return output


def open_llama(checkpoint: Checkpoint) -> Transformer:
    """Load a checkpoint of the Llama family, in any weight format, as float32 for training.

    Raises `CheckpointError` for other families.
    """
    config = text_config(checkpoint.config)
    if config["model_type"] != "llama" or config.get("rope_scaling"):
        raise CheckpointError(
            f"{checkpoint.name}: adapters can be trained for plain Llama models only"
        )
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
        tensor = checkpoint.tensors[stored]
        values = dequantize(tensor) if isinstance(tensor, Weight) else tensor
        parameter.data.copy_(torch.from_numpy(values.astype(np.float32)))
        parameter.requires_grad_(False)
    return model.eval()


def add_low_rank(
    model: Transformer,
    rank: int,
    adapt: Callable[[nn.Linear, int], LowRankLinear] = LowRankLinear,
) -> list[nn.Parameter]:
    """Add an adapter to every matrix of the layers, which `adapt` makes of the matrix and the rank;
    returns the trainable parameters."""
    trainable: list[nn.Parameter] = []
    for layer in model.blocks:
        for name in INNER_NAMES:
            if not name.endswith("norm"):
                adapted = adapt(getattr(layer, name), rank)
                setattr(layer, name, adapted)
                trainable += [adapted.down, adapted.up]
    return trainable


def block_loss(
    model: Transformer,
    texts: TextBatch,
    recipe: AdapterRecipe,
    mask: int,
    generator: torch.Generator,
) -> tuple[torch.Tensor, int]:
    """The summed loss of the masked tokens of `texts`, and their number.

    Each block is masked at its own rate, in each of `recipe.copies` masked copies, which share one
    pass over the clean text. Rows that do not matter are not computed: masked ones before the
    answers, and clean ones of the last block, which no row attends to.
    """
    block, tokens, answer = recipe.block, texts.tokens, texts.answer
    count, length = tokens.shape
    begin = int(answer.any(0).int().argmax()) // block * block
    position = torch.arange(begin, length)
    low, high = MASK_RATES
    rates = torch.rand(recipe.copies, count, (length - begin) // block, generator=generator)
    token_rates = (low + (high - low) * rates).repeat_interleave(block, dim=-1)
    masked = texts.answer[:, begin:] & (
        torch.rand(token_rates.shape, generator=generator) < token_rates
    )
    if not masked.any():
        masked = answer[:, begin:].expand_as(masked)
    noised = tokens[:, begin:].masked_fill(masked, mask)
    num_clean = length - block
    streams = torch.cat(
        [
            torch.zeros(num_clean),
            torch.arange(1, recipe.copies + 1).repeat_interleave(len(position)),
        ]
    ).long()
    positions = torch.cat([torch.arange(num_clean), position.repeat(recipe.copies)])
    copy, row, at = masked.nonzero(as_tuple=True)
    columns = num_clean + copy * len(position) + at
    if recipe.shift:  # the first token of a block is predicted by the clean block before it
        first = (at + begin) % block == 0
        columns = torch.where(first, at + begin - 1, columns - 1)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has a slow backward pass on so few rows
        logits = model(
            torch.cat([tokens[:, :num_clean], *noised], dim=1),
            output_rows=(row, columns),
            positions=positions,
            visible=stream_mask(streams, positions, block),
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
            return _encode_pair(tokenizer, example.prompt, example.answer)


def step_pairs(
    tokenizer: Tokenizer, own: Sequence[Pair], recipe: AdapterRecipe, step: int
) -> list[Pair]:
    """The texts of a step, shortest first; they depend only on the seed and the step."""
    random = Random(f"{recipe.seed}/adapter/{step}")
    pairs: list[Pair] = []
    while len(pairs) < recipe.batch:
        is_own = bool(own) and len(pairs) < OWN_FRACTION * recipe.batch
        prompt, answer = random.choice(own) if is_own else task_pair(tokenizer, random)
        if len(prompt) + len(answer) < recipe.longest:
            pairs.append((prompt, answer))
    return sorted(pairs, key=_length)


def self_pairs(checkpoint: Checkpoint, count: int, seed: int, tokens: int = 48) -> list[Pair]:
    """The model's own greedy answers to prompts that it generates after its chat template."""
    from anydecode.api.llm import LLM
    from anydecode.training.generated import generate_prompts

    with LLM(checkpoint.path, threads=torch.get_num_threads()) as llm:
        return _greedy_answers(llm, generate_prompts(llm, count, seed), tokens)


def bundled_prompt_pairs(checkpoint: Checkpoint, tokens: int = 48) -> list[Pair]:
    """The model's greedy answers to every second prompt of the package, for evaluation."""
    from anydecode.api.llm import LLM
    from anydecode.tasks.prompts import PROMPTS

    with LLM(checkpoint.path, threads=torch.get_num_threads()) as llm:
        chat = llm.tokenizer.render_chat
        prompts = [chat([{"role": "user", "content": prompt.text}]) for prompt in PROMPTS[::2]]
        return _greedy_answers(llm, [llm.encode(text, special=False) for text in prompts], tokens)


def _greedy_answers(llm: Any, prompts: Sequence[list[int]], tokens: int) -> list[Pair]:
    pairs: list[Pair] = []
    for start in range(0, len(prompts), 8):
        batch = [list(prompt) for prompt in prompts[start : start + 8]]
        answers = llm.generate(batch, max_tokens=tokens, decoder="autoregressive")
        pairs += [(prompt, answer.tokens) for prompt, answer in zip(batch, answers, strict=True)]
    return pairs


def _encode_pair(tokenizer: Tokenizer, prompt: str, answer: str) -> Pair:
    return tokenizer.encode(prompt), tokenizer.encode(answer, special=False)


def micro_batches(pairs: Sequence[Pair], recipe: AdapterRecipe, end: int) -> list[TextBatch]:
    """Texts grouped for the forward passes: few per group, of similar lengths if `pairs` are
    sorted.
    """
    groups: list[list[Pair]] = []
    for pair in pairs:
        group = groups[-1] if groups else []
        if group and len(group) < _MICRO_BATCH and _length(pair) <= 2 * _length(group[0]):
            group.append(pair)
        else:
            groups.append([pair])
    return [_padded(group, recipe.block, end) for group in groups]


def _padded(pairs: Sequence[Pair], block: int, end: int) -> TextBatch:
    """Pad each text with `end` tokens to a common number of blocks. The end tokens up to the end of
    the text's last block are trained on."""
    length = -(-(max(map(_length, pairs)) + 1) // block) * block
    tokens = torch.full((len(pairs), length), end)
    answers = torch.zeros(len(pairs), length, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(pairs):
        text = prompt + answer
        tokens[row, : len(text)] = torch.tensor(text)
        answers[row, len(prompt) : -(-(len(text) + 1) // block) * block] = True
    return TextBatch(tokens, answers)


def _length(pair: Pair) -> int:
    return len(pair[0]) + len(pair[1])


class AdapterRun(LossRun):
    """A training run of an adapter in a folder, from which it can be resumed.

    It trains on the tasks, and on `own` answers of the model itself; `base` is the name of the
    model. A new run starts from the adapter in the folder `start`, if there is one. `state.pt` is
    the state to resume from, `log.json` the history. The adapter in the folder has the averaged
    weights that were best on held-out texts so far.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: Path,
        recipe: AdapterRecipe,
        mask: int | None = None,
        own: int = 0,
        base: str | None = None,
        start: Path | None = None,
    ) -> None:
        tokenizer = checkpoint.tokenizer
        if tokenizer is None or not tokenizer.eos_ids:
            raise CheckpointError(
                f"{checkpoint.name}: training needs a tokenizer with an end of text"
            )
        super().__init__(folder, recipe)
        self.tokenizer, self.recipe = tokenizer, recipe
        self.base, self.end = base or str(checkpoint.path), min(tokenizer.eos_ids)
        state = load_state(folder / "state.pt")
        self.mask = choose_mask_token(tokenizer) if mask is None else mask
        factors = None
        if state is None and start is not None:
            factors = _starting_factors(start, self._settings())
        if state is None:
            self.own = self_pairs(checkpoint, own, recipe.seed) if own else []
            self.held_out = {"tasks": held_out_pairs(tokenizer, recipe.seed)}
            if own:
                self.held_out["shipped prompts"] = bundled_prompt_pairs(checkpoint)
        torch.manual_seed(recipe.seed)
        self.model = open_llama(checkpoint)
        self.trainable = add_low_rank(self.model, recipe.rank)
        if start is not None and factors is not None:
            set_factors(self.model, start, factors)
        for name, buffer in [*self.model.named_buffers(), *self.model.named_parameters()]:
            if not name.endswith((".down", ".up")):
                buffer.data = buffer.data.to(DTYPES[recipe.dtype])
        self.average = [weight.detach().clone() for weight in self.trainable]
        self.best_weights = self.average
        self.optimizer = torch.optim.AdamW(
            self.trainable, recipe.rate, (0.9, 0.98), weight_decay=0.01
        )
        self.best = math.inf
        if state is not None:
            self._restore(state)

    def _update(self) -> float:
        recipe = replace(self.recipe, block=self.recipe.block_at(self.progress), first_block=None)
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + self.step)
        pairs = step_pairs(self.tokenizer, self.own, recipe, self.step)
        total, num_masked = 0.0, 0
        self.optimizer.zero_grad(set_to_none=True)
        for texts in micro_batches(pairs, recipe, self.end):
            loss, count = block_loss(self.model, texts, recipe, self.mask, generator)
            loss.backward()  # type: ignore[no-untyped-call]
            total, num_masked = total + float(loss.detach()), num_masked + count
        for weight in self.trainable:
            assert weight.grad is not None
            weight.grad /= num_masked
        self._descend(self.optimizer, self.trainable, recipe.rate, floor=0.02)
        best_weights = min(recipe.average, self.step / (self.step + 10))
        for average, weight in zip(self.average, self.trainable, strict=True):
            average.lerp_(weight.detach(), 1 - best_weights)
        return total / num_masked

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The loss per masked token of the held-out texts, always with the same masks."""
        losses, recipe = {}, replace(self.recipe, copies=1)
        for name, pairs in self.held_out.items():
            generator = torch.Generator().manual_seed(0)
            usable = sorted((p for p in pairs if _length(p) < recipe.longest), key=_length)
            sums = [
                block_loss(self.model, texts, recipe, self.mask, generator)
                for texts in micro_batches(usable, recipe, self.end)
            ]
            losses[name] = sum(float(one) for one, _ in sums) / sum(
                num_masked for _, num_masked in sums
            )
        return losses

    def save(self) -> None:
        """Evaluate the averaged weights, write them if they are the best, and save the state."""
        with self.using_weights(self.average):
            losses = self.evaluate()
            self._record(held_out=losses)
            if _mean([*losses.values()]) < self.best:
                self.best = _mean([*losses.values()])
                self.best_weights = [weight.clone() for weight in self.average]
                save_adapter(self.folder, self.model, self.recipe.rank, self.base)
                save_json(self.folder / "block.json", self._settings())
        save_json(self.folder / "log.json", self.log())
        tensors = {
            "learned": [weight.data for weight in self.trainable],
            "average": self.average,
            "kept": self.best_weights,
        }
        numbers = {name: getattr(self, name) for name in _STATE_FIELDS}
        state = {**tensors, "optimizer": self.optimizer.state_dict(), **numbers}
        save_state(self.folder / "state.pt", state)

    def _settings(self) -> dict[str, Any]:
        """What `block.json` says of the adapter."""
        return {
            "block_size": self.recipe.block,
            "mask_token_id": self.mask,
            "right_shift_logits": self.recipe.shift,
        }

    @contextmanager
    def using_weights(self, weights: Sequence[torch.Tensor]) -> Iterator[Transformer]:
        """The model with these weights in place of the trainable ones."""
        current = [weight.data for weight in self.trainable]
        try:
            for weight, other in zip(self.trainable, weights, strict=True):
                weight.data = other
            yield self.model
        finally:
            for weight, own in zip(self.trainable, current, strict=True):
                weight.data = own

    def log(self) -> dict[str, Any]:
        """Recipe, size and history as plain JSON."""
        size = sum(weight.numel() for weight in self.trainable)
        return {
            "model": self.base,
            "recipe": asdict(self.recipe),
            "parameters": size,
            "own": len(self.own),
            "history": self.history,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        if [one.shape for one in state["learned"]] != [one.shape for one in self.trainable]:
            raise InvalidRequestError(
                f"{self.folder} holds a run of another rank or model: give another folder"
            )
        for name in _STATE_FIELDS:
            setattr(self, name, state[name])
        for weight, stored in zip(self.trainable, state["learned"], strict=True):
            weight.data.copy_(stored)
        self.average, self.best_weights = state["average"], state["kept"]
        self.optimizer.load_state_dict(state["optimizer"])


_STATE_FIELDS = ("step", "seconds", "best", "history", "own", "held_out", "mask")


def train_block_adapter(
    checkpoint: Checkpoint,
    out: Path,
    recipe: AdapterRecipe,
    mask: int | None = None,
    own: int = 0,
    report: Callable[[float, float], None] = lambda *_: None,
    merged: Path | None = None,
    base: str | None = None,
    start: Path | None = None,
) -> AdapterRun:
    """Train an adapter for `checkpoint`, from zero or from the adapter in the folder `start`, or
    resume the run in the folder `out`. With `merged`, also write a block-diffusion model with the
    best adapter merged into its weights."""
    tokenizer = checkpoint.tokenizer
    if merged is not None and not isinstance(tokenizer, HFTokenizer):
        raise CheckpointError(f"{checkpoint.name}: its tokenizer cannot be saved; leave out merged")
    run = AdapterRun(checkpoint, out, recipe, mask, own, base, start)
    run.train(report)
    if merged is not None and isinstance(tokenizer, HFTokenizer):
        with run.using_weights(run.best_weights) as model:
            weights = merged_weights(model)
        block = {"block_size": recipe.block, "right_shift_logits": recipe.shift}
        save_block_llama(merged, weights, model.shape, tokenizer, run.mask, block)
    return run


def _starting_factors(start: Path, settings: dict[str, Any]) -> dict[str, Factors]:
    """The factors of the adapter in the folder `start`.

    Raises:
        CheckpointError: Its files are missing or corrupt.
        InvalidRequestError: It is not for the blocks, the mask or the shift of `settings`.
    """
    found = read_json(start / "block.json")
    for key, value in settings.items():
        if found.get(key) != value:
            raise InvalidRequestError(
                f"{start}: its {key} is {found.get(key)}, that of the run is {value}:"
                " give the run the options with which the adapter was trained"
            )
    return read_factors(start)[1]


def set_factors(model: Transformer, path: Path, factors: Mapping[str, Factors]) -> None:
    """Set the adapters of `model` to those read from `path`. If their rank is lower, the further
    rows of A stay as they are and the further columns of B zero, so that the updates are equal.

    Raises:
        InvalidRequestError: They are those of another model, or of a higher rank.
    """
    for index, layer in enumerate(model.blocks):
        for name, target in INNER_NAMES.items():
            if name.endswith("norm"):
                continue
            adapted, given = getattr(layer, name), factors.get(f"model.layers.{index}.{target}")
            rank = 0 if given is None else len(given.down)
            if (
                given is None
                or rank > len(adapted.down)
                or given.down.shape[1] != adapted.down.shape[1]
                or given.up.shape[0] != adapted.up.shape[0]
            ):
                raise InvalidRequestError(
                    f"{path} is an adapter of another model or of a rank above that of the run,"
                    f" {len(adapted.down)}"
                )
            adapted.down.data[:rank] = torch.from_numpy(given.down)
            adapted.up.data[:, :rank] = torch.from_numpy(given.up) * (given.scale / _SCALE)


def held_out_pairs(tokenizer: Tokenizer, seed: int, count: int = 2) -> list[Pair]:
    """`count` examples of every task that are never trained on."""
    return [
        _encode_pair(tokenizer, one.prompt, one.answer)
        for task in TASKS
        for one in examples(task, count, seed=seed + 1)
    ]


def merged_weights(model: Transformer) -> dict[str, torch.Tensor]:
    """The state dict of a `Transformer` with the adapters merged."""
    adapted = {name: m for name, m in model.named_modules() if isinstance(m, LowRankLinear)}
    weights = {
        name: weight
        for name, weight in model.state_dict().items()
        if name.rpartition(".")[0].removesuffix(".frozen") not in adapted
    }
    return weights | {f"{name}.weight": module.merged for name, module in adapted.items()}


def choose_mask_token(tokenizer: Tokenizer) -> int:
    """The tokenizer's mask token, or the last special token that is neither an end nor a beginning
    of text."""
    if tokenizer.mask_id is not None:
        return tokenizer.mask_id
    reserved = {*tokenizer.eos_ids, tokenizer.bos_id}
    for token in reversed(range(tokenizer.vocab_size)):
        if tokenizer.is_special(token) and token not in reserved:
            return token
    raise InvalidRequestError("this tokenizer has no unused special token: give a mask token")


def save_adapter(out: Path, model: Transformer, rank: int, base: str) -> None:
    """Write the adapter of the model `base` in PEFT's layout, in bfloat16."""
    tensors: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(model.blocks):
        for name, target in INNER_NAMES.items():
            if not name.endswith("norm"):
                adapted = getattr(layer, name)
                stem = f"base_model.model.model.layers.{index}.{target}"
                for part, weight in (("A", adapted.down), ("B", adapted.up)):
                    tensor = weight.detach().to(torch.bfloat16).contiguous()
                    tensors[f"{stem}.lora_{part}.weight"] = tensor
    modules = [target for name, target in INNER_NAMES.items() if "norm" not in name]
    write_adapter(out, tensors, base, rank, round(_SCALE * rank), modules)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
