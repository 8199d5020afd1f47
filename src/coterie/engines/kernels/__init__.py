"""Fast ways to compute a stack of models."""
