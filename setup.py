"""What pyproject.toml cannot say: compiled modules that may be missing, and where the configs lie."""

import os
from pathlib import Path

from setuptools import Extension, find_packages, setup

FOLDER = Path("megatron_fssdp/planning/kernels")
KERNELS = [
    Extension(
        ".".join(source.with_suffix("").parts),
        [str(source)],
        depends=sorted(map(str, FOLDER.glob("*.pxd"))),
        # A CFLAGS of the environment replaces Python's own -O3. Without -g, files have a fifth of the size.
        # A contracted a * b + c rounds once where plain Python rounds twice: ranks could plan differently.
        extra_compile_args=["-O3", "-g0", "-ffp-contract=off"],
        # Without a C compiler, planning runs as plain Python. Published wheels have it compiled.
        optional="CIBUILDWHEEL" not in os.environ,
    )
    for source in sorted(FOLDER.glob("[!_]*.py"))
]

setup(
    packages=[*find_packages(include=["megatron_fssdp", "megatron_fssdp.*"]), "megatron_fssdp.configs"],
    package_dir={"megatron_fssdp.configs": "configs"},
    package_data={
        "": ["py.typed", "*.css", "*.js", "*.j2", "*.pxd", "known_options.txt"],
        "megatron_fssdp.configs": ["**/*.yaml"],
    },
    # MEGATRON_FSSDP_PURE makes a wheel for every machine, in which planning runs as plain Python.
    ext_modules=[] if os.environ.get("MEGATRON_FSSDP_PURE") else KERNELS,
)
