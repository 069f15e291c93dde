"""Finds what `package.module:factory` or `file.py:factory` names, and says precisely what is missing.

A file whose own name belongs to another module gets a name of its own: a user's `random.py` must not become `random`.
That name holds the file's path, and this module finds it again: a worker process that was spawned, and that gets an
object of such a file, imports the name as it would any other.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import linecache
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from gaverify.errors import MissingPackage, ProblemError, SpecError, exit_call, nearest, text_of
from gaverify.patches.sources import encode_source
from gaverify.tracebacks import display_path, repository_of, user_frame
from gaverify.zoo import BUILTINS, find_builtin

# Reads from the text of a Python file which names it defines, without running it.


_MAKERS = ("globals", "exec", "vars", "setattr")
"""Names whose use may define further names of a module while it runs."""


def parse_file(file: Path) -> ast.Module:
    """Returns the syntax tree of a file; an empty one where it cannot be read: importing it says why."""
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def first_name(file: str) -> str:
    """Returns the first public function of a file, else its first class, as a suggestion; "factory" without any."""
    body = parse_file(Path(file)).body
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = [node.name for kind in kinds for node in body if isinstance(node, kind) and not node.name.startswith("_")]
    return names[0] if names else "factory"


def check_attribute(tree: ast.Module, place: str, dotted: str) -> None:
    """Raises `SpecError` where a module's text shows that it has no such name at its top; other texts are let pass."""
    names: dict[str, bool] = {}  # each name, and whether it is a function or class of the module's own
    for node in ast.walk(tree):
        # The text cannot show which names such a module will have.
        if isinstance(node, ast.Name) and node.id in _MAKERS:
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = True
        elif isinstance(node, ast.Name):
            names.setdefault(node.id, False)
        elif isinstance(node, ast.alias):
            names.setdefault((node.asname or node.name).partition(".")[0], False)
    name = dotted.partition(".")[0]
    if not tree.body or name in names or not names.keys().isdisjoint(("*", "__getattr__")):
        return
    public = sorted(public_name for public_name, is_own in names.items() if is_own and not public_name.startswith("_"))
    raise SpecError(no_attribute(place, name, public, public), "model")


def no_attribute(path: str, name: str, known: list[str], likely: list[str]) -> str:
    """Returns the sentence about a name that a module or class does not have."""
    near = nearest(name, known)
    advice = f"did you mean `{near}`?" if near else f"it has {_list_names(likely)}"
    return f"`{path}` has no attribute `{name}`; {advice}"


def _list_names(names: list[str]) -> str:
    if not names:
        return "nothing that could be called"
    listed = ", ".join(f"`{name}`" for name in names[:8])
    return listed if len(names) <= 8 else f"{listed} and {len(names) - 8} more"


# Finds what `package.module:factory` or `file.py:factory` names, and says precisely what is missing.


__path__: list[str] = []  # the import system asks only packages for submodules


def alias(file: Path) -> str:
    """Returns the module name of an absolute path."""
    return f"{__name__}.{file.stem.replace('.', '_')}_{os.fsencode(file).hex()}"


class _Finder:
    """Finds `gaverify.loading.importing.NAME_PATH`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns how to load the file that the name holds; None for every other name."""
        if not name.startswith(f"{__name__}."):
            return None
        try:
            file = bytes.fromhex(name.rpartition("_")[2]).decode()
        except ValueError:
            return None
        return spec_from_file_location(name, file)


# By name, not by identity: a module that is imported twice has another class `_Finder`.
if not any(getattr(finder, "__qualname__", "") == "_Finder" for finder in sys.meta_path):
    sys.meta_path.append(_Finder)


def compile_with(compiler: Callable[[SourceFileLoader, str], CodeType | None]) -> None:
    """From now on asks `compiler` first for the code of a module; None: Python compiles it as always.

    Python's own loader may take cached bytecode, which holds the old text, and other modules may use it.
    """
    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        return compiler(self, fullname) or original(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]


def replace_sources(texts: Mapping[str, str]) -> None:
    """From now on compiles some files from other texts: a patch is tried, and no file changes.

    Args:
        texts: The texts by the real paths of the files.
    """

    def compile_patched(loader: SourceFileLoader, name: str) -> CodeType | None:
        path = loader.get_filename(name)
        text = texts.get(os.path.realpath(path))
        # As bytes, in which Python reads a byte-order mark and a declared encoding.
        return None if text is None else compile(encode_source(text), path, "exec", dont_inherit=True)

    compile_with(compile_patched)
    for path, text in texts.items():
        # Without a time: whoever reads the source (`inspect`, a traceback) does not look at the file again.
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)


