"""Finds what `package.module:factory` or `file.py:factory` names, and says precisely what is missing."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from gaverify.errors import ProblemError, SpecError
from gaverify.tracebacks import user_frame

_FOLDERS: set[str] = set()  # those that `_put_first` has put first in this process


def import_factory(name: str) -> Any:
    """Returns the object that `name` stands for; the attribute may have dots (`module:Class.make`).

    Raises:
        SpecError: No such module, file or attribute.
        ProblemError: The import itself raised.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon:
        raise SpecError(f"`{name}` names a file without a factory; write `{name}:{_first_function(name)}`", "model")
    if not place or not attribute:
        raise SpecError(f"`{name}` is half a name; write `package.module:factory` or `file.py:factory`", "model")
    if place.endswith(".py"):
        module = _import_file(Path(place))
    elif os.sep in place or "/" in place:
        raise SpecError(f"`{place}` is neither a module nor a .py file; write `{place}.py:{attribute}`", "model")
    else:
        module = _import_module(place)
    return _attribute(module, place, attribute)


def _import_module(name: str) -> ModuleType:
    """Imports a module; the current folder comes first, as with `python -m`, and stays for imports during the run."""
    _put_first(os.getcwd())
    importlib.invalidate_caches()  # the file may be younger than Python's listing of its folder
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(name, error) from error  # the module is there; it imports one that is not
        raise SpecError(_no_module(name, error.name), "model") from error
    except (Exception, SystemExit) as error:
        raise _failed(name, error) from error


def _no_module(name: str, missing: str) -> str:
    """The sentence about a module, or a package on the way to it, that does not exist."""
    parent, _, last = missing.rpartition(".")
    package = sys.modules.get(parent)
    folders = list(getattr(package, "__path__", [])) if parent else [os.getcwd()]
    siblings = [entry.name for entry in pkgutil.iter_modules(folders)]
    if parent and not folders:
        return f"`{parent}` is a module, not a package; an attribute follows a colon: `{parent}:{last}`"
    where = f"package `{parent}`" if parent else "current folder or among the installed packages"
    path = Path(*name.split("."))
    file = path.with_suffix(".py") if name.count(".") else path
    advice = f"did you mean `{_join(parent, near)}`?" if (near := _nearest(last, siblings)) else (
        f"start gaverify in the folder that holds `{file.parts[0]}`, or write `path/to/{file.stem}.py:factory`"
    )  # fmt: skip
    return f"there is no module `{missing}` in the {where}; {advice}"


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _import_file(file: Path) -> ModuleType:
    """Runs a file as a module; its own folder comes first, as with `python file.py`."""
    if not file.is_file():
        near = _nearest(file.name, [entry.name for entry in file.parent.glob("*.py") if entry.is_file()])
        advice = f"did you mean `{file.parent / near}`?" if near else "paths start from the current folder"
        raise SpecError(f"there is no file `{file}`; {advice}", "model")
    _put_first(os.getcwd())
    _put_first(str(file.resolve().parent))
    importlib.invalidate_caches()
    # a name that no import can mean: a user's `random.py` must not become everybody's `random`
    name = f"_gaverify_{file.stem}"
    specification = importlib.util.spec_from_file_location(name, file.resolve())
    if specification is None or specification.loader is None:
        raise SpecError(f"`{file}` cannot be imported as Python", "model")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _failed(str(file), error) from error
    return module


def _put_first(folder: str) -> None:
    """Makes `folder` the first place that imports look at.

    It stays there: a model may import while it runs. Modules that came from another spec's folder and that this folder
    has too are forgotten, so that two models with a `layers.py` each get their own.
    """
    for name, module in list(sys.modules.items()):
        home = _home(module) if "." not in name else ""
        if home in _FOLDERS and home != folder and _has(folder, name):
            for entry in [entry for entry in sys.modules if f"{entry}.".startswith(f"{name}.")]:
                del sys.modules[entry]
    _FOLDERS.add(folder)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]


def _home(module: Any) -> str:
    """The folder from which a top-level module was imported."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return ""
    folder = os.path.dirname(file)
    return os.path.dirname(folder) if os.path.basename(file) == "__init__.py" else folder


def _has(folder: str, name: str) -> bool:
    return os.path.isfile(os.path.join(folder, f"{name}.py")) or os.path.isdir(os.path.join(folder, name))


def _failed(place: str, error: BaseException) -> ProblemError:
    """The sentence for user code that raised while it was imported."""
    if isinstance(error, SystemExit):
        return ProblemError(
            f"importing `{place}` left Python with sys.exit({error.code!r}){raised_at(error)}; "
            'put what the script runs under `if __name__ == "__main__":`'
        )
    return ProblemError(f"importing `{place}` raised {described(error)}")


def described(error: BaseException) -> str:
    """Returns an exception as `Type at file:line: text`; the place comes first as a text may have many lines."""
    text = error.msg if isinstance(error, SyntaxError) else str(error).strip()
    return f"{type(error).__name__}{raised_at(error)}{': ' if text else ''}{text}"


def raised_at(error: BaseException) -> str:
    """Returns " at file:line" of the user's code, or "" where no frame is theirs."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {os.path.relpath(error.filename)}:{error.lineno}"
    frame = user_frame(error)
    return f" at {frame}" if frame else ""


def _attribute(module: ModuleType, place: str, dotted: str) -> Any:
    found: Any = module
    path = place
    for name in dotted.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            own = [entry for entry in dir(found) if not entry.startswith("_")]
            near = _nearest(name, own)
            advice = f"did you mean `{near}`?" if near else f"it has {_listed(_likely(found, own))}"
            raise SpecError(f"`{path}` has no attribute `{name}`; {advice}", "model") from error
        path = f"{path}:{name}" if path == place else f"{path}.{name}"
    return found


def _likely(owner: Any, names: list[str]) -> list[str]:
    """Of the attributes, those that the user wrote there and that can be called; imported ones are no factories."""
    home = getattr(owner, "__name__", None)
    callables = [name for name in names if callable(getattr(owner, name, None))]
    return [name for name in callables if getattr(getattr(owner, name), "__module__", None) == home] or callables


def _listed(names: list[str]) -> str:
    if not names:
        return "nothing that could be called"
    shown = ", ".join(f"`{name}`" for name in names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    return near[0] if near else ""


def _first_function(file: str) -> str:
    """The name of the file's first public function, as a suggestion; "factory" if there is none to be read."""
    try:
        body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return "factory"
    names = [node.name for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return names[0] if names else "factory"
