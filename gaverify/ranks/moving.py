"""What R ranks send each other in one window, with `no_sync` and without: counted, not estimated."""

from __future__ import annotations

from dataclasses import replace

from gaverify.children.launching import working_folder
from gaverify.passes.batching import micro_batch_sizes
from gaverify.passes.gradients import PassProbe, full_batch_gradients
from gaverify.passes.isolation import ModelState
from gaverify.passes.task import Task
from gaverify.ranks.engines import Scaled, Synchronised
from gaverify.ranks.groups import alone
from gaverify.ranks.traffic import TrafficMeter
from gaverify.ranks.window import Ranks, Window, accumulated, on_ranks, under_engine, window_of
from gaverify.records.ranks import Moved, Traffic


def moved(task: Task, state: ModelState, steps: int, ranks: Ranks) -> Moved:
    """Returns the collectives and bytes of one window of the ranks.

    Args:
        task: With the whole batch; how it is cut does not count.
        state: Restored in the end.
        steps: K, the micro-batches of each rank.
        ranks: What to run.

    Raises:
        ProblemError: A rank raised, died, or did not end in time.
    """
    sizes = micro_batch_sizes(task.batch_size, steps * ranks.count)
    task = replace(task, sizes=sizes, strategy="accumulate")
    with alone():  # a loss may ask `torch.distributed` for its rank
        reference, record = full_batch_gradients(task, state)
    with working_folder("gaverify-ranks-") as folder:
        found = on_ranks(_counted, window_of(task, record, reference, ranks, folder))
    return Moved(max((once for once, _ in found), key=_order), max((every for _, every in found), key=_order))


def _order(traffic: Traffic) -> tuple[int, int]:
    return traffic.bytes_moved, traffic.count()


def _counted(window: Window, rank: int) -> tuple[Traffic, Traffic]:
    """What the process of a rank does: windows that do not count, then one of each kind."""
    count = window.ranks.count

    def counted(task: Task, own: range) -> tuple[Traffic, Traffic]:
        once = Synchronised(task, window.ranks.engine, own[-1], count)
        for _ in range(2):  # DDP sorts its buckets anew when the window after its first reduction reduces
            _window(window, task, own, once)
        # the last micro-batch of `once` leaves FSDP2's reduction on, as `Scaled` needs it
        return _window(window, task, own, once), _window(window, task, own, Scaled(count))

    return under_engine(window, rank, counted)[0]


def _window(window: Window, task: Task, own: range, probe: PassProbe) -> Traffic:
    meter = TrafficMeter()
    with meter.counting():
        accumulated(window, task, own, probe)
    return meter.traffic
