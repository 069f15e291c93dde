"""One verification by all ranks of a process group: whatever launcher started them calls it on every one."""
