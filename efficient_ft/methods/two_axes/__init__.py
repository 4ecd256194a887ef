"""Methods that select the trained parameters and also drop tokens."""
