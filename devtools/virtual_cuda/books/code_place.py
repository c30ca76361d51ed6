"""Finds the line of the plugin's code, or of the test, that is responsible for an operation."""

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType

import torch

import megatron_fssdp

_PACKAGE = str(Path(megatron_fssdp.__file__).resolve().parent) + "/"
_TESTING = _PACKAGE + "testing/"
_OWN = str(Path(__file__).resolve().parents[1]) + "/"
_TORCH = str(Path(torch.__file__).resolve().parent) + "/"
_STANDARD_LIBRARY = str(Path(sysconfig.get_paths()["stdlib"]).resolve()) + "/"
_MEGATRON = "megatron/"  # of an installed Megatron, and of a checkout
_MAX_CALLERS = 2


@cache
def _name_of_file(path: str) -> tuple[str, bool] | None:
    """The name to show for a source file and whether the file is the plugin's; None for files to skip."""
    if path.startswith("<"):
        return None
    full = str(Path(path).resolve())
    if full.startswith((_OWN, _TORCH, _TESTING)):
        return None
    if full.startswith(_PACKAGE):
        return full.removeprefix(_PACKAGE), True
    if "/site-packages/" in full:
        return full.rpartition("/site-packages/")[2], False
    if full.startswith(_STANDARD_LIBRARY):
        return None
    parts = Path(full).parts
    return "/".join(parts[parts.index("tests") :] if "tests" in parts else parts[-2:]), False


def code_place() -> str:
    """The place of the operation that runs now, as ``file:line``.

    It is the innermost line of the plugin, followed by up to two of its callers in the plugin. If the plugin
    called Megatron there, the innermost line of Megatron comes first. If no code of the plugin is on the
    stack, it is the innermost line outside of torch and the standard library. Operations of a backward pass
    are marked, because autograd calls most of them without a line of Python.
    """
    ours: list[str] = []
    inside_megatron: list[str] = []
    outside = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(ours) <= _MAX_CALLERS:
        named = _name_of_file(frame.f_code.co_filename)
        if named is not None:
            name, is_ours = named
            if is_ours:
                ours.append(f"{name}:{frame.f_lineno}")
            elif not outside:
                outside = f"{name}:{frame.f_lineno}"
                if not ours and name.startswith(_MEGATRON):
                    inside_megatron = [outside]
        frame = frame.f_back
    place = " < ".join(inside_megatron + ours) or outside or "unknown place"
    return f"{place} (backward pass)" if torch._C._current_graph_task_id() != -1 else place
