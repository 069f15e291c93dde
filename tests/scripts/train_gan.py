"""A generative adversarial network: two optimizers, both with accumulated gradients."""

import argparse

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--updates", type=int, default=6)
parser.add_argument("--divide", choices=["both", "discriminator"], default="both")
args = parser.parse_args()

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3)
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3)

# Noise belongs to its sample, as the data does: cutting the batch otherwise does not change it.
data = torch.Generator().manual_seed(1)
rows = args.batch_size * args.accum * args.updates
real_rows = torch.randn(rows, 16, generator=data) * 0.5 + 1
noise_rows = torch.randn(rows, 8, generator=data)
batches = list(zip(real_rows.split(args.batch_size), noise_rows.split(args.batch_size), strict=True))
generator_scale = args.accum if args.divide == "both" else 1

for start in range(0, len(batches), args.accum):
    window = batches[start : start + args.accum]

    discriminator_optimizer.zero_grad()
    for real, noise in window:
        with torch.no_grad():
            fake = generator(noise)
        verdict_real, verdict_fake = discriminator(real), discriminator(fake)
        loss = bce(verdict_real, torch.ones_like(verdict_real)) + bce(verdict_fake, torch.zeros_like(verdict_fake))
        (loss / args.accum).backward()
    discriminator_optimizer.step()

    generator_optimizer.zero_grad()
    for _, noise in window:
        verdict = discriminator(generator(noise))
        loss = bce(verdict, torch.ones_like(verdict))
        (loss / generator_scale).backward()  # here: generator
    generator_optimizer.step()
