"""Readers of datasets in their published formats: one module per format, path -> numpy arrays.

They never run pickle code or use the network. A missing, truncated or invalid file raises `DataError`.
"""
