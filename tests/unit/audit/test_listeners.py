"""The bus and its listeners, told of calls that are made by hand; and the events that they write, read again."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import swa_utils

from gaverify.audit.job import Command, Job
from gaverify.audit.recording import listeners
from gaverify.audit.recording.bus import Bus, Call, FunctionCall, Guard, Nesting, announce_calls
from gaverify.audit.recording.calls import BackwardCall, ForwardCall, Recording
from gaverify.audit.recording.listeners.other_calls import (
    ClipCall,
    ClippingListener,
    LossCall,
    ScalerListener,
    ScalerMethodCall,
    TargetListener,
    ZeroGradCall,
    ZeroGradListener,
)
from gaverify.audit.recording.listeners.updates import WindowListener
from gaverify.audit.recording.recorder import Recorder
from gaverify.audit.recording.storage import Journal, Storage
from gaverify.records.events import (
    AverageUpdate,
    Backward,
    Clipping,
    ClosingRecord,
    Ending,
    Event,
    FileLoaded,
    Forward,
    Framework,
    FrameworkLoop,
    LossOrigin,
    ScalerCall,
    Shard,
    Step,
    TrainedGroup,
    TrainedParameter,
    ZeroGrad,
    read_closing_record,
    read_event,
    write_closing_record,
    write_event,
)
from gaverify.records.ranks import Collective, Traffic

LISTENERS = Path(listeners.__file__).parent
CONTRIBUTING = Path(__file__).parents[3] / "CONTRIBUTING.md"


def recording(folder: Path, events: list[Event]) -> Recording:
    """The shared state of listeners, whose events are kept instead of written; one optimizer of two weights."""
    storage = Storage(folder)
    journal = Journal(SimpleNamespace(event=events.append))  # type: ignore[arg-type]
    shared = Recording(Job(Command(""), "full", 1, folder=str(folder)), storage, Guard(storage), journal)
    shared.watch.add(torch.optim.SGD([torch.nn.Parameter(torch.ones(2, device="cpu"))], lr=0.1))
    shared.watch.look()
    return shared


def set_gradient(shared: Recording, *values: float) -> None:
    (weight,) = shared.watch.parameters(0)
    weight.grad = torch.tensor(values, device="cpu")


class TestBus:
    def test_handlers_run_in_the_order_in_which_they_subscribed(self, tmp_path: Path) -> None:
        seen: list[str] = []

        @contextmanager
        def around(_: Call) -> Iterator[None]:
            seen.append("enter")
            yield
            seen.append("leave")

        bus = Bus(Guard(Storage(tmp_path)))
        bus.after(FunctionCall, lambda _: seen.append("after"))
        bus.around(FunctionCall, around)
        bus.before(FunctionCall, lambda _: seen.append("first"), lambda _: seen.append("second"))
        with bus.announce(FunctionCall()):
            seen.append("call")
        assert seen == ["first", "second", "enter", "call", "leave", "after"]

    def test_a_call_that_raises_is_not_over(self, tmp_path: Path) -> None:
        seen: list[Call] = []
        bus = Bus(Guard(Storage(tmp_path)))
        bus.after(FunctionCall, seen.append)
        with pytest.raises(KeyError), bus.announce(FunctionCall()):
            raise KeyError
        assert not seen and not bus.guard.off

    def test_functions_that_call_each_other_are_announced_once(self, tmp_path: Path) -> None:
        seen: list[FunctionCall] = []
        owner = SimpleNamespace(inner=lambda: 1)
        owner.outer = lambda: owner.inner() + 1
        bus, nesting = Bus(Guard(Storage(tmp_path))), Nesting()
        for name in ("inner", "outer"):
            announce_calls(bus, owner, name, FunctionCall, nesting)
        bus.after(FunctionCall, seen.append)
        assert (owner.outer(), owner.inner()) == (2, 1)
        assert [call.result for call in seen] == [2, 1]

    def test_the_recorders_own_calls_are_not_announced(self, tmp_path: Path) -> None:
        seen: list[FunctionCall] = []
        owner = SimpleNamespace(function=lambda: None)
        bus = Bus(Guard(Storage(tmp_path)))
        announce_calls(bus, owner, "function", FunctionCall)
        bus.before(FunctionCall, lambda call: owner.function(), seen.append)
        owner.function()
        assert len(seen) == 1


class TestListeners:
    """Each is told of calls that nobody made."""

    @pytest.mark.parametrize(("clipped", "active"), [((3.0, 4.0), False), ((0.6, 0.8), True)])
    def test_clipping(self, clipped: tuple[float, float], active: bool, tmp_path: Path) -> None:
        events: list[Event] = []
        shared, calls = recording(tmp_path, events), list[ClipCall]()
        listener = ClippingListener(shared, calls.append)
        set_gradient(shared, 3.0, 4.0)
        call = ClipCall(name="clip_grad_norm_", limit=1.0)
        listener.look(call)
        set_gradient(shared, *clipped)
        listener.note(replace(call, result=torch.tensor(5.0, device="cpu")))
        (event,) = events
        assert isinstance(event, Clipping)
        assert (event.active, event.optimizers, event.norm, event.limit) == (active, (0,) * active, 5.0, 1.0)
        assert len(calls) == 1

    @pytest.mark.parametrize(("steps", "skipped"), [((3, 3), True), ((3, 4), False)])
    def test_a_scaler_that_skips_a_step(self, steps: tuple[int, int], skipped: bool, tmp_path: Path) -> None:
        events: list[Event] = []
        counts = iter(steps)
        listener = ScalerListener(recording(tmp_path, events), lambda: next(counts))
        listener.look(ScalerMethodCall(name="step"))
        listener.note(ScalerMethodCall(name="step"))
        assert [event.skipped for event in events if isinstance(event, ScalerCall)] == [skipped]

    def test_gradients_that_a_call_clears(self, tmp_path: Path) -> None:
        events: list[Event] = []
        shared = recording(tmp_path, events)
        listener = ZeroGradListener(shared, lambda: None)
        set_gradient(shared, 3.0, 4.0)
        listener.look(ZeroGradCall())
        set_gradient(shared, 0.0, 0.0)
        listener.note(ZeroGradCall())
        assert [event.optimizers for event in events if isinstance(event, ZeroGrad)] == [(0,)]

    def test_targets_wait_for_a_backward_pass(self) -> None:
        listener = TargetListener()
        for valid in (3, 2):
            listener.note(LossCall(valid=torch.tensor(valid, device="cpu"), total=4))
        assert listener.read() == ((3, 4), (2, 4))
        listener.clear()
        assert listener.read() == ()


def announce_passes(recorder: Recorder, model: torch.nn.Module, rows: int) -> None:
    """Announces a forward and a backward pass, and makes both."""
    inputs = torch.ones(rows, 3, device="cpu")
    call = ForwardCall(module=model, args=(inputs,), kwargs={}, is_graded=True)
    with recorder.bus.announce(call):
        call.result = model(inputs)
    loss = call.result.sum()
    with recorder.bus.announce(BackwardCall(roots=loss, place=("train.py", 7))):
        loss.backward()


@pytest.mark.parametrize("is_late", [False, True])
def test_what_stands_for_an_optimizer_goes_where_one_is_made(is_late: bool, tmp_path: Path) -> None:
    recorder = Recorder(Job(Command(""), "full", 0, folder=str(tmp_path)), Storage(tmp_path))
    model = torch.nn.Linear(3, 1, device="cpu")
    announce_passes(recorder, model, 2)
    if is_late:
        recorder.steps.note_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    recorder.close(Ending.SCRIPT)
    closing = read_closing_record((tmp_path / "meta.json").read_text(encoding="utf-8"))
    assert closing.steps_itself is not is_late and (closing.optimizers == ("SGD",)) is is_late


def test_a_loop_that_is_announced_by_hand(tmp_path: Path) -> None:
    """Two micro-batches and a step, without a patch of torch: what a recorder writes depends on the calls alone."""
    recorder = Recorder(Job(Command(""), "accumulated", 0, folder=str(tmp_path)), Storage(tmp_path))
    model = torch.nn.Linear(3, 1, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.steps.note_optimizer(optimizer)
    for rows in (2, 1):
        announce_passes(recorder, model, rows)
    recorder.steps.begin(optimizer, None)
    optimizer.step()
    recorder.steps.end(optimizer)
    recorder.close(Ending.SCRIPT)
    events = [read_event(line) for line in (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [event.rows for event in events if isinstance(event, Forward)] == [2, 1]
    backwards = [event for event in events if isinstance(event, Backward)]
    assert [(event.forwards, event.optimizers, event.line) for event in backwards] == [((1,), (0,), 7), ((2,), (0,), 7)]
    assert [event.by_hand for event in events if isinstance(event, Step)] == [False]
    closing = read_closing_record((tmp_path / "meta.json").read_text(encoding="utf-8"))
    assert (closing.updates, closing.ending, closing.models.classes) == (1, Ending.SCRIPT, ("Linear",))


def test_the_listener_in_contributing_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [code for code in codes if "Listener" in code]
    monkeypatch.setattr(swa_utils, "update_bn", swa_utils.update_bn)  # and put back when the test is over
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, str(LISTENERS / "statistics.py"), "exec", dont_inherit=True), names)
    events: list[Event] = []
    shared = recording(tmp_path, events)
    names["StatisticsListener"](shared).listen(Bus(shared.guard))
    swa_utils.update_bn([], torch.nn.BatchNorm1d(2, device="cpu"))
    (event,) = events
    assert isinstance(event, AverageUpdate) and Path(str(event.file)) == Path(__file__)


class TestProtocol:
    @pytest.mark.parametrize(
        "event",
        [
            Forward(1, "train.py", 3, rows=None, model=0, number=2),
            Backward(
                2,
                None,
                None,
                (0, 1),
                targets=((3, 4),),
                forwards=(1, 2),
                scales=(1.0, 0.25),
                loss=2.5,
                framework=FrameworkLoop(Framework.ACCELERATE, 4),
                origin=LossOrigin(met=(("loss.py", 7),), inside=("head",)),
                traffic=Traffic({Collective.REDUCE: 2}, 64),
                gathers=(("train.py", 5), None),
            ),
            Clipping(1, "train.py", 8, (0,), "clip_grad_norm_", active=True, norm=math.inf, limit=1.0),
            FileLoaded(1, "train.py", 1, path="/data/résumé.pt"),
        ],
        ids=lambda event: event.kind,
    )
    def test_an_event_is_read_as_it_was_written(self, event: Event) -> None:
        assert read_event(write_event(event)) == event

    def test_numbers_that_are_none(self) -> None:
        read = read_event(write_event(Backward(1)))
        assert isinstance(read, Backward) and math.isnan(read.loss) and read.forwards is None

    def test_a_closing_record_is_read_as_it_was_written(self) -> None:
        weight = TrainedParameter("0:weight", (8, 2), Shard((4, 0), (4, 2)), addends=2)
        record = ClosingRecord(Ending.EXIT, "0", 2, groups=(TrainedGroup((weight,), (0,)), TrainedGroup(is_part=True)))
        read = read_closing_record(write_closing_record(record))
        assert read == record and read.is_sharded


@pytest.mark.parametrize(
    ("updates", "count", "free", "rank", "copied"),
    [
        (1, 5, 1 << 40, 0, None),  # a single update needs none
        (3, 5, 120, 0, 3),
        (3, 5, 119, 0, 1),  # those of all updates have no room
        (3, 5, 120, 1, None),  # all ranks follow rank 0's steps
        (2, (1 << 23) + 1, 1 << 40, 0, 1),  # 67 MB for two updates
        (2, (1 << 23) + 1, 2 * (4 << 23), 0, 0),  # not twice
    ],
)
def test_small_gradients_are_copied_of_every_update_and_large_ones_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: int, count: int, free: int, rank: int, copied: int | None
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    shared = recording(tmp_path, [])
    shared.job = Job(Command(""), "full", updates, folder=str(tmp_path))
    weight = torch.zeros(1).expand(count).requires_grad_()  # takes no memory
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    entry = shared.watch.of(shared.watch.add(optimizer))
    entry.sample.parameters[0].grad = torch.ones(2)
    monkeypatch.setattr(shared.watch, "all_parameters", lambda: iter([weight]))
    windows = WindowListener(shared, SimpleNamespace(open=SimpleNamespace(number=1)))  # type: ignore[arg-type]
    windows.rank = rank
    windows._copy(entry)
    assert (windows.copies and windows.copies.updates) == copied
    assert [path.name for path in tmp_path.glob("copy-*")] == (["copy-1-0.pt"] if copied else [])
