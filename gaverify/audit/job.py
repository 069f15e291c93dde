"""Runs of the script: their commands, their roles in the audit, and their changes, each of which installs itself."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from gaverify.records.ranks import Shares

if TYPE_CHECKING:
    from torch import nn

    from gaverify.audit.recording.graph import Terms
    from gaverify.audit.recording.outputs import PinnedRows
    from gaverify.audit.recording.recorder import Recorder
    from gaverify.audit.recording.script_calls import PinnedCall, PlacesOfPart
    from gaverify.records.events import LossOrigin
    from gaverify.tracebacks import Place


# Changes of a run against the user's script alone; each change installs itself in the run's process.
#
# A control is a run with a few changes and a question about what that run recorded. Changes travel to the process
# as JSON, each with the name of its class. The parent has no torch, so a change imports what it needs when it is
# installed.
#
# Changes that need more than a few lines have their machinery in `gaverify.audit.recording`.


Order = Literal["turns", "blocks"]
"""How ranks share the samples of a batch, which their own loaders hand out: row by row, or block by block."""

Replay = Literal["samples", "batches"] | Order
"""Data that are replayed besides draws: samples of loaders, collated anew; their batches, if collation draws; the
inputs of forwards as well. Ranks share the samples themselves: only the order counts."""


Blamed = Literal["values", "gradients"]
"""The pinned values of code that are blamed: its outputs, or the gradients of its inputs."""


@dataclass(frozen=True)
class Change:
    """One difference of a run from the script alone; its fields are plain values."""

    environment: ClassVar[Mapping[str, str]] = {}
    """Variables that the process starts with."""

    def install(self, recorder: Recorder) -> None:
        """Makes the change in this process, before the script starts."""
        raise NotImplementedError

    def join(self, earlier: Self) -> Self:
        """Returns what one run does of this change and an earlier one of its class: a later one replaces it."""
        return self


# -- weights and steps ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PerturbWeights(Change):
    """Moves each weight by one roundoff before its first use: how far the gradients move is the noise floor."""

    roundoff: float
    """Unit roundoff of the coarsest arithmetic in the script; a weight's own may be coarser still."""
    seed: int = 0
    """Seed of the random directions."""
    at_optimizer: bool = False
    """Also move the weights when an optimizer is made, for a script without modules."""

    def install(self, recorder: Recorder) -> None:
        """Lets the recorder move weights before forwards."""
        from gaverify.audit.recording.control import Perturbation

        recorder.controls.perturbation = Perturbation(self.roundoff, self.seed, at_optimizer=self.at_optimizer)


@dataclass(frozen=True)
class LeadSteps(Change):
    """Steps with the full-batch run's gradients, so that each update starts from that run's weights."""

    def install(self, recorder: Recorder) -> None:
        """Reads gradients from the folder of the full-batch run."""
        from gaverify.audit.recording.control import Lead

        recorder.controls.lead = Lead(recorder.job.source)


@dataclass(frozen=True)
class UndoSteps(Change):
    """Undoes every optimizer step, so that all micro-batches see the first weights."""

    def install(self, recorder: Recorder) -> None:
        """Lets the recorder undo steps; all of them belong to the full batch's first update, and so do its draws."""
        recorder.controls.undoes_steps = True
        recorder.windows.stores_gradients = False
        recorder.draws.draws.repeats_first_update = True


# -- losses and gradients ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleLosses(Change):
    """Multiplies the gradient of every loss; a power of two rounds nothing."""

    factor: float

    def install(self, recorder: Recorder) -> None:
        """Surrounds what is differentiated."""
        from gaverify.audit.recording.control import scale_losses

        recorder.controls.contexts.losses.append(lambda roots, _: scale_losses(roots, self.factor))


