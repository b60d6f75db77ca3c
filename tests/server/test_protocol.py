"""The bounds of the server's own fields: the values at them are allowed, those beyond are not."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from pydantic import ValidationError  # noqa: E402

from anydecode.server.protocol import CompletionRequest, Function  # noqa: E402


@pytest.mark.parametrize(
    ("field", "allowed", "refused"),
    [
        ("priority", [-1000, 1000], [-1001, 1001]),
        ("first_finish", [1], [0]),
        ("segment", [1], [0]),
    ],
)
def test_bounds_of_fields(field: str, allowed: list[int], refused: list[int]) -> None:
    for value in allowed:
        body: Any = CompletionRequest.model_validate({"prompt": "a", field: value})
        assert getattr(body, field) == value
    for value in refused:
        with pytest.raises(ValidationError, match=field):
            CompletionRequest.model_validate({"prompt": "a", field: value})


def test_names_of_functions() -> None:
    for name in ("a", "get_x-1.y", "a" * 128):
        assert Function(name=name).name == name
    for name in ("", "a" * 129, "a b", "é"):
        with pytest.raises(ValidationError, match="name"):
            Function(name=name)
