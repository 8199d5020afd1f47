"""One run: settings, round loop, run folder, metrics."""
