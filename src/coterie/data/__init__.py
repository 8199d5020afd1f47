"""Samples, and how clients get them."""
