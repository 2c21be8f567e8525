"""Reports of a run, made from its journal alone."""
