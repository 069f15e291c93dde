"""Python imports this before anything else where this folder is on PYTHONPATH: here the simulated device is loaded."""

import os

if os.environ.get("GAVERIFY_SIMULATED_DEVICE"):
    import simulated_cuda

    simulated_cuda.load(os.environ["GAVERIFY_SIMULATED_DEVICE"])
