"""Isolated import of a model's file and the files beside it.

Two models may each have a ``helper.py``. So every load is a separate package with a unique name, and the model's file
and its siblings are modules of that package (relative imports work, as in Triton). ``import helper`` works too, because
code of the package runs with a private ``__import__`` that looks for siblings first. Standard library modules take
precedence over siblings, and installed packages over plain directories, which are often just data.

Invariant: the interpreter keeps no trace of an unloaded model, and importing writes no file to the repository.
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
"""Serializes cache invalidation, because concurrent calls delete the same importers and raise KeyError."""
_numbers = itertools.count(1)
_packages: dict[str, _Package] = {}
"""Loaded packages by name. Global, because import hooks belong to the interpreter."""


class LoadedModule:
    """Imported file of a model.

    ``close`` removes it and its siblings from the interpreter.
    """

    def __init__(self, module: ModuleType, package: _Package) -> None:
        self.module = module
        self._package = package

    @property
    def package(self) -> str:
        """Unique package name of the modules of this load."""
        return self._package.name

    def close(self) -> None:
        """Remove the modules. Objects that are still referenced stay alive."""
        self._package.forget()


def load_module(file: Path, label: str, search: Sequence[Path]) -> LoadedModule:
    """Run a model's file and return its module.

    Args:
        file: the file.
        label: the model's name, which appears in ``__name__``.
        search: the directories of siblings, in order of precedence.

    Raises:
        BaseException: any exception that the file raises.
    """
    _install()
    with _INVALIDATING:
        importlib.invalidate_caches()  # siblings may be newer than the cache
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
    """Install the two import finders and the API module under the name that models import.

    Idempotent.
    """
    if not any(isinstance(finder, _PackageFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PackageFinder())
        sys.meta_path.append(_SiblingFinder())
    from remora.backends import triton_python_backend_utils

    sys.modules[API_NAME] = triton_python_backend_utils


class _Package:
    """Package of one load of a model."""

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
        """Return True if there is a sibling of this top-level name."""
        is_sibling = self._siblings.get(name)
        if is_sibling is None:
            is_sibling = self._siblings[name] = self._look_for(name)
        return is_sibling

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
        """Act as ``__import__`` for the code of this package."""
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
        for key, module in sys.modules.copy().items():  # a copy, because other threads may import
            own_name = vars(module).get("__name__") if isinstance(module, ModuleType) else None
            own = isinstance(own_name, str) and own_name.startswith(prefix)  # also under a plain name
            if own or key == self.name or key.startswith(prefix):
                del sys.modules[key]


class _Loader(SourceFileLoader):
    """Loader that runs a file of a package with the package's builtins, from its source.

    Byte code is neither written into the repository nor read from it.
    """

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
    """Import finder for the modules of model packages.

    Comes first, because the ordinary finder would find them too, with its own loader.
    """

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
    """Import finder of last resort for siblings that are not imported by an import statement.

    Examples are ``importlib.import_module("helper")`` and an object saved by a framework with the name of its class's
    module. The calling code determines the model. Such a module is entered under its plain name, where other models
    find it too while this model is loaded.
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
    """Loader that returns a module that is imported already."""

    def __init__(self, real_name: str) -> None:
        self._real_name = real_name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real_name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # because the import system has overwritten it
