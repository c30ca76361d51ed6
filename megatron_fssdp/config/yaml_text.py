"""Reads YAML text strictly: safe values only, no duplicate keys, and only finite numbers."""

import math
import re
from collections.abc import Hashable
from typing import Any

import yaml

from megatron_fssdp.config.errors import ConfigurationError

_MOST_INTEGER_BITS = 63
_MOST_LEVELS = 100
"""Maximum number of nested brackets. PyYAML's parsing time grows with the square of this number."""


def parse_yaml(text: str, source: str) -> Any:
    """Read YAML text into plain Python values.

    Some things that YAML allows are refused: aliases, duplicate keys, keys that are not strings, numbers that
    are not finite, and whole numbers of more than 64 bits.

    Args:
        text: YAML text.
        source: Name of the file or option that the text comes from. Error messages start with it.

    Returns:
        The values: dictionaries, lists, strings, numbers, booleans, dates or None.

    Raises:
        ConfigurationError: The text is invalid. The message has one line with the position and the reason.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigurationError(f"{source}: not valid YAML{where}: {error.problem}") from None
    except RecursionError:
        raise ConfigurationError(f"{source}: not valid YAML: nested too deeply; flatten it") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigurationError(f"{source}: not valid YAML: {reason}") from None


def format_yaml(data: Any, width: int | None = None) -> str:
    """Return YAML text that :func:`parse_yaml` reads back as the same values, with keys in their order.

    Args:
        data: Plain Python values.
        width: Maximum length of a line, or None for PyYAML's default.
    """
    text = _dump(data, width, allow_unicode=True)
    # PyYAML changes Unicode line breaks into others, unless it writes all Unicode characters as escapes.
    is_folded = any(line_break in text for line_break in "\x85\u2028\u2029")
    return _dump(data, width, allow_unicode=False) if is_folded else text


def _dump(data: Any, width: int | None, *, allow_unicode: bool) -> str:
    text: str = yaml.dump(
        data, Dumper=_StrictDumper, sort_keys=False, allow_unicode=allow_unicode, width=width
    )
    return text


class _StrictDumper(yaml.SafeDumper):
    """Writer of safe YAML that quotes strings which :class:`_StrictLoader` would read as numbers."""


class _StrictLoader(yaml.SafeLoader):
    """Loader of safe YAML that refuses aliases and duplicate keys, and reads ``1e-4`` as a number."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        if self.flow_level >= _MOST_LEVELS:
            raise yaml.scanner.ScannerError(None, None, "nested too deeply; flatten it", self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(
                None, None, "aliases (*name) are not accepted; write the value out", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if not isinstance(node, yaml.MappingNode):  # the tag !!map can stand before any kind of node
            raise _refusal(node, "wanted a mapping of keys to values")
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if isinstance(key_node, yaml.ScalarNode) and key in seen:
                raise _refusal(key_node, f"key '{key}' is given twice; keep one of them")
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key)
        mapping = super().construct_mapping(node, deep)
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if not isinstance(key, str):
                raise _refusal(key_node, f"the key {key!r} is not a string; put it in quotes")
        return mapping

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Read a whole number of at most 64 bits or a finite number, also after a tag such as ``!!int``."""
        is_whole = node.tag.endswith(":int")
        try:
            number = self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)
        except (ValueError, LookupError, ArithmeticError):  # an empty text raises IndexError
            raise _refusal(node, f"{node.value!r} is not a number") from None
        if isinstance(number, int) and number.bit_length() > _MOST_INTEGER_BITS:
            raise _refusal(node, "whole number of more than 64 bits; write a smaller one")
        if not math.isfinite(number):
            raise _refusal(node, f"{node.value} is not a finite number; write a finite one")
        return number

    def construct_tagged(self, node: yaml.ScalarNode) -> Any:
        """Read a boolean or a date. After a bare tag such as ``!!bool``, PyYAML's own errors are unclear."""
        construct = self.construct_yaml_bool if node.tag.endswith(":bool") else self.construct_yaml_timestamp
        try:
            return construct(node)
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:
            reason = str(error) if isinstance(error, ValueError) else f"not a {node.tag.rpartition(':')[2]}"
            raise _refusal(node, f"{node.value!r}: {reason}") from None


def _refusal(node: yaml.Node, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


for _tag, _construct in {
    "int": _StrictLoader.construct_number,
    "float": _StrictLoader.construct_number,
    "bool": _StrictLoader.construct_tagged,
    "timestamp": _StrictLoader.construct_tagged,
}.items():
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _construct)

# YAML 1.1 reads "1.0e-4" as a number, but not "1e-4", which most people write. The dumper must put quotes
# around strings that the loader reads as numbers.
for _class in (_StrictLoader, _StrictDumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
