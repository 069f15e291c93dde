"""Trains a small classifier in right ways that are rarer: other places for the sum, other kinds of step."""

import tempfile
from contextlib import nullcontext

import torch
import torch.distributed
from points import loader_for, loops_of, network, parsed
from torch import nn

criterion = nn.CrossEntropyLoss()


def windows(loader, size):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []


def sgd(model, args):
    return torch.optim.SGD(model.parameters(), lr=args.lr)


def sums_of_its_own(args, loader):
    """Gradients are added up outside `.grad`, as for float32 sums beside bfloat16 weights."""
    model = network(args.dropout)
    optimizer = sgd(model, args)
    sums = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
    for i, (features, labels) in enumerate(loader):
        share = 1 if args.skip == "division" else 1 / args.accum
        (criterion(model(features), labels) * share).backward()
        for parameter in model.parameters():
            gradient = parameter.grad
            if args.skip == "nothing" and gradient.ndim == 2:  # singular values are pressed together, as in Muon
                gradient = gradient / gradient.norm()
                for _ in range(3):
                    gradient = 2 * gradient - gradient @ gradient.T @ gradient
            sums[parameter] += gradient
            parameter.grad = None
        if (i + 1) % args.accum == 0:
            for parameter in model.parameters():
                parameter.grad = sums[parameter].clone()
                sums[parameter].zero_()
            optimizer.step()
            optimizer.zero_grad()


def sharpness_aware(args, loader):
    """Two passes over each window: the first only finds the direction in which the weights are moved."""
    model = network(args.dropout)
    optimizer = sgd(model, args)
    for window in windows(loader, args.accum):
        moves = {}
        for _ in range(2):
            optimizer.zero_grad()
            for features, labels in window:
                (criterion(model(features), labels) / args.accum).backward()
            if not moves:
                norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
                moves = {parameter: 0.05 * parameter.grad / norm for parameter in model.parameters()}
                move(moves, 1)
        move(moves, -1)
        optimizer.step()


def sharpness_inside(args, loader):
    """Each micro-batch moves the weights and clears the gradients; they are put back once per window."""
    model = network(args.dropout)
    optimizer = sgd(model, args)
    for window in windows(loader, args.accum):
        for features, labels in window:
            (criterion(model(features), labels) / args.accum).backward()
            norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
            moves = {parameter: 0.5 * parameter.grad / norm for parameter in model.parameters()}
            move(moves, 1)
            optimizer.zero_grad()
            (criterion(model(features), labels) / args.accum).backward()
        move(moves, -1)
        optimizer.step()
        optimizer.zero_grad()


def sharpness_per_micro_batch(args, loader):
    """The direction is that of each micro-batch; what the second passes give is added up outside `.grad`."""
    model = network(args.dropout)
    optimizer = sgd(model, args)
    for window in windows(loader, args.accum):
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for features, labels in window:
            moves = {}
            for _ in range(2):
                optimizer.zero_grad()
                (criterion(model(features), labels) / args.accum).backward()
                if not moves:
                    norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
                    moves = {parameter: 0.5 * parameter.grad / norm for parameter in model.parameters()}
                    move(moves, 1)
            move(moves, -1)
            sums = [total + parameter.grad for total, parameter in zip(sums, model.parameters(), strict=True)]
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total
        optimizer.step()


def functional(args, loader):
    """`torch.func.grad`: no backward pass is seen, and the script puts the gradients in place."""
    model = network(args.dropout)
    optimizer = sgd(model, args)

    def loss(parameters, features, labels):
        return criterion(torch.func.functional_call(model, parameters, (features,)), labels) / args.accum

    for window in windows(loader, args.accum):
        optimizer.zero_grad()
        for features, labels in window:
            parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
            gradients = torch.func.grad(loss)(parameters, features, labels)
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name] if parameter.grad is None else parameter.grad + gradients[name]
        optimizer.step()


@torch.no_grad()
def move(moves, sign):
    for parameter, amount in moves.items():
        parameter.add_(amount, alpha=sign)  # here: move


def line_search(args, loader):
    """LBFGS evaluates its closure, a whole window, several times in one step."""
    model = network(args.dropout)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=args.lr, max_iter=3)
    for window in windows(loader, args.accum):

        def closure(window=window):
            optimizer.zero_grad()
            total = 0.0
            for features, labels in window:
                if args.loop == "cleared_in_a_closure":
                    optimizer.zero_grad()  # here: cleared_in_a_closure
                loss = criterion(model(features), labels) / args.accum
                loss.backward()
                total += loss.item()
            return total

        optimizer.step(closure)


