"""The callbacks on the scripts that audits run: the same verdicts, no trace, and training that stops in time."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from audits import SCRIPTS, audit

pytestmark = [pytest.mark.hf, pytest.mark.slow]

HUGGING_FACE = """
import sys, tempfile, torch
sys.argv = ["x"]
from hf_trainer import *
from gaverify.callbacks import DivergentTraining, TrainerCallback

def train(kind, callbacks):
    set_seed(0)
    config = GPT2Config(vocab_size=len(WORDS) + 2, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
                        eos_token_id=0, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    model = kind(config)
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=2, use_cpu=True,
            report_to=[], save_strategy="no", remove_unused_columns=False, disable_tqdm=True, learning_rate=1e-3)
        Trainer(model, training, train_dataset=Rows(), data_collator=collate_rows, callbacks=callbacks).train()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

right, wrong = TrainerCallback(), TrainerCallback()
assert torch.equal(train(GPT2LMHeadModel, [right]), train(GPT2LMHeadModel, []))
print("right", right.gate.verdict.outcome.value)
try:
    train(IgnoresTheCount, [wrong])
except DivergentTraining as error:
    codes = sorted({f.code for f in error.verdict.findings if f.severity == "fault"})
    print("wrong", error.verdict.outcome.value, *codes)
known = [{"code": f.code, "location": "*", "reason": "known", "suspected": True} for f in wrong.gate.verdict.findings]
train(IgnoresTheCount, [TrainerCallback(known)])
train(IgnoresTheCount, [TrainerCallback(stop=False)])
print("accepted")
"""

LIGHTNING = """
import sys, torch
sys.argv = ["x"]
from lightning_trainer import *
from gaverify.callbacks import DivergentTraining, LightningCallback

class Divides(Classifier):
    def training_step(self, batch, index):
        return super().training_step(batch, index) / self.trainer.accumulate_grad_batches

class Normalises(Classifier):
    def __init__(self, divide_by):
        super().__init__(divide_by)
        self.network = network(batchnorm=True)

def train(kind, callbacks):
    args = options("x").parse_args(["--batch-size", "4", "--accum", "4"])
    lightning.seed_everything(0, verbose=False)
    model = kind(1)
    lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, max_steps=2, accumulate_grad_batches=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=callbacks,
    ).fit(model, loader_for(args))
    return torch.cat([p.detach().flatten() for p in model.parameters()])

right = LightningCallback()
assert torch.equal(train(Classifier, [right]), train(Classifier, []))
print("right", right.gate.verdict.outcome.value)
for kind in (Divides, Normalises):
    try:
        train(kind, [LightningCallback()])
    except DivergentTraining as error:
        codes = sorted({f.code for f in error.verdict.findings if f.severity == "fault"})
        print(kind.__name__, error.verdict.outcome.value, *codes)
"""


def run(text: str, folder: Path) -> list[str]:
    script = folder / "script.py"
    script.write_text(text)
    code = f"import sys, runpy; sys.path.insert(0, {str(SCRIPTS)!r}); runpy.run_path({str(script)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was verified in" in done.stderr  # what it cost
    return done.stdout.splitlines()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_the_trainer(tmp_path: Path) -> None:
    lines = run(HUGGING_FACE, tmp_path)
    words = ("hf_trainer.py", "--batch-size 8 --accum 1", "--batch-size 2 --accum 4")
    right = audit(*words, "--max-steps 2 --max-grad-norm 0")
    wrong = audit(*words, "--max-steps 2 --max-grad-norm 0 --model ignores-the-count")
    assert f"right {right.outcome}" in lines
    assert f"wrong {wrong.outcome} {' '.join(sorted(wrong.faults))}" in lines
    assert (right.outcome, wrong.outcome) == ("equivalent", "divergent") and "accepted" in lines


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning(tmp_path: Path) -> None:
    lines = run(LIGHTNING, tmp_path)
    right = audit("lightning_trainer.py", "--batch-size 16 --accum 1", "--batch-size 4 --accum 4")
    wrong = audit("lightning_trainer.py", "--batch-size 16 --accum 1", "--batch-size 4 --accum 4", "--divide")
    assert f"right {right.outcome}" in lines and right.outcome == "equivalent"
    assert f"Divides {wrong.outcome} {' '.join(sorted(wrong.faults))}" in lines
    assert "Normalises divergent GAV101" in lines
