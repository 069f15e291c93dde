"""Python imports this module when it starts, in every process of a launcher; it lets the recorder in.

It runs the `sitecustomize` that it hides, takes itself out of the environment that the script sees, and waits for
`torch`: as soon as that has been imported, the recorder installs itself. Standard library only.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_JOB = "GAVERIFY_AUDIT_JOB"
_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))


def _enter() -> None:
    job = os.environ.get(_JOB)
    # Else the search for the hidden `sitecustomize` would find this file.
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    _run_hidden()
    if job is None:
        return
    passed_on = {name: os.environ[name] for name in (_JOB, "PYTHONPATH")}
    _hide_from_the_script(passed_on)
    _give_to_children(passed_on)
    if "torch" in sys.modules:  # what was hidden has imported it
        _install(job)
    else:
        sys.meta_path.insert(0, _After("torch", lambda: _install(job)))


def _run_hidden() -> None:
    """Runs the `sitecustomize` that Python would have found without this one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _hide_from_the_script(passed_on: dict[str, str]) -> None:
    """Shows the script the variables that it was given by the user.

    The process itself keeps the others, because what is started without an environment of its own inherits those
    (`multiprocessing`, `os.system`): only Python's dictionary of them is changed.
    """
    data: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
    encode: Callable[[str], Any] = os.environ.encodekey  # type: ignore[attr-defined]
    # `os.environ.pop` would take the variable from the process as well.
    data.pop(encode(_JOB), None)
    user_path = os.pathsep.join(
        part for part in passed_on["PYTHONPATH"].split(os.pathsep) if os.path.abspath(part) != _HERE
    )
    if user_path:
        data[encode("PYTHONPATH")] = encode(user_path)
    else:
        data.pop(encode("PYTHONPATH"), None)


def _give_to_children(passed_on: dict[str, str]) -> None:
    """Lets in the children that are given an environment of their own, as the workers of torchrun are."""
    import subprocess

    # Such an environment is a copy of `os.environ`, which no longer shows the variables.
    original = subprocess.Popen.__init__

    def init_with_recorder(self: Any, *args: Any, **kwargs: Any) -> None:
        env = kwargs.get("env") or os.environ
        folders = [_HERE, *filter(None, [env.get("PYTHONPATH")])]
        kwargs["env"] = {**env, _JOB: passed_on[_JOB], "PYTHONPATH": os.pathsep.join(folders)}
        original(self, *args, **kwargs)

    subprocess.Popen.__init__ = init_with_recorder  # type: ignore[method-assign]


def _install(job: str) -> None:
    """Imports the gaverify that started this run, whatever other one the script could import, and lets it record."""
    if "gaverify" not in sys.modules:
        file = os.path.join(_PACKAGE, "__init__.py")
        spec = importlib.util.spec_from_file_location("gaverify", file, submodule_search_locations=[_PACKAGE])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["gaverify"] = module
        spec.loader.exec_module(module)
    from gaverify.audit.child import enter

    enter(job)


class _After(importlib.abc.MetaPathFinder):
    """Calls a function once, as soon as a module has been imported.

    Args:
        name: The module.
        then: The function.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the module's own spec, whose loader calls the function after it; None for all other modules."""
        if fullname != self._name:
            return None
        # First, because `find_spec` asks all finders again and would come back here.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            original, then = spec.loader.exec_module, self._then

            def run(module: ModuleType) -> None:
                original(module)
                then()

            spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


_enter()
