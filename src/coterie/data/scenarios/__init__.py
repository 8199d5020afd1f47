"""Parts that scenarios are made of, one file each; found by being here."""