_FOLDERS: set[str] = set()  # those that `_put_first` has put first in this process
_NEEDED = ("click", "ctypes", "html", "jinja2", "markupsafe", "numpy", "pydantic", "pygments", "rich", "torch", "xml")
"""Packages that gaverify imports itself, some only after the user's code ran; a `rich.py` of the user is not meant."""


def import_factory(name: str) -> Any:
    """Returns the object that `name` stands for; the attribute may have dots (`module:Class.make`).

    Raises:
        SpecError: No such module, file or attribute.
        ProblemError: The import itself raised.
    """
    place, _, attribute = name.rpartition(":")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    return _find_attribute(module, place, attribute)


def _import_module(name: str) -> ModuleType:
    """Imports a module; the current folder comes first, as with `python -m`, and stays for imports during the run."""
    _put_first(os.getcwd())
    importlib.invalidate_caches()  # the file may be younger than Python's listing of its folder
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The name of the module that is missing tells a wrong spec from a module with a wrong import.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _make_import_error(name, error) from error  # the module is there; it imports one that is not
        raise SpecError(no_module(name, error.name), "model") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script without a main guard may call `sys.exit`
        raise _make_import_error(name, error) from error


def no_module(name: str, missing: str) -> str:
    """Returns the sentence about a module, or a package on the way to it, that does not exist."""
    parent, _, last = missing.rpartition(".")
    package = sys.modules.get(parent)
    folders = list(getattr(package, "__path__", [])) if parent else [os.getcwd()]
    siblings = [entry.name for entry in pkgutil.iter_modules(folders)]
    if parent and not folders:
        return f"`{parent}` is a module, not a package; an attribute follows a colon: `{parent}:{last}`"
    where = f"package `{parent}`" if parent else "current folder or among the installed packages"
    path = Path(*name.split("."))
    file = path.with_suffix(".py") if name.count(".") else path
    advice = (
        f"did you mean `{parent and parent + '.'}{near}`?"
        if (near := nearest(last, siblings))
        else (f"start gaverify in the folder that holds `{file.parts[0]}`, or write `path/to/{file.stem}.py:factory`")
    )
    return f"there is no module `{missing}` in the {where}; {advice}"


def _import_file(file: Path) -> ModuleType:
    """Runs a file as a module; its own folder comes first, as with `python file.py`."""
    check_file(file)
    _put_first(os.getcwd())
    source = file.resolve()
    depth = _package_depth(source)
    if depth:
        _put_first(str(source.parents[depth]))
    _put_first(str(source.parent))
    importlib.invalidate_caches()  # `init` may have written the file a moment ago
    name = _module_name(source, depth)
    try:
        if depth:
            importlib.import_module(name.rpartition(".")[0])  # what a relative import starts from
        specification = importlib.util.spec_from_file_location(name, source)
        if specification is None or specification.loader is None:
            raise SpecError(f"`{file}` cannot be imported as Python", "model")
        module = importlib.util.module_from_spec(specification)
        # Before its code runs, as the import system does it.
        sys.modules[name] = module  # dataclasses and pickle look their module up here
        specification.loader.exec_module(module)
    except (KeyboardInterrupt, SpecError):
        raise
    except BaseException as error:
        raise _make_import_error(str(file), error) from error
    return module


def check_file(file: Path) -> None:
    """Raises `SpecError` where there is no such file, with the nearest name."""
    if not os.path.isfile(file):
        near = nearest(file.name, [entry.name for entry in file.parent.glob("*.py") if entry.is_file()])
        advice = f"did you mean `{file.parent / near}`?" if near else "paths start from the current folder"
        raise SpecError(f"there is no file `{file}`; {advice}", "model")


def _package_depth(file: Path) -> int:
    """How many folders above a file are packages for it: 0 unless it has relative imports (`from .layers import …`)."""
    levels = [node.level for node in ast.walk(parse_file(file)) if isinstance(node, ast.ImportFrom)]
    needed = max(levels, default=0)
    if not needed:
        return 0
    packages = 0
    # Absolute imports of the package start at its topmost folder, which may lie above what the dots reach.
    while (file.parents[packages] / "__init__.py").is_file():
        packages += 1
    return min(max(needed, packages), len(file.parents) - 1)


def _module_name(file: Path, depth: int) -> str:
    """Returns a name by which worker processes can import the file as well, as pickled objects ask them to.

    That is the file's own name, unless it belongs to another module.
    """
    if depth:
        return ".".join((*file.parts[-depth - 1 : -1], file.stem))
    name, path = file.stem, str(file)
    if not name.isidentifier() or name in sys.stdlib_module_names:
        return alias(file)
    # Imported already: the same file may have its name again, any other module keeps it.
    if name in sys.modules:
        return name if getattr(sys.modules[name], "__file__", None) == path else alias(file)
    # Folders of earlier specs do not count: what they hold is forgotten where this one has the same name.
    installed = [entry for entry in sys.path if entry not in _FOLDERS]
    module_spec = importlib.machinery.PathFinder.find_spec(name, installed)
    return name if module_spec is None or module_spec.origin == path else alias(file)


