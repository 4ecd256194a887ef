"""Basic modules without dependencies on the package: errors, seeding, processes, files, text."""
