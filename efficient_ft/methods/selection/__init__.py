"""Methods that select the parameters to train."""
