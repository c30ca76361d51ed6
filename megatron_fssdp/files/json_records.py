"""Reads JSON objects that this package wrote back into dataclasses."""

from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A number of things in a record: 0 or more, and small enough for NumPy's int64."""

_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}  # making one takes longer than reading a record


def parse_record[RecordT](record_cls: type[RecordT], text: str | bytes) -> RecordT:
    """Read one JSON object into a dataclass, without converting types; unknown keys are ignored.

    Raises:
        ValueError: The object does not fit. The message is one line with key and problem.
    """
    adapter = _ADAPTERS.get(record_cls) or _ADAPTERS.setdefault(record_cls, TypeAdapter(record_cls))
    try:
        record: RecordT = adapter.validate_json(text, strict=True)
        return record
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from None
