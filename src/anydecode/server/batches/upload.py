"""Uploaded files: the parts of a body of the type `multipart/form-data` (RFC 7578).

The body has been received as a whole. Its parts are found by searches for the boundary, whose time
does not depend on what a client writes into a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from email.utils import collapse_rfc2231_value
from urllib.parse import urlsplit

from starlette.requests import Request

from anydecode.server.errors import ApiError

#: Maximum number of parts, of bytes of the headers of a part, and of bytes of a part that is no
#: file.
_MAX_PARTS, _MAX_HEADERS, _MAX_FIELD = 16, 4096, 1024


@dataclass
class Upload:
    """A form with one file.

    Attributes:
        filename: The name of the file.
        content: Its content.
        fields: The other fields.
    """

    filename: str
    content: bytes
    fields: dict[str, str]


def check_origin(http: Request) -> None:
    """Raise `ApiError` if a page of another origin sends a form. Browsers let pages send forms to
    other origins without asking them."""
    origin = http.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != http.headers.get("host"):
        raise ApiError(403, "a page of another origin cannot upload files", code="origin_refused")


def parse_form(content_type: str, body: bytes) -> Upload:
    """The form of a body. Raises `ApiError` if it is not a form with one file named `file`."""
    parts = _parts(content_type, body)
    upload: Upload | None = None
    fields: dict[str, str] = {}
    for headers, content in parts:
        name, filename = _parameter(headers, "name"), _parameter(headers, "filename")
        if name == "file":
            if upload is not None:
                raise _error("it has several files; send one", "file")
            upload = Upload(filename or "file", content, fields)
        elif name is None or name in fields:
            raise _error("a part has no name, or that of another part")
        elif len(content) > _MAX_FIELD:
            raise _error(f"the field {name} is longer than {_MAX_FIELD} bytes", name)
        else:
            fields[name] = content.decode("utf-8", "replace")
    if upload is None:
        raise _error("it has no part named file", "file")
    return upload


def _parts(content_type: str, body: bytes) -> list[tuple[Message, bytes]]:
    """The headers and the content of each part."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary:
        raise ApiError(400, "the body: send it as multipart/form-data", code="invalid_body")
    separator = b"--" + boundary.encode("latin-1", "replace")
    position = 0 if body.startswith(separator) else body.find(b"\r\n" + separator) + 2
    if position == 1:
        raise _error("it does not contain its boundary")
    parts: list[tuple[Message, bytes]] = []
    position += len(separator)
    while body[position : position + 2] != b"--":
        start = body.find(b"\r\n", position, position + 80) + 2  # white space may precede it
        middle = body.find(b"\r\n\r\n", start - 2, start + _MAX_HEADERS)
        end = body.find(b"\r\n" + separator, middle + 2)
        if start == 1 or middle < 0 or end < 0 or body[position : start - 2].strip():
            raise _error("it is not complete, or the headers of a part are too large")
        if len(parts) == _MAX_PARTS:
            raise _error(f"it has more than {_MAX_PARTS} parts")
        headers = HeaderParser().parsestr(body[start : middle + 2].decode("utf-8", "replace"))
        parts.append((headers, body[middle + 4 : end]))
        position = end + 2 + len(separator)
    return parts


def _parameter(headers: Message, name: str) -> str | None:
    """A parameter of the header Content-Disposition of a part."""
    value = headers.get_param(name, header="content-disposition")
    if value is None:
        return None
    try:
        text = collapse_rfc2231_value(value)
    except ValueError:  # its encoding has no texts
        raise _error(f"the encoding of {name} is unknown", name) from None
    return text.encode(errors="replace").decode()  # no lone surrogates, which no answer can contain


def _error(reason: str, param: str | None = None) -> ApiError:
    return ApiError(400, f"the form cannot be read: {reason}", code="invalid_body", param=param)
