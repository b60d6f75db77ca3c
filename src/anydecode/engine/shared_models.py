"""Model objects that several engines run, each on a thread of its own: their passes take turns."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from anydecode.kernels.host import copied
from anydecode.kernels.interface import Output, OutputSpec


@dataclass(eq=False)
class Turns:
    """The turns of one model.

    Args:
        lock: Held during a turn.
        users: What runs the model.
    """

    lock: Any = field(default_factory=threading.RLock)
    users: WeakSet[Any] = field(default_factory=WeakSet)

    def kept(self, output: Output, spec: OutputSpec) -> Output:
        """The output of a pass in this turn, as it remains in the turns of others, whose passes
        overwrite it: copies, if there are others."""
        if len(self.users) == 1:
            return output
        for drafts in spec.drafts:
            if drafts.drafter is not None and drafts.drafter.known_states is not None:
                drafts.drafter.known_states = drafts.drafter.known_states.copy()
        hidden = {layer: copied(rows) for layer, rows in output.hidden.items()}
        return replace(output, logits=copied(output.logits), hidden=hidden)


#: By the id of the model, which its users keep.
_turns: WeakValueDictionary[int, Turns] = WeakValueDictionary()
_turns_lock = threading.Lock()


def turns_of(model: Any, user: Any) -> Turns:
    """The turns of `model`, to be kept by `user`, which runs it."""
    with _turns_lock:
        found = _turns.setdefault(id(model), Turns())
    found.users.add(user)
    return found
