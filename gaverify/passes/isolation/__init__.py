"""Leaves everything as it was: generators, global flags, modes, gradients, and whatever a forward can change.

`ModelState` holds what the user's code can reach: `walk` finds it, nearest first and bounded, and `places` lists what
binds names to values. The rest are context managers. Some things cannot be put back, because Python does not let
anyone look into them: open files, the caches of `functools.lru_cache`, and whatever lies outside this process. Of
iterators the values are recorded (`objects`).
"""

from gaverify.passes.isolation.globals import (
    deterministic,
    eager_when_compiled,
    exact_products,
    foreign_generator_states,
    generator_states,
    gradients_kept,
    isolated_generators,
    seed_everything,
    seed_torch,
)
from gaverify.passes.isolation.objects import (
    RewindableIterator,
    entries_of,
    rewindable_iterators,
)
from gaverify.passes.isolation.places import StatePlace, merge_names, places_of_module, variables
from gaverify.passes.isolation.tensors import storage, written_arguments, written_tensors
from gaverify.passes.isolation.walk import ModelState, keep_places

__all__ = [
    "ModelState",
    "RewindableIterator",
    "StatePlace",
    "deterministic",
    "eager_when_compiled",
    "entries_of",
    "exact_products",
    "foreign_generator_states",
    "generator_states",
    "gradients_kept",
    "isolated_generators",
    "keep_places",
    "merge_names",
    "places_of_module",
    "rewindable_iterators",
    "seed_everything",
    "seed_torch",
    "storage",
    "variables",
    "written_arguments",
    "written_tensors",
]
