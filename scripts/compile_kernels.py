"""Compiles the planning kernels of this checkout, for the Python that runs this script.

usage: python scripts/compile_kernels.py [--quiet]

It needs Cython, setuptools and a C compiler. Kernels that are compiled from their present source are left
alone, so a second run does nothing. ``hatch_build.py`` calls :func:`compile_kernels` during an installation.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def load_kernel_files(root: Path = ROOT) -> Any:
    """The module that knows the kernels' files, without an import of the package.

    Args:
        root: Folder of the checkout.
    """
    path = root / "megatron_fssdp" / "planning" / "native" / "kernel_files.py"
    spec = importlib.util.spec_from_file_location("kernel_files", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def compile_kernels(root: Path = ROOT) -> list[Path]:
    """Compile the kernels that have no compiled form of their present source.

    Files of earlier sources are removed afterwards. Finished files are moved into place, so processes that
    run at the same time only do work twice.

    Args:
        root: Folder of the checkout.

    Returns:
        Paths of all compiled kernels.

    Raises:
        ImportError: Cython or setuptools is not installed.
        Exception: The C compiler is missing or fails; the type depends on setuptools and the compiler.
    """
    layout = load_kernel_files(root)
    files = layout.kernel_files()
    stale = [file for file in files if not file.compiled.is_file()]
    if stale:
        layout.COMPILED.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=layout.COMPILED, prefix=".build-") as folder:
            _compile(stale, Path(folder), layout)
    wanted = {file.compiled for file in files}
    suffix = layout.EXTENSION_SUFFIXES[0]
    for path in layout.COMPILED.glob(f"*{suffix}"):
        if path not in wanted:
            path.unlink(missing_ok=True)
    return sorted(wanted)


def _compile(files: list[Any], folder: Path, layout: Any) -> None:
    """Compile some kernels.

    Args:
        files: The kernels, as ``KernelFile``.
        folder: Empty folder for intermediate files, on the file system of the compiled kernels.
        layout: The module of :func:`load_kernel_files`.
    """
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    extensions = []
    for file in files:
        copy = folder / f"{file.module}.py"
        copy.write_text(layout.source_for_cython(file), encoding="utf-8")
        extensions.append(
            Extension(file.module, [str(copy)], extra_compile_args=list(layout.COMPILE_ARGUMENTS))
        )
    modules = cythonize(
        extensions,
        compiler_directives=dict(layout.DIRECTIVES),
        include_path=[str(layout.TYPES.parent)],
        quiet=True,
    )
    build = Distribution({"name": "kernels", "ext_modules": modules}).get_command_obj("build_ext")
    build.build_lib = str(folder / "lib")
    build.build_temp = str(folder / "temp")
    build.parallel = os.cpu_count()
    build.ensure_finalized()
    build.run()
    for file in files:
        os.replace(folder / "lib" / file.compiled.name, file.compiled)


def main() -> None:
    """Compile the kernels, or say why this is impossible."""
    parser = argparse.ArgumentParser(description="Compiles the planning kernels of this checkout.")
    parser.add_argument("--quiet", action="store_true", help="print nothing if the kernels can be compiled")
    arguments = parser.parse_args()
    try:
        paths = compile_kernels()
    except (Exception, SystemExit) as error:  # compilers fail in many ways; plain Python works without them
        print(f"the planning kernels run as plain Python, because they cannot be compiled: {error}")
        sys.exit(1)
    if not arguments.quiet:
        print(f"compiled {len(paths)} planning kernels into {paths[0].parent}")


if __name__ == "__main__":
    main()
