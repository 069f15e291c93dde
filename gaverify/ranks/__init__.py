"""A problem on several ranks: R processes on this machine with `torch.distributed`, its DDP and its `fully_shard`."""
