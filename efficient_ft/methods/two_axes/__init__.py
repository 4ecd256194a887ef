"""Methods that act on two axes at once."""
