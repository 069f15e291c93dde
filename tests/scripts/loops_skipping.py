"""Trains a small classifier and skips some micro-batches: before the forward, or before the backward pass."""

import torch
from points import loader_for, network, options
from torch import nn

criterion = nn.CrossEntropyLoss()


def parsed():
    parser = options(__doc__)
    parser.add_argument("--bad", default="2", help="quarters of a batch, as a list, that are skipped")
    parser.add_argument("--why", choices=("nan", "empty", "chosen", "unfed", "infinite"), default="nan")
    parser.add_argument("--end", choices=("kept", "skipped", "moved"), default="kept", help="the end of the window")
    parser.add_argument("--divide", choices=("accum", "window", "nothing"), default="accum")
    parser.add_argument("--equal", action="store_true", help="as many targets in every micro-batch")
    return parser.parse_args()


def is_skipped(args, index, labels, bad):
    """Whether a micro-batch is not even fed to the model."""
    if args.why == "empty":
        return bool((labels < 0).all())
    return args.why == "unfed" and args.accum > 1 and index in bad


def main():
    args = parsed()
    torch.manual_seed(args.seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = loader_for(args)
    labels = loader.dataset.tensors[1]
    bad = [int(position) for position in args.bad.split(",")]
    for quarter in range(len(labels) // 4):
        if quarter in bad and args.why in ("nan", "empty"):
            labels[4 * quarter : 4 * quarter + 4] = -100
        elif quarter in bad and args.why == "infinite":  # the full batch's loss is no number either
            loader.dataset.tensors[0][4 * quarter] = torch.inf
        elif quarter % 3 == 0 and not args.equal:
            labels[4 * quarter] = -100
    batches = list(loader)
    differentiated = 0
    for i, (features, labels) in enumerate(batches):
        first = i - i % args.accum
        valid = sum((targets >= 0).sum() for _, targets in batches[first : first + args.accum])
        share = {"accum": 1 / args.accum, "nothing": 1, "window": (labels >= 0).sum() / valid}[args.divide]
        skipped = is_skipped(args, i, labels, bad)
        if not skipped:
            loss = criterion(model(features), labels)  # here: forward
            skipped = not torch.isfinite(loss) or (args.why == "chosen" and args.accum > 1 and i in bad)
        if not skipped:
            (loss * share).backward()  # here: backward
            differentiated += 1
        elif args.end != "kept":
            continue
        if ((differentiated if args.end == "moved" else i + 1) % args.accum) == 0:
            optimizer.step()  # here: step
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
