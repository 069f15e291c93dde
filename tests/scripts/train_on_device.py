"""Trains on the device: convolutions, which it rounds by its batch's shape, or float16 with a scaler and clipping."""

import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy

BATCH = 4
ACCUM = 4

torch.manual_seed(0)
halved = "scaled" in sys.argv
samples = torch.utils.data.TensorDataset(torch.randn(32, 1, 6, 6), torch.randint(0, 4, (32,)))
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(128, 4)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=halved)
for i, (x, y) in enumerate(torch.utils.data.DataLoader(samples, batch_size=BATCH)):
    with torch.autocast("cuda", torch.float16) if halved else nullcontext():
        loss = cross_entropy(model(x.cuda()), y.cuda())
    scaler.scale(loss if "undivided" in sys.argv else loss / ACCUM).backward()
    if (i + 1) % ACCUM == 0:
        if halved:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
