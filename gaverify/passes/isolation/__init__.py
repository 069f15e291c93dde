"""Leaves everything as it was: generators, global flags, modes, gradients, and whatever a forward can change.

`ModelState` holds what the user's code can reach (`walk` finds it: nearest first, and bounded); the rest are context
managers. What cannot be put back, because Python does not let anyone look into it: open files, the caches of
`functools.lru_cache`, and whatever lies outside this process. Of iterators the values are recorded (`objects`).
"""

from gaverify.passes.isolation.functions import Variable, entry_of, variables
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
    BYTES,
    CONTAINERS,
    OWN_ATTRIBUTES,
    UNSET,
    RewindableIterator,
    attributes_of,
    entries_of,
    numpy_types,
    rewindable_iterators,
    scripted_attributes,
    slots_of,
)
from gaverify.passes.isolation.tensors import storage, written_arguments, written_tensors
from gaverify.passes.isolation.walk import ModelState

__all__ = [
    "BYTES",
    "CONTAINERS",
    "OWN_ATTRIBUTES",
    "UNSET",
    "ModelState",
    "RewindableIterator",
    "Variable",
    "attributes_of",
    "deterministic",
    "eager_when_compiled",
    "entries_of",
    "entry_of",
    "exact_products",
    "foreign_generator_states",
    "generator_states",
    "gradients_kept",
    "isolated_generators",
    "numpy_types",
    "rewindable_iterators",
    "scripted_attributes",
    "seed_everything",
    "seed_torch",
    "slots_of",
    "storage",
    "variables",
    "written_arguments",
    "written_tensors",
]
