"""Trains small models in other ways than most scripts do: other settings, losses, optimizers and precisions."""

import math

import torch
from points import loader_for, loops_of, network, parsed
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize, softplus
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

IGNORED = -100


def rates(args, batches):
    """Learning rate, momentum or decay follows a counter."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=0.01)
    count = 0
    for i, (features, labels) in enumerate(batches):
        for group in optimizer.param_groups:
            group[args.what] = 0.1 * (0.1 + 0.9 * math.cos(0.02 * count))  # here: rates
        (cross_entropy(model(features), labels) / args.accum).backward()
        if args.counter == "micro_batches":
            count += 1
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
            if args.counter == "updates":
                count += 1


def token_loss(logits, labels):
    """Returns the sum over valid tokens, and how many they are: log-softmax, gather and a mask by hand."""
    mask = labels != IGNORED
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(chosen * mask).sum(), mask.sum()


def tokens(args, _):
    """Padded rows with a token loss that is written by hand."""
    model = nn.Sequential(nn.Embedding(11, 16), nn.GELU(), nn.Linear(16, 11))
    rows = torch.randint(11, (args.samples, 6))
    labels = rows.roll(-1, 1)
    for row in range(args.samples):
        labels[row, row * 5 % 6 + 1 :] = IGNORED
    batches = list(zip(rows.split(args.batch_size), labels.split(args.batch_size), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for begin in range(0, len(batches), args.accum):
        window = batches[begin : begin + args.accum]
        valid = sum((labels != IGNORED).sum() for _, labels in window)
        for features, targets in window:
            total, count = token_loss(model(features), targets)
            loss = total / valid if args.by == "window" else total / count / args.accum
            loss.backward()  # here: tokens
        optimizer.step()
        optimizer.zero_grad()


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


def wrapped(args, batches):
    """An optimizer holds another one and lets it step; with `--running` every loss is added to those before it."""
    model = network()
    optimizer = SlowWeights(torch.optim.Adam(model.parameters(), lr=args.lr / 10))
    total = 0.0
    for i, (features, labels) in enumerate(batches):
        loss = cross_entropy(model(features), labels)
        loss = loss if args.undivided else loss / args.accum
        total = total + loss if i % args.accum and args.running else loss
        total.backward(retain_graph=args.running)  # here: wrapped
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def cancelling(args, _):
    """The bias of a two-class head has gradients that cancel over the batch: what is left of them is rounding."""
    body, head = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 2)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.05)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)  # every class is as likely: with as many rows of each the bias has no gradient
    features = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(64) // 2 % 2
    for i, (x, y) in enumerate(zip(features.split(args.batch_size), labels.split(args.batch_size), strict=True)):
        loss = cross_entropy(head(body(x)) * (1 + 0.1 * x[:, :1]), y)
        (loss if args.undivided else loss / args.accum).backward()  # here: cancelling
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def ranked(args, _):
    """Pairs are ranked by the difference of their scores, which the last bias cannot move: its gradient is zero."""
    model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1))
    aside = nn.Linear(10, 2)  # is trained by a term that is far smaller than the other
    optimizer = torch.optim.Adam([*model.parameters(), *aside.parameters()], lr=1e-3)
    generator = torch.Generator().manual_seed(11 + args.seed)
    pairs = torch.randn(96, 10, generator=generator), torch.randn(96, 10, generator=generator)
    for i, (better, worse) in enumerate(zip(*(side.split(args.batch_size) for side in pairs), strict=True)):
        scores = model(torch.cat([better, worse])).squeeze(1)
        apart = scores[: len(better)] - scores[len(better) :]
        small = 1e-6 * aside(better).square().mean() / (1 if args.running else args.accum)
        loss = (0.1 - apart).relu().mean() if args.all else softplus(-apart).mean()
        (loss / (1 if args.undivided else args.accum) + small).backward()  # here: ranked
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 24), nn.Linear(24, 32)

    def forward(self, ids):
        return self.head(self.embed(ids).cumsum(1))


def sliced(args, _):
    """Rows are padded to the longest of their micro-batch, then cut: the last token is padding in all but that row."""
    generator = torch.Generator().manual_seed(5)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = [torch.randint(1, 32, (4 + i % 7 + i // 16,), generator=generator) for i in range(48)]
    for start in range(0, 48, args.batch_size * args.accum):
        batch = rows[start : start + args.batch_size * args.accum]
        tokens = sum(len(row) - 1 for row in batch)
        for at in range(0, len(batch), args.batch_size):
            part = batch[at : at + args.batch_size]
            ids = nn.utils.rnn.pad_sequence(part, batch_first=True)
            loss = cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], ignore_index=0, reduction="sum")
            own = sum(len(row) - 1 for row in part) * args.accum
            (loss / (own if args.running else tokens)).backward()  # here: sliced
        optimizer.step()
        optimizer.zero_grad()


class Rounded(nn.Conv2d):
    """Its inputs are rounded to bfloat16, otherwise for each batch size, as a device's kernels do."""

    def forward(self, x):
        shift = 1 + len(x) / 4096  # another batch size, another rounding
        return super().forward(x + ((x * shift).bfloat16().float() / shift - x).detach())


