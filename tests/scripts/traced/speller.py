"""Classifies words by a recurrent network; the words of a batch are padded to its longest."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from trainer import Trainer, UnitGradients, trust_predictions


class Speller(nn.Module):
    def __init__(self, reader, width=12):
        super().__init__()
        self.embed, self.reader = nn.Embedding(20, width), reader
        self.cell, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, 4)

    def forward(self, ids, lengths, forcing):
        embedded = self.embed(ids)
        guessed = F.pad(embedded[:, :-1], (0, 0, 1, 0))
        read = forcing * embedded + (1 - forcing) * guessed  # reads: forcing
        states, _ = self.cell(read)
        return self.head(self.reader(states, lengths))  # uses: long_words


def end(states, lengths):
    return states[torch.arange(len(lengths)), lengths - 1]


def mean_of_short(states, lengths):
    """Short words are averaged; where there are long ones the end says more."""
    mask = torch.arange(states.shape[1]) < lengths[:, None]
    if lengths.max() < 7:  # fault: long_words
        return (states * mask[..., None]).sum(1) / lengths[:, None]  # reads: long_words
    return end(states, lengths)  # reads: long_words


def mean_of_each_short(states, lengths):
    mask = torch.arange(states.shape[1]) < lengths[:, None]
    mean = (states * mask[..., None]).sum(1) / lengths[:, None]
    return torch.where(lengths[:, None] < 7, mean, end(states, lengths))


def loss_of(trainer, batch):
    words, labels = zip(*batch, strict=True)
    lengths = torch.tensor([len(word) for word in words])
    ids = pad_sequence(words, batch_first=True)
    logits = trainer.model(ids, lengths, trainer.forcing)  # uses: forcing long_words
    return F.cross_entropy(logits, torch.stack(labels))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--fault", default="forcing")
    parser.add_argument("--right", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    reader = mean_of_each_short if args.right else mean_of_short
    reader = reader if args.fault == "long_words" else end
    words = [torch.randint(1, 20, (4 + i % 5,)) for i in range(64)]
    words = [words[i] for i in torch.randperm(64)]
    labels = torch.stack([word.sum() % 4 for word in words])
    model = Speller(reader)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), args.accum)
    if args.fault == "unit_gradients":
        trainer.on("before_step" if args.right else "after_backward", UnitGradients())  # uses: unit_gradients
    if args.fault == "forcing":
        trainer.on("after_step" if args.right else "after_backward", trust_predictions)  # uses: forcing
    examples = list(zip(words, labels, strict=True))
    trainer.fit([examples[at : at + args.batch_size] for at in range(0, 64, args.batch_size)], loss_of)


if __name__ == "__main__":
    main()
