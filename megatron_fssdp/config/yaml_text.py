"""Reads YAML text strictly: no tags, no aliases, no duplicate keys, and only finite numbers.

Plain scalars are null, true, false and decimal numbers, as in YAML 1.2. Everything else is text.
"""

import math
import re
from typing import Any

import yaml

from megatron_fssdp.config.errors import ConfigurationError

_WHOLE = re.compile(r"[-+]?[0-9]+$")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")
_NULL = re.compile(r"(?:~|null|Null|NULL|)$")
_BOOLEAN = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
_TAG = "tag:yaml.org,2002:"
_NUMBER_STARTS = list("-+.0123456789")


def parse_yaml(text: str, source: str) -> Any:
    """Read YAML text from a ``source`` into plain values, or raise a ConfigurationError with the position."""
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigurationError(f"{source}: not valid YAML{where}: {error.problem}") from None
    except RecursionError:
        raise ConfigurationError(f"{source}: not valid YAML: nested too deeply; flatten it") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigurationError(f"{source}: not valid YAML: {reason}") from None


def format_yaml(values: Any) -> str:
    """Return YAML text that :func:`parse_yaml` reads back as the same values, with keys in their order."""
    text = ""
    for all_characters in (True, False):
        text = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=all_characters, width=100)
        # PyYAML changes Unicode line breaks into others, unless it writes all such characters as escapes.
        if not set("\x85\u2028\u2029").intersection(text):
            break
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes strings which :func:`parse_yaml` would read as numbers."""


_Dumper.add_implicit_resolver(f"{_TAG}float", _NUMBER, _NUMBER_STARTS)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # none of YAML 1.1, such as `yes` and dates

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _refusal(event, "aliases (*name) are not accepted; write the value out")
        if event.tag is not None:
            raise _refusal(event, f"tags ({event.tag}) are not accepted; remove it")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if not isinstance(key, str):
                raise _refusal(key_node, f"the key {key!r} is not a string; put it in quotes")
            if key in keys:
                raise _refusal(key_node, f"key '{key}' is given twice; keep one of them")
            keys.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        text: str = node.value
        number = int(text) if _WHOLE.match(text) else float(text)
        if not math.isfinite(number):
            raise _refusal(node, f"{text} is not a finite number; write a finite one")
        if isinstance(number, int) and number.bit_length() > 63:
            raise _refusal(node, "whole number of more than 64 bits; write a smaller one")
        return number


_Loader.add_implicit_resolver(f"{_TAG}null", _NULL, ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_TAG}bool", _BOOLEAN, list("tTfF"))
_Loader.add_implicit_resolver(f"{_TAG}float", _NUMBER, _NUMBER_STARTS)
_Loader.add_constructor(f"{_TAG}float", _Loader.construct_number)


def _refusal(place: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, problem, place.start_mark)
