"""Fair shares of tenants by virtual token counters (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024, arXiv:2401.00588)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq

from anydecode.catalogue import Card, register
from anydecode.engine.schedule import DecodesFirst
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence


@register(
    Card(
        "fair",
        "serving",
        paper="Sheng et al. 2024, Fairness in Serving Large Language Models, arXiv:2401.00588",
        exactness="token-exact",
        use="LLM(schedule='fair') or anydecode serve --schedule fair",
        summary="Admits the tenant with the least service next (virtual token counter).",
        deviations=(
            "a tenant is a prefix-cache namespace, which the server derives from the API key",
            "tokens are charged between passes, after they were generated",
        ),
    )
)
class Fair(DecodesFirst):
    """Admits the tenant with the smallest service counter.

    Idling earns no credit: when a tenant without waiting requests sends one, its counter is raised
    to the smallest of the waiting tenants, or, if there is none, to that of the tenant admitted
    last.

    Args:
        row_budget: Maximum number of rows per pass.
        short: Requests of more rows count as prompts.
        prompt: Weight of a prompt token.
        output: Weight of a generated token.
    """

    def __init__(
        self, row_budget: int = 512, short: int = 64, prompt: float = 1.0, output: float = 2.0
    ) -> None:
        super().__init__(row_budget, short)
        if prompt < 0 or output < 0:
            raise InvalidRequestError("the weights of fair must not be negative")
        self.prompt, self.output = prompt, output
        self.served: dict[Hashable, float] = {}
        self._last_admitted: Hashable = None
        self._charged: dict[int, tuple[Sequence, int]] = {}

    def submitted(self, sequence: Sequence, waiting: Iterable[Sequence]) -> None:
        tenant, queued = sequence.namespace, {other.namespace for other in waiting}
        if tenant in queued:
            return
        self._charge()
        floor = min(
            (self.served[other] for other in queued),
            default=self.served.get(self._last_admitted, 0.0),
        )
        self.served[tenant] = max(self.served.get(tenant, 0.0), floor)

    def next_job(self, waiting: Seq[Sequence]) -> int:
        self._charge()
        return min(range(len(waiting)), key=lambda i: self.served[waiting[i].namespace])

    def admitted(self, sequence: Sequence) -> None:
        tenant = sequence.namespace
        if sequence.id not in self._charged:
            self.served[tenant] += self.prompt * len(sequence.prompt)
            self._charged[sequence.id] = (sequence, len(sequence.tokens))
        self._last_admitted = tenant

    def _charge(self) -> None:
        """Charge the tokens generated since the last call."""
        for key, (sequence, num_charged) in list(self._charged.items()):
            num_new = len(sequence.tokens) - num_charged
            self.served[sequence.namespace] += self.output * num_new
            if sequence.finished:
                del self._charged[key]
            else:
                self._charged[key] = (sequence, num_charged + num_new)
