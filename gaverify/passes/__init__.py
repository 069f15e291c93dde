"""One pass over a batch that leaves no trace: problem, batching, weights, draws, isolation, gradients."""
