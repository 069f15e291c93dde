"""Every number that decides something: its meaning, and the measurement or derivation that it comes from.

Plain numbers, no torch. One meaning has one constant; what is measured here was measured on correct models and planted
faults (CONTRIBUTING.md). Units are unit roundoffs u = eps/2 of the arithmetic that carries gradients.
"""

from __future__ import annotations

U32, U64 = 2.0**-24, 2.0**-53
"""Unit roundoffs of float32 and float64."""
TINY = 1e-300
"""Keeps a division by a norm finite; far below any norm that a difference is divided by, in float64 too."""

# -- two computations of the same thing -------------------------------------------------------------------------------

FEW_UNITS = 16.0
"""Roundings of the scale of their terms by which two sums of the same terms (gradients, weights) may differ.

A summed gradient's rounding grows with the terms, not with the sum, and by chance with the root of their number."""
MANY_UNITS = 64.0
"""The same for values that were computed from such sums: steps, rows behind several layers, buffers.

A running average with momentum m keeps u/m of rounding; two of them differ by 64 u for m = 1/32, by 20 u for torch's
0.1. Weights that a noise floor moved differ by 2 u."""
CAPPED_UNITS = 4.0
"""Roundings of float32 that remain in a float64 run: casts in code that stays in float32 (NumPy, a fused kernel).

The smallest true fault on record is 6e-5."""
SHOWS_UNITS = 2.0**11
"""Roundings of the whole gradient; a larger difference is hardly rounding: 1.2e-4 in float32.

Correct models leave 2e-7 to 7e-6 there (40 image architectures, 4 language models)."""
COMPUTED_FLOAT32 = 1e-4
"""Relative difference of two float32 computations of one thing: rows, gradients, fitted factors, repeated runs.

Faults, rows of other samples and factors with another meaning differ by orders of magnitude more."""
CORRECT_FLOAT32 = 2e-5
"""Three times the largest relative difference of a correct model's gradients (7e-6); more may be a second cause."""
SAME_IN_FLOAT32 = FEW_UNITS * U32
"""Relative difference of two numbers that float32 computed in another order: losses, settings, cut gradients."""
SAME_NUMBER = 2 * U32
"""Relative difference of numbers that are the same: one unit in float32's last place."""
AGREE_FLOAT64, AGREE_FLOAT32 = 1e-9, 1e-3
"""Relative difference of rows, and of repeated runs, that agree when a forward is traced in float64 and in float32.

Rows agree to about 1e-12 in float64; a kernel that falls back to float32 leaves about 1e-5. Faults lie far above."""
SAME_ROWS = 1e-2
"""Share of that difference which may remain in sums over all rows, where the rounding of single rows averages out."""
SMALLEST_FAULT = 6e-5
"""The smallest fault on record: `spectral_norm` in float32."""

# -- rounding that was measured ---------------------------------------------------------------------------------------

COARSE = 2.0**-13
"""Unit roundoff above float32's, below that of TF32 and float16 (2⁻¹¹) and of bfloat16 (2⁻⁸)."""
FINE_FLOORS, COARSE_FLOORS = (32.0, 320.0), (4.0, 16.0)
"""Noise floors that a difference may be, and from which on it is a fault; nothing is claimed in between.

In float32 equivalent models reach 9.7 floors and faults start at 4e5. In bfloat16 and float16 one floor is a percent of
the gradient already: equivalent runs reach 1.1, a run that averages token means 40 to 77."""
FEW_TIMES = 8.0
"""Times the rounding of a few samples that the rounding of all may be: at most 4.5 in 1,460 open parameters."""
SAME_ORDER = 100.0
"""Times by which a fault in the first samples may be larger than in the whole batch, beside the root of their sizes.

A fault that comes from the samples' differences falls with that root; a fault of another kind is of another order."""
FINE = 9.9e-6
"""Share of the gradient up to which the first samples may decide: a little below the 1e-5 that reports promise."""
VISIBLE = 0.5
"""K = 2 forgotten or divided twice is the smallest constant factor; a floor above it hides all."""

# -- a window below float32 -------------------------------------------------------------------------------------------

GROUPINGS = 4.0
"""Times by which the unexplained rest of a window may exceed what regrouping a few samples changes.

0.3 to 3.2 in 284 runs of equivalent models and losses in bfloat16, float16 and under autocast; median 1.1, 90 % 1.7."""
SHOWS_GROUPINGS = 2 * GROUPINGS
"""Twice as much, from which on a rest is hardly rounding."""
COHERENT = 0.5
"""Share of a window's rest that other weights may explain: 0.05 to 0.2 in right nets of 0.5 to 29 million parameters.

Half of a rest of 1.5 % is one weight of four that is 3 % off."""
LOST_UNITS = 2.0
"""Units of roundoff, times the root of K, that adding up K gradients in a parameter's own precision loses at most.

Each addition rounds a partial sum by u/2 at random: u/2 · sqrt(Σ (k/K)²) < u · sqrt(K) / 2. Four times as much is not
rounding alone."""
TENTH = 0.1
"""Share of the whole gradient: a method that cannot see a fault of this size leaves the verdict inconclusive."""
REST_UNITS = 8.0
"""Units of roundoff of the whole gradient that two right runs of a script may differ by below float32.

0.1 to 2 in the same 284 runs, 5 on GPT-2 (124 million parameters) in bfloat16 on a GPU."""
LAST_DIGITS = 2.0
"""The same where no weights are fitted: the last digit of each gradient alone makes one unit."""
LITTLE, MOSTLY = 0.5, 0.9
"""Shares of a squared difference that other weights explain: at most the first of rounding, at least the second of a
fault of the weights."""

