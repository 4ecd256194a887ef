"""Files and messages that a run writes."""
