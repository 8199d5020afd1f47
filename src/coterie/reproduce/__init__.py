"""Published tables as commands: suites (what to run), and outcomes (the numbers beside the published ones)."""