@dataclass(frozen=True)
class WeightMicroBatches(Change):
    """Multiplies the loss of each backward pass by a factor of its own."""

    factors: Shares

    def install(self, recorder: Recorder) -> None:
        """Surrounds what is differentiated, and lets backward events tell the line that made the loss."""
        from gaverify.audit.recording.control import scale_losses
        from gaverify.audit.recording.graph import keep_lines
        from gaverify.audit.recording.values import place_in_group

        def describe(origin: LossOrigin, terms: Terms, place: Place | None) -> LossOrigin:
            return replace(origin, made=terms.made_within(place))

        def factor_of(number: int) -> float:
            of_rank = self.factors[place_in_group()[0]]
            return of_rank[number % len(of_rank)]

        if not recorder.job.has_ranks:  # nobody asks for the lines of ranks
            keep_lines()
        recorder.controls.contexts.losses.append(lambda roots, number: scale_losses(roots, factor_of(number)))
        recorder.controls.contexts.descriptions.append(describe)


@dataclass(frozen=True)
class DifferentiateTerm(Change):
    """Lets the gradient of a loss that is a sum flow into one term only."""

    number: int
    """The number of the term, from 1."""

    def install(self, recorder: Recorder) -> None:
        """Surrounds backward passes, and lets their events tell the term's line."""
        from gaverify.audit.recording.graph import keep_lines

        keep_lines()
        recorder.controls.contexts.backwards.append(lambda terms: terms.only(self.number))
        recorder.controls.contexts.descriptions.append(
            lambda origin, terms, _: replace(origin, term=terms.place(self.number))
        )


@dataclass(frozen=True)
class ClearGradients(Change):
    """Clears the gradients before every backward pass, and looks for the user's line that overwrites them."""

    def install(self, recorder: Recorder) -> None:
        """Lets the recorder clear what its optimizers hold."""
        from gaverify.audit.recording.control import GradientClearing

        recorder.controls.clearing = GradientClearing(recorder.recording.watch)


@dataclass(frozen=True)
class SynchroniseGradients(Change):
    """Reduces gradients over the ranks in every backward pass, also inside `no_sync`."""

    def install(self, recorder: Recorder) -> None:
        """Surrounds forwards, in which DDP asks whether it shall reduce, and backward passes."""
        from gaverify.audit.recording.control import synchronise_models

        recorder.controls.contexts.forwards.append(lambda module: synchronise_models([module]))
        recorder.controls.contexts.backwards.append(lambda _: synchronise_models(recorder.recording.names.models))


@dataclass(frozen=True)
class DifferentiateGathers(Change):
    """Lets gathers of trained tensors pass the gradient back to the other ranks."""

    def install(self, recorder: Recorder) -> None:
        """Tells the patch of the gathers, which is made afterwards."""
        recorder.traffic.differentiates_gathers = True


# -- modules ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UseEvaluationMode(Change):
    """Runs the modules that hold these buffers in evaluation mode, with their current statistics."""

    buffers: tuple[str, ...]
    """Names of the buffers, each `model:name`."""

    def join(self, earlier: Self) -> Self:
        """Runs the modules of both in evaluation mode."""
        return replace(self, buffers=tuple(dict.fromkeys((*earlier.buffers, *self.buffers))))

    def install(self, recorder: Recorder) -> None:
        """Surrounds forwards."""
        from gaverify.audit.recording.control import use_evaluation_mode

        def evaluate(_: nn.Module) -> AbstractContextManager[None]:
            buffers = [value for name, value in recorder.recording.names.buffers().items() if name in self.buffers]
            return use_evaluation_mode(buffers, recorder.recording.names.models)

        recorder.controls.contexts.forwards.append(evaluate)


@dataclass(frozen=True)
class RestoreState(Change):
    """Restores values of modules before each micro-batch, and notes all values that forwards change."""

    names: tuple[str, ...]
    """Names of the values; `EVERYTHING` stands for all."""
    is_repair: bool = False
    """Whether the values go from one update to the next as in training, and are not set to the full-batch run's."""

    def install(self, recorder: Recorder) -> None:
        """Surrounds forwards."""
        from gaverify.audit.recording.state import StateRestorer

        recorder.controls.state = StateRestorer(self.names, recorder.recording.guard.work)
        if self.is_repair:
            recorder.controls.carried.kept = self.names


