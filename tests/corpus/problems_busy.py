"""A model and a loss that change everything that a forward can change, and pictures of them to compare."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn


class Helper:
    """A plain object with state of its own."""

    def __init__(self) -> None:
        self.seen = 0
        self.history = [torch.zeros(2)]


class Busy(nn.Module):
    """Changes buffers, attributes, a queue, flags, modes and, through `max_norm`, its own tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, max_norm=1.0)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("queue", torch.zeros(4, 8))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.calls, self.label, self.losses, self.last = 0, "start", [1.0], None
        self.recent: deque[float] = deque([0.0], maxlen=3)
        self.cache: dict[str, Any] = {"x": torch.ones(2)}
        self.tags = {"a"}
        self.helper = Helper()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.dropout(self.norm(self.embedding(tokens).mean(1))))
        x = x + 0.1 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        random.random(), numpy.random.rand()
        with torch.no_grad():
            self.queue.copy_(torch.roll(self.queue, 1, 0))
            self.queue[0] = x.detach().mean(0)
            self.scratch.add_(1)
        self.replaced = self.replaced + 1
        self.calls += 1
        self.label = f"call {self.calls}"
        self.losses.append(float(self.calls))
        self.recent.append(float(self.calls))
        self.cache["x"].add_(1)
        self.cache[f"y{self.calls}"] = x.detach()
        self.tags.add(self.label)
        self.last = x.detach()
        self.new_attribute = self.calls
        self.helper.seen += 1
        self.helper.history.append(x.detach().mean(0))
        self.helper.history[0].add_(1)
        self.dropout.p = 0.3 + 0.01 * self.calls
        self.frozen.weight.requires_grad_(False)
        self.norm.eval()
        return self.head(x)


class Breaks(Exception):
    """What the loss raises in the middle."""


def busy_problem(fail_at: int | None = None) -> tuple[nn.Module, Callable, Any, Callable[[], Any]]:
    """A busy model, a loss that counts its calls in its closure, its batch, and a look at the closure's counters."""
    torch.manual_seed(0)
    model, calls, seen = Busy(), 0, []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        seen.append(calls)
        model.head.weight.requires_grad_(True)
        value = F.cross_entropy(model(batch[0]), batch[1])
        if fail_at is not None and calls_so_far() == fail_at:
            raise Breaks("in the middle")
        return value

    count_up = iter(range(1, 10_000)).__next__
    box: list[int] = []

    def calls_so_far() -> int:
        """Counts in an iterator behind a bound method, where nobody restores it."""
        number = count_up()
        box[:] = [number]
        return number

    batch = (torch.randint(11, (12, 3)), torch.randint(11, (12,)))
    return model, loss, batch, lambda: (calls, list(seen))


def frozen_copy(value: Any, depth: int = 0) -> Any:
    """A comparable picture of nested values; tensors become (dtype, shape, bytes)."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        return (str(value.dtype), tuple(value.shape), data.numpy().tobytes())
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, dict):
        return {key: frozen_copy(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple | deque):
        return [type(value).__name__, *(frozen_copy(entry, depth + 1) for entry in value)]
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, Helper):
        return frozen_copy(vars(value), depth + 1)
    return value


OWN = frozenset(vars(nn.Module()))


def picture_of_model(model: nn.Module) -> dict[str, Any]:
    picture: dict[str, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        picture[f"parameter {name}"] = (
            frozen_copy(parameter),
            id(parameter),
            parameter.data_ptr(),
            parameter.requires_grad,
            str(parameter.device),
        )
        picture[f"grad {name}"] = None if parameter.grad is None else (frozen_copy(parameter.grad), id(parameter.grad))
        hooks = parameter._backward_hooks
        picture[f"parameter hooks {name}"] = len(hooks) if hooks else 0
    for name, buffer in model.named_buffers():
        picture[f"buffer {name}"] = (frozen_copy(buffer), id(buffer), buffer.data_ptr())
    for name, module in model.named_modules():
        picture[f"training {name}"] = module.training
        picture[f"attributes {name}"] = {
            key: frozen_copy(value) for key, value in vars(module).items() if key not in OWN
        }
        picture[f"hooks {name}"] = [
            len(getattr(module, kind))
            for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        ]
        picture[f"class {name}"] = (type(module), "forward" in vars(module))
    picture["state_dict keys"] = list(model.state_dict())
    return picture


def picture_of_world() -> dict[str, Any]:
    kind, keys, *rest = numpy.random.get_state()
    modules = nn.modules.module
    return {
        "python generator": random.getstate(),
        "numpy generator": (kind, keys.tobytes(), *rest),
        "torch generator": torch.get_rng_state().numpy().tobytes(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled),
        "precision": torch.get_float32_matmul_precision(),
        "default dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "anomaly": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
        "attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
        ),
        "mkldnn": torch.backends.mkldnn.enabled,
        "global hooks": (
            len(modules._global_forward_hooks),
            len(modules._global_forward_pre_hooks),
            len(modules._global_backward_hooks),
        ),
        "module assignment": (nn.Module.__setattr__, nn.Module.__call__),
        "dispatch modes": len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def prepared_problem(fail_at: int | None = None) -> Any:
    """A busy problem with gradients already accumulated, mixed training flags, and generators in some known state."""
    model, loss, batch, counters = busy_problem(fail_at)
    model.eval()
    model.dropout.train()
    model.embedding.weight.grad = torch.full_like(model.embedding.weight, 0.5)
    model.norm.bias.grad = None
    model.norm.register_forward_hook(lambda *_: None)
    model.head.register_full_backward_hook(lambda *_: None)
    torch.manual_seed(11), random.seed(12), numpy.random.seed(13)
    return model, loss, batch, counters
