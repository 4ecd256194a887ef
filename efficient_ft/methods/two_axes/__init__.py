"""Methods on two axes at once."""
