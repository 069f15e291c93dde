"""Trains where the backward depends on the batch although the losses add up, and where it does not."""

import torch
from points import loops_of, options, points
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class SlopesOfForward(torch.autograd.Function):
    """A loss per row, whose backward multiplies slopes by the first row's gradient, or by each row's."""

    @staticmethod
    def forward(ctx, logits, labels, first):
        ctx.save_for_backward(logits.softmax(-1) - F.one_hot(labels, logits.shape[1]))
        ctx.first = first
        return F.cross_entropy(logits, labels, reduction="none")

    @staticmethod
    def backward(ctx, gradient):
        (slopes,) = ctx.saved_tensors
        return slopes * (gradient[:1] if ctx.first else gradient)[:, None], None, None


class GradientByRows(torch.autograd.Function):
    """Identity whose backward divides by the number of rows."""

    @staticmethod
    def forward(ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / len(gradient)


class ByRows(nn.Module):
    def forward(self, rows):
        return GradientByRows.apply(rows)


def importance(args, model, features, labels, weight):
    """Each row has an importance of its own."""
    losses = SlopesOfForward.apply(model(features), labels, args.backward == "batch")  # here: importance
    return (losses * weight).mean()


def by_rows(args, model, features, labels, weight):
    return (F.cross_entropy(model(features), labels, reduction="none") * weight).mean()


def importance_of_rows(args, model, features, labels, weight):
    """Weights of micro-batches that are wrong indeed: of each the mean over its importance is taken."""
    return by_rows(args, model, features, labels, weight) / weight.mean()


def main():
    parser = options(__doc__)
    losses = loops_of(globals())
    parser.add_argument("--loop", choices=sorted(losses), required=True)
    parser.add_argument("--backward", choices=["batch", "rows"], default="batch")
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--late", action="store_true", help="divide the gradients, and not the losses")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    last = ByRows() if args.loop == "by_rows" and args.backward == "batch" else nn.Identity()
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4), last)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cpu", enabled=args.scaler)
    data = points(args.samples)
    weight = torch.rand(args.samples, generator=torch.Generator().manual_seed(3)) + 0.2
    loader = DataLoader(TensorDataset(*data.tensors, weight), args.batch_size)
    for i, (features, labels, weight) in enumerate(loader):
        loss = losses[args.loop](args, model, features, labels, weight)
        scaler.scale(loss if args.late else loss / args.accum).backward()
        if (i + 1) % args.accum == 0:
            scaler.unscale_(optimizer)
            for parameter in model.parameters():
                parameter.grad /= args.accum if args.late else 1
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