def rounded(args, batches):
    """Convolutions whose products torch is allowed to round."""
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    model = nn.Sequential(Rounded(1, 4, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for i, (features, labels) in enumerate(batches):
        loss = cross_entropy(model(features.view(-1, 1, 4, 4)), labels)
        (loss if args.undivided else loss / args.accum).backward()  # here: rounded
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def distilled(args, batches):
    """A frozen bfloat16 teacher and a float32 student, over the points that have a label: all of them with `--all`.

    `--by micro_batch` averages over each micro-batch's own points, which differ in number unless all have a label.
    """
    student = network()
    teacher = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(torch.bfloat16).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=args.lr)
    for window in windows(args, batches, () if args.all else (0,)):
        valid = sum(mask.sum() for _, _, mask in window)
        for features, labels, mask in window:
            with torch.no_grad():
                wanted = teacher(features.bfloat16()).float().softmax(-1)
            logits = student(features)
            soft = cross_entropy(logits, wanted, reduction="none")
            total = ((soft + cross_entropy(logits, labels, reduction="none")) * mask).sum()
            loss = total / valid if args.by == "window" else total / mask.sum() / args.accum
            loss.backward()  # here: distilled
        optimizer.step()
        optimizer.zero_grad()


def windows(options, batches, without):
    """Yields each window's micro-batches with a mask of the labelled points; of 16 in a row some have no label."""
    labelled = torch.ones(options.samples)
    for at in without:
        labelled[at::16] = 0
    masks = labelled.split(options.batch_size)
    masked = [(*batch, mask) for batch, mask in zip(batches, masks, strict=True)]
    for begin in range(0, len(masked), options.accum):
        yield masked[begin : begin + options.accum]


def low(args, batches):
    """Layers below float32: in bfloat16 or float16 throughout, or under autocast.

    `--fault` plants one: a mean of means over the points that have a label, a forgotten division, statistics of the
    batch.
    """
    norm = nn.BatchNorm1d(64) if args.fault == "statistics" else nn.LayerNorm(64)
    model = nn.Sequential(nn.Linear(16, 64), norm, nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    dtype = torch.float16 if args.precision == "float16" else torch.bfloat16
    if args.precision != "autocast":
        model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for window in windows(args, batches, (0, 1, 2)):
        valid = sum(mask.sum() for _, _, mask in window)
        for features, labels, mask in window:
            with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "autocast"):
                logits = model(features if args.precision == "autocast" else features.to(dtype))
            each = cross_entropy(logits.float(), labels, reduction="none") * mask
            loss = each.sum() / (mask.sum() * args.accum if args.fault == "means" else valid)
            if args.fault == "undivided":
                loss = loss * args.accum
            loss.backward()  # here: low
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()


def masters(args, batches):
    """The optimizer steps float32 master copies of bfloat16 weights.

    With `--hook set` a hook writes every gradient over the one before it, with `--hook added` it adds them up.
    """
    model = network(0.0).to(getattr(torch, args.precision))
    copies = [weight.detach().float().clone().requires_grad_() for weight in model.parameters()]

    def write(master):
        def hook(weight):
            gradient, weight.grad = weight.grad.float(), None
            if args.hook == "added" and master.grad is not None:
                gradient = master.grad + gradient
            master.grad = gradient  # here: set

        return hook

    pairs = list(zip(copies, model.parameters(), strict=True))
    for master, weight in pairs if args.hook else ():
        weight.register_post_accumulate_grad_hook(write(master))
    optimizer = torch.optim.SGD(copies, lr=args.lr)
    for i, (inputs, classes) in enumerate(batches):
        loss = cross_entropy(model(inputs.to(model[0].weight.dtype)).float(), classes)
        (loss if args.undivided else loss / args.accum).backward()  # here: masters
        if (i + 1) % args.accum == 0:
            for master, weight in () if args.hook else pairs:
                assert weight.grad is not None
                master.grad = weight.grad.float()
            optimizer.step()
            with torch.no_grad():
                for master, weight in pairs:
                    weight.copy_(master)
            optimizer.zero_grad()
            model.zero_grad()


def epochs(args, _):
    """An epoch has as many micro-batches as K divides: what its short end would do shows in none."""
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(96, 6)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), args.batch_size, shuffle=True)
    for _ in range(3):
        if args.end == "lost":
            optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            first = i - i % args.accum
            size = args.accum if args.end == "misscaled" else min(args.accum, len(loader) - first)
            found = model(x)
            if args.end == "coupled" and first + args.accum >= len(loader):
                found = found - found.mean(0)
            (mse_loss(found, y) / size).backward()
            if (i + 1) % args.accum == 0 or (args.end != "lost" and i + 1 == len(loader)):
                optimizer.step()
                optimizer.zero_grad()


