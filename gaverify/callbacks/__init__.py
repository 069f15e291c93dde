"""A gate before the long run: callbacks that verify the trainer's own first window before it trains.

    trainer = transformers.Trainer(…, callbacks=[gaverify.callbacks.TrainerCallback()])
    trainer = lightning.Trainer(…, callbacks=[gaverify.callbacks.LightningCallback()])

Model, loss, collator, samples and accumulation are the trainer's. A divergence that is not accepted raises
`DivergentTraining` before the first step. Each class needs its framework; importing this package needs neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gaverify.callbacks.hugging_face import TrainerCallback as TrainerCallback
    from gaverify.callbacks.lightning import LightningCallback as LightningCallback
    from gaverify.callbacks.verifying import DivergentTraining as DivergentTraining

_HOMES = {
    "DivergentTraining": "gaverify.callbacks.verifying",
    "LightningCallback": "gaverify.callbacks.lightning",
    "TrainerCallback": "gaverify.callbacks.hugging_face",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gaverify.callbacks' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
