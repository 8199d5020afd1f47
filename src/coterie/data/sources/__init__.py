"""Sources of datasets; every module here is imported and registers its own."""
