"""The command line: one module per family of verbs; `main` wires them and prints errors."""
