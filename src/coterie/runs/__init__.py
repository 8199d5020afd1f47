"""One run: settings, round loop, folder, metrics."""
