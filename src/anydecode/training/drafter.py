"""Training of a drafter that reads the states of its target: EAGLE-3 (arXiv:2503.01840), on text
that the target writes itself.

A run has a folder, from which it can be resumed: `data/` (see `DrafterData`), `state.pt`,
`log.json`, and `drafter/`, the drafter in the layout of released checkpoints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.interface import Attention
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import GatedMlp, Network
from anydecode.training.checkpoint import load_state, save_json, save_state
from anydecode.training.drafter_data import NUM_HELD_OUT, DrafterData
from anydecode.training.eagle3 import STEP_DECAY, Eagle3, Eagle3Shape, as_tensor, step_losses

#: Drafted and verified as chains of this length for the acceptance by depth.
DEPTH = 5
#: Calls with the stage of a run and the fraction of it that is done, and a detail to print.
Report = Callable[[str, float, str], None]


@dataclass(frozen=True)
class DrafterRecipe:
    """How a drafter is trained. One of `minutes` and `steps` is the budget of the training itself.

    Attributes:
        minutes: See above.
        steps: See above.
        texts: Number of texts that the model writes.
        tokens: Maximum number of tokens of an answer.
        vocabulary: Number of tokens that the drafter's head has.
        unrolled: Number of draft steps of the loss.
        batch: Texts per step.
        rate: Peak learning rate.
        seed: Random seed.
        save_seconds: Seconds between saved states.
        has_head: Whether the drafter's files have the rows of its head. They are the target's, from
            which anydecode takes them otherwise; other engines need them.
    """

    minutes: float | None = None
    steps: int | None = None
    texts: int = 4000
    tokens: int = 256
    vocabulary: int = 8192
    unrolled: int = 3
    batch: int = 8
    rate: float = 5e-4
    seed: int = 0
    save_seconds: float = 300.0
    has_head: bool = True

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise InvalidRequestError("training takes either minutes or steps")
        sizes = (self.tokens, self.vocabulary, self.unrolled, self.batch)
        if (self.minutes or self.steps or 0) <= 0 or min(sizes) < 1:
            raise InvalidRequestError(
                "minutes or steps, tokens, vocabulary, unrolled and batch must be more than 0"
            )
        if self.texts <= NUM_HELD_OUT:
            raise InvalidRequestError(f"training needs more than {NUM_HELD_OUT} texts")


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The states that EAGLE-3 reads, by number of layers."""
    if num_layers < 6:
        raise UnsupportedCombinationError(
            f"the drafter reads states of three layers of a model with at least 6, not {num_layers}"
        )
    return 2, num_layers // 2, num_layers - 3


def shape_of(network: Network) -> Eagle3Shape:
    """The drafter's sizes for a target. Raises UnsupportedCombinationError for targets of another
    kind than dense Llama-like ones."""
    spec, last = network.spec, network.spec.layers[-1]
    attention, mlp = last.attention, network.weights.layers[-1].mlp
    is_plain = (
        isinstance(attention, Attention)
        and attention.latent_dim is None
        and last.rope is not None
        and 2 * len(last.rope.frequencies) == attention.head_dim
        and (last.rope.factor, last.rope.growth) == (1.0, 0.0)
        and isinstance(mlp, GatedMlp)
        and last.activation == "silu"
        and spec.norm == "rms"
        and (spec.logit_scale, spec.logit_softcap) == (1.0, None)
    )
    if not is_plain:
        raise UnsupportedCombinationError(
            "drafters can be trained for models whose last layer is that of Llama, with a head"
            " without factors"
        )
    assert isinstance(attention, Attention) and isinstance(mlp, GatedMlp) and last.rope is not None
    return Eagle3Shape(
        width=spec.hidden_size,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_width=attention.head_dim,
        hidden=mlp.gate.weight.out_features,
        frequencies=last.rope.frequencies,
        norm_eps=spec.norm_eps,
    )


