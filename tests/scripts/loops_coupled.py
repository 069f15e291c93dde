"""Trains where samples of a batch meet: in the loss, in the model, in what the loop computes; and where they do not."""

import copy

import torch
from points import loader_for, options
from torch import nn
from torch.nn import functional as F


def contrastive(found, others, scale):
    logits = scale * F.normalize(found, dim=1) @ F.normalize(others, dim=1).T  # here: contrastive
    return F.cross_entropy(logits, torch.arange(len(logits)))  # here: made


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 6)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(5.0))

    def forward(self, features):
        return self.left(features[:, :8]), self.right(features[:, 8:])


class Scored(Towers):
    def forward(self, features):
        return {"loss": contrastive(*super().forward(features), self.scale)}


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 4)

    def forward(self, features):
        steps = features.unflatten(1, (2, 8))
        mixed, _ = self.attention(steps, steps, steps)  # here: attention
        return self.head(mixed.mean(1))


class Criterion(nn.Module):
    """A loss with something to train: it hands out nothing for each row."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(5.0))

    def forward(self, left, right):
        return contrastive(left, right, self.scale)


class Routed(nn.Module):
    """Leaves what its router should be balanced by, and a penalty of each row, to whoever looks for them."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, features):
        features = self.inner(features)
        shares = self.router(features).softmax(-1)
        chosen = F.one_hot(shares.argmax(-1), 4).float()
        self.balance = (chosen.mean(0) * shares.mean(0)).sum()  # here: routed
        self.penalty = shares.square().sum(1).mean()
        given = [chosen[:, at, None] * expert(features) for at, expert in enumerate(self.experts)]
        return features + shares.amax(1, keepdim=True) * sum(given)


class Chained(nn.ModuleList):
    """Two models of like names that the script calls one behind the other."""

    def __init__(self):
        super().__init__([nn.Sequential(nn.Linear(16, 8)), nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4))])


def compared(model, features, labels):
    return contrastive(*model(features), model.scale)


def scored(model, features, labels):
    return model(features)["loss"]


def attention(model, features, labels):
    return F.cross_entropy(model(features), labels)


def routed(model, features, labels):
    return F.cross_entropy(model(features), labels) + model.balance


def penalised(model, features, labels):
    return F.cross_entropy(model(features), labels) + model.penalty


def counted(model, features, labels):
    return 16 // len(features) * F.cross_entropy(model(features), labels) + model.balance


def chained(model, features, labels):
    encoder, head = model
    return F.cross_entropy(head(encoder(features)), labels)  # here: chained


def criterion(model, features, labels):
    towers, loss = model
    return loss(*towers(features))


def advantages(model, features, labels):
    gained = features.sum(1)
    gained = (gained - gained.mean()) / gained.std()  # here: advantages
    chosen = model(features)[0].log_softmax(1).gather(1, labels[:, None])[:, 0]
    loss = -(gained * chosen).mean()
    return loss


def against_reference(model, features, labels):
    """As KTO's: held against a reference, which the model is in its first update, and against the batch's mean."""
    rewards = (model(features)[0] - REFERENCE(features)[0].detach()).gather(1, labels[:, None])[:, 0]
    kept = rewards.detach().mean()
    wanted = 1.0 - 2.0 * (labels % 2)
    return (1 - torch.sigmoid(4 * wanted * (rewards - kept))).mean()  # here: against_reference


def cached(args, model, optimizer, loader):
    """Both passes of a cached gradient, written out."""
    window = []
    for features, _ in loader:
        window.append(features)
        if len(window) < args.accum:
            continue
        with torch.no_grad():
            found = [torch.cat(side).requires_grad_() for side in zip(*map(model, window), strict=True)]
        contrastive(*found, model.scale).backward()
        parts = zip(*(side.grad.split(args.batch_size) for side in found), strict=True)
        for features, gradients in zip(window, parts, strict=True):
            torch.autograd.backward(model(features), gradients)
        optimizer.step()
        optimizer.zero_grad()
        window = []


def plain(args, model, optimizer, loader, loss_of):
    for i, (features, labels) in enumerate(loader):
        (loss_of(model, features, labels) / args.accum).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


_LOSSES = (compared, scored, attention, routed, counted, penalised, chained, criterion, advantages, against_reference)
LOSSES = {loss.__name__: loss for loss in _LOSSES}

if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--loop", choices=[*LOSSES, "cached"], default="compared")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    models = {"scored": Scored, "attention": Attending, "chained": Chained}
    models |= dict.fromkeys(("routed", "counted", "penalised"), Routed)
    model = nn.ModuleList([Towers(), Criterion()]) if args.loop == "criterion" else models.get(args.loop, Towers)()
    REFERENCE = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = loader_for(args)
    if args.loop == "cached":
        cached(args, model, optimizer, loader)
    else:
        plain(args, model, optimizer, loader, LOSSES[args.loop])
