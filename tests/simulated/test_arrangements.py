"""Mixed precision, layouts and adapters on the device, as on the host."""

from __future__ import annotations

import pytest
from arithmetic import ARRANGEMENTS, FAULTS, check


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_on_the_device(name: str, fault: str) -> None:
    check(ARRANGEMENTS[name], fault, "cuda")
