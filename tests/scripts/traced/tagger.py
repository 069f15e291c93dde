"""Tags the words of short sentences with a small transformer. Its settings are the constants below."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH = 16
ACCUM = 1
WIDTH = 16
FAULT = "smoothing"
RIGHT = False


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, states):
        states = states + self.attention(states, states, states, need_weights=False)[0]
        if FAULT == "norm_of_all" and not RIGHT:
            states = F.layer_norm(states, states.shape)  # fault: norm_of_all
        else:
            states = F.layer_norm(states, states.shape[-1:])
        return states + self.mlp(states)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(30, WIDTH), nn.Parameter(0.1 * torch.randn(6, WIDTH))
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 5)

    def forward(self, words):
        return self.head(self.blocks(2 * self.embed(words) + self.place))  # uses: norm_of_all


torch.manual_seed(0)
model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
sentences = torch.randint(30, (64, 6))
tags = (sentences + sentences.roll(1, 1)) % 5
for i, (words, wanted) in enumerate(zip(sentences.split(BATCH), tags.split(BATCH), strict=True)):
    logits = model(words).flatten(0, 1)  # uses: norm_of_all
    smoothing = 1 / len(words) if FAULT == "smoothing" and not RIGHT else 1 / 16  # fault: smoothing
    loss = F.cross_entropy(logits, wanted.flatten(), label_smoothing=smoothing)  # reads: smoothing
    (loss / ACCUM).backward()
    if (i + 1) % ACCUM == 0:
        optimizer.step()
        optimizer.zero_grad()
