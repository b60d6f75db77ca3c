"""Stored responses: who can read them, how long they stay, and conversations that continue them."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.errors import InvalidRequestError  # noqa: E402
from anydecode.server.database import Database  # noqa: E402
from anydecode.server.responses import store as stores  # noqa: E402
from anydecode.server.responses.store import ResponseStore  # noqa: E402
from replaying import replaying_llm  # noqa: E402
from server_client import RESPONSES, served  # noqa: E402

GREEDY: dict[str, Any] = {"temperature": 0, "decoder": "autoregressive"}
USER = {"id": "msg_in", "type": "message", "role": "user", "status": "completed", "content": []}


def a_response(identity: str, text: str = "", status: str = "completed", **fields: Any) -> Any:
    output = [{"id": f"msg_{identity}", "type": "message", "text": text}]
    head = {"id": identity, "created_at": int(time.time()), "status": status}
    return {**head, "output": output, **fields}


async def stored(store: ResponseStore, *identities: str, tenant: str | None = None) -> list[str]:
    """Those of `identities` that the store returns."""
    return [one for one in identities if await store.response(tenant, one) is not None]


async def test_what_is_stored_is_returned_to_its_tenant_only() -> None:
    store = ResponseStore(Database("memory"), 1 << 20, 60)
    response = a_response("a", "text")
    events = [b"event: x\ndata: {}\n\n", b"event: y\ndata: {}\n\n"]
    assert await store.put("one", response, [USER], events)
    assert await store.response("one", "a") == response
    assert await store.conversation("one", "a") == (response, [USER])
    assert await store.input_items("one", "a") == [USER]
    assert await store.events("one", "a") == events
    ids = ["msg_a", "msg_in"]
    assert await store.items("one", ids) == {"msg_a": response["output"][0], "msg_in": USER}
    assert await store.items("one", ["msg_x", *ids]) == {}
    for other in ("two", "", None):
        assert await store.response(other, "a") is None
        assert await store.conversation(other, "a") is None
        assert await store.input_items(other, "a") is None
        assert await store.events(other, "a") == []
        assert await store.items(other, ids) == {}
        assert not await store.delete(other, "a")
    assert await store.delete("one", "a") and not await store.delete("one", "a")
    assert await store.items("one", ids) == {}
    store._database.close()


async def test_the_oldest_responses_of_the_largest_tenant_are_removed() -> None:
    store = ResponseStore(Database("memory"), 20_000, 60)
    assert await store.put("small", a_response("s", "x" * 1000), [], [])
    assert await store.put("large", a_response("running", "x" * 1000, "in_progress"), [], [])
    names = [f"l{number}" for number in range(8)]
    for number, name in enumerate(names):
        created = time.time() - 30 + number
        assert await store.put("large", a_response(name, "x" * 3000, created_at=created), [], [])
    assert await stored(store, *names, tenant="large") == names[-3:]
    assert await stored(store, "running", tenant="large") == ["running"]
    assert await stored(store, "s", tenant="small") == ["s"]
    assert not await store.put("small", a_response("huge", "x" * 20_000), [], [])
    assert await stored(store, "s", "huge", tenant="small") == ["s"]
    # Alone larger than all others together, it is kept all the same.
    assert await store.put("new", a_response("n", "x" * 15_000), [], [])
    assert await stored(store, "n", tenant="new") == ["n"]
    assert await stored(store, *names, tenant="large") == []
    assert await store.put("new", a_response("n", "x"), [], [])
    for number, name in enumerate(names[:3]):
        created = time.time() - 30 + number
        assert await store.put("large", a_response(name, "x" * 3000, created_at=created), [], [])
    assert await stored(store, *names, tenant="large") == names[:3]
    store._database.close()


async def test_old_responses_are_not_returned_and_removed() -> None:
    store = ResponseStore(Database("memory"), 1 << 20, 60)
    assert await store.put(None, a_response("old", created_at=time.time() - 61), [USER], [])
    assert await stored(store, "old") == []
    assert await store.items(None, ["msg_in"]) == {}
    assert await store.put(None, a_response("new"), [USER], [])
    [count] = store._database.connection.execute("SELECT COUNT(*) FROM responses").fetchone()
    assert count == 1
    store._database.close()


async def test_a_file_outlasts_the_store(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    store = ResponseStore(Database(str(path)), 20_000, 60)
    assert path.stat().st_mode & 0o777 == 0o600
    await store.put(None, a_response("done", "secret words"), [USER], [])
    await store.put(None, a_response("cut", status="in_progress"), [USER], [])
    with pytest.raises(InvalidRequestError, match="--store .*locked; give a file that one server"):
        ResponseStore(Database(str(path)), 20_000, 60)
    store._database.close()
    assert b"secret words" in path.read_bytes()
    store = ResponseStore(Database(str(path)), 20_000, 60)
    assert (await store.response(None, "done"))["status"] == "completed"
    failed = await store.response(None, "cut")
    assert (failed["status"], failed["error"]) == ("failed", stores.INTERRUPTED)
    for number in range(8):  # those of earlier processes count
        await store.put(None, a_response(f"n{number}", "x" * 3000), [], [])
    assert await stored(store, "done", "cut") == []
    store._database.close()
    assert b"secret words" not in path.read_bytes()


async def test_other_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE t (a)")
    text = tmp_path / "text"
    text.write_text("no database " * 100)
    for path in (other, text, tmp_path, tmp_path / "none" / "x"):
        before = path.read_bytes() if path.is_file() else b""
        with pytest.raises(InvalidRequestError, match="--store .*; give a file") as caught:
            ResponseStore(Database(str(path)), 1000, 60)
        assert "\n" not in str(caught.value)
        assert (path.read_bytes() if path.is_file() else b"") == before


async def test_a_failed_write_changes_nothing() -> None:
    store = ResponseStore(Database("memory"), 20_000, 60)
    await store.put(None, a_response("a", "x" * 3000), [], [])
    with pytest.raises(UnicodeEncodeError):
        await store.put(None, a_response("a\ud800", "x" * 3000), [], [])
    sizes = dict(store._rows.sizes)
    store._rows.read_sizes()
    assert store._rows.sizes == sizes
    assert await stored(store, "a") == ["a"]
    store._database.close()


def text_of(response: dict[str, Any]) -> str:
    [item] = response["output"]
    return str(item["content"][0]["text"])


def test_a_conversation_goes_on_from_a_stored_response() -> None:
    with scripted_llm() as llm, served(llm) as client:
        fields: dict[str, Any] = {"max_output_tokens": 8, **GREEDY}
        one = client.ask(RESPONSES, "hello", **fields, instructions="be brief")
        two = client.ask(RESPONSES, "more", **fields, previous_response_id=one["id"])
        turns = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": text_of(one)},
            {"role": "user", "content": "more"},
        ]
        whole = client.ask(RESPONSES, **fields, input=turns)
        assert two["output"][0]["content"] == whole["output"][0]["content"]
        assert two["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        details = whole["usage"]["input_tokens_details"]
        assert details["cached_tokens"] > 0
        assert sum(details.values()) == whole["usage"]["input_tokens"]
        assert two["previous_response_id"] == one["id"]
        # The first one is part of the second, and is not needed any more.
        assert client.http.delete(f"{RESPONSES}/{one['id']}").json() == {
            "id": one["id"],
            "object": "response",
            "deleted": True,
        }
        three = client.ask(RESPONSES, "on", **fields, previous_response_id=two["id"])
        listed = client.http.get(f"{RESPONSES}/{three['id']}/input_items?order=asc").json()
        texts = [item["content"][0]["text"] for item in listed["data"]]
        assert texts == ["hello", text_of(one), "more", text_of(two), "on"]
        assert client.http.get(f"{RESPONSES}/{three['id']}").json() == three
        # References to items stand for them.
        references = [{"id": item["id"]} for item in listed["data"][:3]]
        references[1]["type"] = "item_reference"
        again = client.ask(RESPONSES, **fields, input=references)
        assert text_of(again) == text_of(two)


def test_input_items_come_in_pages() -> None:
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    with scripted_llm() as llm, served(llm) as client:
        path = f"{RESPONSES}/{client.ask(RESPONSES, input=items)['id']}/input_items"

        def page(query: str) -> tuple[str, dict[str, Any]]:
            answer = client.http.get(f"{path}?{query}").json()
            data = answer["data"]
            assert [answer["first_id"], answer["last_id"]] == [data[0]["id"], data[-1]["id"]]
            return "".join(item["content"][0]["text"] for item in data), answer

        assert page("")[0] == "43210"
        text, first = page("order=asc&limit=2")
        assert (text, first["has_more"]) == ("01", True)
        text, last = page(f"order=asc&limit=3&after={first['last_id']}")
        assert (text, last["has_more"]) == ("234", False)
        for query in ("limit=0", "limit=101", "order=up", "after=x"):
            answer = client.http.get(f"{path}?{query}")
            assert answer.status_code == 400
            assert query.partition("=")[0] in answer.json()["error"]["message"]


def test_responses_of_another_key_do_not_exist() -> None:
    with scripted_llm() as llm, served(llm, api_keys=("one", "two")) as client:

        def ask(key: str, method: str, path: str, **body: Any) -> Any:
            headers = {"authorization": f"Bearer {key}"}
            return client.http.request(method, f"{RESPONSES}{path}", headers=headers, **body)

        body = {"input": "a", "max_output_tokens": 2}
        own = ask("one", "POST", "", json=body).json()
        identity = own["id"]
        follow = {**body, "previous_response_id": identity}
        reference = {**body, "input": [{"id": own["output"][0]["id"]}]}
        for key, is_owner in (("two", False), ("one", True)):
            answers = [
                ask(key, "GET", f"/{identity}"),
                ask(key, "GET", f"/{identity}/input_items"),
                ask(key, "POST", "", json=follow),
                ask(key, "POST", "", json=reference),
                ask(key, "DELETE", f"/{identity}"),
            ]
            assert {one.status_code for one in answers} == {200 if is_owner else 404}
            if not is_owner:
                missing = ask(key, "GET", "/resp_none").json()["error"]["message"]
                found = answers[0].json()["error"]["message"]
                assert found == missing.replace("resp_none", identity)
                for method, path in (("POST", "/cancel"), ("GET", "?stream=true")):
                    assert ask(key, method, f"/{identity}{path}").status_code == 404
        assert ask("one", "GET", f"/{identity}").status_code == 404
        assert client.http.get(f"{RESPONSES}/{identity}").status_code == 401


def test_what_is_not_to_be_stored_is_not() -> None:
    with scripted_llm() as llm:
        with served(llm) as client:
            for stream in (False, True):
                response = client.last(RESPONSES, stream, store=False)
                assert response["store"] is False
                assert client.http.get(f"{RESPONSES}/{response['id']}").status_code == 404
            response = client.last(RESPONSES, True, "abc", trace=True)
            assert response["anydecode"].pop("trace")
            kept = client.http.get(f"{RESPONSES}/{response['id']}").json()
            assert kept == response  # without the trace
            assert client.http.get(f"{RESPONSES}/{response['id']}?stream=true").status_code == 400
        with served(llm, store="none") as client:
            assert "ignored" not in client.ask(RESPONSES)["anydecode"]
            response = client.ask(RESPONSES, store=True)
            assert response["store"] is False and response["anydecode"]["ignored"] == ["store"]
            for fields in ({"previous_response_id": "resp_1"}, {"background": True}):
                error = client.refused(RESPONSES, **fields)
                assert "this server stores no responses" in error["message"]
                assert error["code"] == "unsupported_parameter"
            for path in ("", "/input_items", "?stream=true"):
                assert client.http.get(f"{RESPONSES}/resp_1{path}").status_code == 404
            assert client.http.delete(f"{RESPONSES}/resp_1").status_code == 404
        with served(llm, store_bytes=100) as client:
            response = client.ask(RESPONSES)
            assert response["store"] is False and response["status"] == "incomplete"
            assert client.last(RESPONSES, True)["store"] is False


def test_results_of_functions_are_added_to_a_stored_response() -> None:
    text = '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "name": "go", "parameters": {"type": "object"}}]
    fields: dict[str, Any] = {"tools": tools, "max_output_tokens": 100, **GREEDY}
    with replaying_llm(text) as llm, served(llm) as client:
        first = client.ask(RESPONSES, **fields)
        [call] = first["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "there"}
        fields["previous_response_id"] = first["id"]
        second = client.ask(RESPONSES, **fields, input=[output])
        listed = client.http.get(f"{RESPONSES}/{second['id']}/input_items?order=asc").json()
        kinds = [item["type"] for item in listed["data"]]
        assert kinds == ["message", "function_call", "function_call_output"]
        wrong = client.refused(RESPONSES, **fields, input=[{**output, "call_id": "x"}])
        assert "no function_call has the call_id 'x'" in wrong["message"]


def test_a_file_outlasts_the_server(tmp_path: Path) -> None:
    with scripted_llm() as llm:
        with served(llm, store=str(tmp_path / "db")) as client:
            response = client.ask(RESPONSES)
        with served(llm, store=str(tmp_path / "db")) as client:
            assert client.http.get(f"{RESPONSES}/{response['id']}").json() == response
