"""Draft-and-verify denoising: several denoising steps are verified in one forward pass.

Canvases after the next steps are drafted from the last predictions. One pass scores all of them,
and the steps that slow denoising would have taken are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import CachePolicy
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Ranking, best_first
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

#: A drafted canvas: which drafts, by rank, are unmasked in it, ascending.
Node = tuple[int, ...]


@dataclass
class Drafts:
    """What a pass verifies.

    Attributes:
        positions: The masks of the window, ascending.
        chain: The same masks in the order in which they would be unmasked, by the last predictions.
        tokens: Their drafted tokens.
        nodes: The drafted canvases; the first is right in any case.
        scored: The predictions for those of the canvases that have masks.
    """

    positions: np.ndarray
    chain: np.ndarray
    tokens: np.ndarray
    nodes: list[Node]
    scored: dict[Node, Predictions]


class ChainDenoiser(Denoiser):
    """Drafts up to `drafts` denoising steps ahead, and keeps those that one-token denoising takes.

    Draft k is the canvas with the k best-ranked masks unmasked. It is kept if the predictions for
    draft k - 1 lead to it. The text is that of one-token denoising, at every temperature.

    Args:
        drafts: The largest number of drafted canvases per pass.
        blocks: The blocks.
        ranking: The order of the masks of a block.
        cache: The cache policy.
        mask: The mask token.
        ahead: How many blocks after the current one are drafted too.
    """

    def __init__(
        self,
        drafts: int,
        blocks: FixedBlocks,
        ranking: Ranking,
        cache: CachePolicy,
        mask: int | None = None,
        ahead: int = 0,
    ) -> None:
        if drafts < 1:
            raise InvalidRequestError(
                f"drafts must be at least 1 (at least one draft), not {drafts}"
            )
        super().__init__(blocks, ranking, cache=cache, mask=mask)
        self.block_grid = blocks
        self.drafts = drafts
        self.ahead = ahead

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        window = self._window(canvas)
        [predictions] = yield from self.forward(
            sequence, canvas, region=window if self.ahead else None
        )
        if sequence.sampler.is_stateful:
            self.unmask_step(sequence, canvas, predictions)
            return
        while True:
            if canvas.block is None:
                canvas.open(canvas.frontier, self.blocks.block_end(canvas, predictions))
            positions = np.array([i for i in canvas.masked(*window) if i in predictions])
            chain = self._order(canvas, predictions, positions)
            nodes = self.nodes(canvas, predictions, chain)
            used = chain[: 1 + max(node[-1] for node in nodes)]
            predictions.keep()
            drafts = Drafts(positions, used, predictions.tokens(used), nodes, {})
            open_nodes = [node for node in nodes if len(node) < len(positions)]
            if open_nodes:
                scored = yield from self.forward(
                    sequence,
                    canvas,
                    [
                        canvas.copy_tokens(used[list(node)], drafts.tokens[list(node)])
                        for node in open_nodes
                    ],
                    window,
                )
                drafts.scored = dict(zip(open_nodes, scored, strict=True))
            path = self.walk(canvas, predictions, drafts)
            for source, chosen in path:
                if canvas.block is None:
                    canvas.open(canvas.frontier, self.blocks.window_end(canvas))
                self.commit(sequence, canvas, source, chosen)
                if sequence.finished:
                    return
            reached = tuple(sorted(_offsets(used, path)))
            if reached not in drafts.scored or (canvas.block is None and not self.ahead):
                return
            predictions, window = drafts.scored[reached], self._window(canvas)

    def nodes(self, canvas: Canvas, predictions: Predictions, chain: np.ndarray) -> list[Node]:
        """The canvases to draft; each holds ranks in `chain`, and the first is the next step's."""
        return [tuple(range(k)) for k in range(1, min(self.drafts, len(chain)) + 1)]

    def walk(
        self, canvas: Canvas, predictions: Predictions, drafts: Drafts
    ) -> list[tuple[Predictions, np.ndarray]]:
        """The steps that denoising takes within the drafted canvases.

        Returns:
            Of every step the predictions that it follows, and the positions that it unmasks.
        """
        node = drafts.nodes[0]
        path = [(predictions, drafts.chain[list(node)])]
        while node in drafts.scored:
            source = drafts.scored[node]
            source.step = canvas.step + len(node)
            remaining = np.setdiff1d(drafts.positions, drafts.chain[list(node)])
            best = self._order(canvas, source, remaining)[0]
            found = np.flatnonzero(drafts.chain == best)
            if not len(found) or source.token(best) != drafts.tokens[found[0]]:
                break
            node = tuple(sorted((*node, int(found[0]))))
            if node not in drafts.nodes:
                break
            path.append((source, np.array([best])))
        return path

    def _window(self, canvas: Canvas) -> tuple[int, int]:
        """The block and those after it that are drafted."""
        first, stop = canvas.block or (canvas.frontier, self.blocks.window_end(canvas))
        for _ in range(self.ahead):
            if stop < len(canvas):
                stop = self.block_grid.end_of_block(canvas, stop)
        return first, stop

    def _order(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        """`positions` in the order in which they would be unmasked: by blocks, then by rank."""
        order: np.ndarray = positions[best_first(self.ranking.rank(canvas, predictions, positions))]
        if not self.ahead:
            return order
        ends = [self.block_grid.end_of_block(canvas, int(position)) for position in order]
        result: np.ndarray = order[np.argsort(ends, kind="stable")]
        return result


def _offsets(chain: np.ndarray, path: list[tuple[Predictions, np.ndarray]]) -> list[int]:
    """The ranks in `chain` of all positions of a path."""
    committed = np.concatenate([chosen for _, chosen in path])
    return np.flatnonzero(np.isin(chain, committed)).tolist()
