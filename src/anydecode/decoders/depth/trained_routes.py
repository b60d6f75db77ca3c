"""What methods share whose rows follow a route that reads what was trained for the model."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from anydecode.decoders.depth.fewer_layers import FewerLayers
from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.routes import Route
from anydecode.models.exit_files import network_of
from anydecode.scoring.sequence import Sequence


class TrainedRoutes(FewerLayers):
    """A decoder with a route for each model that it has met.

    Args:
        own: What was trained, of a file of the decoder's own; None: that of the model's folder.
    """

    #: The attribute of a model that has what was trained for it; in words, what that is.
    part: ClassVar[str]
    #: The command of `anydecode train` that makes it, and the parameter that names its file.
    command: ClassVar[str]
    parameter: ClassVar[str] = "routers"

    def __init__(self, own: Any) -> None:
        self._own = own
        self._routes: dict[int, Route] = {}

    @abstractmethod
    def route(self, model: Any, trained: Any) -> Route:
        """How rows run through `model`, for which `trained` was trained.

        Raises:
            AnydecodeError: There is no exit, or the model has no such passes.
        """

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        self.trained_route(sequence)

    def trained_route(self, sequence: Sequence) -> Any:
        """The route of the sequence's model.

        Raises:
            AnydecodeError: Nothing was trained for the model, or it has no layers of its own.
        """
        model: Any = sequence.model()
        trained = getattr(model, self.part, None) if self._own is None else self._own
        key = self.card.key
        if trained is None:
            raise UnsupportedCombinationError(
                f"{key} needs {self.part.replace('_', ' ')}: `anydecode train {self.command}` makes"
                f" them, and {key}:{self.parameter}=FILE reads them"
            )
        if id(trained) not in self._routes:
            lacks = f"layers to leave or skip: {key} needs a transformer"
            trained.check(network_of(model, lacks))
            self._routes[id(trained)] = self.route(model, trained)
        return self._routes[id(trained)]
