"""Images in prompts: encoded by encode workers, handed over, and fed in place of tokens. The text
is that of one engine with the same embeddings, whatever is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.api.generation import Generation
from anydecode.certification.oracles.prefill.clip_forward import tiny_encoder
from anydecode.cluster import worker as worker_module
from anydecode.cluster.fleet import MAX_ENCODES, MIN_BLOCKS, SendTo
from anydecode.cluster.launcher import Launcher, LocalWorkers, places
from anydecode.cluster.media import MediaCache, pieces_of, read_media
from anydecode.cluster.proxy import FleetLLM
from anydecode.cluster.worker import Worker
from anydecode.errors import FleetError, InvalidRequestError, UnsupportedCombinationError
from anydecode.models.clip import ClipEncoder
from anydecode.models.patch_encoder import PatchEncoder
from anydecode.scoring.media import Encoder, Media
from anydecode.scoring.prompt_embeds import PromptEmbeds
from simulated_fleet import World, text
from waiting import wait_for
from worker_threads import SECRET, start_worker

MODEL, OPTIONS = "tiny-autoregressive", {"threads": 1, "cache_positions": 4096}
PROMPT = [65 + number % 26 for number in range(165)]


def image(seed: int, height: int = 32, width: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


IMAGES = [Media(3, image(1)), Media(40, image(2, 64, 80)), Media(131, image(3))]


def embeds(media: list[Media], hidden_size: int) -> list[PromptEmbeds]:
    encoder = PatchEncoder(hidden_size)
    return [PromptEmbeds(one.first, encoder.encode(one.pixels)) for one in media]


@contextmanager
def running(*roles: str, encoder: Encoder | None = None) -> Iterator[tuple[FleetLLM, list[Worker]]]:
    """A fleet with workers of these roles on threads, and their encoder."""
    with FleetLLM(MODEL, SECRET, encoder=encoder, **OPTIONS) as fleet, ExitStack() as stack:
        workers = []
        for number, role in enumerate(roles):
            llm = LLM(MODEL, **OPTIONS)
            name = f"{role}-{number}"
            worker, thread = start_worker(
                llm, fleet.fleet_port, name=name, role=role, encoder=encoder
            )
            stack.callback(thread.join, 20)
            workers.append(worker)
        wait_for(lambda: len(fleet.status()["workers"]) == len(roles))
        stack.callback(fleet.close)  # before the threads are joined
        yield fleet, workers


def results(answer: Generation) -> list[Any]:
    return [(one.tokens, one.finish_reason, one.logprobs) for one in answer.samples]


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM(MODEL, **OPTIONS) as llm:
        yield llm


def expected(alone: LLM, media: list[Media], **options: Any) -> list[Any]:
    given = embeds(media, alone.model.spec.hidden_size)
    return results(alone.generate(PROMPT, prompt_embeds=given, **options))


@pytest.mark.slow
def test_the_text_is_that_of_one_engine_with_the_same_embeddings(alone: LLM) -> None:
    with running("encode", "encode", "prefill", "decode") as (fleet, workers):
        for options in ({}, {"temperature": 1.0, "n": 2}, {"logprobs": 2, "namespace": "tenant"}):
            given: dict[str, Any] = {"max_tokens": 12, "seed": 5, **options}
            found = fleet.generate(PROMPT, prompt_embeds=IMAGES, **given)
            assert results(found) == expected(alone, IMAGES, **given)
        counts = fleet.status()["counts"]
        assert [one.media.num_encoded for one in workers[2:]] == [0, 0]
        num_encoded = sum(one.media.num_encoded for one in workers)
        assert len(IMAGES) <= num_encoded <= 2 * len(IMAGES)  # once, or by both encode workers
        assert counts["encodings"] == 4 * len(IMAGES)
        assert counts["handovers"] >= 2 and counts["restarts"] == 0
        fleet.generate(PROMPT, max_tokens=2)
        assert fleet.status()["counts"]["encodings"] == counts["encodings"]
        wait_for(lambda: not any(one["leases"] for one in fleet.status()["workers"]))


@pytest.mark.slow
def test_images_of_equal_size_share_no_cached_prefix(alone: LLM) -> None:
    with running("encode", "mixed") as (fleet, _):
        options: dict[str, Any] = {"max_tokens": 6}
        for seed, num_cached in ((1, 0), (1, 160), (2, 0)):
            media = [Media(20, image(seed))]
            found = fleet.generate(PROMPT, prompt_embeds=media, **options)
            assert found.stats.num_cached_tokens == num_cached
            assert results(found) == expected(alone, media, **options)


@pytest.mark.slow
def test_without_encode_workers_the_others_encode(alone: LLM) -> None:
    with running("mixed") as (fleet, workers):
        found = fleet.generate(PROMPT, prompt_embeds=IMAGES, max_tokens=6)
        assert results(found) == expected(alone, IMAGES, max_tokens=6)
        assert workers[0].media.num_encoded == len(IMAGES)


@pytest.mark.slow
def test_a_fleet_has_the_encoder_of_llava(alone: LLM) -> None:
    encoder = ClipEncoder(*tiny_encoder(alone.model.spec.hidden_size))
    media = [Media(10, image(1, encoder.image_size, encoder.image_size))]
    given = [PromptEmbeds(10, encoder.encode(media[0].pixels))]
    expected = alone.generate(PROMPT, prompt_embeds=given, max_tokens=8)
    with running("encode", "mixed", encoder=encoder) as (fleet, workers):
        found = fleet.generate(PROMPT, prompt_embeds=media, max_tokens=8)
        assert results(found) == results(expected)
        assert [one.media.num_encoded for one in workers] == [1, 0]


def test_workers_with_another_encoder_are_refused(alone: LLM) -> None:
    config, tensors = tiny_encoder(alone.model.spec.hidden_size)
    name = "multi_modal_projector.linear_2.bias"
    other = ClipEncoder(config, {**tensors, name: tensors[name] + 1})
    with FleetLLM(MODEL, SECRET, encoder=ClipEncoder(config, tensors), **OPTIONS) as fleet:
        with LLM(MODEL, **OPTIONS) as llm, pytest.raises(FleetError, match="encoder"):
            asyncio.run(Worker(llm, SECRET, encoder=other).run("127.0.0.1", fleet.fleet_port))


@pytest.mark.slow
def test_embeddings_that_do_not_come_are_computed_again(
    alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One piece is missing; and nobody answers in time."""
    monkeypatch.setattr(worker_module, "pieces_of", lambda rows: pieces_of(rows[:-1]))
    with running("encode", "mixed") as (fleet, workers):
        found = fleet.generate(PROMPT, prompt_embeds=IMAGES, max_tokens=6)
        assert results(found) == expected(alone, IMAGES, max_tokens=6)
        assert workers[1].media.num_encoded == len(IMAGES)
        monkeypatch.setattr(worker_module, "PULL_SECONDS", 0.0)
        others = [Media(5, image(9))]
        found = fleet.generate(PROMPT, prompt_embeds=others, max_tokens=6)
        assert results(found) == expected(alone, others, max_tokens=6)
        assert workers[1].media.num_encoded == len(IMAGES) + 1


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ([Media(0, np.zeros((8, 8), np.uint8))], "must be uint8"),
        ([Media(0, np.zeros((8, 9, 3), np.uint8))], "multiples of 8"),
        ([Media(0, np.zeros((8, 8, 3)))], "must be uint8"),
        ([Media(164, image(0, 8, 8))], "before its last token"),
        ([Media(3, image(0)), Media(4, image(0))], "given for position 4"),
        ([PromptEmbeds(0, np.zeros((1, 64), np.float32))], "give a list of Media"),
        (PromptEmbeds(0, np.zeros((1, 64), np.float32)), "give a list of Media"),
        (Media(0, image(0)), "give a list of Media"),
    ],
)
def test_what_is_no_image_in_the_prompt_is_refused(media: Any, message: str) -> None:
    with FleetLLM(MODEL, SECRET, **OPTIONS) as fleet:
        with pytest.raises((InvalidRequestError, UnsupportedCombinationError), match=message):
            fleet.generate(PROMPT, prompt_embeds=media)


