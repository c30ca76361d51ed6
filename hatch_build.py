"""Compiles the planning kernels while the package is built or installed; without a compiler it goes on."""

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledKernels(BuildHookInterface):
    """Adds the compiled kernels to a wheel, and compiles them in place for an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels before a wheel is made.

        Args:
            version: ``editable`` for an editable installation, otherwise ``standard``.
            build_data: What the wheel will contain; changed in place.
        """
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        script = _load(root / "scripts" / "compile_kernels.py")
        try:
            compiled = script.compile_kernels(root)
        except (Exception, SystemExit) as error:  # a wheel of plain Python is complete, too
            self.app.display_warning(
                f"The planning kernels are not compiled, they run as plain Python: {error}"
            )
            return
        if version != "editable":
            for path in compiled:
                build_data["force_include"][str(path)] = path.relative_to(root).as_posix()
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
