"""Trains modules that look like the cause and are none: a control that replaces their outputs hides the real one."""

import torch
from points import loader_for, options
from torch import nn
from torch.nn import functional as F


class Scaled(nn.Module):
    """Returns the mean of the batch beside its result, and normalises the gradient of its own weight if asked to.

    Args:
        hooked: Whether the gradient is normalised: in each micro-batch, and so once more than in the full batch.
        centred: Whether the mean is taken off the result.
    """

    def __init__(self, hooked, centred):
        super().__init__()
        self.weight, self.centred = nn.Parameter(torch.linspace(0.5, 1.5, 8)), centred
        if hooked:
            self.weight.register_hook(lambda gradient: gradient / gradient.norm())  # here: normalising

    def forward(self, hidden):
        mean = hidden.mean(0).expand_as(hidden)  # here: reporting
        return (hidden - mean if self.centred else hidden) * self.weight, mean


class Reporting(nn.Module):
    def __init__(self, hooked, centred):
        super().__init__()
        self.first, self.scaled, self.head = nn.Linear(16, 8), Scaled(hooked, centred), nn.Linear(8, 4)

    def forward(self, features, labels):
        hidden, self.mean = self.scaled(self.first(features).tanh())
        return self.head(hidden)


class Largest(nn.Module):
    """The largest of each row's places; with its own mean over the batch taken off if asked to.

    Args:
        centred: Whether it is.
    """

    def __init__(self, centred=False):
        super().__init__()
        self.weight, self.centred = nn.Parameter(torch.linspace(0.5, 1.5, 8)), centred

    def forward(self, hidden, mask):
        largest = hidden.masked_fill(~mask, -9.0).amax(1)
        if self.centred:
            largest = largest - largest.mean(0)
        return largest * self.weight


class Longest(nn.Module):
    """A mean over as many places as the longest row of the micro-batch has."""

    def forward(self, hidden, mask):
        return (hidden * mask).mean(1)


class Padded(nn.Module):
    """Cuts rows to lengths of 4 to 7, pads them to the longest of the batch, and embeds every number.

    Args:
        centred: Whether the mean over the batch is taken off what a frozen layer gives.
        pool: Makes a vector of each row.
    """

    def __init__(self, centred, pool):
        super().__init__()
        self.embedding, self.pool, self.head = nn.Linear(1, 8).requires_grad_(False), pool, nn.Linear(8, 4)
        self.centred = centred

    def forward(self, features, labels):
        lengths = 4 + labels
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).unsqueeze(-1)
        hidden = self.embedding(features[:, : mask.shape[1], None] * mask).tanh()
        if self.centred:
            hidden = hidden - hidden.mean((0, 1))
        return self.head(self.pool(hidden, mask))  # here: padded


MODELS = {
    "hooked": lambda: Reporting(hooked=True, centred=False),
    "plain": lambda: Reporting(hooked=False, centred=False),
    "centred": lambda: Reporting(hooked=False, centred=True),
    "centred_before": lambda: Padded(centred=True, pool=Largest()),
    "centred_inside": lambda: Padded(centred=False, pool=Largest(centred=True)),
    "padded": lambda: Padded(centred=False, pool=Largest()),
    "longest": lambda: Padded(centred=False, pool=Longest()),
}

if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--loop", choices=[*MODELS], required=True)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = MODELS[args.loop]()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=args.lr)
    for i, (features, labels) in enumerate(loader_for(args)):
        (F.cross_entropy(model(features, labels), labels) / args.accum).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