def test_a_message_is_the_image() -> None:
    media = Media(7, image(4, 16, 24))
    read = read_media(media.to_plain())
    assert read.first == 7 and np.array_equal(read.pixels, media.pixels)
    with pytest.raises(InvalidRequestError, match="of 16 x 24 x 2 bytes has 1152"):
        read_media({**media.to_plain(), "shape": [16, 24, 2]})


def test_rows_depend_on_the_image_alone() -> None:
    encoder, other = PatchEncoder(48), PatchEncoder(48, seed=1)
    assert encoder.fingerprint == PatchEncoder(48).fingerprint != other.fingerprint
    rows = encoder.encode(image(1))
    assert rows.shape == (16, 48) and rows.dtype == np.float32 and np.isfinite(rows).all()
    assert np.array_equal(rows, PatchEncoder(48).encode(image(1)))
    others = [other.encode(image(1)), encoder.encode(image(2))]
    assert not any(np.array_equal(rows, one) for one in others)
    turned = encoder.encode(np.ascontiguousarray(image(1)[::-1]))
    assert not np.array_equal(np.sort(turned, 0), np.sort(rows, 0))


def test_the_least_recently_used_embeddings_go_first() -> None:
    encoder = PatchEncoder(4)
    cache = MediaCache(encoder, max_bytes=3 * 4 * 4)
    one, two, three, four = (Media(0, image(seed, 8, 8)) for seed in range(4))
    for media in (one, two, three, one, four):
        assert np.array_equal(cache.rows(media), encoder.encode(media.pixels))
    assert cache.num_encoded == 4
    assert [media.key(encoder) in cache for media in (one, two, three, four)] == [1, 0, 1, 1]
    assert not cache.store(two, pieces_of(np.zeros((1, 3), np.float32)))
    assert cache.store(two, pieces_of(encoder.encode(two.pixels)))
    assert np.array_equal(cache.rows(two), encoder.encode(two.pixels))
    assert cache.num_encoded == 4


