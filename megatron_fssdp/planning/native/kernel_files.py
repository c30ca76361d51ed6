"""Which files the kernels consist of, and where the compiled form of each one lies.

The name of a compiled file has a hash of everything that it was made from: the kernel's source with its
parts, and the way it is compiled. A compiled file of other sources therefore has another name and is never
found. Names also have the tag of the Python version and machine.

The module imports the standard library only, because builds load it by its path, where the package's
dependencies are not installed.
"""

import hashlib
import re
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

KERNELS = Path(__file__).parent.parent / "kernels"
"""Folder of the kernels' sources."""

COMPILED = KERNELS / "compiled"
"""Folder of the compiled kernels."""

REPLACED_IMPORTS = {
    "from megatron_fssdp.planning.native import compiler_marks as cython\n": "import cython\n",
    "from megatron_fssdp.planning.native.kernel_types import ": "from cython.cimports.kernel_types import ",
}
"""Imports in the source of a kernel that Cython reads in another form. Each kernel has the types."""

TYPES = Path(__file__).parent / "kernel_types.pxd"
"""C types of the names that kernels import from ``kernel_types``."""

DIRECTIVES = {
    "boundscheck": False,  # the plain form checks indexes
    "initializedcheck": False,
    "wraparound": False,  # so kernels must not use negative indexes
    "infer_types": True,  # a variable has the C type of what is assigned to it
    "language_level": 3,
}
"""Cython's options. Divisions keep Python's rules for negative numbers."""

COMPILE_ARGUMENTS = ("-O3", "-g0", "-ffp-contract=off")
"""Arguments of the C compiler.

A contracted ``a * b + c`` would round once where plain Python rounds twice, and ranks could plan differently.
"""

PARTS = "parts"
"""Folder beside the kernels' sources: classes of kernels that are too long for one file.

A kernel imports a part in one line, and Cython reads the part's text in place of that line.
"""

_PART = re.compile(r"^from megatron_fssdp\.planning\.kernels\.parts\.(\w+) import .*\n", re.MULTILINE)
_CONSTANT = re.compile(r"^(_[A-Z][A-Z_]*) = (-?[0-9][0-9.e-]*)(?: *#.*)?$", re.MULTILINE)
_INNER = re.compile(r"^( *)@cython\.inner$", re.MULTILINE)
# Final methods are called directly, so the C compiler can put them in line.
_INNER_MARKS = r"\1@cython.final\n\1@cython.cfunc\n\1@cython.nogil\n\1@cython.exceptval(check=False)"
_DIGEST_BYTES = 8


@dataclass(frozen=True)
class KernelFile:
    """One kernel's source and the place of its compiled form.

    Attributes:
        source: Path of the source.
        module: Name of the compiled module, with the hash of the source.
        compiled: Path of the compiled module, whether it exists or not.
    """

    source: Path
    module: str
    compiled: Path


def kernel_files(sources: Path = KERNELS, compiled: Path = COMPILED) -> tuple[KernelFile, ...]:
    """All kernels, by name.

    Args:
        sources: Folder of the sources.
        compiled: Folder of the compiled modules.
    """
    marks = sorted(REPLACED_IMPORTS.items()), _INNER_MARKS
    recipe = repr((sorted(DIRECTIVES.items()), COMPILE_ARGUMENTS, marks)).encode() + TYPES.read_bytes()
    paths = sorted(path for path in sources.glob("*.py") if path.name != "__init__.py")
    return tuple(_kernel_file(path, compiled, recipe) for path in paths)


def _kernel_file(source: Path, compiled: Path, recipe: bytes) -> KernelFile:
    text = _with_parts(source, source.parent / PARTS)
    digest = hashlib.blake2b(text.encode() + recipe, digest_size=_DIGEST_BYTES).hexdigest()
    module = f"{source.stem}_{digest}"
    return KernelFile(source, module, compiled / f"{module}{EXTENSION_SUFFIXES[0]}")


def source_for_cython(file: KernelFile) -> str:
    """The source of a kernel as Cython reads it.

    Args:
        file: The kernel.

    Raises:
        ValueError: The kernel imports no types.
    """
    text = _with_parts(file.source, file.source.parent / PARTS)
    # Without the interpreter's lock, C functions cannot read a module's constants: write their values.
    for name, value in _CONSTANT.findall(text):
        text = re.sub(rf"\b{name}\b(?! = )", value, text)
    text = _INNER.sub(_INNER_MARKS, text)
    for plain, compiled in REPLACED_IMPORTS.items():
        text = text.replace(plain, compiled)
    if "from cython.cimports.kernel_types import " not in text:
        raise ValueError(f"{file.source} imports no C types: wanted some from planning.native.kernel_types")
    return text


def _with_parts(source: Path, parts: Path, seen: set[str] | None = None) -> str:
    """The text of a source with its parts in place of their first imports.

    Args:
        source: Path of the source.
        parts: Folder of the parts.
        seen: Names of the parts that are in the text already.
    """
    names = set() if seen is None else seen

    def text_of(found: re.Match[str]) -> str:
        if found[1] in names:
            return ""
        names.add(found[1])
        return _with_parts(parts / f"{found[1]}.py", parts, names)

    return _PART.sub(text_of, source.read_text(encoding="utf-8"))
