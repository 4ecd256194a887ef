"""Files that a run writes and messages that a run prints."""
