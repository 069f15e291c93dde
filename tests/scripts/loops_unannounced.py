"""Trains without a backward pass or an optimizer of torch's; `--style` says how, `--undivided` forgets the ÷ K."""

import argparse

import torch
from torch import nn
from torch.func import functional_call

RATE = 0.05


def momentum(state, gradient, weight):
    state["m"] = 0.9 * state.get("m", 0.0) + gradient
    return state["m"]


def adam(state, gradient, weight):
    state["t"] = state.get("t", 0) + 1
    state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * gradient
    state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * gradient**2
    return state["m"] / (1 - 0.9 ** state["t"]) / ((state["v"] / (1 - 0.999 ** state["t"])).sqrt() + 1e-8)


def signs(state, gradient, weight):
    return gradient.sign()


def lion(state, gradient, weight):
    moment = state.get("m", torch.zeros_like(gradient))
    state["m"] = 0.99 * moment + 0.01 * gradient
    return (0.9 * moment + 0.1 * gradient).sign() + 0.01 * weight


def norms(state, gradient, weight):
    return gradient * weight.norm() / gradient.norm()


RULES = {rule.__name__: rule for rule in (momentum, adam, signs, lion, norms)}


class Own:
    """An optimizer that is none of torch's; `divisor` is what its step divides by."""

    def __init__(self, parameters, rule, divisor=1, rate=RATE):
        self.parameters, self.rule, self.divisor, self.rate = list(parameters), RULES[rule], divisor, rate
        self.state = [{} for _ in self.parameters]

    @torch.no_grad()
    def step(self, gradients=None):
        gradients = [parameter.grad for parameter in self.parameters] if gradients is None else gradients
        for parameter, gradient, state in zip(self.parameters, gradients, self.state, strict=True):
            parameter.sub_(self.rate * self.rule(state, gradient / self.divisor, parameter))

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


def plain(args, model, batches):
    """Moves the weights by hand, as `word_language_model` of pytorch/examples does."""
    for i, (x, y) in enumerate(batches):
        (nn.functional.mse_loss(model(x), y) / args.share).backward()  # here: plain
        if (i + 1) % args.accum == 0 or args.every:
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-RATE)
            model.zero_grad()


def gradients(args, model, batches):
    """The same without `.grad`."""
    parameters, sums = list(model.parameters()), None
    optimizer = Own(parameters, args.rule)
    for i, (x, y) in enumerate(batches):
        loss = nn.functional.mse_loss(model(x), y) / args.share
        found = torch.autograd.grad(loss, parameters)  # here: gradients
        sums = found if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
        if (i + 1) % args.accum == 0 or args.every:
            optimizer.step(sums)
            sums = None


def own(args, model, batches):
    """An optimizer of the script's own."""
    rate = RATE * args.accum if args.rate_by_k else RATE
    optimizer = Own(model.parameters(), args.rule, args.accum if args.late == "step" else 1, rate)
    for i, (x, y) in enumerate(batches):
        (nn.functional.mse_loss(model(x), y) / args.share).backward()  # here: own
        if (i + 1) % args.accum == 0 or args.every:
            if args.late == "edit":
                for parameter in model.parameters():
                    parameter.grad /= args.accum
            if args.clip:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def each(args, model, batches):
    """Divides, uses and clears the gradient of one parameter after the other."""
    optimizer = Own(model.parameters(), args.rule)
    for i, (x, y) in enumerate(batches):
        with torch.enable_grad():
            (nn.functional.mse_loss(model(x), y) / args.share).backward()  # here: each
        if (i + 1) % args.accum == 0:
            for parameter, state in zip(optimizer.parameters, optimizer.state, strict=True):
                if args.late == "edit":
                    parameter.grad /= args.accum
                parameter.sub_(RATE * optimizer.rule(state, parameter.grad, parameter))
                parameter.grad = None


