"""Learns features of small images: a query encoder, a key encoder that follows it, a memory of earlier keys."""

import argparse
import copy
from collections import deque
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--fault", default="memory")
parser.add_argument("--right", action="store_true")
args = parser.parse_args()
config = SimpleNamespace(margin=0.4, temperature=0.3, momentum=0.7)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 6, 3), nn.GELU(), nn.Conv2d(6, 8, 3, stride=2), nn.GELU())
        self.head = nn.Linear(8, 8)

    def forward(self, images):
        return F.normalize(self.head(self.features(images).mean((2, 3))), dim=1)


class Memory:
    """The newest keys, of which each is a negative of every query."""

    def __init__(self, keys):
        self.keys = deque(keys, maxlen=len(keys))

    def add(self, keys):
        self.keys.extend(keys.unbind())  # fault: memory

    def scores(self, queries):
        return queries @ torch.stack(tuple(self.keys)).T  # reads: memory


@torch.no_grad()
def follow(keys, queries):
    for key, query in zip(keys.parameters(), queries.parameters(), strict=True):
        key.mul_(config.momentum).add_(query, alpha=1 - config.momentum)  # fault: key_encoder


def contrast(queries, keys, memory):
    agreement = (queries * keys).sum(1, keepdim=True)  # uses: key_encoder
    scores = torch.cat([agreement, memory.scores(queries)], 1) / config.temperature  # uses: memory
    return F.cross_entropy(scores, torch.zeros(len(queries), dtype=torch.long))  # uses: memory key_encoder


def triplets(queries, keys, others):
    near, far = (queries - keys).norm(dim=1), (queries - others).norm(dim=1)
    return F.softplus(2 * (near - far + config.margin)).mean()  # reads: margin


torch.manual_seed(0)
encoder, target = Encoder(), Encoder()
others = copy.deepcopy(encoder)
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.3)
memory = Memory(F.normalize(torch.randn(24, 8), dim=1))
first = torch.randn(64, 1, 8, 8)
second = first + 0.3 * torch.randn(64, 1, 8, 8)
views = zip(first.split(args.batch_size), second.split(args.batch_size), strict=True)
fresh = []
for i, (left, right) in enumerate(views):
    ends = (i + 1) % args.accum == 0
    if args.fault == "key_encoder" and (not args.right or i % args.accum == 0):
        follow(target, encoder)  # fault: key_encoder
    queries = encoder(left)
    with torch.no_grad():
        keys = target(right)  # reads: key_encoder
    if args.fault == "margin":
        loss = triplets(queries, keys, others(left.flip(3)).detach())  # uses: margin
        if ends or not args.right:
            config.margin *= 1.5  # fault: margin
    else:
        loss = contrast(queries, keys, memory)  # uses: memory key_encoder
    (loss / args.accum).backward()
    if args.fault == "memory" and not args.right:
        memory.add(keys)  # fault: memory
    fresh.append(keys)
    if ends:
        optimizer.step()
        optimizer.zero_grad()
        if args.right:
            memory.add(torch.cat(fresh))
        fresh = []
