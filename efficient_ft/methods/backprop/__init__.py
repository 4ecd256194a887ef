"""Methods that compute an approximate gradient."""