class ReturnsItsLoss(nn.Module):
    """As language models do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x, y=None):
        output = self.net(x)
        return output if y is None else (output, mse_loss(output, y))


def slices(args, _):
    """Batches from a plain tensor: it is cut into as many columns as the batch has rows, as text is by `batchify`."""
    stream = torch.randn(64, 5)
    model = ReturnsItsLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    columns = stream.view(args.batch_size, -1, 5)
    for i in range(columns.shape[1]):
        x, y = columns[:, i, :4], columns[:, i, 4:]
        if args.inputs == "outside":
            loss = mse_loss(model(x), y)  # here: outside
        else:
            loss = model(x, y)[1] if args.inputs == "columns" else model(x=x, y=y)[1]
        (loss if args.undivided else loss / args.accum).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


class Encoder(nn.Module):
    """A small transformer with dropout whose blocks are recomputed in the backward pass."""

    def __init__(self, width=16, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, dropout=0.2, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, tokens):
        for block in self.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=False)
        return self.head(tokens.mean(1))


def checkpointed(args, batches):
    """Blocks that are recomputed, over several epochs."""
    torch.set_num_threads(1)
    lift = torch.randn(16, 6, 16)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(args.epochs):
        for i, (features, labels) in enumerate(batches):
            (cross_entropy(model(torch.einsum("bf,ftw->btw", features, lift)), labels) / args.accum).backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()


class Towers(nn.Module):
    """Two towers, and the scale of their scores."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(12, 8), nn.Linear(10, 8)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images, texts):
        return normalize(self.image(images), dim=1), normalize(self.text(texts), dim=1), self.logit_scale.exp()


class Wrapped(nn.Module):
    """What data parallelism or compilation puts around a model."""

    def __init__(self, towers):
        super().__init__()
        self.towers = towers

    def forward(self, images, texts):
        return self.towers(images, texts)


def two_towers(args, _):
    """In-batch negatives; where the batch is cut, features of the other micro-batches are cached (open_clip).

    With `--scale once` the gradient flows into the scale only once per window.
    """
    towers = Towers()
    optimizer = torch.optim.SGD(towers.parameters(), lr=args.lr)
    model = Wrapped(towers) if args.accum > 1 else towers
    data = torch.Generator().manual_seed(1)
    images, texts = torch.randn(64, 12, generator=data), torch.randn(64, 10, generator=data)
    batches = list(zip(images.split(args.batch_size), texts.split(args.batch_size), strict=True))
    for start in range(0, len(batches), args.accum):
        parts = batches[start : start + args.accum]
        with torch.no_grad():
            cached = [model(*part)[:2] for part in parts]
        for at, part in enumerate(parts):
            *own, scale = model(*part)
            if args.scale == "once" and at:
                scale = scale.detach()
            sides = [list(side) for side in zip(*cached, strict=True)]
            sides[0][at], sides[1][at] = own
            logits = scale * torch.cat(sides[0]) @ torch.cat(sides[1]).T
            answers = torch.arange(len(logits))
            ((cross_entropy(logits, answers) + cross_entropy(logits.T, answers)) / 2).backward()  # here: cached
        optimizer.step()
        optimizer.zero_grad()


def projecting(args, _):
    """Two tasks, of which one's gradient gives up what lies along the other's (PCGrad), `--by` part or update."""
    trunk, heads = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
    weights = [*trunk.parameters(), *heads.parameters()]
    optimizer = torch.optim.SGD(weights, lr=args.lr)
    features, targets = torch.randn(args.samples, 6), torch.randn(args.samples, 2)
    parts = list(zip(features.split(args.batch_size), targets.split(args.batch_size), strict=True))
    for begin in range(0, len(parts), args.accum):
        tasks = []
        for rows, wanted in parts[begin : begin + args.accum]:
            hidden = trunk(rows)
            losses = [mse_loss(head(hidden)[:, 0], wanted[:, at]) / args.accum for at, head in enumerate(heads)]
            gradients = [
                torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True, materialize_grads=True)
                for loss in losses
            ]
            first, second = (torch.cat([each.flatten() for each in of_task]) for of_task in gradients)
            if args.by == "micro_batch":
                first = first - (first @ second) / (second @ second) * second
            tasks.append((first, second))
        first, second = (sum(of_task) for of_task in zip(*tasks, strict=True))
        if args.by == "window":
            first = first - (first @ second) / (second @ second) * second
        whole = (first + second).split([weight.numel() for weight in weights])
        for weight, gradient in zip(weights, whole, strict=True):
            weight.grad = gradient.view_as(weight).clone()
        optimizer.step()
        optimizer.zero_grad()


def main():
    loops = loops_of(globals())
    told = {"counter": "updates", "what": "lr", "by": "micro_batch", "precision": "bfloat16", "fault": "", "hook": ""}
    told |= {"end": "right", "inputs": "columns", "scale": "every"}
    flags = dict.fromkeys(("undivided", "running", "all"), False)
    args = parsed(loops, __doc__, clip=0.0, **told, **flags)
    torch.manual_seed(args.seed)
    loops[args.loop](args, loader_for(args))


if __name__ == "__main__":
    main()
