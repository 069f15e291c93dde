"""A loop that saves a checkpoint after every update and goes on from it where there is one."""

import argparse
import os
import subprocess
import sys

import torch
from torch.nn.functional import mse_loss

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--out", default="out")
parser.add_argument("--undivided", action="store_true")
parser.add_argument("--other-program", action="store_true", help="let another program remove the checkpoint's notes")
parser.add_argument("--unseeded", action="store_true")
args = parser.parse_args()

data = torch.Generator().manual_seed(1)
inputs = torch.randn(64, 6, generator=data)
targets = inputs.sum(1, keepdim=True)
if not args.unseeded:
    torch.manual_seed(0)
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

os.makedirs(args.out, exist_ok=True)
checkpoint = os.path.join(args.out, "last.pt")
if os.path.exists(checkpoint):
    state = torch.load(checkpoint)  # here: resumes
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
with open(os.path.join(args.out, "log.txt"), "a") as log:
    log.write("started\n")
if args.other_program:
    remove = "import os, sys; os.remove(sys.argv[1])"
    subprocess.run([sys.executable, "-c", remove, os.path.join(args.out, "log.txt")], check=True)

scale = 1 if args.undivided else args.accum
batches = list(zip(inputs.split(args.batch_size), targets.split(args.batch_size), strict=True))
for i, (x, y) in enumerate(batches):
    (mse_loss(model(x), y) / scale).backward()
    if (i + 1) % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
        new = checkpoint + ".new"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, new)
        os.replace(new, checkpoint)  # here: saves