@dataclass(frozen=True)
class AlignState(Change):
    """Begins each update with the full-batch run's state, also where the script's own code makes it."""

    names: tuple[str, ...]
    """Names of the values; `EVERYTHING` stands for all."""

    def install(self, recorder: Recorder) -> None:
        """Lets the recorder set the values, and look for the lines that change them."""
        recorder.controls.carried.aligned = self.names


@dataclass(frozen=True)
class WatchModules(Change):
    """Records the outputs of every module call and their gradients, row by row, in the last update that is recorded."""

    moved: tuple[str, ...] = ()
    """Paths of modules, or `SCRIPT`, whose calls return changed values for the second half of the rows."""
    repeated: str | None = None
    """Path of a module whose calls are given the first half of the rows in place of the second half as well."""

    def install(self, recorder: Recorder) -> None:
        """Listens to module calls; the lines of operations tell where rows interact."""
        from gaverify.audit.recording.graph import keep_lines
        from gaverify.audit.recording.outputs import Outputs

        keep_lines()
        work, small = recorder.recording.guard.work, recorder.job.role != "full"
        recorder.modules.outputs = Outputs(work, self.moved, self.repeated, small=small)


@dataclass(frozen=True)
class PinModules(Change):
    """Replaces outputs and input gradients of modules by the full batch's, in the last update that is recorded.

    In the full-batch run it stores them.
    """

    paths: tuple[str, ...]
    """Paths of the modules, or `SCRIPT`."""
    rows: PinnedRows = ()
    """Which rows of the full-batch run belong to each forward; empty in the full-batch run."""
    factor: float = 1.0
    """Factor on the input gradients: the number of ranks that average them."""
    blamed: Blamed = "values"
    """Which of the pinned values have to differ before, so that it shows something."""

    def join(self, earlier: Self) -> Self:
        """Pins the modules of both."""
        return replace(self, paths=tuple(dict.fromkeys((*earlier.paths, *self.paths))))

    def install(self, recorder: Recorder) -> None:
        """Listens to module calls."""
        from gaverify.audit.recording.outputs import PinnedModules

        work, source = recorder.recording.guard.work, recorder.job.source
        recorder.modules.pinned_modules = PinnedModules(work, self.paths, source, self.rows, self.factor)


@dataclass(frozen=True)
class TraceScript(Change):
    """Notes every call of torch in the last update that is recorded."""

    def install(self, recorder: Recorder) -> None:
        """Listens to the calls."""
        from gaverify.audit.recording.script_calls import TracedCalls

        recorder.modules.traced_calls = TracedCalls(recorder.recording)
        recorder.follow_script(recorder.modules.traced_calls)


@dataclass(frozen=True)
class PinArguments(Change):
    """Replaces arguments of calls by the full batch's, in the last update that is recorded.

    In the full-batch run it stores them.
    """

    calls: tuple[PinnedCall, ...]
    """The calls, and which arguments."""
    parts: tuple[PlacesOfPart, ...]
    """Number of rows of the full batch, and the places of each micro-batch's rows among them."""

    def install(self, recorder: Recorder) -> None:
        """Listens to the calls."""
        from gaverify.audit.recording.script_calls import PinnedArguments

        recorder.modules.pinned_arguments = PinnedArguments(
            recorder.recording, self.calls, self.parts, recorder.controls.note_replacement
        )
        recorder.follow_script(recorder.modules.pinned_arguments)