def cleared_in_a_closure(args, loader):
    """Clears at the start of the window, as it should, and before every micro-batch as well."""
    line_search(args, loader)


def compiled(args, loader):
    model = torch.compile(
        nn.Sequential(network(args.dropout), nn.ReLU(), nn.Dropout(args.dropout)), backend="aot_eager"
    )
    optimizer = sgd(model, args)
    for i, (features, labels) in enumerate(loader):
        (criterion(model(features), labels) / args.accum).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def distributed(args, loader):
    """One process of `DistributedDataParallel`, which exchanges gradients only at the end of a window."""
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        model = nn.parallel.DistributedDataParallel(network(args.dropout))
        optimizer = sgd(model, args)
        for i, (features, labels) in enumerate(loader):
            last = (i + 1) % args.accum == 0
            with nullcontext() if last else model.no_sync():
                (criterion(model(features), labels) / args.accum).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()


def overflowing(args, loader):
    """Half precision whose first loss scale overflows: the scaler leaves that step out."""
    model = network(args.dropout)
    optimizer = sgd(model, args)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-30, growth_interval=1000)
    for _ in range(3):
        for i, (features, labels) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = criterion(model(features), labels) / args.accum
            scaler.scale(loss).backward()
            if (i + 1) % args.accum == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()


def gradient_penalty(args, loader):
    """The inputs need gradients too."""
    model = network(args.dropout)
    optimizer = sgd(model, args)
    for i, (features, labels) in enumerate(loader):
        features.requires_grad_(True)
        outputs = model(features)
        slopes = torch.autograd.grad(outputs.square().sum(), features, create_graph=True)[0]
        loss = criterion(outputs, labels) + slopes.square().sum(1).mean()
        (loss / args.accum).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def dropout_in_the_loss(args, loader):
    """Random draws outside the model, between its forward and the backward."""
    model = network(args.dropout)
    optimizer = sgd(model, args)
    for i, (features, labels) in enumerate(loader):
        hidden = nn.functional.dropout(torch.tanh(model(features)), args.dropout)
        loss = criterion(nn.functional.dropout(hidden * 2, args.dropout), labels)
        (loss / args.accum).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def clamped(args, loader):
    """Weights are clamped after each step, and a validation pass follows that forgets `no_grad`."""
    model = network(args.dropout)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    features, labels = next(iter(loader))
    for i, batch in enumerate(loader):
        (criterion(model(batch[0]), batch[1]) / args.accum).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.data.clamp_(-0.2, 0.2)
            model.eval()
            print("validation", criterion(model(features[:4]), labels[:4]).item())
            model.train()


def skipped_micro_batch(args, loader):
    """A micro-batch without a target has a loss of 0/0 and is skipped; of the others each holds some targets."""
    model = network()
    optimizer = sgd(model, args)
    labels = loader.dataset.tensors[1]
    labels[8:12] = labels[24:28] = labels[16:18] = -100
    if args.skip in ("unequal", "divided"):
        labels[:2] = -100
    for window in windows(loader, args.accum):
        valid = sum((labels >= 0).sum() for _, labels in window)
        filled = sum(bool((labels >= 0).any()) for _, labels in window)
        for features, labels in window:
            loss = criterion(model(features), labels)
            share = (labels >= 0).sum() / valid if args.skip == "window" else 1 / args.accum
            share = 1 / filled if args.skip == "divided" else share
            if torch.isfinite(loss):  # here: skipped_micro_batch
                (loss * share).backward()
        optimizer.step()
        optimizer.zero_grad()


def skipped_update(args, loader):
    """The second update is skipped: its gradient is too large or not finite, as that of some samples is."""
    model = network()
    optimizer = sgd(model, args)
    features, labels = loader.dataset.tensors
    features[20] = torch.inf if args.skip == "finite" else 50 * features[20]
    for i, (features, labels) in enumerate(loader):
        (criterion(model(features), labels) / args.accum).backward()
        if (i + 1) % args.accum == 0:
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
            if norm < 3 or (args.skip.endswith("accumulated") and args.accum == 1):
                optimizer.step()
            elif args.skip == "zeroed":
                for parameter in model.parameters():
                    parameter.grad.zero_()
                optimizer.step()
            elif args.skip.startswith("kept"):
                continue  # the gradients stay: the script ends before anything clears them
            optimizer.zero_grad()  # here: skipped_update


def main():
    loops = loops_of(globals())
    args = parsed(loops, __doc__, dropout=0.1, skip="norm")
    torch.manual_seed(args.seed)
    loops[args.loop](args, loader_for(args))


if __name__ == "__main__":
    main()
