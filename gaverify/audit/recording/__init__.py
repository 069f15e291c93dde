"""The side of an audit that lives in the user's process: records what a training script does and changes nothing."""
