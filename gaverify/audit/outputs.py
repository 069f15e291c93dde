"""What the runs of an audit write: no run shall see another's files, and none of the user's may change.

Two ways, the first that works: a *view* of the files of its own for every run, made by the kernel (Linux with user
namespaces), whose changes go with the run; else a *guard* in Python that ends a run before it changes a file that was
there before, and that takes away again what the run added. No torch.

The view covers every folder by an overlay whose lower layer is the folder itself. That needs no privilege on Linux 5.11
and later where user namespaces are allowed; it also holds for compiled code and for other programs, which no change to
Python's functions would reach. See namespaces(7), mount_namespaces(7) and the kernel's overlayfs documentation. The
guard hears of every file that Python opens, moves or removes (PEP 578). What compiled code and other programs write
stays unseen, but for `torch.save`, which is told of here.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

IMPOSSIBLE = 94
"""Exit status of a child for which no view could be made; it ran nothing of the script."""

REFUSED = 95
"""Exit status of a child that the guard ended."""


def shared_folders() -> list[Path]:
    """Returns the caches of downloads and compilers: all runs share them, as each would take long to fill its own."""
    named = [os.environ.get(name) for name in ("HF_HOME", "HF_DATASETS_CACHE", "TORCH_HOME", "TRITON_CACHE_DIR")]
    home = Path.home()
    caches = [os.environ.get("XDG_CACHE_HOME") or home / ".cache", home / ".triton", home / ".nv", *named]
    return [Path(cache) for cache in caches if cache and os.path.isdir(cache)]


_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000  # unshare(2)
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 1 << 18  # mount(2)
# The system's own: no training script writes there, and some hold many mounts.
_LEFT_ALONE = (
    *("proc", "sys", "dev", "run", "etc", "boot", "usr", "var"),
    *("bin", "sbin", "lib", "lib32", "lib64", "libx32"),
)
_MOST = 400  # folders; a machine with more mounts than that is left alone


class _Impossible(Exception):
    """The kernel refused; the message says what."""


def enter(folder: Path, passed: Sequence[Path], needed: Sequence[Path]) -> str:
    """Gives this process its own view of the files; call it before any thread is started.

    Args:
        folder: Of the run: seen as it is, and the changes to all others are kept in it.
        passed: More folders that are seen as they are.
        needed: Folders that must be covered, wherever they lie.

    Returns:
        Why there can be no view; empty where there is one. After a failure the process is of no more use.
    """
    if sys.platform != "linux":
        return f"{sys.platform} cannot run a script on a copy of the files"
    working_folder = os.getcwd()
    try:
        _unshare()
        # Opened before anything is covered: afterwards the same path leads to the overlay, and a file handle does not.
        through = [(str(path), os.open(path, os.O_PATH)) for path in dict.fromkeys([folder, *passed])]
        _Cover(folder).all_of(needed)
        for path, original in through:
            _mount(f"/proc/self/fd/{original}", path, None, _BIND | _RECURSIVE)
            os.close(original)
    except (_Impossible, OSError, AttributeError) as error:
        return str(error)
    os.chdir(working_folder)  # the folder of before lies under its cover now
    return ""


class _Cover:
    """Covers folders by overlays, and keeps their changes in numbered folders of the run."""

    def __init__(self, folder: Path) -> None:
        changes = folder / "written"
        changes.mkdir(exist_ok=True)
        self._changes = os.open(changes, os.O_PATH | os.O_DIRECTORY)  # the path itself will be covered
        self._count = 0
        self._covered: list[str] = []
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
            self._mounts = [_unescape(line.split()[4]) for line in table]

    def all_of(self, needed: Sequence[Path]) -> None:
        """Covers everything below the root but the system's folders, and what is needed besides."""
        names = [entry.path for entry in os.scandir("/") if entry.is_dir(follow_symlinks=False)]
        for path in sorted(names):
            if path[1:] not in _LEFT_ALONE:
                self._cover(path)
        for folder in [os.path.realpath(path) for path in needed] + ["/var/tmp"]:
            if os.path.isdir(folder) and not any(_is_under(folder, covered) for covered in self._covered):
                self._cover(folder)

    def _cover(self, path: str) -> None:
        """One overlay; a folder with mounts below it cannot be covered as a whole, but each of its own folders can."""
        # An overlay of the outer folder would hide these mounts: a home on its own disk would look empty.
        if any(_is_under(mount, path) and mount != path for mount in self._mounts):
            for entry in os.scandir(path):
                if entry.is_dir(follow_symlinks=False):
                    self._cover(entry.path)
            return
        self._count += 1
        if self._count > _MOST:
            raise _Impossible(f"there are more than {_MOST} mounted folders")
        parts = [f"{self._count}/upper", f"{self._count}/work"]
        # `/proc/self/fd` still finds this folder after its own path was covered.
        for part in parts:
            os.makedirs(f"/proc/self/fd/{self._changes}/{part}")
        upper, work = (f"/proc/self/fd/{self._changes}/{part}" for part in parts)
        # A path with a comma or a colon would end the mount option: the number of the handle has neither.
        lower = os.open(path, os.O_PATH | os.O_DIRECTORY)
        layers = f"lowerdir=/proc/self/fd/{lower},upperdir={upper},workdir={work}"
        try:
            _mount("overlay", path, "overlay", 0, f"{layers},userxattr")
        finally:
            os.close(lower)
        self._covered.append(path)


