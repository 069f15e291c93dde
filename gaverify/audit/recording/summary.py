"""The closing record of a run, from what its listeners own when it ends."""

from __future__ import annotations

import copy
import multiprocessing.process
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from gaverify.passes.wrappers import engine_of, is_flattened, is_sharded, offset_of_shard, tensor_parallel
from gaverify.records.events import (
    ClosingRecord,
    DrawSummary,
    Ending,
    ModelSummary,
    Shard,
    TrainedGroup,
    TrainedParameter,
    UnseenCalls,
)
from gaverify.torch_internals import compiled_frames

if TYPE_CHECKING:
    from gaverify.audit.recording.recorder import Recorder

_BY_THE_SCRIPT = "weights changed by the script itself"


def summarise(recorder: Recorder, ending: Ending, exit_code: str) -> ClosingRecord:
    """Returns the closing record.

    Args:
        recorder: The listeners.
        ending: How the run ended.
        exit_code: What the script gave `sys.exit`.
    """
    recording, windows, loop = recorder.recording, recorder.windows, recorder.data.loop
    draws, models, watch = recorder.draws.draws.summarise(), recording.names.models, recording.watch
    optimizers = tuple(type(entry.optimizer).__name__ for entry in watch)
    return ClosingRecord(
        ending,
        exit_code,
        # The journal's number is that of the update that is being worked on.
        recording.journal.update - 1,
        windows.rank,
        windows.ranks,
        groups=tuple(_summarise_group(recorder, index) for index in range(len(watch))),
        # Each model that is moved by hand has an entry that stands for an optimizer; people are told once.
        optimizers=(_BY_THE_SCRIPT,) if recorder.by_hand.is_expected else optimizers,
        models=ModelSummary(
            tuple(type(model).__name__ for model in models),
            engine_of(models),
            is_flattened(models),
            tensor_parallel(models, watch.all_parameters()),
            recorder.forwards.returns_loss,
        ),
        arithmetic=recording.roundoff.describe(),
        draws=DrawSummary(
            # A loop's draws are kept in one run and dealt in the others: one count serves for both.
            draws.count + loop.count,
            draws.dealt + loop.count,
            {**draws.unaligned, **loop.unaligned},
            draws.fused,
            loop.moved,
        ),
        loaders=recorder.data.loaders.count,
        epochs=recorder.data.loaders.ended,
        moves_by_hand=recorder.by_hand.has_moved_weights,
        had_gradients=windows.had_gradients,
        by_change=windows.by_change,
        unseen=UnseenCalls(
            recording.guard.left_out, recorder.gradients.elsewhere, started_processes(), _has_compiled()
        ),
        control=recorder.controls.summarise(),
        torch=torch.__version__,
    )


def _summarise_group(recorder: Recorder, index: int) -> TrainedGroup:
    """Returns what an optimizer trains."""
    names, parameters = recorder.recording.names, recorder.recording.watch.parameters(index)
    addends, is_part = recorder.windows.addends.get(index, {}), index in recorder.steps.parts
    trained = tuple(
        TrainedParameter(
            # Models are numbered by the order in which their parameters are named, which parts must not change.
            "" if is_part else names.key(parameter, index, at),
            _shape(parameter),
            _shard_of(parameter),
            addends.get(at),
        )
        for at, parameter in enumerate(parameters)
    )
    return TrainedGroup(trained, tuple(names.models_of(parameters)), is_part)


def started_processes() -> int:
    """Returns how many processes the script has started by `multiprocessing` so far; workers of loaders are some."""
    counter = getattr(multiprocessing.process, "_process_counter", None)  # private: newer Pythons may lack it
    return 0 if counter is None else next(copy.copy(counter)) - 1  # a copy: `next` counts on


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns a parameter's shape; a lazy module's has none before its first forward."""
    return () if is_lazy(parameter) else tuple(parameter.shape)


def _shard_of(parameter: torch.Tensor) -> Shard | None:
    """Returns the piece of a parameter that this process holds; None where it holds all of it."""
    data: Any = parameter.data
    return Shard(offset_of_shard(data), tuple(data.to_local().shape)) if is_sharded(data) else None


def _has_compiled() -> bool:
    """Whether the script has compiled anything: steps inside a compiled graph are not seen."""
    return compiled_frames() > 0
