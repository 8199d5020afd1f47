"""Datasets in the form their authors gave them out: one file per file format, path -> numpy arrays.

Nothing is ever unpickled by running pickle code, and nothing is fetched. A file that is missing, cut short
or of another kind is refused with one sentence (`coterie.errors.DataError`).
"""
