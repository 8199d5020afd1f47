"""What a client does with its own samples."""
