"""The cards of decoders that `/decoders` lists."""

from __future__ import annotations

import pytest

pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from anydecode import catalogue  # noqa: E402
from server_client import Client  # noqa: E402


def test_the_list_has_the_cards_with_the_values_that_requests_may_set(client: Client) -> None:
    listed = client.http.get("/decoders").json()
    found = {card["key"]: card for card in listed["decoders"]}
    card, entry = found["prompt-lookup"], catalogue.find("prompt-lookup").card
    names = ("family", "exactness", "summary", "paper")
    assert {name: card[name] for name in names} == {name: getattr(entry, name) for name in names}
    assert card["deviations"] == list(entry.deviations)
    assert card["missing"] == list(entry.missing)
    parameters = {one["name"]: one for one in card["parameters"]}
    assert parameters["size"]["remote"] == "1 to 64" and parameters["size"]["default"] == "7"
    memory = next(one for one in found["auto"]["parameters"] if one["name"] == "memory")
    assert memory["remote"] == ""  # requests may not set it
    assert listed["claims"] == catalogue.CLAIMS and card["family"] in listed["families"]


def test_decoders_that_the_model_cannot_run_are_listed_with_the_reason(client: Client) -> None:
    listed = client.http.get("/decoders").json()
    reasons = {card["key"]: card["reason"] for card in listed["unavailable"]}
    assert "diffusion" in reasons["llada"]
    assert not reasons.keys() & {card["key"] for card in listed["decoders"]}
    assert "min-p" not in reasons  # a sampler, not a decoder
