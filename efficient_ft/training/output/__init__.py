"""Files that a run writes, and messages that it prints."""
