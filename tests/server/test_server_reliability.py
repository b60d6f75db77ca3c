"""Reliability of the server: unreliable clients, exhausted memory, and kills."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")

from anydecode.benchmarks.serving import soak as soak_module  # noqa: E402
from anydecode.benchmarks.serving.soak import Case, Soak, soak  # noqa: E402
from anydecode.certification.tiny import tiny_llm, tiny_model  # noqa: E402
from anydecode.constraints import byte_cache  # noqa: E402
from anydecode.constraints.byte_cache import ByteCache, cached_bytes  # noqa: E402
from anydecode.engine import costs  # noqa: E402
from anydecode.errors import InvalidRequestError  # noqa: E402
from anydecode.memory.spill import DiskSpill  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402


@pytest.mark.slow
def test_a_soak_leaks_nothing() -> None:
    result = soak(120, distinct=40, seed=1)
    assert not result.wrong and result.compared > 50 and result.slots_left == 0
    assert set(result.kinds) == set(soak_module.KINDS) and sum(result.kinds.values()) == 120


@pytest.mark.slow
def test_a_soak_with_attacks_killed_workers_and_a_full_disk(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    monkeypatch.setattr(soak_module, "KILL_SECONDS", 0.2)
    monkeypatch.setattr(soak_module, "ATTACK_SECONDS", 0.0)
    result = soak(300, distinct=40, attacks=True, kills=True, full_disk=True)
    assert not result.wrong and result.compared > 100
    assert result.killed and result.attacks and result.failed_writes


@pytest.mark.slow
def test_a_soak_detects_wrong_texts_and_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong texts, leaked positions and growing memory are each detected."""
    monkeypatch.setattr(
        soak_module, "cases", lambda *rest: [Case({"prompt": "a", "max_tokens": 2, "n": 1}, ["?"])]
    )
    kinds = {"whole": 1}
    monkeypatch.setattr(soak_module, "KINDS", kinds)
    make = soak_module.tiny_llm

    def leaking(**options: Any) -> Any:
        llm = make(**options)
        llm.engine.runners["target"].pool.allocate(3)
        return llm

    monkeypatch.setattr(soak_module, "tiny_llm", leaking)
    result = soak(3, at_once=1)
    assert len([line for line in result.wrong if line.startswith("whole: status 200")]) == 3
    assert any("the memory check failed" in line for line in result.wrong)
    assert any("3 positions" in line for line in result.wrong)


@pytest.mark.parametrize("bounded, is_wrong", [(0, True), (90, False), (60, True)])
def test_memory_of_a_soak_may_grow_by_what_has_limits(bounded: int, is_wrong: bool) -> None:
    """With attacks too: the caches that they fill are counted, not assumed."""
    grown = Soak(
        1000,
        Counter(),
        memory=[100 << 20] * 10 + [200 << 20] * 10,
        bounded=[5 << 20] * 10 + [(5 + bounded) << 20] * 10,
        attacks=Counter({"wrong decoders: 400": 9}),
    )
    grown.check_memory()
    message = f"memory grew from 100 to 200 MiB, and what has limits by {bounded} MiB"
    assert grown.wrong == ([message] if is_wrong else [])


def test_the_bytes_of_all_caches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    # Caches of earlier tests may be collected at any time, so they are not among those counted.
    monkeypatch.setattr(byte_cache, "_caches", weakref.WeakSet())
    cache: ByteCache[str, int] = ByteCache(1 << 20)
    cache.put("a", 1, 1000)
    other: ByteCache[str, int] = ByteCache(1 << 20)
    other.put("b", 1, 200)
    assert cached_bytes() == cache.num_bytes + other.num_bytes >= 1200
    del cache
    gc.collect()
    assert cached_bytes() == other.num_bytes


