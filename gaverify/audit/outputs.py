"""A view of the files of its own for every run of an audit: no run sees what another writes, and no file changes.

The kernel makes it (Linux with user namespaces), and its changes go with the run. It covers every folder by an overlay
whose lower layer is the folder itself. That needs no privilege on Linux 5.11 and later where user namespaces are
allowed, and holds for compiled code and other programs as well. No torch.

See namespaces(7), mount_namespaces(7) and the kernel's overlayfs documentation.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

IMPOSSIBLE = 94
"""Exit status of a child for which no view could be made; it ran nothing of the script."""


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
        folder: The run's folder: it is seen as it is, and the changes to all others are kept in it.
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
