"""Sentences of different length as padded rows of tokens, and a small causal language model."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

TEXT = """the cat sleeps
a small dog ran after the ball until it was dark
rain
we walked home along the river and talked about the summer
she sings
nobody had seen the old clock move since last winter
bread and salt
the train was late again so they played cards on the floor
yes
my brother keeps bees behind the shed
the lamp went out and for a while nobody said a word
snow fell
two boats drifted slowly under the bridge at noon
go on
every morning the baker opens his window and whistles
it is cold here""".splitlines()

WORDS = sorted({word for line in TEXT for word in line.split()})
PADDING = 0
IGNORED = -100


class Sentences(torch.utils.data.Dataset):
    """`repeats` times the text; `equal` makes every sentence five words."""

    def __init__(self, repeats=2, equal=False):
        lines = TEXT * repeats
        tokens = [[WORDS.index(word) + 1 for word in line.split()] for line in lines]
        if equal:
            tokens = [(row * 5)[:5] for row in tokens]
        self.rows = [torch.tensor([len(WORDS) + 1, *row]) for row in tokens]  # the first token begins a sentence

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        return self.rows[at]


def collate(rows):
    """Pads to the longest sentence of this batch; padding is no target."""
    inputs = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)
    return {"input_ids": inputs, "labels": labels}


def sentences_loader(batch_size, workers=0, **kwargs):
    return DataLoader(Sentences(**kwargs), batch_size, collate_fn=collate, num_workers=workers)


class LanguageModel(nn.Module):
    def __init__(self, width=32, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS) + 2, width)
        self.position = nn.Embedding(32, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout, batch_first=True)
        self.head = nn.Linear(width, len(WORDS) + 2)

    def forward(self, input_ids, **kwargs):
        length = input_ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=input_ids.device)
        hidden = self.embedding(input_ids) + self.position.weight[:length]
        return self.head(self.block(hidden, src_mask=mask, is_causal=True))


def token_loss(logits, labels, reduction="mean"):
    """Cross entropy of each next token."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)


def valid_tokens(labels):
    return (labels[:, 1:] != IGNORED).sum().item()
