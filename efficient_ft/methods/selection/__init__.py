"""Which parameters train."""