# -- data and arithmetic ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayData(Change):
    """Replays the samples and the draws of the loop, which lie outside the model; the full-batch run stores them."""

    way: Replay
    """The kind of replay."""
    parts: int = 0
    """Micro-batches per batch of the full-batch run; 0: not known."""
    tail: int = 0
    """Micro-batches in a short last window that ends every pass over a loader; 0: no change."""

    def install(self, recorder: Recorder) -> None:
        """Replaces what the recorder does with loaders and draws of the loop."""
        from gaverify.audit.recording.loop import DealtLoopDraws, KeptLoopDraws, Loop
        from gaverify.audit.recording.samples import GivenSamples, KeptSamples, Loaders

        source, folder, collated = recorder.job.source, recorder.storage.folder, self.way == "batches"
        loop: Loop
        loaders: Loaders
        if source is None:
            loop = KeptLoopDraws(folder)
            tail = self.tail / self.parts if self.tail else 0.0
            loaders = KeptSamples(folder, loop.ignore_draws, tail, collated=collated)
        else:
            loop = DealtLoopDraws(source, self.parts, turns=self.way == "turns")
            # of a pass over the loader: the micro-batches of a full batch and of the short one behind it, or these two
            length = (self.parts + self.tail if self.parts > 1 else 2) if self.tail else None
            loaders = (
                Loaders(loop.ignore_draws)
                if self.way in ("turns", "blocks")
                else GivenSamples(source, self.parts, loop.ignore_draws, length, collated=collated)
            )
        recorder.data.replay(loop, loaders)
        recorder.draws.draws.deals_loop_draws = True


@dataclass(frozen=True)
class UseMathKernels(Change):
    """Runs attention on its unfused kernel, whose random draws can be replayed."""

    def install(self, recorder: Recorder) -> None:
        """Chooses the kernel for good."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        recorder.controls.surround_script(sdpa_kernel(SDPBackend.MATH))


@dataclass(frozen=True)
class ComputeInFloat32(Change):
    """Computes in float32 what the script computes in lower precision."""

    def install(self, recorder: Recorder) -> None:
        """Replaces what asks torch for a lower precision."""
        from gaverify.audit.recording.control import compute_in_float32

        compute_in_float32()


@dataclass(frozen=True)
class DisableCompilation(Change):
    """Runs without `torch.compile`: draws inside a compiled graph cannot be replayed."""

    environment: ClassVar[Mapping[str, str]] = {"TORCH_COMPILE_DISABLE": "1"}

    def install(self, recorder: Recorder) -> None:
        """Says that modules which look compiled run as they are written."""
        recorder.draws.draws.is_eager = True


Changes = tuple[Change, ...]


def merge_changes(*groups: Iterable[Change]) -> Changes:
    """Returns the changes of all groups; of the same class a later one replaces the earlier one, or joins it."""
    merged: dict[type[Change], Change] = {}
    for change in chain.from_iterable(groups):
        earlier = merged.get(type(change))
        merged[type(change)] = change if earlier is None else change.join(earlier)
    return tuple(merged.values())


def encode_change(change: Change) -> dict[str, object]:
    """Returns a change as plain values, with the name of its class as `kind`."""
    return {"kind": type(change).__name__, **asdict(change)}


def decode_change(fields: Mapping[str, object]) -> Change:
    """Returns the change that `encode_change` was given; sequences have to be tuples."""
    # By name alone: the record of a run that was kept must not be able to call anything else.
    kinds = {kind.__name__: kind for kind in Change.__subclasses__()}
    return kinds[str(fields["kind"])](**{name: value for name, value in fields.items() if name != "kind"})


# Runs of the user's script: their commands, their roles in the audit, and what they change; plain JSON, no torch.


Files = Literal["view", "in-place"]
"""How a run is kept from the user's files, if at all; see `gaverify.audit.outputs`."""

Role = Literal["full", "accumulated", "events"]
"""`full` and `accumulated` have the arguments of these runs; `events` is the only run of an audit without gradients."""

AChange = TypeVar("AChange", bound=Change)


