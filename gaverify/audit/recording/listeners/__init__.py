"""One listener for each concern of the recorder: each owns its state, and subscribes to calls on the bus."""
