"""Importing a model's file, and the files beside it, as if no other model were there; the law: the interpreter keeps no
trace of a model that is unloaded, and the repository none of one that is loaded.

Two models may each have a ``helper.py``. So every load is a package of its own, with a name that nobody else has: the
model's file and its siblings are modules of that package (relative imports work, as in Triton). ``import helper`` works
too: code of the package runs with its own ``__import__``, which looks for siblings first. Standard library modules win
over siblings, and so do installed packages over plain folders, which are often just data.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import itertools
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

API_NAME = "triton_python_backend_utils"

_INVALIDATING = threading.Lock()
"""Two at once would delete the same entries of Python's table of importers, and the second fails with a KeyError."""
_numbers = itertools.count(1)
_packages: dict[str, _Package] = {}
"""The packages that are loaded, by name. Import hooks are the interpreter's, so that their state is the module's."""


class LoadedModule:
    """A model's file, imported. ``close`` takes it and its siblings out of the interpreter."""

    def __init__(self, module: ModuleType, package: _Package) -> None:
        self.module = module
        self._package = package

    @property
    def package(self) -> str:
        """The name under which the modules of this load, and of no other, are found."""
        return self._package.name

    def close(self) -> None:
        """Forget the module. Objects that are still referred to live on."""
        self._package.forget()


def load_module(file: Path, label: str, search: Sequence[Path]) -> LoadedModule:
    """Run a model's file.

    Args:
        file: the file.
        label: what the model is called; appears in ``__name__``.
        search: the folders in which siblings are looked for, best first.

    Raises:
        BaseException: whatever the file raises.
    """
    _install()
    with _INVALIDATING:
        importlib.invalidate_caches()  # siblings may have been written a moment ago
    package = _Package(f"remora_model_{re.sub(r'[^0-9A-Za-z]', '_', label)}_{next(_numbers)}", search)
    try:
        name = f"{package.name}.{re.sub(r'[^0-9A-Za-z_]', '_', file.stem)}"
        loader = _Loader(name, str(file), package.builtins)
        spec = ModuleSpec(name, loader, origin=str(file))
        spec.has_location = True
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        loader.exec_module(module)
    except BaseException:
        package.forget()
        raise
    return LoadedModule(module, package)


def _install() -> None:
    """Put our two finders into place, and the API under the name that models know it by. Harmless when repeated."""
    if not any(isinstance(finder, _PackageFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PackageFinder())
        sys.meta_path.append(_SiblingFinder())
    from remora.backends import triton_python_backend_utils

    sys.modules[API_NAME] = triton_python_backend_utils


class _Package:
    """The package that one load of a model is."""

    def __init__(self, name: str, search: Sequence[Path]) -> None:
        self.name = name
        self._search = tuple(search)
        self._siblings: dict[str, bool] = {}
        self.builtins: dict[str, Any] = {**vars(builtins), "__import__": self._import}
        module = ModuleType(name, "One load of one model.")
        module.__path__ = [str(folder) for folder in search]
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        _packages[name] = self

    def has(self, name: str) -> bool:
        """Is there a sibling of this top-level name?"""
        known = self._siblings.get(name)
        if known is None:
            known = self._siblings[name] = self._look_for(name)
        return known

    def _look_for(self, name: str) -> bool:
        if name in sys.stdlib_module_names or name == API_NAME:
            return False
        for folder in self._search:
            if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
                return True
            if any((folder / f"{name}{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
                return True
        folders = any((folder / name).is_dir() for folder in self._search)
        return folders and name not in sys.modules and PathFinder.find_spec(name) is None

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002 - the names of builtins.__import__
        locals: Mapping[str, Any] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """``__import__`` for the code of this package."""
        top = name.partition(".")[0]
        if level or not self.has(top):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        if fromlist:
            return builtins.__import__(f"{self.name}.{name}", globals, locals, fromlist)
        importlib.import_module(f"{self.name}.{name}")
        return sys.modules[f"{self.name}.{top}"]

    def forget(self) -> None:
        _packages.pop(self.name, None)
        prefix = f"{self.name}."
        for key, module in sys.modules.copy().items():  # at once: others may import meanwhile
            own_name = vars(module).get("__name__") if isinstance(module, ModuleType) else None
            own = isinstance(own_name, str) and own_name.startswith(prefix)  # entered under a plain name
            if own or key == self.name or key.startswith(prefix):
                del sys.modules[key]


class _Loader(SourceFileLoader):
    """Runs a file of a package with the package's builtins, always from its source: byte code is neither written into
    the repository nor believed when it lies there."""

    def __init__(self, fullname: str, path: str, names: dict[str, Any]) -> None:
        super().__init__(fullname, path)
        self._builtins = names

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._builtins
        super().exec_module(module)


class _PackageFinder:
    """Finds the modules of our packages. Comes first: the ordinary finder would find them too, with its own loader."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is None:
            return None
        package = _packages.get(fullname.partition(".")[0])
        if package is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path, package.builtins)
            spec.cached = None
        return spec


class _SiblingFinder:
    """The last resort for siblings that are not imported by an import statement: ``importlib.import_module("helper")``
    or an object stored by a framework that names its class's module. The model is the one whose code is calling.

    Such a module is entered under its plain name, where other models find it too as long as this one is loaded.
    """

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is not None or not _packages:
            return None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            package = _packages.get(str(frame.f_globals.get("__name__", "")).partition(".")[0])
            if package is not None:
                return ModuleSpec(fullname, _Alias(f"{package.name}.{fullname}")) if package.has(fullname) else None
            frame = frame.f_back
        return None


class _Alias(Loader):
    """A loader that gives a module that is there already."""

    def __init__(self, real_name: str) -> None:
        self._real_name = real_name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real_name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has overwritten it
