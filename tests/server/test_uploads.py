"""Uploaded files: forms of clients are read as they were meant, others are refused in one line, and
pages of other origins cannot upload."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

from anydecode.server.batches.upload import Upload, parse_form  # noqa: E402
from anydecode.server.errors import ApiError  # noqa: E402
from server_client import Client  # noqa: E402

FILES = "/v1/files"
TYPE = "multipart/form-data; boundary=b"


def encoded(files: Any, data: dict[str, str]) -> tuple[str, bytes]:
    request = httpx.Request("POST", "http://localhost", files=files, data=data)
    return request.headers["content-type"], request.read()


def form(*parts: str, end: str = "--b--\r\n") -> bytes:
    return "".join(f"--b\r\n{part}\r\n" for part in parts).encode() + end.encode()


FILE = 'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\nx\ny'


@given(
    content=st.binary(max_size=300) | st.lists(
        st.sampled_from([b"--", b"b", b"\r\n", b"\r", b"\n", b"--b", b": "]), max_size=12
    ).map(b"".join),
    name=st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1),
    value=st.text(st.characters(codec="utf-8"), max_size=20),
)  # fmt: skip
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_forms_of_httpx_are_read_as_they_were_meant(content: bytes, name: str, value: str) -> None:
    upload = parse_form(*encoded({"file": (name, content)}, {"purpose": value}))
    assert upload.content == content
    assert upload.fields == {"purpose": value}
    escaped = name.replace("\\", "\\\\").replace('"', "%22")
    assert upload.filename in (escaped, name.replace('"', "%22"))


def test_forms_of_other_clients_are_read() -> None:
    expected = Upload("f", b"x\ny", {})
    assert parse_form(TYPE, form(FILE)) == expected
    assert parse_form('Multipart/Form-Data; BOUNDARY="b"', form(FILE)) == expected
    assert parse_form(TYPE, b"preamble\r\n" + form(FILE) + b"epilogue") == expected
    assert parse_form(TYPE, form(FILE).replace(b"--b\r\n", b"--b \t\r\n")) == expected
    assert parse_form(TYPE, form(FILE, end="--b--")) == expected
    unnamed = "content-disposition: form-data; name=file\r\n\r\n--"
    assert parse_form(TYPE, form(unnamed)) == Upload("file", b"--", {})
    utf8 = FILE.replace('filename="f"', "filename*=UTF-8''%C3%A4")
    assert parse_form(TYPE, form(utf8)).filename == "\u00e4"


def test_names_of_files_can_be_sent_again(client: Client) -> None:
    for encoding in ("utf-8", "utf-7", "unicode_escape", "raw_unicode_escape", "undefined", "zlib"):
        for text in ("%5Cud800", "+2AA-", "%ED%A0%80", "%FF", "%"):
            name = FILE.replace('filename="f"', f"filename*={encoding}''{text}")
            purpose = 'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
            answer = client.http.post(
                FILES, content=form(name, purpose), headers={"content-type": TYPE}
            )
            assert answer.is_success or "the encoding of filename is unknown" in answer.text
    assert client.http.get(FILES).status_code == 200


@pytest.mark.parametrize(
    "content_type, body, message",
    [
        ("application/json", b"{}", "send it as multipart/form-data"),
        ("multipart/form-data", form(FILE), "send it as multipart/form-data"),
        ("", b"", "send it as multipart/form-data"),
        (TYPE, b"", "does not contain its boundary"),
        (TYPE, b"x--b\r\n", "does not contain its boundary"),
        (TYPE, b"--b\r\n", "not complete"),
        (TYPE, form(FILE, end=""), "not complete"),
        (TYPE, b"--bx\r\n" + form(FILE), "not complete"),
        (TYPE, form("no headers"), "not complete"),
        (TYPE, form("a: " + "x" * 5000 + "\r\n\r\n"), "headers of a part are too large"),
        (TYPE, form(*[FILE.replace("file", f"f{n}") for n in range(17)]), "more than 16 parts"),
        (TYPE, form(FILE, FILE), "several files"),
        (TYPE, form("a: b\r\n\r\n"), "a part has no name"),
        (TYPE, form(*[FILE.replace('"file"', '"a"')] * 2), "that of another part"),
        (TYPE, form(FILE.replace('"file"', '"a"') + "x" * 2000), "longer than 1024 bytes"),
        (TYPE, b"--b--\r\n", "no part named file"),
    ],
)
def test_other_forms_are_refused_in_one_line(content_type: str, body: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        parse_form(content_type, body)
    assert caught.value.status == 400 and "\n" not in caught.value.message


def test_pages_of_other_origins_cannot_upload(client: Client) -> None:
    def upload(origin: str | None) -> Any:
        headers = {} if origin is None else {"origin": origin}
        fields = {"files": {"file": ("f", b"{}")}, "data": {"purpose": "batch"}}
        return client.http.post(FILES, **fields, headers=headers)  # type: ignore[arg-type]

    assert upload(None).status_code == 200
    assert upload(str(client.http.base_url).rstrip("/")).status_code == 200
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        answer = upload(origin)
        assert answer.status_code == 403, origin
        assert "another origin" in answer.json()["error"]["message"]


def test_bodies_that_are_no_forms_are_refused(client: Client) -> None:
    for arguments in ({"json": {"purpose": "batch"}}, {"content": b"x"}, {"data": {"a": "b"}}):
        answer = client.http.post(FILES, **arguments)  # type: ignore[arg-type]
        assert answer.status_code == 400, answer.text
        assert "multipart/form-data" in answer.json()["error"]["message"]
    answer = client.http.post(FILES, files={"file": b"{}"}, data={"purpose": "batch", "extra": "1"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "extra"
