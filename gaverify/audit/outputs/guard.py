"""Ends a run before it changes a file that was there before it, and remembers what it adds.

Python tells its audit hooks of every file that it opens, moves or removes (PEP 578). What compiled code and other
programs write stays unseen, but for `torch.save`, which is told of here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

from gaverify.audit.outputs import REFUSED

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_ELSEWHERE = ("/dev", "/proc", "/sys", "/run")


class Guard:
    """Watches this process and those that it forks.

    Args:
        folder: Of the run; it may write there, and the list of what it adds stands there, a path a line.
        passed: More folders in which it may write.
        told: Called before the process ends, with the file that would have been changed.
    """

    def __init__(self, folder: Path, passed: Sequence[Path], told: Callable[[str], None]) -> None:
        self._free = tuple(os.path.realpath(path) + os.sep for path in (folder, *passed))
        self._told = told
        self._list = os.open(folder / "added.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._read = folder / "added.txt"
        self._added: set[str] = set()
        self._reading = False
        self._events: Mapping[str, Callable[[tuple[Any, ...]], None]] = {
            "open": self._opened,
            "os.remove": lambda args: self._changed(args[0]),
            "os.rmdir": lambda args: self._changed(args[0]),
            "os.truncate": lambda args: self._changed(args[0]),
            "os.mkdir": lambda args: self._made(args[0]),
            "os.link": lambda args: self._made(args[1]),
            "os.symlink": lambda args: self._made(args[1]),
            "os.rename": self._renamed,
        }

    def install(self) -> None:
        """Starts to watch; there is no way to stop."""
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        handler = self._events.get(event)
        if handler is not None and not self._reading:
            handler(args)

    def _opened(self, args: tuple[Any, ...]) -> None:
        path, _, flags = args
        if isinstance(flags, int) and flags & _WRITES and not isinstance(path, int):
            self._made(path)

    def _renamed(self, args: tuple[Any, ...]) -> None:
        self._changed(args[0])
        self._made(args[1])

    def _made(self, path: Any) -> None:
        """A file that is new, or one that is opened for writing."""
        name = self._name(path)
        if name is None:
            return
        if os.path.lexists(name):
            self._changed(path)
            return
        os.write(self._list, os.fsencode(name) + b"\n")
        self._added.add(name)

    def _changed(self, path: Any) -> None:
        name = self._name(path)
        if name is not None and os.path.lexists(name) and not os.path.isdir(name) and not self._is_ours(name):
            self._refuse(name)

    def _name(self, path: Any) -> str | None:
        """The file's full path; None where the run may do what it likes."""
        try:
            text = os.fsdecode(path)
        except TypeError:
            return None
        folder, base = os.path.split(os.path.abspath(text))
        name = os.path.join(os.path.realpath(folder), base)
        free = name.startswith(self._free) or f"{os.sep}__pycache__{os.sep}" in name
        return None if free or name.startswith(_ELSEWHERE) else name

    def _is_ours(self, name: str) -> bool:
        if name not in self._added:  # another process of this run may have made it
            self._reading = True
            try:
                self._added |= set(added(self._read))
            finally:
                self._reading = False
        return name in self._added

    def _refuse(self, name: str) -> NoReturn:
        self._reading = True
        self._told(name)
        os._exit(REFUSED)


def added(path: Path) -> list[str]:
    """Returns what a list of added files holds, in order; nothing where there is no list."""
    try:
        return [os.fsdecode(line) for line in path.read_bytes().splitlines()]
    except OSError:
        return []


def take_away(folder: Path) -> None:
    """Removes what the guarded run in `folder` added: files, and folders that are empty again."""
    for name in reversed(added(folder / "added.txt")):
        try:
            (os.rmdir if os.path.isdir(name) and not os.path.islink(name) else os.remove)(name)
        except OSError:
            continue


def tell_of_saving() -> None:
    """Makes `torch.save` tell the hooks of its file, which it writes in compiled code."""
    import torch

    original = torch.save

    @wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            sys.audit("open", os.fspath(f), "wb", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        return original(obj, f, *args, **kwargs)

    torch.save = save
