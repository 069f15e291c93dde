"""Operations of a forward pass and the suspects among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gaverify.records.findings import Location

FunctionKey = tuple[str, tuple[str, int] | None, int]
"""A call of a torch function: its name, the line of the user's code, the how-manieth of this name on this line."""
SuspectKind = Literal["rows", "matrix", "non-additive", "control-flow", "random"]


@dataclass(frozen=True)
class Operation:
    """One operation: its name at the dispatcher, the module path around it, and its line.

    `caller` is said beside a line of a library: the class of the outermost module or loss around the operation that is
    none of the model's, and the nearest line of the user's own code.
    """

    name: str
    module: str | None = None
    kind: str = ""
    library: bool = False
    file: str | None = None
    line: int | None = None
    source: str = ""
    caller: str = ""

    @property
    def location(self) -> Location:
        """Module path and class, file and line."""
        return Location(self.module, self.kind or None, self.file, self.line)

    @property
    def place(self) -> tuple[str, str, str | None, int | None]:
        """What tells one operation from another: its name, its module and its line."""
        return self.name, self.module or "", self.file, self.line if self.file is not None else None

    def __str__(self) -> str:
        where = f"`{self.name}`"
        if self.file is not None:
            where += f" at {self.file}:{self.line}"
        return where + (f" in `{self.module}`" if self.module else "")


@dataclass(frozen=True)
class ModuleDifference:
    """How far a module's outputs for the same samples are apart between the full batch and the micro-batches.

    `difference` is relative to the largest value of an output; 0 where they agree to rounding.
    """

    module: str
    difference: float


@dataclass(frozen=True)
class Suspect:
    """The first operation whose result for the same samples depends on the batch that they came in.

    `source` is the reduction over the batch that it reads, where there is one; `in_model`: outputs of a module of the
    model differ by it, sample by sample; `statistics`: the module around it scales channels by batch statistics.
    `functions` are the torch calls whose results a control run holds constant, `source_functions` those of the
    reductions, `again` those of its line and of others like it that differ as well, in modules of the same class;
    `exits` those whose samples differ next; `frame` is the line where the code decides, of a suspect of kind "control-
    flow"; `calls` are the module calls that a cached gradient opens; `outputs` the positions of those outputs of its
    module that differ (none: all of them do). `order` tells how the samples lie in a dimension with several rows of
    each: 0 as its outer, 1 as its inner index; None: not known.
    """

    kind: SuspectKind
    operation: Operation
    source: Operation | None
    difference: float
    samples: int
    in_model: bool
    statistics: bool
    functions: tuple[FunctionKey, ...] = ()
    source_functions: tuple[FunctionKey, ...] = ()
    again: tuple[FunctionKey, ...] = ()
    exits: tuple[FunctionKey, ...] = ()
    frame: tuple[str, int] | None = None
    calls: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    order: int | None = None

    @property
    def culprit(self) -> Operation:
        """Where samples meet first: the reduction, or the operation itself."""
        return self.source or self.operation
