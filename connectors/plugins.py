"""User code by name: `module:function` or `path/file.py:function`.

`load` returns the named callable or raises `ConfigError`. Relative paths and modules start at the
configuration's folder; that folder goes to the END of the module path, so a user's `trainer/` or
`operators/` never shadows ours.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from connectors.config import ConfigError

_importing = threading.Lock()


def load(spec: str, base_dir: str | Path) -> Callable[..., Any]:
    """The callable `spec` names; ConfigError saying what is wrong with it otherwise. A file is
    imported once a process, however often it is named."""
    source, separator, name = spec.rpartition(":")
    if not separator or not source or not name.isidentifier():
        raise ConfigError(f"{spec}: is neither module:function nor path/file.py:function")
    with _importing:
        module = (
            _from_file(spec, Path(base_dir, source).expanduser())
            if source.endswith(".py")
            else _from_path(spec, source, Path(base_dir))
        )
    found = getattr(module, name, None)
    if not callable(found):
        problem = "is not callable" if found is not None else "does not exist"
        raise ConfigError(f"{spec}: {name} {problem} in {source}")
    return found  # type: ignore[no-any-return]


def check(spec: str, base_dir: str | Path, built_in: Collection[str]) -> None:
    """ConfigError unless `spec` is one of `built_in`, or `file.py:function` of a file that parses
    and defines it, or looks like `module:function`. Imports nothing, so it costs nothing."""
    if spec in built_in:
        return
    source, separator, name = spec.rpartition(":")
    if not separator or not source or not name.isidentifier():
        close = difflib.get_close_matches(spec, built_in, n=1)
        known = f"did you mean {close[0]}?" if close else f"known: {', '.join(built_in)}"
        raise ConfigError(f"{spec} is no module:function or file.py:function; {known}")
    if not source.endswith(".py"):
        return
    file = Path(base_dir, source).expanduser()
    try:
        tree = ast.parse(file.read_text(), filename=str(file))
    except OSError as error:
        raise ConfigError(f"there is no file {file} ({error.strerror})") from error
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no Python: {error}") from error
    if name not in set(_defined(tree)):
        close = difflib.get_close_matches(name, set(_defined(tree)), n=1)
        raise ConfigError(
            f"{name} does not exist in {file}" + (f", did you mean {close[0]}?" if close else "")
        )


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names a module binds at its top level, as far as its source tells."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.alias(name=name, asname=asname):
                yield asname or name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name


def _from_file(spec: str, file: Path) -> ModuleType:
    file = file.resolve()
    if not file.is_file():
        raise ConfigError(f"{spec}: there is no file {file}")
    # A name of its own: two files `reward.py` of different folders are two modules.
    name = f"headwater_plugin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    _reachable(file.parent)
    described = importlib.util.spec_from_file_location(name, file)
    if described is None or described.loader is None:
        raise ConfigError(f"{spec}: {file} cannot be imported")
    module = importlib.util.module_from_spec(described)
    sys.modules[name] = module
    try:
        described.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{spec}: {file} fails: {_short(error)}") from error
    return module


def _from_path(spec: str, source: str, base_dir: Path) -> ModuleType:
    _reachable(base_dir.resolve())
    try:
        return importlib.import_module(source)
    except Exception as error:
        raise ConfigError(f"{spec}: cannot import {source}: {_short(error)}") from error


def _reachable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
