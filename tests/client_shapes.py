"""Types that users give to clients, as JSON Schemas of every kind."""

from __future__ import annotations

from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field


class Unit(str, Enum):
    """A unit of temperature."""

    celsius = "celsius"
    kelvin = "kelvin"


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Oslo", "Rome"]
    population: Annotated[int, Field(ge=1, le=9)] | None = None


class Trip(BaseModel):
    """A journey: nested models in a list, an enum, an optional value."""

    model_config = ConfigDict(extra="forbid")
    cities: Annotated[list[City], Field(min_length=1, max_length=2)]
    unit: Unit
    guide: Literal["Ann", "Bo"] | None = None


class Cat(BaseModel):
    """One kind of pet."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    """The other kind."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["dog"]
    tricks: Annotated[set[Literal["sit", "roll"]], Field(max_length=2)]


class Booking(BaseModel):
    """Arguments with a format, unique items, alternatives, and a nested model."""

    model_config = ConfigDict(extra="forbid")
    day: date
    city: City
    seats: Annotated[set[Literal["A1", "A2", "B1"]], Field(min_length=1, max_length=3)]
    pet: Annotated[Union[Cat, Dog], Field(discriminator="kind")]  # noqa: UP007 oneOf


def tool(model: type[BaseModel], name: str) -> dict[str, Any]:
    """A tool of OpenAI's API whose arguments are `model`."""
    function = {
        "name": name,
        "description": model.__doc__,
        "parameters": model.model_json_schema(),
    }
    return {"type": "function", "function": function}
