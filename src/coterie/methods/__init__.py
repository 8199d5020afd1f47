"""The methods, one file each: citation, state, client half, server half. Found by being here."""
