"""Parts of scenarios; every module here is imported and registers its own."""
