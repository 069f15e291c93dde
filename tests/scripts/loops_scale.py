"""Trains a small classifier; `--loop` picks a way in which people get the scale of the loss wrong, or right."""

import torch
from points import begun, loops_of, parsed
from torch import nn

criterion = nn.CrossEntropyLoss()


def division_forgotten(args, model, optimizer, loader):
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels)
        loss.backward()  # here: division_forgotten
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def divided_twice(args, model, optimizer, loader):
    def compute_loss(features, labels):
        return criterion(model(features), labels) / args.accum

    for i, (features, labels) in enumerate(loader):
        loss = compute_loss(features, labels) / args.accum
        loss.backward()  # here: divided_twice
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def divided_by_constant(args, model, optimizer, loader):
    """The number of micro-batches of another run, in both runs."""
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / 16
        loss.backward()  # here: divided_by_constant
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def scaled_after_backward(args, model, optimizer, loader):
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels)
        loss.backward()  # here: scaled_after_backward
        loss = loss / args.accum
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def penalty_undivided(args, model, optimizer, loader):
    """The mean over the samples is divided; the penalty on the weights is added once per micro-batch."""
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        loss = loss + 0.01 * sum(weight.square().sum() for weight in model.parameters())  # here: penalty_undivided
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def penalty_later(args, model, optimizer, loader):
    """The same behind a warm-up of one update."""
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        strength = 0.01 if i >= args.accum else 0.0
        loss = loss + strength * sum(weight.square().sum() for weight in model.parameters())  # here: penalty_later
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def penalty_divided(args, model, optimizer, loader):
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels)
        loss = loss + 0.01 * sum(weight.square().sum() for weight in model.parameters())
        (loss / args.accum).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def short_window(args, model, optimizer, loader):
    """The last window of an epoch is short, and divided by the configured number all the same."""
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        loss.backward()  # here: short_window
        if (i + 1) % args.accum == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def ragged_batches(args, model, optimizer, loader):
    """16 samples in micro-batches of 6, 6 and 4, whose means are averaged as if they were equally many."""
    for features, labels in loader:
        parts = list(zip(features.split(args.micro), labels.split(args.micro), strict=True))
        for part, answers in parts:
            loss = criterion(model(part), answers) / len(parts)
            loss.backward()  # here: ragged_batches
        optimizer.step()
        optimizer.zero_grad()


def marked_means(args, model, optimizer, loader):
    """Means over the marked samples of micro-batches of 6, 6 and 4, weighted by what `--by` says."""
    average = torch.ones(())
    for features, labels in loader:
        marked = (torch.arange(len(features)) * 7 % 5 < torch.arange(len(features)) // 4 + 1).float()
        for at in torch.arange(len(features)).split(args.micro):
            log_p = model(features[at]).log_softmax(-1).gather(-1, labels[at, None])[:, 0]
            total, count = -(log_p * marked[at]).sum(), marked[at].sum()
            share = len(at) / len(features)
            if args.by == "columns":  # a weight that only the graph shows: the shares of the first feature's size
                share = float(features[at, 0].abs().sum() / features[:, 0].abs().sum())
            loss = total / marked.sum() if args.by == "marked" else total / count * share
            if args.by == "average":  # a divisor that every forward moves, beside the right shares of samples
                average = 0.9 * average + 0.1 * log_p.detach().square().mean()
                loss = -log_p.mean() / average * share
            loss.backward()  # here: marked_means
        optimizer.step()
        optimizer.zero_grad()


def matched_targets(args, model, optimizer, loader):
    """The mean over the matched samples times the batch size, as detectors do it; nothing is divided."""
    for i, (features, labels) in enumerate(loader):
        matched = features[:, 0] > -0.5
        loss = criterion(model(features)[matched], labels[matched]) * len(labels)
        loss.backward()  # here: matched_targets
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def empty_micro_batch(args, model, optimizer, loader):
    """Samples without a label count for nothing; one micro-batch has no other."""
    for i, (features, labels) in enumerate(loader):
        unlabelled = args.batch_size * (i % args.accum) + torch.arange(len(labels)) < 4
        loss = criterion(model(features), labels.masked_fill(unlabelled, -100)) / args.accum
        loss.backward()  # here: empty_micro_batch
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def class_weights(args, model, optimizer, loader):
    """A weighted cross entropy divides by the weights of the classes that it is given."""
    weighted = torch.nn.CrossEntropyLoss(torch.arange(1.0, 1 + model(next(iter(loader))[0]).shape[-1]))
    for i, (features, labels) in enumerate(loader):
        (weighted(model(features), labels) / args.accum).backward()  # here: class_weights
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def usual(args, model, optimizer, loader):
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def gradients_divided(args, model, optimizer, loader):
    """The gradients are divided after the window instead of the losses inside it."""
    for i, (features, labels) in enumerate(loader):
        criterion(model(features), labels).backward()
        if (i + 1) % args.accum == 0:
            for parameter in model.parameters():
                parameter.grad /= args.accum
            optimizer.step()
            optimizer.zero_grad()


def losses_summed(args, model, optimizer, loader):
    """One backward over the summed losses of the window."""
    total = 0.0
    for i, (features, labels) in enumerate(loader):
        total = total + criterion(model(features), labels) / args.accum
        if (i + 1) % args.accum == 0:
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            total = 0.0


def cleared_at_start(args, model, optimizer, loader):
    for i, (features, labels) in enumerate(loader):
        if i % args.accum == 0:
            optimizer.zero_grad()
        loss = criterion(model(features), labels) / args.accum
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()


def cleared_by_hand(args, model, optimizer, loader):
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad = None


def logged_loss_off(args, model, optimizer, loader):
    running = 0.0
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels)
        running += loss.item()
        (loss / args.accum).backward()
        if (i + 1) % args.accum == 0:
            print(f"loss {running:.3f}")  # K times the mean
            running = 0.0
            optimizer.step()
            optimizer.zero_grad()


def constant_divisor(args, model, optimizer, loader):
    """Each micro-step multiplies by the same constant, kept in a tensor."""
    weight = torch.tensor(1.0 / args.accum)
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels)
        loss.backward(gradient=weight)
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def other_order(args, model, optimizer, loader):
    """The micro-batches of a window come in another order."""
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == args.accum:
            for features, labels in reversed(window):
                (criterion(model(features), labels) / args.accum).backward()
            optimizer.step()
            optimizer.zero_grad()
            window = []


def short_window_divided(args, model, optimizer, loader):
    """The last window of an epoch is short and divided by what it has."""
    for i, (features, labels) in enumerate(loader):
        members = min(args.accum, len(loader) - i // args.accum * args.accum)
        (criterion(model(features), labels) / members).backward()
        if (i + 1) % args.accum == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def weighted_by_samples(args, model, optimizer, loader):
    """Micro-batches of 6, 6 and 4 samples, each weighted by its share."""
    for features, labels in loader:
        for part, answers in zip(features.split(args.micro), labels.split(args.micro), strict=True):
            (criterion(model(part), answers) * len(part) / len(features)).backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    loops = loops_of(globals())
    args = parsed(loops, __doc__, micro=16, by="samples", optimizer="SGD", dropout=0.0, batchnorm=False)
    begin = begun(args, args.dropout, args.batchnorm, args.optimizer)
    for _ in range(args.epochs):
        loops[args.loop](*begin)


if __name__ == "__main__":
    main()
