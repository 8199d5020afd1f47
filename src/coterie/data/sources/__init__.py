"""Sources of samples, one file each; found by being here."""
