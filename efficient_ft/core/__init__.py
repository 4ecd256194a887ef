"""Basics without dependencies inside the package: errors, seeding, processes, the input specification."""
