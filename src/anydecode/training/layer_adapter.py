"""The second phase of FiRST (arXiv:2410.12513): the layer routers stay as they are, and a low-rank
adapter (Hu et al., arXiv:2106.09685) learns the model's own answers, which all of its layers wrote,
with the layers that the routers choose for each prompt.

A run has a folder, from which it can be resumed: `state.pt`, `log.json`, and `model/`, the model
with the adapter, and with the routers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import load_network
from anydecode.models.layer_routers import FILE_NAME, LayerRouters
from anydecode.training.block_adapter import Pair
from anydecode.training.layer_routers import Routers, answer_tokens, routed_logits
from anydecode.training.low_rank_run import LowRankRecipe, LowRankTextRun
from anydecode.training.own_answers import padded


@dataclass(frozen=True)
class LayerAdapterRecipe(LowRankRecipe):
    """How an adapter is trained.

    Attributes:
        threshold: A prompt runs the layers whose mean probability is at least this.
    """

    answers: int = 64
    rate: float = 3e-4
    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threshold <= 1:
            raise InvalidRequestError("threshold must be from 0 to 1")


class LayerAdapterRun(LowRankTextRun):
    """A training run in a folder.

    Args:
        checkpoint: The model to start from.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.
        routers: The file of the model's layer routers.

    Raises:
        CheckpointError: The model is no plain Llama, its tokenizer cannot be written, or the file
            has no routers.
        InvalidRequestError: The routers are those of another model, there are too few answers, or
            the folder holds another run.
    """

    recipe: LayerAdapterRecipe
    differs_in = "another rank, threshold or model, or of other routers"
    name = "layer adapter"

    def __init__(
        self, checkpoint: Checkpoint, folder: Path, recipe: LayerAdapterRecipe, routers: Path
    ) -> None:
        super().__init__(checkpoint, folder, recipe)
        self._stored = stored = LayerRouters.load(routers)
        stored.check(load_network(checkpoint, None))
        self.routers = Routers(stored.layers, self.model.shape.width)
        with torch.no_grad():
            self.routers.weight.copy_(torch.from_numpy(stored.weight))
            self.routers.bias.copy_(torch.from_numpy(stored.bias))
        self.routers.requires_grad_(False)
        numbers = [stored.weight.tolist(), stored.bias.tolist()]
        self._adapt([recipe.threshold, stored.layers, numbers])

    def loss(self, pairs: Sequence[Pair]) -> tuple[torch.Tensor, int]:
        texts = padded(pairs)
        logits, _ = routed_logits(self.model, self.routers, *texts, threshold=self.recipe.threshold)
        return functional.cross_entropy(logits, answer_tokens(*texts)), len(logits)

    def _write(self) -> None:
        super()._write()
        self._stored.save(self.model_folder / FILE_NAME)
