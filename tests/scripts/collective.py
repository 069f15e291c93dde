"""Verifies wrapped models on every rank of a launcher; rank 0 prints what each case showed as JSON.

Each line of a case: name, how the model is wrapped, and what is wrong with it.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import gaverify
from gaverify.passes import gradients as passes_gradients

warnings.simplefilter("ignore")
SAMPLES, STEPS = 24, 3
seen: list[Any] = []


class Recorded(TorchDispatchMode):
    """Writes down every collective."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def plain(words: list[str]) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)]
    if "batchnorm" in words:
        layers.insert(1, nn.BatchNorm1d(9))
    if "deep" in words:
        layers[2:2] = [layer for _ in range(8) for layer in (nn.Linear(9, 9), nn.Tanh())]
    if "dropout" in words:
        layers.insert(1, nn.Dropout(0.5))
    return nn.Sequential(*layers)


def added_up(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    """A communication hook that forgets the mean."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


HOOKS = {"hook-sum": added_up, "hook-mean": default_hooks.allreduce_hook, "hook-half": default_hooks.fp16_compress_hook}


def wrapped(model: nn.Sequential, words: list[str]) -> Any:
    if "ddp" in words:
        under = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view="views" in words)
        for hook in (hook for word, hook in HOOKS.items() if word in words):
            under.register_comm_hook(None, hook)
        return under
    options: dict[str, Any] = {}
    if "hsdp" in words:
        options["mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "shards"))
    if "bfloat16" in words:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "inner" in words:  # the copies of a shard never meet
        options["mesh"] = options["mesh"]["shards"]
    if "fsdp1" in words:
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if "fsdp2" in words or "hsdp" in words:
        fully_shard(model[0], **options)
        fully_shard(model, **options)
    if "summed" in words:  # what the engine reduces is added up: the loop divides, or forgets to
        for part in (model[0], model):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return model


def loss_of(words: list[str], size: int) -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if "talks" in words:
            dist.all_reduce(torch.ones(1))
        value = cross_entropy(model(batch[0]), batch[1])
        return value * 3 if "tripled" in words and len(batch[0]) < size else value

    return loss


def case(words: list[str]) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = plain(words)
    torch.manual_seed(5)
    x, y = torch.randn(SAMPLES, 7), torch.randint(0, 3, (SAMPLES,))
    if "low" in words:  # one class after the other: what micro-batches give cancels but for bfloat16's rounding
        x, y, whole = x.bfloat16(), torch.arange(3).repeat_interleave(SAMPLES // 3), whole.bfloat16()
        for parameter in whole[-1].parameters():
            parameter.data *= 0.05
    types = {"half": torch.float16, "brain": torch.bfloat16, "double": torch.float64}
    for dtype in (types[word] for word in words if word in types):
        x, whole = x.to(dtype), whole.to(dtype)
    if "padded" in words:
        y[:3] = y[9] = -100
    x_here, y_here = (x.chunk(ranks)[rank], y.chunk(ranks)[rank]) if "apart" in words else (x, y)
    model = wrapped(copy.deepcopy(whole), words)
    loss = loss_of(words, len(x))
    seen.clear()
    recorded = Recorded()
    with recorded:
        try:
            verdict = gaverify.verify(
                model,
                loss,
                (x_here, y_here),
                steps=STEPS * (2 if "many" in words or ("other-steps" in words and rank) else 1),
                exact="exact" in words,
                seed=rank if "other-seed" in words else 0,
            )
        except gaverify.ProblemError as error:
            return {"refused": of_all(str(error)), "sequences": of_all(recorded.names)}
    cross_entropy(whole(x), y).backward()
    apart = {}
    for (name, parameter), gradient in zip(whole.named_parameters(), seen[0].values(), strict=True):
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        apart[name] = float((full - parameter.grad).norm() / parameter.grad.norm())
    return {
        "outcome": of_all(verdict.outcome.value),
        "faults": sorted({f.code for f in verdict.findings if f.severity == "fault"}),
        "notes": sorted({f.code for f in verdict.findings if f.severity != "fault"}),
        "line": all(f.location is not None for f in verdict.findings if f.severity == "fault"),
        "proven": all(f.proven for f in verdict.findings if f.severity == "fault"),
        "reference": max(apart.values()),
        "differences": [row.relative_difference for row in verdict.parameters],
        "sequences": of_all(recorded.names),
        "reduces": reduces(model),
    }


def reduces(model: Any) -> bool:
    """Whether the user's wrapper still averages over the ranks once the verdict is there."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return True
    torch.manual_seed(dist.get_rank())
    model.zero_grad()
    model(torch.randn(4, 7).to(next(model.parameters()).dtype)).square().mean().backward()
    norms = of_all(float(next(model.parameters()).grad.norm()))
    return len(set(norms)) == 1


def of_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def main() -> None:
    dist.init_process_group("gloo")
    run_full_batch = passes_gradients._run_full_batch

    def keep_gradients(*args: Any, **kwargs: Any) -> Any:
        result = run_full_batch(*args, **kwargs)
        seen.append({name: None if g is None else g.clone() for name, g in result.gradients.items()})
        return result

    passes_gradients._run_full_batch = keep_gradients
    answers = {name: case(name.split()) for name in sys.argv[1:]}
    if dist.get_rank() == 0:
        print(json.dumps(answers), flush=True)
    # torch's thread of the last collective lets go of its tensors when it gets Python's lock: at exit that would abort
    time.sleep(1.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
