"""The noise of models that read the time or their own predictions: shares, texts and times."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from anydecode.models.spec import TimeSpec
from anydecode.training.consistency import trajectories
from anydecode.training.noised_canvas import gaussian_share, noise_time, noised_texts
from anydecode.training.tokenizer import SpecialTokens

SIZE, MASK = 24, 5
SPECIAL = SpecialTokens(MASK, 0, (MASK,))


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _spec(time: TimeSpec | None) -> Any:
    return SimpleNamespace(time=time)


@pytest.mark.parametrize("time", [0.4, 0.7, 1.0])
def test_the_share_of_text_is_that_of_gaussian_noise(time: float) -> None:
    """A text of `trajectories` keeps a token as often as one whose noise may draw it again."""
    tokens = torch.arange(SIZE).repeat(4000, 1)
    times = torch.full((len(tokens),), time)
    special = SpecialTokens(-1, 0, ())
    text, _ = trajectories(tokens, SIZE, (times, times), _generator(), special)
    share = gaussian_share(time, SIZE)
    assert float((text == tokens).double().mean()) == pytest.approx(
        share + (1 - share) / SIZE, abs=0.005
    )
    assert abs(gaussian_share(time - 0.15, SIZE) - share) > 0.005


def _counts(time: TimeSpec | None, moment: float) -> tuple[float, float, float]:
    """The shares of kept tokens, of masks and of each other token in noised texts."""
    tokens = torch.full((200, 400), 3)
    level = noise_time(_spec(time), moment, SIZE)
    text, same = noised_texts(tokens, SIZE, (level, level), _generator(), SPECIAL)
    assert torch.equal(text, same)
    counts = torch.bincount(text.flatten(), minlength=SIZE + 1).double() / text.numel()
    assert len(counts) == SIZE + 1
    others = [token for token in range(SIZE + 1) if token not in (3, MASK)]
    assert float(counts[others].std()) < 0.2 * float(counts[others].mean())
    return float(counts[3]), float(counts[MASK]), float(counts[others].mean())


def test_mixed_noise_has_the_shares_of_its_time() -> None:
    """Those of von Rütte et al., with a share of random tokens that is largest at time 1/2."""
    spec = TimeSpec(8, reads_noise=False, margin=1e-4, uniform=0.3)
    for moment in (0.2, 0.5, 0.9):
        kept, masks, other = _counts(spec, moment)
        c = 2 * 0.3 / 0.7 * math.sqrt(moment * (1 - moment))
        assert kept == pytest.approx((1 - moment + c / SIZE) / (1 + c), abs=0.01)
        assert masks == pytest.approx(moment / (1 + c), abs=0.01)
        assert other == pytest.approx(c / SIZE / (1 + c), abs=0.01)
        assert noise_time(_spec(spec), moment, SIZE).value == moment


def test_random_noise_is_never_the_mask() -> None:
    share = gaussian_share(0.9, SIZE)
    for time in (None, TimeSpec(8, reads_noise=True, margin=1e-3)):
        kept, masks, other = _counts(time, 0.9)
        assert masks == 0.0
        assert kept == pytest.approx(share + (1 - share) / SIZE, abs=0.01)
        assert other == pytest.approx((1 - share) / SIZE, abs=0.01)
    assert noise_time(_spec(None), 0.9, SIZE).value is None
    reads = TimeSpec(8, reads_noise=True, margin=1e-3)
    assert noise_time(_spec(reads), 0.9, SIZE).value == pytest.approx(-math.log(share))


def test_a_token_that_is_noise_stays_noise() -> None:
    tokens = torch.randint(6, SIZE, (50, 60), generator=_generator(1))
    later, earlier = (noise_time(_spec(None), time, SIZE) for time in (1.0, 0.7))
    noisier, cleaner = noised_texts(tokens, SIZE, (later, earlier), _generator(), SPECIAL)

    def is_one_trajectory(noisier: Any, cleaner: Any) -> bool:
        return bool(((cleaner == tokens) | (cleaner == noisier)).all())

    assert is_one_trajectory(noisier, cleaner)
    assert (noisier != tokens).sum() > (cleaner != tokens).sum() > 0
    other, _ = noised_texts(tokens, SIZE, (earlier, earlier), _generator(7), SPECIAL)
    assert not is_one_trajectory(noisier, other), "noise of its own is no trajectory"
