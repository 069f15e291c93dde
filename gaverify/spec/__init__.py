"""Specs: TOML files and command line words become a validated `Spec`; no torch."""

from gaverify.spec.fields import Spec
from gaverify.spec.loading import load_specs, parse_spec, read_specs

__all__ = ["Spec", "load_specs", "parse_spec", "read_specs"]
