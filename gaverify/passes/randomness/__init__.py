"""Random draws: recorded in the full batch's pass, dealt out again sample by sample in the micro-batches' passes.

Shapes: B samples, rows `start` to `stop - 1` of a micro-batch of n; a draw may hold m rows per sample (folded heads).

A draw is keyed by the state of its generator before it. Activation checkpointing restores that state and draws again,
so a repeated key is the same draw. The real operation always runs, so that the generator moves as the user's code
expects; only its result is replaced.

Which draw of the full batch is this one, and which of its rows are these samples'? The first reading answers by order:
the i-th draw, the rows at the samples' places. Where an operation reads a tensor, the rows of that tensor must then
agree with the full batch's (`draws`); where they do not, or counts or shapes do not correspond, the pass's report is
`ambiguous` and a second reading can be asked for: draws by the place in the code that made them (`foreign`), rows by
their contents, folded rows with the batch as inner index. It covers loops over samples, experts that draw for the
tokens they were sent, and Python's and NumPy's generators (`foreign`). Rows of packed sequences are found by what
packed them (`packing`).

Special rules for an operation stand in one table (`operations`). The draws of a training script's loop are no
pass's: an audit keeps them in a ledger of its own kind and deals them out by their place in the loop
(`audit/recording/loop`).
"""

from gaverify.passes.randomness.dealing import Dealer, Dealing, DealingReport, Reading, Recomputing, Refusal
from gaverify.passes.randomness.draws import Draw, DrawLedger, DrawRecorder
from gaverify.passes.randomness.foreign import named_modules
from gaverify.passes.randomness.operations import draw_mode
from gaverify.passes.randomness.packing import tells_rows

__all__ = [
    "Dealer",
    "Dealing",
    "DealingReport",
    "Draw",
    "DrawLedger",
    "DrawRecorder",
    "Reading",
    "Recomputing",
    "Refusal",
    "draw_mode",
    "named_modules",
    "tells_rows",
]
