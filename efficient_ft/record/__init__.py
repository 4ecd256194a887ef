"""What a run leaves behind: its files, and what is read from them."""
