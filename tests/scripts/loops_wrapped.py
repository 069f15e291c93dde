"""Trains with an optimizer that holds another one and lets it step: slow weights follow the fast ones."""

import torch
from points import loader_for, network, options
from torch import nn


class SlowWeights(torch.optim.Optimizer):
    """Every third step the weights go half the way back to where they were three steps before."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.count = inner, 0
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        result = self.inner.step(closure)
        self.count += 1
        fast = [p for group in self.inner.param_groups for p in group["params"]]
        for slow, parameter in zip(self.slow, fast, strict=True) if self.count % 3 == 0 else ():
            parameter.copy_(slow.lerp_(parameter, 0.5))
        return result


def main():
    parser = options(__doc__)
    parser.add_argument("--loss", choices=("divided", "undivided", "running"), default="divided")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model, loader = network(), loader_for(args)
    optimizer = SlowWeights(torch.optim.Adam(model.parameters(), lr=args.lr / 10))
    total = 0.0
    for i, (features, labels) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(features), labels)
        loss = loss if args.loss == "undivided" else loss / args.accum
        total = total + loss if i % args.accum and args.loss == "running" else loss
        total.backward(retain_graph=args.loss == "running")  # here: loss
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
