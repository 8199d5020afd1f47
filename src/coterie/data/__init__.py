"""Datasets, and how they are partitioned into federations."""