class DrafterRun:
    """A training run of a drafter in a folder.

    Args:
        model: The target, in any of the forms that `LLM` takes a path in.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.
        dtype: The weight format of the target, whose states and answers are learned.
    """

    def __init__(
        self, model: str | Path, folder: Path, recipe: DrafterRecipe, dtype: str | None = None
    ) -> None:
        self.model_path, self.folder, self.recipe, self.dtype = model, folder, recipe, dtype
        self.target: Checkpoint = load_checkpoint(model)
        self.network = load_network(self.target, dtype)
        self.shape, spec = shape_of(self.network), self.network.spec
        self.taps = default_taps(spec.num_layers)
        source = {"model": self.target.name, "dtype": dtype}
        self.data = DrafterData(folder / "data", source, self.taps, spec.hidden_size)
        self.vocabulary: list[int] = []
        self.step, self.seconds = 0, 0.0
        self.history: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {}

    @property
    def drafter(self) -> Path:
        """The folder of the drafter."""
        return self.folder / "drafter"

    @property
    def progress(self) -> float:
        """The fraction of the training's budget that is spent."""
        if self.recipe.minutes is not None:
            return min(1.0, self.seconds / (60 * self.recipe.minutes))
        return min(1.0, self.step / (self.recipe.steps or 1))

    def run(self, report: Report = lambda *_: None) -> None:
        """Write texts, collect states, train, and evaluate the drafter; what a run before has done
        is not repeated."""
        recipe = self.recipe
        with LLM(self.model_path, dtype=self.dtype, threads=torch.get_num_threads()) as llm:
            self.data.generate(
                llm,
                recipe.texts,
                recipe.tokens,
                recipe.seed,
                lambda done: report("texts", done, f"{len(self.data.texts)} texts"),
            )
            self.data.collect(llm, lambda done: report("states", done, ""))
        self.train(report)
        self.evaluate(report)
        self._save_log()

    # --- training

    def train(self, report: Report = lambda *_: None) -> None:
        """Train until the budget is spent. Ctrl-C saves too."""
        self._prepare()
        last, saved = time.monotonic(), self.seconds
        sums: list[list[float]] = []
        if not self.step:
            self._record(held_out=self._held_out())
        try:
            while self.progress < 1.0:
                sums.append(self._update())
                now = time.monotonic()
                self.seconds, last = self.seconds + now - last, now
                if self.step % 10 == 0:
                    self._record(acceptance=_means(sums[-10:]))
                if self.step % 200 == 0:
                    self._record(held_out=self._held_out())
                if self.seconds - saved > self.recipe.save_seconds:
                    self._save()
                    last, saved = time.monotonic(), self.seconds
                first = _means(sums[-10:])[0]
                report("training", self.progress, f"accepted first drafts: {first:.3f}")
            self._record(held_out=self._held_out())
        finally:
            self._save()

    def _prepare(self) -> None:
        recipe, spec, data = self.recipe, self.network.spec, self.data
        self.vocabulary = data.vocabulary(recipe.vocabulary, spec.vocab_size)
        embedding = as_tensor(self.network.weights.embedding)
        head = as_tensor(self.network.weights.head)[self.vocabulary].clone()
        torch.manual_seed(recipe.seed)
        self.learner = Eagle3(self.shape, embedding, head)
        self.learner.initialize(self.network)
        self.optimizer = torch.optim.AdamW(
            self.learner.parameters(), recipe.rate, (0.9, 0.95), weight_decay=0.01
        )
        self._rows = torch.full((spec.vocab_size,), -1)
        self._rows[self.vocabulary] = torch.arange(len(self.vocabulary))
        state = load_state(self.folder / "state.pt")
        if state is not None:
            if state["vocabulary"] != self.vocabulary:
                raise InvalidRequestError(
                    f"{self.folder}: was trained with another draft vocabulary; give the same"
                    " number of texts and of tokens in the head"
                )
            self.learner.load_state_dict(state["weights"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds = state["step"], state["seconds"]
            self.history = state["history"]

    def _indices(self) -> list[int]:
        """The texts of the current step: every text once per epoch, in an order that depends on
        the seed and the epoch."""
        size, count = self.recipe.batch, len(self.data.texts) - NUM_HELD_OUT
        per_epoch = len(self.data.batches(range(count), size))
        epoch, index = divmod(self.step, per_epoch)
        random = Random(f"{self.recipe.seed}/drafter/{epoch}")
        indices = list(range(NUM_HELD_OUT, len(self.data.texts)))
        random.shuffle(indices)
        batches = self.data.batches(indices, size)
        random.shuffle(batches)
        return batches[index]

    def _update(self) -> list[float]:
        losses = self._losses(self._indices())
        total = sum(
            (STEP_DECAY**step * one.loss / max(1, one.count) for step, one in enumerate(losses)),
            torch.zeros(()),
        )
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(total)
        nn.utils.clip_grad_norm_(self.learner.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            warmup = min(1.0, (self.step + 1) / 100)
            schedule = 0.1 + 0.45 * (1 + math.cos(math.pi * self.progress))
            group["lr"] = self.recipe.rate * warmup * schedule
        self.optimizer.step()
        self.step += 1
        return [one.accepted / max(1, one.count) for one in losses]

    def _losses(self, indices: list[int]) -> list[Any]:
        batch = self.data.load(indices)
        # A token that the head has not cannot be drafted: its position is left out.
        has_row = self._rows[batch.tokens.roll(-1, 1)] >= 0
        trained = batch.is_answer & has_row
        with torch.autocast("cpu", torch.bfloat16):
            return step_losses(
                self.learner, batch.tokens, batch.taps, batch.final, trained, self.recipe.unrolled
            )

    @torch.no_grad()
    def _held_out(self) -> list[float]:
        """The probability that a draft is accepted on held-out texts, by draft step."""
        sums = np.zeros((2, self.recipe.unrolled))
        for indices in self.data.batches(range(NUM_HELD_OUT), self.recipe.batch):
            for step, one in enumerate(self._losses(indices)):
                sums[:, step] += one.accepted, one.count
        return [float(value) for value in sums[0] / sums[1].clip(1)]

    def _record(self, **values: list[float]) -> None:
        rounded = {name: [round(one, 4) for one in value] for name, value in values.items()}
        self.history.append({"step": self.step, "seconds": round(self.seconds, 1), **rounded})

    def _save(self) -> None:
        state = {
            "weights": self.learner.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
            "vocabulary": self.vocabulary,
        }
        save_state(self.folder / "state.pt", state)
        self._save_log()
        save_eagle3(
            self.drafter,
            self.learner,
            self.target.config,
            self.taps,
            self.vocabulary,
            self.recipe.has_head,
        )

    def _save_log(self) -> None:
        save_json(self.folder / "log.json", self.log())

    def log(self) -> dict[str, Any]:
        """The recipe, the history, and the results."""
        data = {
            "texts": len(self.data.texts),
            "tokens": self.data.starts[-1],
            "head_coverage": round(self.data.coverage(self.vocabulary), 4),
        }
        return {
            "recipe": asdict(self.recipe),
            "data": data,
            "steps": self.step,
            "seconds": round(self.seconds, 1),
            "history": self.history,
            "results": self.results,
        }

    # --- evaluation

    def evaluate(self, report: Report = lambda *_: None) -> None:
        """Measure the drafter in the engine, on held-out prompts: tokens per pass of the target,
        and the fraction of the drafts that is accepted at each depth of a chain, of those whose
        predecessors were."""
        prompts = [text.prompt for text in self.data.texts[:NUM_HELD_OUT]]
        threads = torch.get_num_threads()
        with LLM(self.model_path, draft=self.drafter, dtype=self.dtype, threads=threads) as llm:
            for temperature in (0.0, 0.8):
                reached, accepted = np.zeros(DEPTH), np.zeros(DEPTH)
                passes = tokens = 0
                answers = llm.generate(
                    prompts,
                    decoder=f"eagle:size={DEPTH},depth={DEPTH},width=1",
                    temperature=temperature,
                    max_tokens=self.recipe.tokens,
                    trace=True,
                )
                for answer in answers:
                    passes, tokens = passes + answer.stats.passes, tokens + len(answer.tokens)
                    for event in answer.trace or ():
                        length, kept = len(event["drafted"]), len(event["accepted"])
                        reached[: min(kept + 1, length)] += 1
                        accepted[:kept] += 1
                report("evaluation", 0.5 if temperature == 0 else 1.0, "")
                self.results[f"temperature {temperature}"] = {
                    "tokens_per_pass": round(tokens / max(1, passes), 3),
                    "accepted_by_depth": [
                        round(float(value), 3) for value in accepted / reached.clip(1)
                    ],
                }


def _means(rows: list[list[float]]) -> list[float]:
    return [float(value) for value in np.mean(rows, 0)]


def save_eagle3(
    folder: Path,
    learner: Eagle3,
    target: dict[str, Any],
    taps: tuple[int, ...],
    vocabulary: list[int],
    has_head: bool = True,
) -> None:
    """Write a drafter in EAGLE-3's layout, in bfloat16. `target` is the target's config."""
    shape, num_tokens = learner.shape, learner.embedding.shape[0]
    tokens = torch.tensor(vocabulary)
    kept = torch.zeros(num_tokens, dtype=torch.bool)
    kept[tokens] = True
    tensors = {
        **{name: part.detach().bfloat16() for name, part in learner.state_dict().items()},
        **({"lm_head.weight": learner.head.bfloat16()} if has_head else {}),
        "d2t": tokens - torch.arange(len(tokens)),
        "t2d": kept,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": target["rope_theta"],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": num_tokens,
        "draft_vocab_size": len(tokens),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps)},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    partial = path.with_suffix(".part")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(partial))
    partial.replace(path)
    save_json(folder / "config.json", config)
