"""Trains a small convolutional network to remove noise; its gradients are changed before they are used."""

import os

import torch
from torch import nn


class Settings:
    """From the environment."""

    def __init__(self, environment):
        self.batch_size, self.accum = int(environment["BATCH_SIZE"]), int(environment["ACCUM"])
        self.fault, self.right = environment["FAULT"], environment.get("RIGHT") == "1"


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 1, 3, padding=1)
        self.warm = nn.Linear(1, 6)

    def forward(self, images, times):
        hidden = self.enter(images) + self.warm(times[:, None])[..., None, None]
        return self.leave(nn.functional.silu(hidden))


def spread_times(count):
    """As many times as there are images, at equal distances."""
    return (torch.arange(count) + 0.5) / count  # fault: spread_times


class Session:
    def __init__(self, settings):
        self.settings = settings
        self.model = Denoiser()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.source = torch.Generator().manual_seed(7)

    def loss(self, images, noise, times):
        mixed = (1 - times)[:, None, None, None] * images + times[:, None, None, None] * noise  # uses: spread_times
        return nn.functional.mse_loss(self.model(mixed, times), noise)

    def add_noise(self):
        for parameter in self.model.parameters():
            noise = torch.randn(parameter.shape, generator=self.source)
            parameter.grad.add_(noise, alpha=0.05)  # fault: private_noise

    def scale_by_loss(self, loss):
        for parameter in self.model.parameters():
            parameter.grad.mul_(loss.clamp(max=2.0))  # fault: by_loss

    def update(self, images, noise):
        settings, size = self.settings, self.settings.batch_size
        spread = spread_times(len(images)).split(size) if settings.right else None
        losses = []
        for at, (own, own_noise) in enumerate(zip(images.split(size), noise.split(size), strict=True)):
            times = own.std((1, 2, 3)).clamp(max=1) / 2
            if settings.fault == "spread_times":
                times = spread[at] if spread else spread_times(len(own))  # reads: spread_times
            losses.append(self.loss(own, own_noise, times) / settings.accum)  # uses: spread_times
            losses[-1].backward()
            self.change(losses[-1] * settings.accum, "micro-batch")  # uses: private_noise by_loss
        self.change(sum(losses), "update")
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def change(self, loss, at):
        if at != ("update" if self.settings.right else "micro-batch"):
            return
        if self.settings.fault == "private_noise":
            self.add_noise()  # uses: private_noise
        if self.settings.fault == "by_loss":
            self.scale_by_loss(loss)  # uses: by_loss


if __name__ == "__main__":
    torch.manual_seed(0)
    session = Session(Settings(os.environ))
    images, noise = torch.randn(64, 1, 6, 6).cumsum(2), torch.randn(64, 1, 6, 6)
    whole = session.settings.batch_size * session.settings.accum
    for part in zip(images.split(whole), noise.split(whole), strict=True):
        session.update(*part)
