"""Trains GPT-2's architecture, from random weights, on padded sentences with the Hugging Face `Trainer`."""

import argparse
import tempfile

from sentences import WORDS, Sentences, collate
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Rows(Sentences):
    def __getitem__(self, at):
        return {"ids": self.rows[at]}


def collate_rows(rows):
    batch = collate([row["ids"] for row in rows])
    return {**batch, "attention_mask": (batch["labels"] != -100).long()}


class IgnoresTheCount(GPT2LMHeadModel):
    """Accepts what its trainer passes, and divides by the tokens of its own batch all the same."""

    accepts_loss_kwargs = True

    def forward(self, input_ids=None, attention_mask=None, labels=None, num_items_in_batch=None, **kwargs):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="0 does not clip")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations in the backward")
    parser.add_argument("--equal", action="store_true", help="sentences of one length")
    parser.add_argument("--model", choices=["gpt2", "ignores-the-count"], default="gpt2")
    args = parser.parse_args()
    set_seed(0)
    config = GPT2Config(
        vocab_size=len(WORDS) + 2,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=args.dropout,
        embd_pdrop=args.dropout,
        attn_pdrop=args.dropout,
    )
    model = (GPT2LMHeadModel if args.model == "gpt2" else IgnoresTheCount)(config)
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=args.batch_size,
            gradient_accumulation_steps=args.accum,
            max_steps=args.max_steps,
            learning_rate=1e-3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            bf16=args.bf16,
            gradient_checkpointing=args.checkpoint,
            max_grad_norm=args.max_grad_norm,
            remove_unused_columns=False,
            logging_steps=1,
        )
        trainer = Trainer(model, training, train_dataset=Rows(equal=args.equal), data_collator=collate_rows)
        trainer.train()


if __name__ == "__main__":
    main()