# -- where the host is the limit --------------------------------------------------------------------------------------

FEWEST_MULTIPLICATIONS = 64
"""Multiplications that take as long as to read and write an element of their result.

An A100 makes 9.7e12 of them in IEEE float32 a second, and moves 1.6e12 bytes.
Source: NVIDIA A100 Tensor Core GPU Architecture, 2020."""
HOST_BOUND, HOST_BOUND_CPU = 1 << 26, 1 << 18
"""Multiplications of an operation in float32, on average, that take no longer than the host needs to launch it.

An A100 makes 1e8 in the 10 µs of a launch, one core of a CPU 4e5."""
LARGEST_COPY = 1 << 26
"""Elements of half a precision that are copied in float32 with two gradients: 0.8 GB."""
BACKWARD_TOO = 3
"""Times the work of a forward that it takes with its backward, where each product is followed by two."""

# -- weights of micro-batches -----------------------------------------------------------------------------------------

FIT_FLOAT64, FIT_FLOAT32 = 1e-6, 1e-3
"""Largest residual of a fit of weights or of one factor that explains everything, by the precision of the gradients.

Float64 fits of additive losses leave 1e-12 or less, a coupled loss more than 1e-4; float32 fits leave 3e-8, and up to
3e-7 over ranks. Factors that differ by less are the same."""
FIT_UNITS = 256.0
"""Roundings that a fit over ranks leaves at most: 5 were measured in float32, faults leave 0.13 of the gradient."""
FIT_MAGNIFIES = 10.0
"""Times its residual by which a fit's weights may be wrong: smaller digits mean nothing."""
FIT_EXACT = 1e-10
"""Relative rounding of weights that were fitted in float64; they are shown to so many digits at most."""
NO_WEIGHT = FEW_UNITS * U32
"""Share of the largest fitted weight that is only its rounding (2e-7 to 3e-7 in float32, over ranks)."""
LOST_SHARE = 1e-3
"""Share of the largest weight below which a backward pass did not reach the gradient.

A pass that reached it has its share of the samples; a fit in float32 leaves 3e-7 and so is off by 3e-6 at most."""
THREE_DIGITS = 5e-3
"""Relative rounding of a number to three digits, as weights of losses are noted; bfloat16's is 4e-3."""
ONE_FACTOR = 1e-2
"""Largest residual of one factor for all gradients that is rounding, in bfloat16 (4e-3) too."""
MOVED_SHARES = (0.0, 0.02, 1.0)
"""Shares of itself by which each parameter is moved, up or down, to test fitted weights at other parameters.

Near, where the loss surely stays finite, and far (to zero or twice itself), where a maximum, a threshold or a branch
turns out differently."""

# -- what a control or a cause explains -------------------------------------------------------------------------------

COINCIDENCE = 0.01
"""Chance that some fraction is as near to any number as this one: its denominator squared, times the tolerance."""
SMALL_PART = 0.01
"""Share of a difference that is negligible: what a control leaves of it, or a cause explains of it."""
HELPS = 0.5
"""Share of a difference that a control has to remove before its suspect counts as a cause."""
STARTED_APART = 1e-3
"""Relative distance of initial weights that were drawn anew: these differ by 1.4, rounded ones by 64 u at most."""
CUT = 2.0
"""Factor by which the rows of both runs may differ; K = 2 micro-batches taken for the batch is the smallest mistake."""
SAME_NORM = 1e-3
"""Relative difference of the full batch's norms with and without a patch that keeps its loss.

Rounding moves them by 1e-6 in float32; a patch that divides this loss as well, or drops it, by half or more."""

TOO_SMALL_TO_CLIP = U32
"""Factor of losses with which no gradient meets a limit; a power of two rounds nothing."""

# -- what is worth saying ---------------------------------------------------------------------------------------------

BITS_WORTH_A_NOTE = 0.5
"""Bits that an accumulated gradient loses against the full batch's before a note says so: half the first bit."""
NEGLIGIBLE = 0.1
"""Times the gradient's sampling noise below which a difference is negligible: in quadrature it adds 0.5 % to it."""

# -- what an audit stores of gradients --------------------------------------------------------------------------------

KEPT_ELEMENTS = 4096
"""Elements up to which a parameter's gradient is stored as it is: few enough, and less than a sketch in half."""
SKETCH_WIDTHS = (1021, 509)
"""Buckets of a parameter's sketch, where there are few such parameters and where there are many.

A norm is read from W buckets with a standard deviation of sqrt(2 / W) / 2 (2.2 % and 3.1 %). Where all elements are
alike it is up to twice that; 20 % are at least three times as much. Primes, so that no column of a matrix falls into
few buckets: its elements are as far apart as a row is long."""
MOST_WIDE_SKETCHES = 1500
"""Sketched parameters of an optimizer from which on sketches are narrow: 12 MB for each of two updates and stages."""
