"""Trains with state that the script's own code makes after a step, of all micro-batches or of the last one alone."""

import copy

import torch
from points import begun, loops_of, parsed
from torch import nn
from torch.nn import functional


class Routed(nn.Module):
    """Chooses two of six experts for each row; a bias that is moved after each step balances their loads."""

    def __init__(self, plain):
        super().__init__()
        self.router, self.experts = nn.Linear(16, 6, bias=False), nn.Parameter(torch.randn(6, 16, 4) * 0.3)
        for name in ("bias", "loads"):
            if plain:
                setattr(self, name, torch.zeros(6))
            else:
                self.register_buffer(name, torch.zeros(6))

    def forward(self, rows):
        scores = torch.sigmoid(self.router(rows))
        chosen = (scores + self.bias).topk(2, -1).indices
        mask = torch.zeros_like(scores).scatter(1, chosen, 1.0)
        self.loads += mask.sum(0)
        return torch.einsum("nd,edf,ne->nf", rows, self.experts, scores * mask)

    @torch.no_grad()
    def move(self):
        self.bias += 0.2 * torch.sign(self.loads.mean() - self.loads)  # here: routed
        self.loads.zero_()


def train(args, model, forward, after, before=False):
    """Trains; `after` is given the outputs of the window, or of its last micro-batch alone."""
    _, _, _, loader = begun(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    window = []
    for i, (features, labels) in enumerate(loader):
        outputs, loss = forward(model, features, labels)
        (loss / args.accum).backward()
        window = [*([] if args.last else window), outputs.detach()]
        if (i + 1) % args.accum == 0:
            if before:
                after(torch.cat(window))
            optimizer.step()
            if not before:
                after(torch.cat(window))
            optimizer.zero_grad()
            window = []


def classified(model, features, labels):
    outputs = model(features)
    return outputs, functional.cross_entropy(outputs, labels)


def routed(args, plain=False, before=False):
    torch.manual_seed(args.seed)
    model = Routed(plain)

    def forward(model, features, labels):
        if args.last:
            model.loads.zero_()
        return classified(model, features, labels)

    train(args, model, forward, lambda _: model.move(), before)


def plain(args):
    routed(args, plain=True)


def before(args):
    routed(args, before=True)


def taught(args):
    """A teacher follows faster where the outputs are large."""
    _, model, _, _ = begun(args)
    teacher = copy.deepcopy(model)
    for parameter in teacher.parameters():
        parameter.data.mul_(1.5)

    def forward(model, features, labels):
        with torch.no_grad():
            wanted = teacher(features)
        outputs, loss = classified(model, features, labels)
        return outputs, loss + functional.mse_loss(outputs, wanted)

    @torch.no_grad()
    def follow(outputs):
        rate = outputs.square().mean().clamp_max(0.9)
        for own, followed in zip(teacher.parameters(), model.parameters(), strict=True):
            own.lerp_(followed, rate)  # here: taught

    train(args, model, forward, follow)


def queued(args):
    """Negatives from a queue, into which the script writes after the step; its pointer is a plain number."""
    _, model, _, _ = begun(args)
    model.register_buffer("queue", torch.randn(48, 4))
    model.pointer = 0

    def forward(model, features, labels):
        outputs = model(features)
        against = torch.cat([(outputs * outputs.roll(1, 1)).sum(1, keepdim=True), outputs @ model.queue.T], 1)
        return outputs, functional.cross_entropy(against, torch.zeros_like(labels))

    def enqueue(outputs):
        places = (model.pointer + torch.arange(len(outputs))) % len(model.queue)
        model.queue[places] = outputs  # here: queued
        model.pointer = (model.pointer + len(outputs)) % len(model.queue)

    train(args, model, forward, enqueue)


def cooled(args):
    """A temperature, a plain number, that the script takes from the outputs."""
    _, model, _, _ = begun(args)
    model.temperature = 1.0

    def forward(model, features, labels):
        outputs = model(features)
        return outputs, functional.cross_entropy(outputs / model.temperature, labels)

    def cool(outputs):
        model.temperature = 0.5 * model.temperature + float(outputs.square().mean())  # here: cooled

    train(args, model, forward, cool)


SEEN = {"temperature": 1.0, "updates": 0}


class Tempered(nn.Module):
    """Divides by a number that lies outside of all modules; from the second update on it may take a mean off, too."""

    def __init__(self, mixes):
        super().__init__()
        self.mixes = mixes

    def forward(self, rows):
        if self.mixes and SEEN["updates"]:
            return rows - rows.mean(0)  # here: mixed
        return rows / SEEN["temperature"]


def hidden(args, mixes=False):
    """A temperature out of sight: the module that reads it does not mix its samples."""
    _, model, _, _ = begun(args)

    def cool(outputs):
        SEEN["temperature"] = 1.0 if mixes else 0.5 + float(outputs.square().mean())
        SEEN["updates"] += 1

    train(args, nn.Sequential(model, Tempered(mixes), nn.Linear(4, 4)), classified, cool)


def mixed(args):
    hidden(args, mixes=True)


def normalised(args):
    """Running statistics that no forward in training reads: nothing is made of them."""
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten())
    train(args, model.append(nn.Linear(16, 4)), classified, lambda _: None)


if __name__ == "__main__":
    LOOPS = loops_of(globals())
    ARGS = parsed(LOOPS, __doc__, last=False)
    LOOPS[ARGS.loop](ARGS)
