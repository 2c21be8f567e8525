"""What a run did, read from its journal alone."""
