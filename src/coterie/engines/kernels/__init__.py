"""Kernels: the code that computes a stack of models."""
