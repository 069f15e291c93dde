"""Loops that draw random numbers between their forwards, and loaders whose samples depend on the batch size."""

import argparse
import random

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--loop", default="diffusion")
parser.add_argument("--undivided", action="store_true")
parser.add_argument("--workers", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(0)
random.seed(0)
WIDTH = 6
model = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
rows = torch.randn(96, WIDTH)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scale = 1 if args.undivided else args.accum


class Rows(Dataset):
    """A data set with an augmentation of its own."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return len(rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return rows[index] + self.noise * torch.randn(WIDTH)


class Stream(IterableDataset):
    """Whole batches of its own, in an order that hangs on their size."""

    def __iter__(self):
        order = torch.randperm(96, generator=torch.Generator().manual_seed(args.batch_size))
        yield from rows[order].split(args.batch_size)


class Shards(IterableDataset):
    """Samples of shards whose order hangs on the batch size."""

    def __iter__(self):
        order = torch.randperm(6, generator=torch.Generator().manual_seed(args.batch_size))
        for shard in order.tolist():
            yield from rows[shard * 16 : (shard + 1) * 16]


class Buckets(BatchSampler):
    """Batches of neighbours in some order, drawn batch by batch."""

    def __init__(self):
        self.batches = torch.arange(len(rows)).split(args.batch_size)

    def __iter__(self):
        for at in torch.randperm(len(self.batches)).tolist():
            yield self.batches[at].tolist()

    def __len__(self):
        return len(self.batches)


def train(batches, loss_of):
    """The loop that all share."""
    for i, batch in enumerate(batches):
        (loss_of(batch) / scale).backward()  # here: backward
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def diffusion(batch):
    """Noise and time steps for every sample."""
    noise = torch.randn_like(batch)
    time = torch.randint(0, 10, (len(batch),)) / 10
    noisy = batch * (1 - time[:, None]) + noise * time[:, None]
    return mse_loss(model(noisy), noise)


def mixed(batch):
    """One share for the whole batch, partners rolled within the sample."""
    share = random.betavariate(0.4, 0.4)
    partner = batch.flip(1)
    return mse_loss(model(share * batch + (1 - share) * partner), batch)


def crops(batch):
    """Two views of every sample, drawn at one line."""
    first, second = (batch + 0.1 * torch.randn(batch.shape) for _ in range(2))
    return mse_loss(model(first), second)


def one_by_one(batch):
    """A number for each sample, drawn in a loop over them."""
    return mse_loss(model(torch.stack([row * random.uniform(0.5, 1.5) for row in batch])), batch)


def partners(batch):
    """Partners from the whole batch: what it draws has no part for a micro-batch."""
    return mse_loss(model(0.7 * batch + 0.3 * batch[torch.randperm(len(batch))]), batch)  # here: partners


def targets(batch):
    """Noise in the targets alone: the model sees the same samples, and its draws have counterparts."""
    return mse_loss(model(batch), batch + torch.randn_like(batch))


def plain(batch):
    """Nothing is drawn."""
    return mse_loss(model(batch), batch.sin())


def collate(samples):
    """Hides entries by chance, as the collators of masked language models do."""
    batch = torch.stack(samples)
    return torch.where(torch.rand_like(batch) < 0.3, 0.0, batch), batch


def masked(batch):
    """The hidden entries are to be restored."""
    seen, whole = batch
    return mse_loss(model(seen), whole)


def get_batch():
    """Samples by their drawn indices."""
    return rows[torch.randint(len(rows), (args.batch_size,))]


def ahead():
    """Draws the next batch while the forward of this one is running, and others to evaluate on in between."""
    batch = get_batch()
    for i in range(6 * args.accum):
        if i % args.accum == 0:
            with torch.no_grad():
                [model(get_batch()) for _ in range(2)]
        loss = plain(batch)
        batch = get_batch()
        (loss / scale).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def epochs():
    """Evaluates on drawn samples after every epoch, so that the next shuffle is another one for another size."""
    loader = DataLoader(Rows(), args.batch_size, shuffle=True)
    for _ in range(2):
        train(loader, plain)
        with torch.no_grad():
            [model(torch.randn(args.batch_size, WIDTH)) for _ in range(args.accum)]


fixed = rows.split(args.batch_size)
shuffled = torch.Generator().manual_seed(args.batch_size)  # another order for another size
loops = {
    "diffusion": lambda: train(fixed, diffusion),
    "mixed": lambda: train(fixed, mixed),
    "crops": lambda: train(fixed, crops),
    "one_by_one": lambda: train(fixed, one_by_one),
    "partners": lambda: train(fixed, partners),
    "targets": lambda: train(fixed, targets),
    "ahead": ahead,
    "shuffled": lambda: train(
        DataLoader(Rows(), args.batch_size, shuffle=True, generator=shuffled, num_workers=args.workers), plain
    ),
    "augmented": lambda: train(
        DataLoader(Rows(0.1), args.batch_size, shuffle=True, num_workers=args.workers), diffusion
    ),
    "masked": lambda: train(
        DataLoader(Rows(), args.batch_size, shuffle=True, collate_fn=collate, num_workers=args.workers), masked
    ),
    "sharded": lambda: train(DataLoader(Shards(), args.batch_size), plain),
    "bucketed": lambda: train(DataLoader(Rows(), batch_sampler=Buckets()), plain),
    "epochs": epochs,
    "stream": lambda: train(DataLoader(Stream(), batch_size=None), plain),
}
loops[args.loop]()