def _put_first(folder: str) -> None:
    """Makes `folder` the first place that imports look at.

    It stays there: a model may import while it runs. Modules of another spec's folder are forgotten if this folder has
    them too, so that two models with a `layers.py` each get their own.
    """
    for name, module in list(sys.modules.items()):
        home = _home(module) if "." not in name else ""
        if home in _FOLDERS and home != folder and _has(folder, name):
            for entry in [entry for entry in sys.modules if f"{entry}.".startswith(f"{name}.")]:
                del sys.modules[entry]
    # By their real paths, as "" is the current folder.
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != os.path.realpath(folder)]
    for name in _NEEDED:
        if name not in sys.modules and _has(folder, name):
            with suppress(ImportError):  # not every one is installed
                importlib.import_module(name)  # while the user's own is not found
    _FOLDERS.add(folder)
    sys.path.insert(0, folder)


def _home(module: Any) -> str:
    """The folder from which a top-level module was imported."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return ""
    folder = os.path.dirname(file)
    return os.path.dirname(folder) if os.path.basename(file) == "__init__.py" else folder


def _has(folder: str, name: str) -> bool:
    return os.path.isfile(os.path.join(folder, f"{name}.py")) or os.path.isdir(os.path.join(folder, name))


def _make_import_error(place: str, error: BaseException) -> ProblemError:
    """The sentence for user code that raised while it was imported."""
    if isinstance(error, SystemExit):
        return ProblemError(
            f"importing `{place}` called {exit_call(error)}{raised_at(error)}; "
            'put what the script runs under `if __name__ == "__main__":`'
        )
    text = f"importing `{place}` raised {describe_error(error)}"
    if missing := missing_package(error):
        return MissingPackage(f"{text}; install the package that has `{missing}`")
    return ProblemError(text + _hint_at_shadowing(error))


def missing_package(error: BaseException) -> str:
    """Returns the package that the user's code imports and that is not installed; "" for every other error.

    Nobody would install a package whose name is near to a module beside the code, or that a folder of the project has:
    a wrong import must not look like a package that this machine lacks.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    name = error.name.partition(".")[0]
    folders = {Path(os.getcwd()), Path(sys.path[0] or os.getcwd())}  # `_put_first`: the model's own comes first
    roots = {root for folder in folders if (root := repository_of(folder)) is not None}
    above = {parent for folder in folders for parent in folder.parents if any(map(parent.is_relative_to, roots))}
    if any(_has(str(folder), name) for folder in folders | above):
        return ""
    modules_beside = [module.name for module in pkgutil.iter_modules(map(str, folders))]
    return "" if nearest(name, modules_beside, _MISSPELT) or _can_be_found(name) else name


_MISSPELT = 0.8
"""How alike a name has to be to one beside the code to be a mistake of typing."""


def _can_be_found(name: str) -> bool:
    """Whether there is such a module: then a part of it is missing, which another version may have."""
    with suppress(ImportError, ValueError):
        return name in sys.modules or importlib.util.find_spec(name) is not None
    return False


def _hint_at_shadowing(error: BaseException) -> str:
    """A hint where the user's own file has the name of a package that gaverify uses, and so is not what is imported."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    folder = next((folder for folder in _FOLDERS if name in _NEEDED and _has(folder, name)), "")
    return (
        f"; `{name}` in `{display_path(folder)}` has the name of a package that gaverify needs: rename it"
        if folder
        else ""
    )


def describe_error(error: BaseException) -> str:
    """Returns an exception as `Type at file:line: text`; the place comes first as a text may have many lines."""
    text = error.msg if isinstance(error, SyntaxError) else text_of(error)
    return f"{type(error).__name__}{raised_at(error)}{': ' if text else ''}{text}"


def raised_at(error: BaseException) -> str:
    """Returns " at file:line" of the user's code, or "" where no frame is theirs."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {os.path.relpath(error.filename)}:{error.lineno}"
    frame = user_frame(error)
    return f" at {frame}" if frame else ""


def _find_attribute(module: ModuleType, place: str, dotted: str) -> Any:
    value: Any = module
    path = place
    for name in dotted.split("."):
        try:
            value = getattr(value, name)
        except AttributeError as error:
            public_names = [entry for entry in dir(value) if not entry.startswith("_")]
            raise SpecError(no_attribute(path, name, public_names, _likely(value, public_names)), "model") from error
        path = f"{path}:{name}" if path == place else f"{path}.{name}"
    return value


