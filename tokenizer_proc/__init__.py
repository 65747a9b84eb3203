"""Text to token ids, in a process of its own."""
