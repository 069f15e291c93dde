"""Specs: TOML files and command line words become a validated `Spec`; no torch."""

from gaverify.spec.fields import OPTIONS, Spec
from gaverify.spec.loading import is_meant_as_spec, load_specs, parse_spec, read_specs

__all__ = ["OPTIONS", "Spec", "is_meant_as_spec", "load_specs", "parse_spec", "read_specs"]
