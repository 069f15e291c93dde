"""Trains a small classifier with what else belongs to an update: clipping, schedulers, averages, a grad scaler."""

import torch
from points import begun, loops_of, parsed

criterion = torch.nn.CrossEntropyLoss()


# those of `tests/support/mutated_loops.py`
#: loops


def main():
    loops = loops_of(globals())
    args = parsed(loops, __doc__, clip=100.0, device="cpu", ignored=0)
    *begin, loader = begun(args)
    labels = loader.dataset.tensors[1]
    labels[: args.ignored] = criterion.ignore_index  # so many samples count for nothing, all at the beginning
    for _ in range(args.epochs):
        loops[args.loop](*begin, loader)


if __name__ == "__main__":
    main()
