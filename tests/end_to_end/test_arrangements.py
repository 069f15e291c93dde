"""Mixed precision, layouts, adapters, compilation: a fault in them is found and proven, the right twin is quiet."""

from __future__ import annotations

import pytest
from arithmetic import ARRANGEMENTS, COMPILED, FAULTS, check


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_on_the_host(name: str, fault: str) -> None:
    check(ARRANGEMENTS[name], fault, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str, fault: str) -> None:
    check(COMPILED[name], fault, "cpu")
