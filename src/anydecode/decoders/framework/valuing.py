"""Values texts by a reward within a decoding."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Generator
from collections.abc import Sequence as Seq
from hashlib import blake2b

from anydecode.errors import InvalidRequestError, RewardError, one_line
from anydecode.rewards.reward import Reward, SampledText
from anydecode.scoring.score import ActionResult, Call, DecoderAction
from anydecode.scoring.sequence import TARGET, Sequence

#: Maximum number of values that are kept.
MAX_KEPT = 4096
_BYTES_PER_VALUE = 200


class Valuing:
    """Values texts by `reward`, in batches, each text once. One object serves all sequences of
    a decoder.

    Args:
        reward: The reward.
        bounds: The smallest and largest value that the method allows, or None for any.
    """

    def __init__(self, reward: Reward, bounds: tuple[float, float] | None = None) -> None:
        self.reward = reward
        self.bounds = bounds if reward.bounds is None else reward.bounds
        if bounds is not None and reward.bounds is not None:
            low, high = reward.bounds
            if low < bounds[0] or high > bounds[1]:
                raise InvalidRequestError(
                    f"the reward is between {low:g} and {high:g}; this method needs one between"
                    f" {bounds[0]:g} and {bounds[1]:g}"
                )
        self._kept: OrderedDict[bytes, float] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """The estimated memory of the kept values, in bytes."""
        return _BYTES_PER_VALUE * len(self._kept)

    def values(
        self, sequence: Sequence, texts: Seq[SampledText]
    ) -> Generator[DecoderAction, ActionResult, list[float]]:
        """One value per text.

        Raises:
            RewardError: The reward fails, takes too long, or returns something else than one finite
                number within its bounds per text.
        """
        prompt = sequence.tokenizers[TARGET].decode(sequence.prompt)
        found: dict[bytes, float] = {}
        missing: dict[bytes, SampledText] = {}
        for one in texts:
            key = self._key(prompt, one)
            if key in self._kept:
                found[key] = self._kept[key]
            else:
                missing.setdefault(key, one)
        if missing:
            batch = list(missing.values())
            values = yield from self._valued(prompt, batch)
            found.update(zip(missing, values, strict=True))
        for key, value in found.items():
            self._kept[key] = value
            self._kept.move_to_end(key)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return [found[self._key(prompt, one)] for one in texts]

    def _valued(
        self, prompt: str, batch: list[SampledText]
    ) -> Generator[DecoderAction, ActionResult, list[float]]:
        """The checked values of a batch."""
        reward = self.reward
        call = Call(lambda: reward.values(prompt, batch), reward.seconds * len(batch))
        if reward.is_fast:
            try:
                call.result = call.function()
            except Exception as error:
                call.error = error
        else:
            yield call
        name = reward.name
        if call.is_late:
            raise RewardError(
                f"the reward {name} took longer than {call.seconds:g} seconds for {len(batch)}"
                " texts: make it faster, or raise its seconds"
            )
        if call.error is not None:
            reason = one_line(f"{type(call.error).__name__}: {call.error}").removesuffix(":")
            raise RewardError(f"the reward {name} failed: {reason}") from call.error
        return self._checked(name, call.result, len(batch))

    def _checked(self, name: str, values: Seq[float], count: int) -> list[float]:
        try:
            numbers = [float(value) for value in values]
        except (TypeError, ValueError, OverflowError):
            raise RewardError(
                f"the reward {name} returned {one_line(repr(values), 80)}; it must return one"
                " number per text"
            ) from None
        if len(numbers) != count:
            raise RewardError(
                f"the reward {name} returned {len(numbers)} values for {count} texts; it must"
                " return one number per text"
            )
        low, high = self.bounds or (-math.inf, math.inf)
        for number in numbers:
            if not math.isfinite(number) or not low <= number <= high:
                allowed = "finite" if self.bounds is None else f"from {low:g} to {high:g}"
                raise RewardError(
                    f"the reward {name} returned {number:g}; its values must be {allowed}"
                )
        return numbers

    def _key(self, prompt: str, one: SampledText) -> bytes:
        """A digest of what the value of a text depends on."""
        parts = [prompt, one.text, str(one.is_complete)]
        if self.reward.reads_logprobs:
            parts += [repr(one.logprob), str(one.num_tokens)]
        return blake2b("\0".join(parts).encode(errors="replace"), digest_size=16).digest()
