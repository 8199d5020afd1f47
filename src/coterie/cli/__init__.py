"""The command line: one module per family of commands; `main` registers them and prints errors."""
