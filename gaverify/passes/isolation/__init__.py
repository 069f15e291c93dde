"""Leaves everything as it was: generators, global flags, modes, gradients, and whatever a forward can change.

`ModelState` holds what the user's code can reach (`walk` finds it: nearest first, and bounded); the rest are context
managers. What cannot be put back, because Python does not let anyone look into it: iterators, open files, the caches
of `functools.lru_cache`, and whatever lies outside this process.
"""

from gaverify.passes.isolation.containers import BYTES, CONTAINERS, entries_of, numpy_types
from gaverify.passes.isolation.flags import deterministic, eager_when_compiled, gradients_kept, mode_set
from gaverify.passes.isolation.functions import variables
from gaverify.passes.isolation.generators import (
    foreign_generator_states,
    generator_states,
    isolated_generators,
    seed_everything,
    seed_torch,
)
from gaverify.passes.isolation.modules import OWN_ATTRIBUTES, scripted_attributes
from gaverify.passes.isolation.objects import UNSET, attributes_of, slots_of
from gaverify.passes.isolation.state import ModelState
from gaverify.passes.isolation.tensors import storage, written_arguments, written_tensors

__all__ = [
    "BYTES",
    "CONTAINERS",
    "OWN_ATTRIBUTES",
    "UNSET",
    "ModelState",
    "attributes_of",
    "deterministic",
    "eager_when_compiled",
    "entries_of",
    "foreign_generator_states",
    "generator_states",
    "gradients_kept",
    "isolated_generators",
    "mode_set",
    "numpy_types",
    "scripted_attributes",
    "seed_everything",
    "seed_torch",
    "slots_of",
    "storage",
    "variables",
    "written_arguments",
    "written_tensors",
]