def test_preemption_changes_no_text_of_any_decoder() -> None:
    """Six concurrent requests where two fit into memory, on a real transformer, with several
    decoders."""
    prompts = [letter * 90 for letter in "abcdef"]
    decoders = ["autoregressive", "prompt-lookup", "suffix"] * 2
    bodies: list[dict[str, Any]] = [
        {"prompt": p, "decoder": d, "max_tokens": 60, "seed": 4, "temperature": 0.8}
        for p, d in zip(prompts, decoders, strict=True)
    ]
    with tiny_llm(prefix_cache=False) as alone:
        options = {"max_tokens": 60, "seed": 4, "temperature": 0.8}
        expected = [alone.generate(prompt, **options).text for prompt in prompts]
    texts: dict[str, str] = {}
    with tiny_llm(cache_positions=330) as llm, LiveServer(llm, Settings(port=0)) as server:
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:

            def ask(body: dict[str, Any]) -> None:
                answer = http.post("/v1/completions", json=body).json()
                texts[body["prompt"]] = answer["choices"][0]["text"]

            threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
            assert "anydecode_preemptions_total 0.0" not in http.get("/metrics").text
        assert llm.engine.num_preemptions > 0
    assert [texts[prompt] for prompt in prompts] == expected


_PROGRAM = """
import sys
from pathlib import Path
from anydecode.api.llm import LLM
from anydecode.certification.tiny import tiny_model
from anydecode.models.scripted import ByteTokenizer
from anydecode.server.running import serve
from anydecode.server.settings import Settings
model = tiny_model()
model.path = Path(sys.argv[1])
llm = LLM(model, tokenizer=ByteTokenizer(), cache_positions=400, prefix_spill=sys.argv[2])
serve(llm, Settings(name="tiny", port=0))
"""


def _serve(model: Path, folder: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(model), str(folder)],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"running on (http://[0-9.:]+)", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, found[1]
    raise AssertionError("the server did not start")


@pytest.mark.slow
def test_a_killed_server_restarts_with_a_consistent_spill(tmp_path: Path) -> None:
    """After `kill -9` while prefixes are written, no block is truncated, and the next process uses
    them."""
    model = tmp_path / "model"
    model.write_text("the name that blocks are filed under")
    folder = tmp_path / "spill"
    generator = random.Random(2)
    prompts = ["".join(generator.choices("abcdefgh", k=150)) for _ in range(30)]
    body = {"max_tokens": 4, "seed": 1, "temperature": 0.8, "ignore_eos": True}
    process, url = _serve(model, folder)
    texts: dict[str, str] = {}

    def ask(prompt: str) -> None:
        try:
            request = {"prompt": prompt, **body}
            path = f"{url}/v1/completions"
            answer = httpx.post(path, json=request, timeout=60, trust_env=False)
            texts[prompt] = answer.json()["choices"][0]["text"]
        except httpx.HTTPError:
            return

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for one in threads:
        one.start()
    while len(texts) < 12 or not list(folder.rglob("*.block")):
        time.sleep(0.002)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    for one in threads:
        one.join()
    (identity,) = folder.iterdir()
    files = list(identity.glob("*.block"))
    (identity / f"{'00' * 32}-{process.pid}.part").write_bytes(
        b"cut o"
    )  # as after a kill during a write
    spill = DiskSpill(folder, 1 << 30, identity.name)
    assert files and all(spill.get(bytes.fromhex(file.stem)) is not None for file in files)
    spill.close()
    assert not list(identity.glob("*.part"))
    before = dict(texts)
    process, url = _serve(model, folder)
    try:
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        for prompt in before:
            ask(prompt)
        assert texts == before
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
        restored = re.search(r'prefix_restored_tokens_total{runner="target"} (\d+)', metrics)
        assert restored is not None and int(restored[1]) > 0
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_truncated_cost_table_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)
    model = tiny_model()
    model.path = tmp_path / "model"
    model.path.write_text("x")
    original = costs.load(model, tmp_path)
    (file,) = (tmp_path / "costs").iterdir()
    whole = file.read_text()
    for cut in (0, len(whole) // 2, len(whole) - 2):
        file.write_text(whole[:cut])
        model.cost_table = None  # as in another process
        again = costs.load(model, tmp_path)
        assert set(again.seconds_by) == set(original.seconds_by)
        assert json.loads(file.read_text())["rows"]
    assert [path.name for path in (tmp_path / "costs").iterdir()] == [file.name]


def test_an_unusable_spill_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        tiny_llm(prefix_spill=tmp_path / "file" / "below")
    with pytest.raises(InvalidRequestError, match="not a number of bytes"):
        tiny_llm(prefix_spill="memory", spill_limit="much")
