"""Trains a small classifier beside an average of its weights that is kept by hand, in the ways people write it."""

import copy

import torch
from points import loader_for, network, options
from torch import nn

criterion = nn.CrossEntropyLoss()
DECAY = 0.9


class Copied:
    """A copied model that is moved by `lerp_` through its state."""

    def __init__(self, model, args):
        self.module = copy.deepcopy(x=model, memo={}).eval()

    @torch.no_grad()
    def update(self, model):
        for old, new in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            old.lerp_(new, 1 - DECAY)


class Loaded(Copied):
    """A copied model that loads a state which is put together."""

    def update(self, model):
        new = model.state_dict()
        self.module.load_state_dict(
            {name: DECAY * value + (1 - DECAY) * new[name] for name, value in self.module.state_dict().items()}
        )


class Warmed(Copied):
    """A decay that grows with the updates it has made, as diffusers and timm have it."""

    def __init__(self, model, args):
        super().__init__(model, args)
        self.updates = 0

    @torch.no_grad()
    def update(self, model):
        decay = min(DECAY, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        new = [parameter.data for parameter in model.parameters()]
        torch._foreach_lerp_([parameter.data for parameter in self.module.parameters()], new, 1 - decay)


class Snapshot(Copied):
    """A copy that takes the weights as they are: the policy before, the weights for a norm of their change."""

    def update(self, model):
        self.module.load_state_dict(model.state_dict())
        self.before = [parameter.detach().clone() for parameter in model.parameters()]


class Frozen(Copied):
    """A teacher that stays as it was, beside counters that do not."""

    seen = torch.zeros(())
    norms = torch.zeros(32, 16)

    def update(self, model):
        self.seen += 1
        self.norms += model[0].weight.detach().abs()
        self.norms *= 0.5


class Together:
    """All of them."""

    def __init__(self, model, args):
        self.averages = [kind(model, args) for kind in KINDS]
        self.module = self.averages[0].module

    def update(self, model):
        for average in self.averages:
            average.update(model)


KINDS = (Copied, Loaded, Warmed, Snapshot, Frozen)
AVERAGES = {kind.__name__.lower(): kind for kind in (*KINDS, Together)}


def main():
    parser = options()
    parser.add_argument("--average", default="copied", choices=sorted(AVERAGES))
    parser.add_argument("--when", default="update", choices=["update", "before", "after", "top"])
    parser.add_argument("--target", action="store_true", help="the loss uses what the copy gives")
    parser.add_argument("--resumed", action="store_true", help="the copy does not begin as the weights")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr / 10)
    average = AVERAGES[args.average](model, args)
    for parameter in average.module.parameters() if args.resumed else ():
        parameter.data /= 2
    for _ in range(args.epochs):
        for i, (features, labels) in enumerate(loader_for(args)):
            if args.when == "top":
                average.update(model)
            outputs = model(features)
            loss = criterion(outputs, labels)
            if args.target:
                with torch.no_grad():
                    targets = average.module(features)
                loss = loss + nn.functional.mse_loss(outputs, targets)
            (loss / args.accum).backward()
            if args.when == "before":
                average.update(model)
            if (i + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
                if args.when == "update":
                    average.update(model)
            if args.when == "after":
                average.update(model)


if __name__ == "__main__":
    main()
