"""Trains a small classifier with Lightning's `Trainer`, which accumulates and divides by itself."""

import lightning
import torch
from points import loader_for, network, options
from torch import nn


class Classifier(lightning.LightningModule):
    def __init__(self, divide_by, never=False):
        super().__init__()
        self.network = network(dropout=0.1)
        self.divide_by, self.never = divide_by, never

    def on_train_batch_start(self, batch, index):
        if self.never:  # the ranks train alone
            self.trainer.strategy.model.require_backward_grad_sync = False

    def training_step(self, batch, index):
        features, labels = batch
        loss = nn.functional.cross_entropy(self.network(features), labels)
        self.log("loss", loss)
        return loss / self.divide_by

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    parser = options(__doc__)
    parser.add_argument("--divide", action="store_true", help="divide the loss although the Trainer does it")
    parser.add_argument("--devices", type=int, default=0, help="ranks under DDP, which Lightning starts")
    parser.add_argument("--never", action="store_true", help="no backward pass reduces over the ranks")
    args = parser.parse_args()
    lightning.seed_everything(args.seed)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.devices or 1,
        strategy="ddp" if args.devices else "auto",
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accum,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Classifier(args.accum if args.divide else 1, args.never), loader_for(args))


if __name__ == "__main__":
    main()
