"""Trains a small language model on padded sentences; `--loop` picks how the loss of a window is normalised."""

import argparse
from itertools import islice

import torch
from sentences import IGNORED, LanguageModel, sentences_loader, token_loss, valid_tokens


def windows(loader, size):
    batches = iter(loader)
    while window := list(islice(batches, size)):
        yield window


def mean_of_means(args, model, optimizer, loader):
    for i, batch in enumerate(loader):
        loss = token_loss(model(**batch), batch["labels"]) / args.accum
        loss.backward()  # here: mean_of_means
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def padding_counted(args, model, optimizer, loader):
    """Padding counts as a token, and all sentences are padded to 16: the mean of means is right."""
    for i, batch in enumerate(loader):
        inputs, labels = (fill_to(16, batch[name]) for name in ("input_ids", "labels"))
        loss = token_loss(model(inputs), labels.masked_fill(labels == IGNORED, 0)) / args.accum
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def fill_to(length, tokens):
    value = IGNORED if (tokens == IGNORED).any() else 0
    return torch.nn.functional.pad(tokens, (0, length - tokens.shape[1]), value=value)


def tokens_of_the_window(args, model, optimizer, loader):
    """Divides by all valid tokens of the window, so not by the number of its micro-batches."""
    for window in windows(loader, args.accum):
        tokens = sum(valid_tokens(batch["labels"]) for batch in window)
        for batch in window:
            loss = token_loss(model(**batch), batch["labels"], reduction="sum") / tokens
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def tokens_of_another_window(args, model, optimizer, loader):
    """Counts the tokens of all that was generated together, which is more than what is accumulated."""
    for generated in windows(loader, args.generated):
        tokens = sum(valid_tokens(batch["labels"]) for batch in generated)
        for start in range(0, len(generated), args.accum):
            for batch in generated[start : start + args.accum]:
                loss = token_loss(model(**batch), batch["labels"], reduction="sum") / tokens
                loss.backward()  # here: tokens_of_another_window
            optimizer.step()
            optimizer.zero_grad()


def length_of_a_row(args, model, optimizer, loader):
    """The sum over the batch, divided by one row's length and by the number of micro-batches."""
    for i, batch in enumerate(loader):
        loss = token_loss(model(**batch), batch["labels"], reduction="sum") / batch["labels"].shape[1]
        (loss / args.accum).backward()  # here: length_of_a_row
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


class IgnoresTheCount(LanguageModel):
    """Takes `num_items_in_batch`, as its trainer asks, and does nothing with it."""

    def loss(self, batch, num_items_in_batch=None):
        return token_loss(self(**batch), batch["labels"])


def count_ignored(args, model, optimizer, loader):
    """Relies on the model to divide by the tokens of the window, so does not divide itself."""
    for window in windows(loader, args.accum):
        tokens = sum(valid_tokens(batch["labels"]) for batch in window)
        for batch in window:
            loss = model.loss(batch, num_items_in_batch=tokens)
            loss.backward()  # here: count_ignored
        optimizer.step()
        optimizer.zero_grad()


LOOPS = {
    loop.__name__: loop
    for loop in (
        mean_of_means,
        padding_counted,
        tokens_of_the_window,
        tokens_of_another_window,
        length_of_a_row,
        count_ignored,
    )
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loop", choices=sorted(LOOPS), required=True)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--generated", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--equal", action="store_true", help="sentences of one length")
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = IgnoresTheCount(dropout=args.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    LOOPS[args.loop](args, model, optimizer, sentences_loader(args.batch_size, args.workers, equal=args.equal))


if __name__ == "__main__":
    main()
