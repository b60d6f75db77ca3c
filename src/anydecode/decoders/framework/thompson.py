"""Thompson sampling of whether another draft follows, by how often drafts were accepted (Liu et
al., EESD, arXiv:2406.03853)."""

from __future__ import annotations

from random import Random

from anydecode.scoring.sequence import Sequence

#: How the rate of another draft is drawn, see `Posterior`.
CONTROLS = ("beta", "calibration")
#: The weight of the drafter's confidence in Calibration-TS, in drafts.
CONFIDENCE_WEIGHT = 5.0


class Posterior:
    """The acceptance rate of drafts, as accepted and rejected ones tell. Counts decay by `memory`
    per round."""

    def __init__(self, sequence: Sequence, memory: float) -> None:
        self.memory = memory
        self.accepted = 0.0
        self.rejected = 0.0
        self._random = Random(f"{sequence.noise.seed}/{sequence.noise.stream}")
        self._length, self._start = -1, self._random.getstate()  # of the present round

    def begin(self, length: int) -> None:
        """Begin the round behind a text of `length` tokens. One that starts again after a
        preemption has the same draws."""
        if length == self._length:
            self._random.setstate(self._start)
        self._length, self._start = length, self._random.getstate()

    def continues(self, confidence: float | None = None) -> bool:
        """Whether another draft follows, with a probability drawn from the posterior:
        Beta(accepted + 1, rejected + 1), or with the drafter's confidence c in its last draft
        (Calibration-TS), whose prior has the mean c, Beta(accepted + w c + 1, rejected + w (1 - c)
        + 1)."""
        accepted, rejected = self.accepted + 1, self.rejected + 1
        if confidence is not None:
            accepted += CONFIDENCE_WEIGHT * confidence
            rejected += CONFIDENCE_WEIGHT * (1 - confidence)
        rate = self._random.betavariate(accepted, rejected)
        return self._random.random() < rate

    def observe(self, num_accepted: int, num_drafts: int) -> None:
        """Count the drafts of a round: those accepted, and the first rejected one."""
        if num_drafts:
            self.accepted = self.memory * self.accepted + num_accepted
            self.rejected = self.memory * self.rejected + (num_accepted < num_drafts)
