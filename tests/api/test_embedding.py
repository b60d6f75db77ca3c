"""The mean of hidden states, over chunks of a long text."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.api.embedding import PooledState
from anydecode.certification.checks import scripted_llm
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.pooled_states import CHUNK
from anydecode.models.pooling import Pooling
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


class AtOnce(Decoder):
    """Takes the hidden states of the whole prompt in one request."""

    def __init__(self) -> None:
        self.states = np.empty(0)

    def decode(self, sequence: Sequence) -> Decoding:
        depth = sequence.model().spec.num_layers
        scores = yield sequence.score(sequence.prompt, rows="all", hidden=(depth,))
        self.states = np.array(scores.hidden[depth].tolist())


@pytest.mark.parametrize("length", [1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_the_mean_counts_every_position_once(length: int) -> None:
    prompt = [(7 * position) % 251 for position in range(length)]
    whole, mean = AtOnce(), PooledState(Pooling(), has_final_norm=False)
    with scripted_llm(prefix_cache=False) as llm:
        for decoder in (whole, mean):
            llm.generate(prompt, decoder=decoder, max_tokens=1)
    assert len(whole.states) == length
    expected = whole.states.mean(axis=0)
    assert mean.vector() == pytest.approx((expected / np.linalg.norm(expected)).tolist())
