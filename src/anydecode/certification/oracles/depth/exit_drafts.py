"""What the oracle tests of trained early exits share: drafts by a forward pass of the target's
first layers and the trained one, and the rows that both models compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from anydecode.certification.checks import Check
from anydecode.certification.chi_square import VOCABULARY
from anydecode.certification.oracles.depth.layerskip import repeats
from anydecode.certification.oracles.speculative.bandit import ExitForward
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks
from anydecode.certification.oracles.speculative.rejection_rules import (
    network_script,
    rejection_checks,
)
from anydecode.certification.rounds import TracedRound, accepted, plain_token, rounds
from anydecode.certification.tiny import early_exit_checkpoint, tiny_network, with_drafter
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network

PROMPT, LENGTH, EXIT = "the cat sat on the cat", 40, 2
#: Position, first layer, and end of the layers of a row.
Row = tuple[int, int, int]


class StopRule(Protocol):
    """When drafts end, and what is learned from a round."""

    def continues(self, token_share: float, top_share: float) -> bool: ...

    def observe(self, num_accepted: int, num_drafts: int) -> None: ...


def exit_checks(
    decoder: str, max_drafts: int, rule: Callable[[], StopRule], **drafter: Any
) -> Iterator[Check]:
    """Checks that drafts are those of a forward pass, end where `rule` says, and that no layer runs
    twice for a token.

    Args:
        decoder: The method.
        max_drafts: Maximum draft length.
        rule: Makes the stop rule of one generation.
        drafter: Options of `early_exit_checkpoint`.
    """

    def make(target: Network) -> Checkpoint:
        return early_exit_checkpoint(target, after=EXIT, **drafter)

    for temperature in (0.0, 0.9):
        with with_drafter(make, cache_positions=1024, prefix_cache=False) as llm:
            target: Network = llm.model.network  # type: ignore[attr-defined]
            ran, drafter_ran = (
                recorded(llm.engine.runners[name].model) for name in ("target", "draft")
            )
            trace = rounds(llm, decoder, PROMPT, LENGTH, temperature=temperature)
        where = f"{decoder}, T={temperature}"
        wrong = _num_wrong(make(target), target, trace, temperature, max_drafts, rule())
        yield Check(f"drafts equal the oracle's, {where}", wrong == 0, f"{wrong} of {len(trace)}")
        sizes = sorted({len(one.tokens) for one in trace})
        yield Check(f"several lengths are drafted, {where}", len(sizes) > 2, f"{sizes}")
        cut = sum(len(one.accepted) < len(one.tokens) for one in trace)
        detail = f"{accepted(trace)} accepted, {cut} rounds with a rejection"
        yield Check(
            f"drafts are accepted and rejected, {where}", min(cut, accepted(trace)) > 5, detail
        )
        exits = [EXIT] * len(trace)
        is_repeated = repeats(ran, trace, exits, len(target.weights.layers))
        yield Check(f"no layer runs twice for a token, {where}", not is_repeated)
        # A row of the last draft of a round follows in the next round, if it was accepted.
        expected = len(PROMPT) - 1 + sum(len(one.tokens) for one in trace)
        expected += sum(
            0 < len(one.tokens) == len(one.accepted) and len(after.tokens) > 0
            for one, after in pairwise(trace)
        )
        is_own = all((start, stop) == (EXIT, EXIT + 1) for _, start, stop in drafter_ran)
        detail = f"{len(drafter_ran)} rows, {expected} expected"
        yield Check(
            f"the drafter runs the trained layer only, {where}",
            is_own and len(drafter_ran) == expected,
            detail,
        )


def same_exit(target: Network, *, has_mlp: bool) -> Checkpoint:
    """An exit whose layer adds nothing, before the target's head."""
    checkpoint = early_exit_checkpoint(target, after=EXIT, has_mlp=has_mlp)
    tensors = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if name not in ("d2t", "t2d", "lm_head.weight")
    }
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        if (weight := f"exit_layer.{name}.weight") in tensors:
            tensors[weight] = np.zeros_like(tensors[weight])
    tensors["exit_norm.weight"] = np.ones_like(tensors["exit_norm.weight"])
    return replace(checkpoint, tensors=tensors)


def exit_penalty_checks(decoder: str, *, has_mlp: bool) -> Iterator[Check]:
    """Checks of penalties with a target whose layers add nothing, and an exit that is the same."""
    drafter = partial(same_exit, has_mlp=has_mlp)
    options: dict[str, Any] = {"residual": 0.0, "vocabulary": VOCABULARY}
    yield from penalty_checks(
        decoder, partial(with_drafter, drafter, cache_positions=1024, **options)
    )


def exit_rejection_checks(key: str, *, has_mlp: bool, **parameters: Any) -> Iterator[Check]:
    """Checks of the rejection rule with a target over five tokens whose later layers change what
    the exit drafts."""
    options: dict[str, Any] = {"layers": 4, "residual": 0.3, "vocabulary": VOCABULARY}
    drafter = partial(early_exit_checkpoint, after=EXIT, has_mlp=has_mlp)
    yield from rejection_checks(
        key,
        partial(with_drafter, drafter, cache_positions=8192, **options),
        script=network_script(tiny_network(**options)),
        **parameters,
    )


def recorded(model: Any) -> list[Row]:
    """The rows that the model runs from now on."""
    ran: list[Row] = []
    run = model.run

    def recording(rows: Any, *rest: Any) -> Any:
        ran.extend(
            zip(rows.positions.tolist(), rows.start.tolist(), rows.stop.tolist(), strict=True)
        )
        return run(rows, *rest)

    model.run = recording
    return ran


def _num_wrong(
    early_exit: Checkpoint,
    target: Network,
    trace: list[TracedRound],
    temperature: float,
    max_drafts: int,
    rule: StopRule,
) -> int:
    """Rounds whose drafts differ."""
    wrong, start = 0, len(trace[0].text)
    forward, num_read = ExitForward(early_exit, target), 0
    for one in trace:
        for token in one.text[num_read:-1]:
            forward.step(token)
        num_read = len(one.text) - 1
        size = min(max_drafts, LENGTH - (len(one.text) - start) - 1)
        drafts: list[int] = []
        for token, *shares in _drafts(_copied(forward), one.text, temperature, size):
            drafts.append(token)
            if len(drafts) == size or not rule.continues(*shares):
                break
        wrong += one.tokens != drafts
        rule.observe(len(one.accepted), len(drafts))
    return wrong


def _copied(forward: ExitForward) -> ExitForward:
    """A forward pass that goes on from the same positions."""
    other = copy(forward)
    other.cache, other.states = forward.cache.copy(), copy(forward.states)
    other.states.keys = [list(rows) for rows in forward.states.keys]
    other.states.values = [list(rows) for rows in forward.states.values]
    return other


def _drafts(
    forward: ExitForward, text: list[int], temperature: float, count: int
) -> Iterator[tuple[int, float, float]]:
    """Up to `count` drafts behind a text whose tokens but the last `forward` has read, with their
    probabilities and the largest ones."""
    text = list(text)
    for _ in range(count):
        logits = forward.step(text[-1])
        text.append(plain_token(logits, len(text), temperature))
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        yield text[-1], float(weights[text[-1]]), float(weights.max())
