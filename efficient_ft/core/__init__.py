"""Basic modules for errors, seeds, processes, files and text. These modules import no other part of this package."""