def inline(args, model, batches):
    """Divides on the line that moves a weight; micro-batches have different numbers of targets."""
    for i, (x, y) in enumerate(batches):
        labels, scores = (y[:, 0] > 0).long().masked_fill(x[:, 0] > 1.0, -100), model(x)
        nn.functional.cross_entropy(torch.cat([scores, -scores], 1), labels).backward()  # here: inline
        if (i + 1) % args.accum == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= RATE * parameter.grad / args.accum
            model.zero_grad()


def assigned(args, model, batches):
    """Gradients of `autograd.grad` that an optimizer of torch's uses."""
    optimizer, parameters = torch.optim.SGD(model.parameters(), lr=RATE), list(model.parameters())
    for i, (x, y) in enumerate(batches):
        found = torch.autograd.grad(nn.functional.mse_loss(model(x), y) / args.share, parameters)  # here: assigned
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if (i + 1) % args.accum == 0 or args.every:
            optimizer.step()
            optimizer.zero_grad()


def functional(args, model, batches):
    """Gradients of `torch.func.grad` that an optimizer of torch's uses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def loss(weights, x, y):
        return nn.functional.mse_loss(functional_call(model, weights, (x,)), y) / args.share

    for i, (x, y) in enumerate(batches):
        found = torch.func.grad(loss)({name: weight.detach() for name, weight in model.named_parameters()}, x, y)
        for name, parameter in model.named_parameters():
            parameter.grad = found[name] if parameter.grad is None else parameter.grad + found[name]
        if (i + 1) % args.accum == 0 or args.every:
            optimizer.step()
            optimizer.zero_grad()


def compiled(args, model, batches):
    """Backward passes and steps inside a compiled function."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    @torch.compile(backend="eager")
    def train(x, y, step):
        (nn.functional.mse_loss(model(x), y) / args.share).backward()  # here: compiled
        if step:
            optimizer.step()
            optimizer.zero_grad()

    for i, (x, y) in enumerate(batches):
        train(x, y, (i + 1) % args.accum == 0 or args.every)


def captured(args, model, batches):
    """Both passes in a CUDA graph, as far as there is one without a device: its host copies are refused."""
    optimizer, capturing = torch.optim.SGD(model.parameters(), lr=RATE), []
    torch.cuda.is_initialized = lambda: bool(capturing)
    torch.cuda.is_current_stream_capturing = lambda: bool(capturing)
    to_host = torch.Tensor.cpu

    def refused(tensor, *options):
        assert not capturing, "operation not permitted when stream is capturing"
        return to_host(tensor, *options)

    torch.Tensor.cpu = refused
    for i, (x, y) in enumerate(batches):
        capturing.append(True)
        (nn.functional.mse_loss(model(x), y) / args.share).backward()
        if args.whole:
            optimizer.step()
        capturing.clear()
        if (i + 1) % args.accum == 0 and not args.whole:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


STYLES = {
    style.__name__: style for style in (plain, gradients, own, each, inline, assigned, functional, compiled, captured)
}

MIDDLES = {"tanh": nn.Tanh, "batch-norm": lambda: nn.BatchNorm1d(8), "layer-norm": lambda: nn.LayerNorm(8)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--style", choices=STYLES, required=True)
    parser.add_argument("--undivided", action="store_true")
    parser.add_argument("--every", action="store_true", help="step after every micro-batch")
    parser.add_argument("--rule", choices=RULES, default="momentum", help="of an optimizer of the script's own")
    parser.add_argument("--late", choices=("edit", "step"), help="divide by K before the step, or inside it")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--whole", action="store_true", help="step inside the captured graph")
    parser.add_argument("--rate-by-k", action="store_true")
    parser.add_argument("--middle", choices=MIDDLES, default="tanh", help="the layer between the two")
    args = parser.parse_args()
    args.share = 1 if args.undivided or args.late else args.accum
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), MIDDLES[args.middle](), nn.Linear(8, 1))
    inputs = torch.randn(32, 4)
    targets = inputs.sum(1, keepdim=True)
    batches = zip(inputs.split(args.batch_size), targets.split(args.batch_size), strict=True)
    STYLES[args.style](args, model, batches)


if __name__ == "__main__":
    main()
