"""The files of the web page, as the server sends them."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from server_client import Client  # noqa: E402

TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}


def referenced(text: str) -> set[str]:
    """The files that a file of the page loads."""
    return set(re.findall(r'(?:from "\.|(?:src|href)="page)/([\w.]+)"', text))


def test_every_file_that_the_page_loads_is_served_with_its_type_and_the_policy(
    client: Client,
) -> None:
    pending, seen = referenced(client.http.get("/").text), set[str]()
    while pending:
        name = pending.pop()
        seen.add(name)
        answer = client.http.get(f"/page/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"] == TYPES[name.rpartition(".")[2]]
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        pending |= referenced(answer.text) - seen
    assert {"page.css", "page.js", "api.js", "race.js"} <= seen


def test_the_page_has_no_inline_script(client: Client) -> None:
    text = client.http.get("/").text
    assert re.findall(r"<script([^>]*)>([^<]*)", text) == [
        (' type="module" src="page/page.js"', "")
    ]
    assert not re.search(r"\son\w+=|javascript:", text)


@pytest.mark.parametrize("name", ["app.py", "none.js", "page", "%2e%2e%2fapp.py"])
def test_no_other_file_is_served(client: Client, name: str) -> None:
    assert client.http.get(f"/page/{name}").status_code == 404
