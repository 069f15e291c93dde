"""What the classifier scripts share: labelled points, a small network, the usual options."""

import argparse
import inspect

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def options(description=None):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accum", type=int, default=1, help="micro-batches per update")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--shuffle", action="store_true")
    return parser


def points(samples):
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(samples, 16, generator=generator)
    return TensorDataset(features, (features[:, :4] + 0.3 * features[:, 4:8]).argmax(1))


def loader_for(args, **kwargs):
    dataset = points(args.samples)
    return DataLoader(dataset, args.batch_size, shuffle=args.shuffle, num_workers=args.workers, **kwargs)


def network(dropout=0.0, batchnorm=False):
    middle = nn.BatchNorm1d(32) if batchnorm else nn.Identity()
    return nn.Sequential(nn.Linear(16, 32), middle, nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 4))


def loops_of(names):
    """The functions of a script that begin with `args`, by their names: what its `--loop` picks from."""
    own = {name: each for name, each in names.items() if getattr(each, "__module__", "") == names["__name__"]}
    return {name: each for name, each in own.items() if next(iter(inspect.signature(each).parameters), "") == "args"}


def parsed(loops, description, **more):
    """The usual options, `--loop` and `more` of them with their defaults."""
    parser = options(description)
    parser.add_argument("--loop", choices=sorted(loops), required=True)
    for name, default in more.items():
        kind = {"action": "store_true"} if default is False else {"type": type(default), "default": default}
        parser.add_argument(f"--{name}", **kind)
    return parser.parse_args()


def begun(args, dropout=0.0, batchnorm=False, optimizer="SGD"):
    torch.manual_seed(args.seed)
    model = network(dropout, batchnorm)
    return args, model, getattr(torch.optim, optimizer)(model.parameters(), lr=args.lr), loader_for(args)
