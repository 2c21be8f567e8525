"""The trainer, the runs that it makes, and their checkpoints."""
