"""Specs: TOML files and command line words become a validated `Spec`; no torch."""

from gaverify.spec.fields import OPTIONS, Spec
from gaverify.spec.loading import load_specs, parse_spec, read_specs

__all__ = ["OPTIONS", "Spec", "load_specs", "parse_spec", "read_specs"]