def _likely(owner: Any, names: list[str]) -> list[str]:
    """Returns the names that the user wrote there and that can be called; imported ones are no factories."""
    home = getattr(owner, "__name__", None)
    callables = [name for name in names if callable(getattr(owner, name, None))]
    return [name for name in callables if getattr(getattr(owner, name), "__module__", None) == home] or callables


# Finds out what `--model` names without importing torch, so that an unknown name is answered at once.


WEIGHTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".pt2", ".onnx")
"""Endings of files that hold a model's numbers, not its code."""

_HUB = re.compile(r"[\w.-]+/[\w.-]+")


class NameKind(Enum):
    """The kind of thing that a name stands for."""

    BUILTIN = auto()
    FACTORY = auto()
    """`package.module:factory` or `file.py:factory`."""
    TRANSFORMERS = auto()
    """A folder that `save_pretrained` wrote, or `organisation/name` on the hub."""


def kind_of(name: str) -> NameKind:
    """Returns what a name stands for.

    Raises:
        SpecError: It stands for nothing that can be run; the sentence says what to write instead.
    """
    if any(builtin.name == name for builtin in BUILTINS):
        return NameKind.BUILTIN
    is_of_hub = _HUB.fullmatch(name) and not name.endswith((".py", *WEIGHTS)) and not os.path.exists(Path(name).parent)
    if is_of_hub or os.path.isfile(os.path.join(name, "config.json")):
        return NameKind.TRANSFORMERS
    is_factory = (":" in name or name.endswith(".py")) and not os.path.isdir(name)
    if wrong := _explain_name(name) if is_factory else _explain_no_model(name):
        raise SpecError(wrong, "model")
    return NameKind.FACTORY


def check_name(name: str) -> None:
    """Raises `SpecError` for a name that cannot be found, where that is certain without running any of the user's code.

    A module that is not at the top of its package, or that defines its names as it runs, is left to the import.
    """
    if kind_of(name) is not NameKind.FACTORY:
        return
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        check_file(Path(place))
        check_attribute(parse_file(Path(place)), place, attribute)
        return
    top = place.partition(".")[0]
    if top in sys.modules:
        return
    module_spec = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    if module_spec is None:
        raise SpecError(no_module(place, top), "model")
    if top == place and not module_spec.submodule_search_locations:
        check_attribute(parse_file(Path(module_spec.origin or "")), place, attribute)


def _explain_name(name: str) -> str:
    """Says what is wrong with a name that has a colon or is a Python file, and what to write.

    "" where only the import can tell.
    """
    place, colon, attribute = os.path.splitdrive(name)[1].rpartition(":")
    if not colon:
        return f"`{name}` is a file; write `{name}:{first_name(name)}`"
    if attribute and ":" not in place and (place.endswith(".py") or re.fullmatch(r"[^./\\][^/\\]*", place)):
        return ""
    return f"`{name}` names no factory; write `package.module:factory` or `file.py:factory`"


def _explain_no_model(name: str) -> str:
    """Says what a name is that no model has, and what to write in its place."""
    file = f"{name.replace('.', os.sep)}.py"
    place, _, attribute = name.rpartition(".")
    what, instead = "is no Python file", "file.py:factory"
    if os.path.isdir(name):
        folder = Path(name)
        modules = sorted(str(entry) for entry in folder.glob("*.py") if entry.name != "__init__.py")
        what, instead = "is a folder", f"{modules[0]}:{first_name(modules[0])}" if modules else instead
        instead = f"gaverify run {name}" if any(folder.glob("*.toml")) else instead
    elif name.endswith(WEIGHTS) and os.path.exists(name):
        what, instead = "holds weights, not the model's code", f"gaverify init --checkpoint {name}"
    elif name.endswith(".toml") and os.path.exists(name):
        what, instead = "is a spec", f"gaverify run {name}"
    elif os.path.isfile(file):
        what, instead = "is a module", f"{file}:{first_name(file)}"
    elif place and not name.endswith(WEIGHTS) and _is_module(place):
        what, instead = "has no colon", f"{place}:{attribute}"
    elif not os.path.exists(name):
        if not {"/", os.sep, "."} & set(name):
            find_builtin(name)  # raises `SpecError`, with the nearest
        what = "does not exist"
    return f"`{name}` {what}; write `{instead}`"


def _is_module(name: str) -> bool:
    """Whether there is a module of this name, or a file or folder that may be one."""
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    file, top = os.path.join(*name.split(".")), name.partition(".")[0]
    return os.path.isfile(f"{file}.py") or os.path.isdir(file) or _can_be_found(top)
