"""Memory of the runs of an audit: the most that one had, and whether two fit side by side. No torch is imported."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from gaverify.records.events import PeakMemory

_STATUS, _SYSTEM, _GROUP = Path("/proc/self/status"), Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def peak_memory() -> PeakMemory:
    """Returns the most memory that this process has had so far; zeros where the system does not tell."""
    host, torch = _read_kilobytes(_STATUS, "VmHWM") or 0, sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return PeakMemory(host)
    free, _ = torch.cuda.mem_get_info()
    return PeakMemory(host, torch.cuda.max_memory_reserved(), free + torch.cuda.memory_reserved())


def fit_side_by_side(peak: PeakMemory, processes: int) -> bool:
    """Whether some processes that need as much as a run had fit beside it, in main memory and on its device."""
    available = _available()
    fits_host = available is None or (processes + 1) * peak.host <= available
    return fits_host and 2 * peak.device <= peak.device_room


def _available() -> int | None:
    """Bytes of main memory that a new process may take; None where the system does not tell."""
    amounts = [_read_kilobytes(_SYSTEM, "MemAvailable")]
    try:  # a container's limit
        limit, used = ((_GROUP / name).read_text(encoding="ascii") for name in ("memory.max", "memory.current"))
        amounts.append(int(limit) - int(used) if limit.strip() != "max" else None)
    except (OSError, ValueError):
        pass
    known_amounts = [amount for amount in amounts if amount is not None]
    return min(known_amounts) if known_amounts else None


def _read_kilobytes(path: Path, name: str) -> int | None:
    """Returns the bytes of one line of a file of the kernel's; None where there is none."""
    try:
        match = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(encoding="ascii", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None
