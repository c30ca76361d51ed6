"""Reads YAML text strictly: no tags, no aliases, no duplicate keys, and only finite numbers.

Plain scalars are null, true, false and decimal numbers, as in YAML 1.2. Everything else is text.
"""

import math
import re
from typing import Any

import yaml

from megatron_fssdp.config.errors import ConfigurationError

_WORDS = {
    spelling: value
    for word, value in {"": None, "~": None, "null": None, "true": True, "false": False}.items()
    for spelling in (word, word.title(), word.upper())
}
_WHOLE = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_DEFAULT_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))


def parse_yaml(text: str, source: str) -> Any:
    """Read YAML text into plain Python values.

    Raises:
        ConfigurationError: The text is invalid. One line has ``source``, where the text comes from, the
            position and the reason.
    """
    try:
        node = _Loader(text).get_single_node()
        return None if node is None else _value(node)
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
    """Return YAML text that :func:`parse_yaml` reads back as the same values, with keys in their order."""
    for all_characters in (True, False):
        text: str = yaml.dump(
            data, Dumper=_Dumper, sort_keys=False, allow_unicode=all_characters, width=width
        )
        # PyYAML changes Unicode line breaks into others, unless it writes all such characters as escapes.
        if not set("\x85\u2028\u2029").intersection(text):
            break
    return text


class _Dumper(yaml.SafeDumper):
    """Writer of safe YAML that quotes strings which :func:`parse_yaml` would read as numbers."""


_NUMBERS = re.compile(f"(?:{_NUMBER.pattern})$")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBERS, list("-+.0123456789"))


class _Loader(yaml.BaseLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            problem = "aliases (*name) are not accepted; write the value out"
            raise yaml.composer.ComposerError(None, None, problem, self.peek_event().start_mark)
        return super().compose_node(parent, index)


def _value(node: yaml.Node) -> Any:
    if node.tag not in _DEFAULT_TAGS:
        raise _refusal(node, f"tags ({node.tag}) are not accepted; remove it")
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _value(key_node)
        if not isinstance(key, str):
            raise _refusal(key_node, f"the key {key!r} is not a string; put it in quotes")
        if key in result:
            raise _refusal(key_node, f"key '{key}' is given twice; keep one of them")
        result[key] = _value(value_node)
    return result


def _scalar(node: yaml.ScalarNode) -> Any:
    text: str = node.value
    if node.style is not None:  # quoted, or a block
        return text
    if text in _WORDS:
        return _WORDS[text]
    if not _NUMBER.fullmatch(text):
        return text
    number = int(text) if _WHOLE.fullmatch(text) else float(text)
    if not math.isfinite(number):
        raise _refusal(node, f"{node.value} is not a finite number; write a finite one")
    if isinstance(number, int) and number.bit_length() > 63:
        raise _refusal(node, "whole number of more than 64 bits; write a smaller one")
    return number


def _refusal(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, problem, node.start_mark)
