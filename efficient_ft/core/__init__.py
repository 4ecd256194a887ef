"""Basic modules that import nothing else from the package: errors, seeds, processes, files and text."""
