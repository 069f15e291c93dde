"""One verdict by all ranks: those that any launcher has started, or that `--ranks` starts on this machine."""
