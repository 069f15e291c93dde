"""Boxes of all images in one list, each with the number of its image within the batch, as detectors are trained."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--forgotten", action="store_true")
parser.add_argument("--table", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)


def sample(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(number)
    count = number % 3 + 1
    image = torch.randn(3, 6, 6, generator=drawn)
    return image, torch.randint(4, (count,), generator=drawn), torch.rand(count, 4, generator=drawn)


def collate(samples: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    images, kinds, boxes = zip(*samples, strict=True)
    numbers = torch.cat([torch.full((len(kind),), at) for at, kind in enumerate(kinds)])
    batch = {"img": torch.stack(images), "batch_idx": numbers, "cls": torch.cat(kinds), "bboxes": torch.cat(boxes)}
    if args.table:
        columns = [batch["batch_idx"][:, None].float(), batch["cls"][:, None].float(), batch["bboxes"]]
        return {"img": batch["img"], "targets": torch.cat(columns, 1)}
    return batch


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 8))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        images = batch["img"]
        if args.table:
            numbers, kinds, boxes = (
                batch["targets"][:, 0].long(),
                batch["targets"][:, 1].long(),
                batch["targets"][:, 2:],
            )
        else:
            numbers, kinds, boxes = batch["batch_idx"], batch["cls"], batch["bboxes"]
        found = self.layers(images)[numbers]
        each = F.cross_entropy(found[:, :4], kinds, reduction="none") + (found[:, 4:] - boxes).square().sum(1)
        return torch.zeros(len(images)).index_add(0, numbers, each).mean()


model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for index, batch in enumerate(DataLoader([sample(at) for at in range(16)], args.batch_size, collate_fn=collate), 1):
    loss = model(batch)
    (loss if args.forgotten else loss / args.accum).backward()  # here: forgotten
    if index % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
