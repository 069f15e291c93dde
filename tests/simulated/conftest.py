"""The tests here need the simulated device, which is loaded before torch: `python tests/simulated` runs them."""

import os

collect_ignore_glob = [] if os.environ.get("GAVERIFY_SIMULATED_DEVICE") else ["test_*.py"]
