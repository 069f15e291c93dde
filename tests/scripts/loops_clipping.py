"""Trains a small classifier whose gradients are changed between the last backward pass and the step."""

import torch
from points import loader_for, network, options
from torch import nn

criterion = nn.CrossEntropyLoss()


def norm_of(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()


def by_norm(args, model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), args.clip)


def by_value(args, model, optimizer):
    nn.utils.clip_grad_value_(model.parameters(), args.clip)


def by_hand(args, model, optimizer):
    """Clipping as people write it themselves, in place."""
    factor = min(1.0, args.clip / norm_of(model).item())
    for parameter in model.parameters():
        parameter.grad.mul_(factor)


def divided_then_by_hand(args, model, optimizer):
    """The losses are summed undivided; the gradients are divided before they are clipped, both by hand."""
    for parameter in model.parameters():
        parameter.grad /= args.accum
    by_hand(args, model, optimizer)


def divided_then_by_norm(args, model, optimizer):
    """The losses are summed undivided; the gradients are divided before they are clipped."""
    for parameter in model.parameters():
        parameter.grad /= args.accum
    by_norm(args, model, optimizer)


def by_norm_then_divided(args, model, optimizer):
    """The losses are summed undivided; the gradients are clipped before they are divided."""
    nn.utils.clip_grad_norm_(model.parameters(), args.clip)  # here: by_norm_then_divided
    for parameter in model.parameters():
        parameter.grad /= args.accum


def centralised(args, model, optimizer):
    """Gradient centralisation: the mean of each row is taken out."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))


def nothing(args, model, optimizer):
    pass


CHANGES = {
    change.__name__: change
    for change in (by_norm, by_value, by_hand, divided_then_by_norm, divided_then_by_hand,
                   by_norm_then_divided, centralised, nothing)
}  # fmt: skip


class DividingSGD(torch.optim.SGD):
    """Divides what it is given by the micro-batches of a window, in its own step."""

    def __init__(self, parameters, lr, count):
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.count = count

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(self.count)
        return super().step(closure)


def optimizer_for(args, model):
    if args.optimizer == "dividing":
        return DividingSGD(model.parameters(), args.lr, args.accum)
    if args.optimizer == "lower_rate":
        return torch.optim.SGD(model.parameters(), lr=args.lr / args.accum)
    return getattr(torch.optim, args.optimizer)(model.parameters(), lr=args.lr)


def main():
    parser = options(__doc__)
    parser.add_argument("--change", choices=sorted(CHANGES), default="by_norm")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--optimizer", choices=["SGD", "Adam", "dividing", "lower_rate"], default="SGD")
    parser.add_argument("--undivided", action="store_true")
    parser.add_argument(
        "--aliases", action="store_true", help="lazy clones share their memory, as CUDA's kernels see it"
    )
    args = parser.parse_args()
    if args.aliases:
        torch._lazy_clone = lambda tensor, **_: tensor.detach()
        torch._C._is_cow_tensor = lambda _: True
    torch.manual_seed(args.seed)
    model = network()
    optimizer = optimizer_for(args, model)
    for i, (features, labels) in enumerate(loader_for(args)):
        loss = criterion(model(features), labels)
        if not args.undivided:
            loss = loss / args.accum
        loss.backward()  # here: loss
        if (i + 1) % args.accum == 0:
            CHANGES[args.change](args, model, optimizer)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