@pytest.mark.slow
@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
def test_a_process_that_is_killed_changes_no_word(alone: LLM, role: str) -> None:
    requests = [[Media(3 + number, image(number)), Media(60, image(99))] for number in range(8)]
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 2, "ignore_eos": True}
    texts = [expected(alone, media, **options) for media in requests]
    with FleetLLM(MODEL, SECRET, **OPTIONS) as fleet:
        address = f"127.0.0.1:{fleet.fleet_port}"
        arguments = [MODEL, "--address", address, "--threads", "1", "--cache-positions", "4096"]
        launcher = Launcher(LocalWorkers(arguments, SECRET))
        launcher.start(places(None, 1, 1, 1))
        try:
            wait_for(lambda: len(fleet.status()["workers"]) == 3, 120)
            pids = {one["role"]: one["pid"] for one in fleet.status()["workers"]}
            with ThreadPoolExecutor(8) as threads:
                answers = [
                    threads.submit(fleet.generate, PROMPT, prompt_embeds=media, **options)
                    for media in requests
                ]
                wait_for(lambda: fleet.status()["counts"]["encodings"] >= 3, 60)
                os.kill(pids[role], signal.SIGKILL)
                assert [results(one.result()) for one in answers] == texts
            assert fleet.status()["counts"]["lost_workers"] == 1
        finally:
            launcher.close()


# The state machines.


def test_the_images_of_a_prompt_are_encoded_at_once_by_several_workers() -> None:
    """Each at the worker that will have encoded it first; the prompt waits for all."""
    world = World()
    for role in ("encode", "encode", "mixed"):
        world.join(role)
    number = world.submit(images=(9, 4, 2))
    sent = [(name, frame["task"] - number) for name, _, frame in world.frames]
    assert sent == [("w0", 1), ("w1", 2), ("w1", 3)]
    world.settle(10)
    assert world.received[number] == text(number)
    assert world.num_images == 3 and world.fleet.counts["encodings"] == 3
    assert all(len(one.ledger.leases) == 0 for one in world.workers.values())


def test_an_encode_worker_has_few_images_at_a_time_and_a_text_waits_for_none() -> None:
    world = World()
    for role in ("encode", "mixed"):
        world.join(role)
    world.submit(images=(4,) * 5)
    world.submit()
    kinds = [frame["type"] for name, _, frame in world.frames]
    assert kinds.count("encode") == MAX_ENCODES and kinds.count("run") == 1
    assert [name for name, _, frame in world.frames if frame["type"] == "run"] == ["w1"]


def test_embeddings_go_to_the_prefill_worker_and_its_blocks_to_the_next() -> None:
    world = World()
    for role in ("encode", "prefill", "decode"):
        world.join(role)
    number = world.submit(num_blocks=MIN_BLOCKS, images=(4, 4))
    world.settle(10)
    assert world.received[number] == text(number)
    assert world.num_images == 2 and world.fleet.counts["handovers"] == 1


@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
@pytest.mark.parametrize("step", range(14))
def test_a_worker_killed_at_any_step_changes_no_word(role: str, step: int) -> None:
    world = World()
    names = {one: world.join(one) for one in ("encode", "prefill", "decode")}
    number = world.submit(num_blocks=MIN_BLOCKS, images=(4, 6))
    for _ in range(step):
        if world.frames:
            world.deliver(0)
        else:
            for worker in list(world.workers.values()):
                world.progress(worker)
            world.act()
        world.check()
    world.crash(names[role])
    if role == "decode":
        world.join("decode")
    world.settle(60)
    world.check()
    assert world.received[number] == text(number)
    assert not world.fleet.tasks
    assert all(len(one.ledger.leases) == 0 for one in world.workers.values())


def test_an_image_that_is_lost_again_and_again_is_left_to_the_prompt() -> None:
    world = World()
    world.join("mixed")
    number = world.submit(images=(4,))
    world.settle(5)
    assert world.received[number] == text(number)
    number = world.submit(images=(4,))
    for _ in range(3):
        encoder = world.join("encode")
        world.crash(encoder)
    world.settle(10)
    assert world.received[number] == text(number)
    assert world.fleet.counts["quarantines"] == 0


def test_a_worker_that_keeps_no_embeddings_leaves_them_to_the_prompt() -> None:
    world = World()
    encoder = world.join("encode")
    world.join("mixed")
    world.workers[encoder].ledger.leases.max_bytes = 0
    number = world.submit(images=(4,))
    world.settle(10)
    assert world.received[number] == text(number) and world.num_images == 0


def test_an_image_that_cannot_be_encoded_fails_at_the_worker_of_its_prompt() -> None:
    world = World()
    encoder = world.join("encode")
    world.join("mixed")
    number = world.submit(images=(4,))
    part = next(one for one in world.fleet.tasks if one != number)
    failed = {"type": "failed", "task": part, "attempt": 0, "kind": "X", "message": "m"}
    world.fleet.receive(encoder, {**failed, "is_final": True}, world.now)
    sent = [one.frame for one in world.fleet.actions if isinstance(one, SendTo)]
    assert [(one["type"], one["encoded"]) for one in sent if "encoded" in one] == [("run", [None])]