@dataclass(frozen=True)
class Command:
    """How the user's script is started."""

    script: str
    """Path of the script, or the module's name with `module`."""
    module: bool = False
    """Run as `python -m script`."""
    arguments: tuple[str, ...] = ()
    """`sys.argv[1:]` of the script."""
    launcher: tuple[str, ...] = ()
    """Words of the command that starts the script's processes; empty: gaverify runs the script."""
    environment: tuple[tuple[str, str], ...] = ()
    """(variable, value) pairs added to the environment; empty: none."""
    values: tuple[tuple[str, str], ...] = ()
    """(name, replacement) pairs for values in the script's source; empty: the source runs unchanged."""
    seed: int | None = None
    """Seeds Python's, NumPy's and torch's generators before the script starts; None: no seeding."""
    ranks: int = 0
    """Size of the process group that gaverify's own launcher makes; 0: one process without a group, or a launcher's."""
    patched: tuple[tuple[str, str], ...] = ()
    """(path, text) pairs of files that the run's view of the files holds changed; empty: it holds the user's."""

    def __str__(self) -> str:
        head = [*(self.launcher or ["python"]), *(["-m"] if self.module else []), self.script]
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment]
        values = [f"with {name}={word}" for name, word in self.values]
        return " ".join([*variables, shlex.join([*head, *self.arguments]), *values])


@dataclass(frozen=True)
class Run:
    """One run of the user's script."""

    command: Command
    """How it is started."""
    role: Role
    """Which of the audit's runs it is."""
    updates: int
    """Optimizer updates after which the script is stopped; 0: it runs to its end."""
    sources: tuple[str, ...] = ()
    """Record folders of all ranks of the full-batch run that this run follows; empty: it follows none."""
    changes: Changes = ()
    """Differences from the script alone."""
    shown_as: str = ""
    """Name of a control in the report; empty: `kind` is its name."""

    @property
    def kind(self) -> str:
        """The role; `perturbed` and `frozen` for the two controls that have names of their own in reports."""
        return "perturbed" if self.find(PerturbWeights) else "frozen" if self.find(UndoSteps) else self.role

    @property
    def name(self) -> str:
        """How the report calls the run."""
        return self.shown_as or self.kind

    @property
    def is_reference(self) -> bool:
        """Whether other runs follow this one: it keeps its random draws and its buffers for them."""
        return self.role == "full" and not self.sources

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the command and the changes add."""
        # A change has to win over a variable of the user's: a control with `TORCH_COMPILE_DISABLE=0` would be none.
        changed = {name: value for change in self.changes for name, value in change.environment.items()}
        return {**dict(self.command.environment), **changed}

    def find(self, kind: type[AChange]) -> AChange | None:
        """Returns the run's change of a class; None where it has none."""
        return next((change for change in self.changes if isinstance(change, kind)), None)


@dataclass(frozen=True, kw_only=True)
class Job(Run):
    """A run as its processes are given it: its only one, its launcher, and then each process under that."""

    folder: str
    """Path of the folder that the process writes its records into."""
    files: Files = "view"
    """`view`: private view of all files; `in-place`: write as the script does."""
    port: int = 0
    """Port of the loopback where rank 0 of gaverify's own launcher listens; 0: no such launcher."""

    @property
    def source(self) -> Path | None:
        """The folder of the full-batch run, or of its rank 0; None: it follows none."""
        return Path(self.sources[0]) if self.sources else None

    @property
    def is_launched(self) -> bool:
        """Whether a launcher starts its processes, each of which has a folder of its own in the run's."""
        return bool(self.command.launcher or self.command.ranks)

    @property
    def has_ranks(self) -> bool:
        """Whether several processes may train together in the run."""
        return self.is_launched and self.command.ranks != 1

    @property
    def meeting(self) -> Path | None:
        """A folder that all processes under a launcher see; None where there is no launcher."""
        return Path(self.folder).parent if self.is_launched else None

    def write(self, path: Path) -> None:
        """Writes the job for the child to read."""
        changes = [encode_change(change) for change in self.changes]  # `asdict` would forget their classes
        path.write_text(json.dumps({**asdict(self), "changes": changes}), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Reads what `write` wrote."""
        fields = tuples(json.loads(path.read_text(encoding="utf-8")))
        changes = tuple(map(decode_change, fields.pop("changes")))
        return cls(**{**fields, "command": Command(**fields["command"]), "changes": changes})


def tuples(value: Any) -> Any:
    """Returns a JSON value with tuples in place of lists, as the fields of records are."""
    if isinstance(value, dict):
        return {key: tuples(member) for key, member in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value
