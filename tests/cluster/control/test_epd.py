"""epd: its certificate, mistakes that the certificate rejects, and roles that change in a fleet."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from anydecode.api import request as request_module
from anydecode.certification.oracles.control import epd as oracle
from anydecode.cluster import media as media_module
from anydecode.cluster.control.distserve import placements
from anydecode.cluster.control.epd import RoleSwitch
from anydecode.cluster.control.roles import Group
from anydecode.cluster.fleet import Fleet, Part, Task
from anydecode.cluster.proxy import FleetLLM
from anydecode.cluster.simulator.simulation import Link
from anydecode.errors import InvalidRequestError
from anydecode.models import patch_encoder
from anydecode.scoring.media import Encoder, Media
from certificates import assert_certified, assert_rejected, replace_class_default
from simulated_fleet import World, text


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("epd")


def test_an_encoder_without_positions_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_encoder, "_positions", lambda height, width, size: 0.0)
    assert_rejected("epd")


_ENCODED = Fleet._encoded
_END_LEASE = Fleet._end_lease
_NUM_WAITING = Fleet._num_waiting
_PARTS = FleetLLM._parts
_STEP = RoleSwitch.step


def _keep_images(self: Fleet, task: Task, now: float) -> None:
    if not isinstance(task, Part):
        _END_LEASE(self, task, now)


def _key_of_bytes(self: Media, encoder: Encoder) -> str:
    return sha256(encoder.fingerprint.encode() + self.pixels.tobytes()).hexdigest()


def _smallest_first(self: FleetLLM, *given: Any) -> list[Part]:
    parts = _PARTS(self, *given)
    numbers = sorted(one.number for one in parts)
    for number, one in zip(numbers, sorted(parts, key=lambda one: one.num_rows), strict=True):
        one.number = number
    return parts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "twin"),
    [
        (media_module.MediaEmbeds, "read", lambda self: np.array(self.rows)),
        (request_module, "prefix_namespace", lambda namespace, names: namespace),
        (Fleet, "_encoders", lambda self, part, now: self._able(part)[:1]),
        (Fleet, "_encoders", lambda self, part, now: []),
        (Fleet, "_is_encoded", lambda self, task, now: True),
        (Fleet, "_encoded", lambda self, *given: _ENCODED(self, *given)[::-1]),
        (Fleet, "_end_lease", _keep_images),
        (Fleet, "_num_waiting", lambda *given: {**_NUM_WAITING(*given), "encode": 0}),
        (Fleet, "_change_roles", lambda self, now: None),
        (Media, "key", _key_of_bytes),
        (FleetLLM, "_parts", _smallest_first),
    ],
    ids=[
        "empty embeddings",
        "a cache that knows no images",
        "one encode worker for all",
        "no encode worker",
        "a prompt that does not wait",
        "images in another order",
        "embeddings that are never freed",
        "images that wait and are not counted",
        "roles that stay",
        "a key without the shape",
        "the smallest image first",
    ],
)
def test_a_mistake_in_the_stages_is_rejected(
    owner: Any, name: str, twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, twin)
    assert_rejected("epd")


def _hasty(self: RoleSwitch, *given: Any) -> Any:
    self._samples = self._samples[-1:] if given[0] % 5 else []
    return _STEP(self, *given)


def _last_worker(self: RoleSwitch, now: float, groups: list[Group], *places: int) -> Any:
    more = [Group(one.prefill + 1, one.decode + 1, one.encode + 1, one.waiting) for one in groups]
    return _STEP(self, now, more, *places)


@pytest.mark.slow
@pytest.mark.parametrize("twin", [_hasty, _last_worker], ids=["last look", "last worker"])
def test_a_mistake_in_the_changes_is_rejected(twin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoleSwitch, "step", twin)
    assert_rejected("epd")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parameter", "value"), [("period", 6.0), ("sample", 2.0), ("balance", 0.7)]
)
def test_another_default_is_rejected(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_class_default(monkeypatch, RoleSwitch, parameter, value)
    assert_rejected("epd")


@pytest.mark.slow
def test_allocations_without_encode_workers_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "placements", lambda workers, has_images: placements(workers))
    assert_rejected("epd")


@pytest.mark.slow
def test_transfers_in_no_time_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Link, "embedding_seconds", lambda self, num_embeddings: 0.0)
    assert_rejected("epd")


@pytest.mark.parametrize(
    "options",
    [{"period": 0}, {"sample": 0}, {"sample": 6}, {"balance": 1.1}, {"balance": -0.1}],
    ids=str,
)
def test_parameters_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match="epd has"):
        RoleSwitch(**options)


def test_without_queues_or_workers_no_role_changes() -> None:
    control = RoleSwitch(period=1.0)
    for now in range(5):
        assert control.step(float(now), [Group(1, 3, 0, {"encode": 9})], 2, 4) == []


@pytest.mark.parametrize("num_images", [0, 9])
def test_roles_change_under_load_and_no_answer_changes(num_images: int) -> None:
    """Many images: workers go to the encode stage. No images: one leaves it."""
    world = World()
    world.fleet.control = RoleSwitch(period=2.0)
    for role in ("encode", "encode", "prefill", "decode", "decode", "decode"):
        world.join(role)
    numbers = []
    for _ in range(8):
        images = (4,) * num_images
        numbers += [world.submit(images=images) for _ in range(3 if num_images else 9)]
        world.settle(1.0)
        world.check()
    roles = [member.role for member in world.fleet.members.values()]
    if num_images:
        assert roles.count("encode") > 2
    else:
        assert roles.count("encode") == 1 and roles.count("decode") == 4
    assert set(roles) == {"encode", "prefill", "decode"}
    assert world.fleet.counts["role_changes"] >= 1
    world.settle(120)
    assert all(world.received[one] == text(one) for one in numbers)