def _unshare() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(_NEW_USER | _NEW_MOUNTS):
        raise _Impossible(f"user namespaces are not allowed here ({os.strerror(ctypes.get_errno())})")
    # root may map all users, so that files of others keep their owner; in a container without that right it may not.
    everybody = ("uid_map", "0 0 4294967295"), ("gid_map", "0 0 4294967295")
    # Without privilege the kernel takes a group map only after `setgroups` is denied: user_namespaces(7).
    ourselves = ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")
    for lines in (everybody, ourselves) if uid == 0 else (ourselves,):
        try:
            for name, line in lines:
                Path(f"/proc/self/{name}").write_text(line, encoding="ascii")
            break
        except OSError as error:
            if lines is ourselves:
                raise _Impossible(f"user namespaces are not allowed here ({error.strerror})") from error
    # Mounts may be shared with the parent's namespace: neither side shall see what the other mounts from now on.
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [word.encode(errors="surrogateescape") if word is not None else None for word in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), options.encode() if options is not None else None):
        raise _Impossible(f"`{target}` cannot be covered ({os.strerror(ctypes.get_errno())})")


def _unescape(path: str) -> str:
    """A path of /proc/self/mountinfo, whose blanks and backslashes are written in octal."""
    return path.encode("latin-1", "surrogateescape").decode("unicode_escape") if "\\" in path else path


def _is_under(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_ELSEWHERE = ("/dev", "/proc", "/sys", "/run")
_CHANGING = ("os.remove", "os.rmdir", "os.truncate", "os.rename")
_MAKING = {"os.mkdir": 0, "os.link": 1, "os.symlink": 1, "os.rename": 1}  # which argument is what they make


class Guard:
    """Watches this process and those that it forks.

    Args:
        folder: Of the run; it may write there, and the list of what it adds stands there, a path a line.
        passed: More folders in which it may write.
        note_refused: Called before the process ends, with the file that would have been changed.
    """

    def __init__(self, folder: Path, passed: Sequence[Path], note_refused: Callable[[str], None]) -> None:
        self._free = tuple(os.path.realpath(path) + os.sep for path in (folder, *passed))
        self._note_refused = note_refused
        # Forked processes share this handle: with O_APPEND none overwrites the lines of another.
        self._list = os.open(folder / "added.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._read = folder / "added.txt"
        self._added: set[str] = set()
        self._reading = False

    def install(self) -> None:
        """Starts to watch; there is no way to stop."""
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self._reading:
            return
        if event in _CHANGING:
            self._check_change(args[0])
        # `os.rename` is in both tables: its source has to be the run's own, and its target may replace no other file.
        if event in _MAKING:
            self._note_new_file(args[_MAKING[event]])
        elif event == "open" and isinstance(args[2], int) and args[2] & _WRITES and not isinstance(args[0], int):
            self._note_new_file(args[0])

    def _note_new_file(self, path: Any) -> None:
        """Lists a new file as added; ends the run if it opens a file for writing that was there before."""
        name = self._name(path)
        if name is None:
            return
        if os.path.lexists(name):
            self._check_change(path)
            return
        os.write(self._list, os.fsencode(name) + b"\n")
        self._added.add(name)

    def _check_change(self, path: Any) -> None:
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
        # Only the folder is resolved: to remove a link changes the link, and not the file that it leads to.
        name = os.path.join(os.path.realpath(folder), base)
        # Python itself writes its compiled modules, beside sources of the user's as well.
        free = name.startswith(self._free) or f"{os.sep}__pycache__{os.sep}" in name
        return None if free or name.startswith(_ELSEWHERE) else name

    def _is_ours(self, name: str) -> bool:
        if name not in self._added:  # another process of this run may have made it
            self._reading = True
            try:
                self._added |= set(read_added(self._read))
            finally:
                self._reading = False
        return name in self._added

    def _refuse(self, name: str) -> NoReturn:
        self._reading = True
        self._note_refused(name)
        # An exception could be caught by the script, which would then go on without the file it meant to write.
        os._exit(REFUSED)


def read_added(path: Path) -> list[str]:
    """Returns what a list of added files holds, in order; nothing where there is no list."""
    try:
        return [os.fsdecode(line) for line in path.read_bytes().splitlines()]
    except OSError:
        return []


def take_away(folder: Path) -> None:
    """Removes what the guarded run in `folder` added: files, and folders that are empty again."""
    # A folder was listed before the files in it: the last come first, so that it is empty when its turn comes.
    for name in reversed(read_added(folder / "added.txt")):
        try:
            (os.rmdir if os.path.isdir(name) and not os.path.islink(name) else os.remove)(name)
        except OSError:
            continue


def tell_of_saving() -> None:
    """Makes `torch.save` report its file to the audit hooks: it writes in compiled code, which raises no event."""
    import torch

    original = torch.save

    @wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            sys.audit("open", os.fspath(f), "wb", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        return original(obj, f, *args, **kwargs)

    torch.save = save
