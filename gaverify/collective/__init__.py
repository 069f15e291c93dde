"""One verification by all ranks, whatever launcher started them, or by those that `--ranks` starts on this machine."""
