"""Reports, plots and the live page: they read run folders only."""
