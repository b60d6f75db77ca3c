"""Recipes of drafters that read the states of their target, by name."""

from __future__ import annotations

from anydecode.errors import InvalidRequestError
from anydecode.training.drafters.blockwise import Blockwise
from anydecode.training.drafters.chimera import Chimera
from anydecode.training.drafters.clover import Clover, Clover2
from anydecode.training.drafters.dflash import DFlash
from anydecode.training.drafters.dspark import DSpark
from anydecode.training.drafters.eagle import Eagle
from anydecode.training.drafters.eagle3 import Eagle3
from anydecode.training.drafters.early_exit import EarlyExit, KangarooAdapter
from anydecode.training.drafters.falcon import Falcon
from anydecode.training.drafters.hydra import Hydra, HydraPlus
from anydecode.training.drafters.learner import Learner
from anydecode.training.drafters.longspec import LongSpec
from anydecode.training.drafters.medusa import Medusa
from anydecode.training.drafters.parallelspec import ParallelSpec
from anydecode.training.drafters.peagle import PEagle

RECIPES: dict[str, type[Learner]] = {
    learner.recipe: learner
    for learner in (
        *(Eagle3, Eagle, Medusa, Hydra, HydraPlus, Blockwise, Clover, Clover2),
        *(Chimera, Falcon),
        *(DFlash, DSpark, PEagle, ParallelSpec, EarlyExit, KangarooAdapter, LongSpec),
    )
}

#: What `anydecode train` trains for other methods that draft, by their keys.
OTHERS = {
    "distillspec": "draft-model --recipe distillspec",
    "fastdraft": "draft-model --recipe fastdraft",
    "hidden-transfer": "hidden-transfer",
    "judge": "judge",
    "lud": "masks --units 0.9",
    "mars": "masks",
    "mtp-future": "future-masks",
    "ppd": "prompts",
    "s2d": "nested",
    "scylla": "scaling --recipe scylla",
    "space": "masks",
    "specdec++": "acceptance-head",
}


def find_recipe(name: str) -> type[Learner]:
    """The recipe of this name. Raises InvalidRequestError if there is none."""
    if name in OTHERS:
        raise InvalidRequestError(
            f"{name!r} is no recipe of drafters that read the model's states; it is trained by"
            f" `anydecode train {OTHERS[name]}`"
        )
    if name not in RECIPES:
        raise InvalidRequestError(f"recipe {name!r} is unknown; choose from {', '.join(RECIPES)}")
    return RECIPES[name]
